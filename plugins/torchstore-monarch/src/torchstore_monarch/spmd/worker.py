"""``python -m torchstore_monarch.spmd.worker tcp://ADDRESS:PORT TIMEOUT``: one host's worker.

Prints ``ready`` once it listens, and serves a Monarch root that attaches to it, until all processes
that the root started here have ended. If none was started, it ends when its standard input ends
(the rank that started it has given up or died), or after TIMEOUT seconds.

Anyone who reaches the port can make Monarch run code here: see ``starting``.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time
from pathlib import Path

from monarch.actor import start_worker_loop_forever

_POLL_S = 0.5
# The root first ends the processes that it started, then the worker, and waits for both.
_ROOT_ENDS_IT_S = 2.0
_LISTEN_S = 10.0
_LISTENING = "0A"


def _children() -> list[int]:
    """Return the pids of child processes that have not been reaped."""
    tasks = Path("/proc/self/task").iterdir()
    return [int(pid) for task in tasks for pid in (task / "children").read_text().split()]


def _listens(port: int) -> bool | None:
    """Return whether this process listens at the port (True), another one (False), or none (None).
    The engine itself does not report that a port is taken.
    """
    rows = [row.split() for row in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    at_port = {
        f"socket:[{row[9]}]"
        for row in rows
        if row[3] == _LISTENING and int(row[1].rpartition(":")[2], 16) == port
    }
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            if os.readlink(f"/proc/self/fd/{fd}") in at_port:
                return True
    return False if at_port else None


def _wait_for_listening(port: int, timeout: float) -> bool:
    deadline = time.monotonic() + timeout
    while (listens := _listens(port)) is None and time.monotonic() < deadline:
        time.sleep(_POLL_S / 50)
    return bool(listens)


def main() -> int:
    """Entry point of the module."""
    address, timeout = sys.argv[1], float(sys.argv[2])
    deadline = time.monotonic() + timeout
    start_worker_loop_forever(ca="trust_all_connections", address=address)
    if not _wait_for_listening(int(address.rpartition(":")[2]), min(timeout, _LISTEN_S)):
        os.write(sys.stderr.fileno(), f"cannot listen on {address}\n".encode())
        os._exit(1)  # the engine's own threads would keep the process
    os.write(sys.stdout.fileno(), b"ready\n")
    seen, wanted, last = False, True, 0.0
    while True:
        now = time.monotonic()
        if _children():
            seen, last = True, now
        elif now - last > _ROOT_ENDS_IT_S if seen else not wanted or now > deadline:
            break
        if wanted:
            wanted = not select.select([sys.stdin.fileno()], [], [], _POLL_S)[0]
        else:
            time.sleep(_POLL_S)
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
