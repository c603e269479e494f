"""``python -m tests.simulation SEED`` runs one seed; with ``--seeds N``, that many from it on."""

from __future__ import annotations

import argparse
import gc
import logging
import multiprocessing
import sys
import time

from tests.simulation.promises.violations import Violation
from tests.simulation.shrinking import find, told
from tests.simulation.world import run_seed

_BATCH = 250
# So many seeds have everything imported and made that is imported and made when it is first needed.
_REHEARSED = 40


def _begin() -> None:
    """What holds for all runs of a process is done once. It ends after one batch, which leaves
    less than 100 MB: so nobody has to look for the memory that nothing refers to any more.
    """
    gc.disable()
    logging.disable(logging.CRITICAL)


def _run(batch: tuple[int, int]) -> tuple[int, float, list[tuple[int, str]]]:
    """Run seeds: how many steps they took, how long that took the processor, and what was found."""
    begun, steps = time.process_time(), 0
    found: list[tuple[int, str]] = []
    for seed in range(*batch):
        try:
            steps += run_seed(seed).step
        except Violation as violation:
            found.append((seed, str(violation)))
    return steps, time.process_time() - begun, found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("seed", type=int, help="the seed to run, or the first of them")
    parser.add_argument("--seeds", type=int, default=1, help="how many")
    parser.add_argument("--processes", type=int, default=1, help="how many processes share them")
    options = parser.parse_args()
    end = options.seed + options.seeds
    batches = [(at, min(at + _BATCH, end)) for at in range(options.seed, end, _BATCH)]
    steps, seconds = 0, 0.0
    _begin()
    _run((0, _REHEARSED))  # so no other process has to import and find out what this one has
    gc.collect()
    with multiprocessing.Pool(options.processes, _begin, maxtasksperchild=1) as pool:
        for more, spent, violations in pool.imap(_run, batches):
            steps, seconds = steps + more, seconds + spent
            if violations:
                seed, what = violations[0]
                found = find(seed)
                print(f"seed {seed}: {what}" if found is None else told(found))
                return 1
    rate = f"{steps / seconds:,.0f} steps and {options.seeds / seconds:,.0f} seeds a second"
    print(f"{options.seeds:,} seeds, {steps:,} steps: no promise is broken ({rate} of a core)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
