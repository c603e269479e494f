"""The program of a measured process: a publisher (owns stores, puts) or a reader (joins, gets).

``python -m torchstore_cli.bench.worker_main LOOP`` reads commands from standard input, one JSON
object per line, and answers each with one. ``{"op": "weights.put", ...}`` calls the method ``put``
of the commands called ``weights`` with the other fields. The process ends when standard input is
closed, or with the process that started it. ``benchmarks/worker.py`` has these commands and more.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import json
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

import torchstore_core as ts
from torchstore_cli.bench import echo
from torchstore_cli.bench.measuring import process_size, timed, until_quiet
from torchstore_cli.bench.small import SmallValues
from torchstore_cli.bench.weights import Weights
from torchstore_core.errors import TorchStoreError

__all__ = ["Stores", "serve", "standard_commands"]

_PR_SET_PDEATHSIG = 1

#: Runs a coroutine on the one event loop of the process, and returns its result.
Run = Callable[[Coroutine[Any, Any, Any]], Any]


class Stores:
    """Commands on whole stores."""

    def __init__(self, loop: str) -> None:
        self._runner = asyncio.Runner(loop_factory=lambda: echo.new_loop(loop))

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine on this process's one event loop."""
        return self._runner.run(work)

    def open(self, **options: Any) -> dict[str, Any]:
        """Start a store of our own; ``options``: as for ``initialize``."""
        seconds, client = self.run(timed(ts.initialize(**options)))
        return {**self._described(client), "seconds": seconds}

    def connect(self, address: str, **options: Any) -> dict[str, Any]:
        """Join a store; ``options``: as for ``connect``."""
        return self._described(self.run(ts.connect(address, **options)))

    def _described(self, client: ts.Client) -> dict[str, Any]:
        pid = self.run(client.status()).controller_pid
        return {"address": client.address, "server_pid": pid}

    def delete(self, prefix: str) -> None:
        """Delete every key that starts with ``prefix``."""

        async def delete() -> None:
            await ts.delete_batch(await ts.keys(prefix))

        self.run(delete())

    def close(self) -> None:
        """End our store, or leave the one we joined."""
        gc.collect()
        self.run(ts.shutdown())

    def settle(self) -> None:
        """Wait until the server has stopped warming memory in the background."""
        self.run(until_quiet())

    def size(self, pid: int) -> dict[str, int]:
        """Return the size of a process."""
        return process_size(pid)


def standard_commands(stores: Stores) -> dict[str, Any]:
    """Return the commands of every measured process, by the name that precedes the dot."""
    return {
        "store": stores,
        "small": SmallValues(stores.run),
        "weights": Weights(stores.run, stores.open),
    }


def serve(commands: dict[str, Any]) -> None:
    """Execute commands until standard input is closed.

    A TorchStoreError from a command becomes its answer. Any other error ends the process, whose
    standard error then contains the traceback.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started this
    # Replies have a pipe of their own; everything else that is printed goes to standard error.
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for line in sys.stdin:
        fields = json.loads(line)
        group, _, name = fields.pop("op").partition(".")
        reply: dict[str, Any]
        try:
            reply = {"ok": getattr(commands[group], name)(**fields)}
        except TorchStoreError as error:
            reply = {
                "error": error.code,
                "message": error.message,
                "key": error.key,
                "details": error.details,
            }
        with suppress(BrokenPipeError):  # nobody waits for the reply; the input will end, too
            replies.write(json.dumps(reply) + "\n")


def main(loop: str) -> None:
    """Serve the standard commands."""
    stores = Stores(loop)
    commands = standard_commands(stores)
    serve(commands)
    commands["small"].end_echo()
    stores.close()


if __name__ == "__main__":
    main(sys.argv[1])
