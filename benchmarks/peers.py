"""A measured process: publisher (owns stores, puts) or reader (joins them, gets).

``python peers.py LOOP`` reads commands from standard input, one JSON object a line, and answers
each with one. ``{"op": "weights.put", ...}`` calls that part's method with the other fields. The
process ends when standard input closes, or with the process that started it.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import json
import os
import signal
import sys
import traceback
from collections.abc import Coroutine
from typing import Any

import echo
from checkpoints import Checkpoints
from dicts import Dicts
from jobs import Job
from small import Small
from watching import process_size, timed, until_quiet
from weights import Weights

import torchstore_core as ts

_PR_SET_PDEATHSIG = 1


class Store:
    """Commands on whole stores."""

    def __init__(self, loop: str) -> None:
        self._runner = asyncio.Runner(loop_factory=lambda: echo.new_loop(loop))

    def run(self, what: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine on this process's one event loop."""
        return self._runner.run(what)

    def open(self, **options: Any) -> dict[str, Any]:
        """Start a store of our own; options as of ``initialize``."""
        seconds, client = self.run(timed(ts.initialize(**options)))
        pid = self.run(ts.status()).controller_pid
        return {"seconds": seconds, "address": client.address, "server_pid": pid}

    def connect(self, address: str) -> None:
        """Join a store."""
        self.run(ts.connect(address))

    def close(self) -> None:
        """End our store, or leave the one we joined."""
        gc.collect()
        self.run(ts.shutdown())

    def settle(self) -> None:
        """Wait until no background warming goes on."""
        self.run(until_quiet())

    def size(self, pid: int) -> dict[str, int]:
        """Size of a process."""
        return process_size(pid)


def main(loop: str) -> None:
    """Serve commands until standard input closes."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started this
    # Replies have a pipe of their own: whatever else prints goes to standard error.
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    store = Store(loop)
    small = Small(store.run)
    dicts = Dicts(store.run)
    job = Job(store.run)
    parts = {
        "store": store,
        "small": small,
        "weights": Weights(store.run, store.open),
        "dicts": dicts,
        "checkpoints": Checkpoints(dicts),
        "job": job,
    }
    for line in sys.stdin:
        command = json.loads(line)
        part, _, name = command.pop("op").partition(".")
        try:
            reply = {"ok": getattr(parts[part], name)(**command)}
        except Exception:
            reply = {"error": traceback.format_exc()}
        replies.write(json.dumps(reply) + "\n")
    small.end_echo()
    dicts.drop()
    store.close()
    job.end()


if __name__ == "__main__":
    main(sys.argv[1])
