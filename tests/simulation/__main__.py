"""``python -m tests.simulation SEED``: runs one seed; with ``--seeds N``, that many from it on."""

from __future__ import annotations

import argparse
import sys
import time

from tests.simulation.violations import Violation
from tests.simulation.world import run_seed


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("seed", type=int, help="the seed to run, or the first of them")
    parser.add_argument("--seeds", type=int, default=1, help="how many")
    options = parser.parse_args()
    started, steps = time.process_time(), 0
    for seed in range(options.seed, options.seed + options.seeds):
        try:
            steps += run_seed(seed).step
        except Violation as found:
            print(f"seed {seed}: {found}")
            return 1
    spent = time.process_time() - started
    print(f"{options.seeds} seeds, {steps} steps, no violation; {steps / spent:,.0f} steps/s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
