"""``python -m torchstore_monarch.spmd.worker tcp://ADDRESS:PORT TIMEOUT``: one host's worker.

Prints ``ready`` and serves a Monarch root that attaches to it, until the processes that the root
started here have ended, or none was started within TIMEOUT seconds.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from monarch.actor import start_worker_loop_forever

_POLL_S = 0.5


def _children() -> list[int]:
    """Processes that this one has started and that have not been reaped."""
    tasks = Path("/proc/self/task").iterdir()
    return [int(pid) for task in tasks for pid in (task / "children").read_text().split()]


def main() -> int:
    """Entry point of the module."""
    address, timeout = sys.argv[1], float(sys.argv[2])
    start_worker_loop_forever(ca="trust_all_connections", address=address)
    os.write(sys.stdout.fileno(), b"ready\n")
    deadline = time.monotonic() + timeout
    seen = False
    while True:
        there = bool(_children())
        seen = seen or there
        if (seen and not there) or (not seen and time.monotonic() > deadline):
            break
        time.sleep(_POLL_S)
    os._exit(0)  # the engine's own threads would keep the process


if __name__ == "__main__":
    sys.exit(main())
