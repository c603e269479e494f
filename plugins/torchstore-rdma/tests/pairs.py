"""A server half in a process of its own, and links to it, without a store."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import pytest

from torchstore_core.contracts.transport import Copy, LinkContext, Segment, ServerContext
from torchstore_core.machine.topology import probe
from torchstore_core.server.memory.isolated import IsolatedServer
from torchstore_core.server.memory.segment import open_memory
from torchstore_rdma.engine import Engine, Job
from torchstore_rdma.link import RdmaLink

__all__ = ["FABRICS", "MB", "Memory", "Pair", "needs_nixl", "pair", "paused"]

MB = 1 << 20
# Small enough that the memory of one is used again for the next.
_PART = 64 << 10
#: Values of UCX_TLS: what UCX chooses on one host, and what it uses between hosts without RDMA.
FABRICS = ("all", "tcp")

needs_nixl = pytest.mark.skipif(
    find_spec("nixl_cu12") is None, reason="NIXL is not installed (nixl-cu12)"
)


def _count(data: bytes, value: int) -> int:
    """How many bytes have that value: mostly all or none, which is known ten times sooner."""
    if data == bytes([value]) * len(data):
        return len(data)
    return data.count(value) if value in data else 0


class Memory:
    """Bytes of this process, at an address."""

    def __init__(self, nbytes: int, value: int = 0) -> None:
        self.nbytes = nbytes
        self._buffer = (ctypes.c_char * nbytes)()
        self.address = ctypes.addressof(self._buffer)
        self.fill(value)

    def fill(self, value: int) -> None:
        ctypes.memset(self.address, value, self.nbytes)

    def count(self, value: int) -> int:
        """How many bytes have that value."""
        view = memoryview(self._buffer).cast("B")
        parts = range(0, self.nbytes, _PART)
        return sum(_count(bytes(view[at : at + _PART]), value) for at in parts)

    def bytes(self) -> bytes:
        return bytes(self._buffer)

    def set(self, data: bytes) -> None:
        ctypes.memmove(self.address, data, len(data))

    def copy(self, offset: int = 0) -> Copy:
        return Copy(self.address, 0, offset, self.nbytes)


class Pair:
    """A volume with one segment, in whose place the test is.

    Args:
        cuda_devices: how many both sides believe to have. If there are any, registering memory
            counts as expensive.
    """

    def __init__(self, nbytes: int, cuda_devices: int = 0) -> None:
        self.nbytes = nbytes
        self.topology = msgspec.structs.replace(probe(), cuda_devices=cuda_devices)
        self.fd = open_memory("test", nbytes)
        self.server = IsolatedServer("torchstore_rdma.server:RdmaServer")
        self.offer = b""

    async def start(self, directory: str) -> None:
        context = ServerContext("store", "volume", directory, self.topology)
        self.offer = await self.server.start(context, [Segment(0, self.fd, self.nbytes)])

    async def link(self, peer: bytes = b"client", *, same_host: bool = True) -> RdmaLink:
        async def ask(request: bytes) -> bytes:
            return await self.server.handshake(peer, request)

        here = self.topology
        context = LinkContext(here, here, same_host, True, self.offer, ask)
        return await RdmaLink.connect(self.offer, context)

    @property
    def pid(self) -> int:
        """Of the server half."""
        process = self.server._process
        assert process is not None
        return process._process.pid

    def is_alive(self) -> bool:
        return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"

    def look(self, offset: int, nbytes: int) -> bytes:
        return os.pread(self.fd, nbytes, offset)

    def put(self, offset: int, data: bytes) -> None:
        os.pwrite(self.fd, data, offset)

    def count(self, value: int) -> int:
        """How many bytes of the segment have that value."""
        parts = range(0, self.nbytes, _PART)
        return sum(_count(self.look(at, _PART), value) for at in parts)

    def fill(self, value: int) -> None:
        for at in range(0, self.nbytes, MB):
            self.put(at, bytes([value]) * min(MB, self.nbytes - at))

    def descriptors(self) -> int:
        """Of the server half's process."""
        return len(os.listdir(f"/proc/{self.pid}/fd"))


@asynccontextmanager
async def pair(
    directory: Path, nbytes: int = 64 * MB, fabric: str = "", cuda_devices: int = 0
) -> AsyncIterator[Pair]:
    made = Pair(nbytes, cuda_devices)
    before = os.environ.get("UCX_TLS")
    if fabric:
        os.environ["UCX_TLS"] = fabric
    try:
        await made.start(str(directory))
        yield made
    finally:
        if fabric and before is None:
            del os.environ["UCX_TLS"]
        elif before is not None:
            os.environ["UCX_TLS"] = before
        if made.server._process is not None:
            with suppress(ProcessLookupError):
                os.kill(made.pid, signal.SIGCONT)
        await made.server.close()
        os.close(made.fd)


async def late_bytes(seconds: float = 0.5) -> None:
    """Let bytes arrive that are still on their way. Nothing says that there are none, so it takes
    time.
    """
    await asyncio.sleep(seconds)


@contextmanager
def paused(begun: Callable[[], bool]) -> Iterator[list[Job]]:
    """The threads of clients, without which nothing moves, stand still from when ``begun()`` is
    true to the end: what a test does meanwhile, it does in the middle of a transfer, however late.
    Yields the batches that stand still.
    """
    jobs: list[Job] = []
    go_on, step = threading.Event(), Engine._step

    def stand(engine: Engine, agent: Any, peer: str, job: Job, kept: Any) -> bool:
        if begun():
            jobs.append(job)
            go_on.wait(60)
        return step(engine, agent, peer, job, kept)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "_step", stand)
        try:
            yield jobs
        finally:
            go_on.set()
