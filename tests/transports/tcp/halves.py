"""Both halves of ``tcp`` with real sockets between them, but without a store."""

from __future__ import annotations

import ctypes
import mmap
import os
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
from tests.support import open_files

from torchstore_core.contracts.transport import Copy, LinkContext, Segment, ServerContext
from torchstore_core.machine.topology import probe
from torchstore_core.server.memory.segment import open_memory
from torchstore_transports.tcp.link import TcpLink
from torchstore_transports.tcp.server import TcpServer
from torchstore_transports.tcp.wire.protocol import Endpoint, Welcome

MB = 1 << 20
PEER = b"peer"

#: Changes where a client believes that the volume listens.
Route = Callable[[tuple[Endpoint, ...]], tuple[Endpoint, ...]]


_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


class Looked:
    """Memory that is looked at and filled where it lies: copies take longer than transfers."""

    @property
    def address(self) -> int:
        raise NotImplementedError

    def holds(self, content: bytes, nbytes: int | None = None) -> bool:
        """Whether it begins with this content, or with so much of it."""
        size = len(content) if nbytes is None else nbytes
        return _memcmp(self.address, content, size) == 0

    def is_full_of(self, byte: bytes, nbytes: int, at: int = 0) -> bool:
        begin = self.address + at
        same = _memcmp(begin, begin + 1, nbytes - 1) == 0
        return same and ctypes.string_at(begin, 1) == byte

    def fill(self, byte: bytes, nbytes: int) -> None:
        ctypes.memset(self.address, ord(byte), nbytes)


class Volume(Looked):
    """A server half with one segment, and the memory of that."""

    def __init__(self, nbytes: int) -> None:
        self.segment = Segment(7, open_memory("test", nbytes), nbytes)
        self.memory = mmap.mmap(self.segment.fd, nbytes)
        self.server = TcpServer()
        self.offer = b""
        self.welcome: Welcome | None = None

    async def start(self) -> None:
        context = ServerContext("store", "volume", "/tmp", probe())
        self.offer = await self.server.start(context, [self.segment])

    async def connect(self, peer: bytes = PEER, route: Route | None = None) -> TcpLink:
        async def handshake(request: bytes) -> bytes:
            answer = await self.server.handshake(peer, request)
            self.welcome = msgspec.msgpack.decode(answer, type=Welcome)
            if route is None:
                return answer
            there = route(self.welcome.endpoints)
            return msgspec.msgpack.encode(msgspec.structs.replace(self.welcome, endpoints=there))

        here = probe()
        context = LinkContext(here, here, True, True, offer=self.offer, handshake=handshake)
        return await TcpLink.connect(self.offer, context)

    @property
    def address(self) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(self.memory))

    @property
    def endpoint(self) -> Endpoint:
        assert self.welcome is not None
        return self.welcome.endpoints[0]

    async def close(self) -> None:
        await self.server.close()
        self.memory.close()
        os.close(self.segment.fd)


@asynccontextmanager
async def volume(nbytes: int = 64 * MB) -> AsyncIterator[Volume]:
    made = Volume(nbytes)
    await made.start()
    try:
        yield made
    finally:
        await made.close()


@asynccontextmanager
async def linked(
    nbytes: int = 64 * MB, route: Route | None = None
) -> AsyncIterator[tuple[TcpLink, Volume]]:
    async with volume(nbytes) as made:
        link = await made.connect(route=route)
        try:
            yield link, made
        finally:
            link.close()


class Local(Looked):
    """Memory of the client, in huge pages: to get small ones takes as long as a transfer."""

    def __init__(self, nbytes: int, content: bytes = b"") -> None:
        memory = mmap.mmap(-1, max(nbytes, 1))
        memory.madvise(mmap.MADV_HUGEPAGE)
        memory[: len(content)] = content
        self.buffer = (ctypes.c_char * nbytes).from_buffer(memory)

    @property
    def address(self) -> int:
        return ctypes.addressof(self.buffer)

    @property
    def raw(self) -> bytes:
        return self.buffer.raw

    def copy(self, offset: int = 0, nbytes: int | None = None, segment: int = 7) -> Copy:
        size = len(self.buffer) if nbytes is None else nbytes
        return Copy(self.address, segment, offset, size)


def drip(sock: socket.socket, said: bytes = b"") -> None:
    """Say something, and then a byte at a time, until the other end has closed, or for 10 s."""
    ends = time.monotonic() + 10
    with sock:
        sock.sendall(said)
        while time.monotonic() < ends:
            try:
                sock.sendall(b"t")
            except OSError:
                return
            time.sleep(0.05)  # what a slow stranger does


def threads() -> list[str]:
    """The names of the threads of both halves that run."""
    return sorted(
        one.name for one in threading.enumerate() if one.name.startswith("torchstore-tcp")
    )


def sockets() -> set[str]:
    """The sockets of networks that this process has open. A thread or the collector may close some
    of what was there before a test. (Those to servers, which are of no network, may be opened, too:
    by clients of earlier tests whose server has died, for a while.)
    """
    found = set()
    for link, file in open_files().items():
        if not file.startswith("socket:"):
            continue
        try:
            same = socket.socket(fileno=os.dup(int(link.name)))
        except OSError:  # it was just closed
            continue
        with same:
            if same.family != socket.AF_UNIX:
                found.add(os.readlink(f"/proc/self/fd/{same.fileno()}"))
    return found


def opened_since(before: set[str]) -> dict[str, str]:
    """The sockets that have been opened since then, each with what the kernel says of it."""
    said = {}
    for name in ("tcp", "tcp6"):
        for line in Path("/proc/net", name).read_text().splitlines()[1:]:
            said[f"socket:[{line.split()[9]}]"] = f"{name} {line}"
    return {one: said.get(one, "?") for one in sockets() - before}


def listening(port: int) -> bool:
    """Whether anybody in this network namespace listens at a port."""
    lines = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path("/proc/net", name).read_text().splitlines()[1:]
    ]
    return any(line[3] == "0A" and int(line[1].rpartition(":")[2], 16) == port for line in lines)
