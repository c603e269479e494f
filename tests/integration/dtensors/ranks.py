"""Real ranks: processes that are joined by gloo, over loopback, and run what a test tells them.

To import what belongs to DTensors takes a process half a second, after torch. So one process does
it, the nursery, and ranks are forked from it; and many cases run in the same ranks.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import inspect
import json
import os
import signal
import socket
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from tests.processes import fork

__all__ = ["Jobs", "Nursery", "Ranks"]

# The last one is imported by the first use of a DTensor.
_HEAVY = ("torch.distributed.tensor", "torch.distributed.fsdp", "torch._dynamo")
# Far above what anything here takes on slow cores, below the limit of a test.
_PATIENCE_S = 300.0


class Failed(NamedTuple):
    """Sent instead of a result when a rank fails."""

    text: str


class Nursery:
    """A process that has imported what is heavy, and ``modules``, and forks ranks.

    A context manager: neither it nor the ranks outlive it.

    Attributes:
        jobs: process groups that know nothing of each other, by name: of 1, 2, 2, 4 and 8 ranks.
    """

    def __init__(self, *modules: str) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(_PATIENCE_S)
        with Connection(theirs.detach()) as orders:
            self._process = fork(
                _nursery, orders, [*_HEAVY, *modules], files={}, environment=os.environ
            )
        sizes = {"one": 1, "two": 2, "other": 2, "four": 4, "eight": 8}
        self.jobs: Jobs = {name: Ranks(self, size) for name, size in sizes.items()}

    def __enter__(self) -> Nursery:
        return self

    def __exit__(self, *_: object) -> None:
        for ranks in self.jobs.values():
            ranks.kill()
        self._socket.close()
        self._process.kill()
        self._process.join()

    def fork(self, rank: int, size: int, folder: str) -> tuple[int, Connection]:
        """One more process: its pid, and a pipe to it."""
        ours, theirs = socket.socketpair()
        with theirs:
            order = json.dumps([rank, size, folder]).encode()
            socket.send_fds(self._socket, [order], [theirs.fileno()])
            pid = int(self._socket.recv(100) or 0)
        assert pid, "the nursery has ended"
        return pid, Connection(ours.detach())


class Ranks:
    """The ranks of one process group. They are started when they are first told something, and
    again after one of them has failed: the others may be stuck in a collective.
    """

    def __init__(self, nursery: Nursery, size: int) -> None:
        self.size = size
        self._nursery = nursery
        self._running: list[tuple[int, Connection]] = []

    async def run(
        self, function: Callable[..., Any], *args: Any, only: Sequence[int] | None = None
    ) -> list[Any]:
        """What ``function(*args)`` gave on every rank, or on ``only`` these.

        Args:
            function: of a module, sync or async. It finds the store of this process.
            args: what can be pickled, and holds no tensors; nor may the result.
        """
        if not self._running:
            self._start()
        chosen = range(self.size) if only is None else only
        pipes = [self._running[rank][1] for rank in chosen]
        for pipe in pipes:
            with suppress(ConnectionError):  # it has ended, as will be seen
                pipe.send((os.environ.get("TORCHSTORE_ADDRESS", ""), function, args))
        return await asyncio.to_thread(self._results, function.__name__, pipes)

    def _start(self) -> None:
        # Kept until the ranks are gone: they go on meeting there, for the groups of their meshes.
        self._folder = tempfile.TemporaryDirectory()
        for rank in range(self.size):
            self._running.append(self._nursery.fork(rank, self.size, self._folder.name))

    def _results(self, name: str, pipes: Sequence[Connection]) -> list[Any]:
        end = time.monotonic() + _PATIENCE_S
        results: list[Any] = []
        for pipe in pipes:
            try:
                there = pipe.poll(max(0.0, end - time.monotonic()))
                results.append(pipe.recv() if there else Failed("it says nothing"))
            except (EOFError, ConnectionError):
                results.append(Failed("it has ended"))
            if isinstance(results[-1], Failed):  # the others may wait for it; ask them no more
                end = min(end, time.monotonic() + 1.0)
        failed = [r.text for r in results if isinstance(r, Failed)]
        if failed:
            self.kill()
            raise AssertionError(f"{name} failed:\n" + "\n".join(failed))
        return results

    def kill(self) -> None:
        """``kill -9`` to all of them."""
        for pid, pipe in self._running:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            pipe.close()
        if self._running:
            self._folder.cleanup()
        self._running = []


Jobs = dict[str, Ranks]


# ---- in the other processes ---------------------------------------------------------------


def _nursery(connection: Connection, modules: Sequence[str]) -> None:
    orders = socket.socket(fileno=os.dup(connection.fileno()))
    connection.close()
    gc.disable()
    for module in modules:
        importlib.import_module(module)
    gc.freeze()  # what it shares with the ranks
    gc.enable()
    while True:
        order, fds, _, _ = socket.recv_fds(orders, 4096, 1)
        if not order:  # the test is over
            return
        pid = os.fork()  # never waited for: no other process gets its pid while it may be killed
        if pid == 0:
            orders.close()
            try:
                _rank(Connection(fds[0]), *json.loads(order))
            finally:
                os._exit(1)
        os.close(fds[0])
        orders.send(str(pid).encode())


def _rank(pipe: Connection, rank: int, size: int, folder: str) -> None:
    import torch
    import torch.distributed as dist

    # OpenMP's threads do not survive a fork; with more than one, torch waits for them for ever.
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    patience = timedelta(seconds=_PATIENCE_S)
    meet = f"file://{folder}/meet"
    dist.init_process_group("gloo", meet, patience, rank=rank, world_size=size)
    with asyncio.Runner() as runner:
        while True:
            try:
                address, function, args = pipe.recv()
            except (EOFError, ConnectionError):
                return
            os.environ["TORCHSTORE_ADDRESS"] = address
            try:
                result = function(*args)
                if inspect.iscoroutine(result):
                    result = runner.run(result)
            except BaseException:
                result = Failed(f"rank {rank}:\n{traceback.format_exc()}")
            pipe.send(result)
