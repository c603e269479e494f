"""A simple, correct transport. The modules beside it have some that are wrong in one way each.

The client half opens the segment through the server half's descriptor, and moves bytes in a thread.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import msgspec

from torchstore_core.contracts.hooks import hookimpl
from torchstore_core.contracts.transport import (
    Bid,
    Copy,
    Link,
    LinkContext,
    Refusal,
    Segment,
    ServerContext,
    TransportServer,
    TransportSpec,
)
from torchstore_core.errors import TransportError, TransportUnavailableError
from torchstore_core.machine.tasks import wait_ended

OFFER = b"simple"
OPEN = b"open"
_PIECE = 64 << 10


class Simple(TransportServer):
    """Tells clients where the segments are."""

    def __init__(self) -> None:
        self.segments: dict[int, Segment] = {}
        self.peers: set[bytes] = set()

    async def start(self, context: ServerContext, segments: Sequence[Segment]) -> bytes:
        self.segments = {segment.id: segment for segment in segments}
        return OFFER

    async def handshake(self, peer: bytes, request: bytes) -> bytes:
        if request != OPEN:
            raise TransportError("that is no request")
        self.peers.add(peer)
        places = [
            (s.id, f"/proc/{os.getpid()}/fd/{s.fd}", s.nbytes) for s in self.segments.values()
        ]
        return msgspec.msgpack.encode(places)

    async def disconnect(self, peer: bytes) -> None:
        self.peers.discard(peer)

    def registered(self, segment: int) -> int:
        return self.segments[segment].nbytes if self.peers else 0

    async def close(self) -> None:
        self.peers.clear()
        self.segments.clear()


class SimpleLink(Link):
    """Correct. Subclasses spoil one thing."""

    rows: ClassVar[bool] = True

    def __init__(self, segments: dict[int, tuple[int, int]], context: LinkContext) -> None:
        self.segments = segments
        self.context = context
        self.closed = False

    @classmethod
    async def connect(cls, offer: bytes, context: LinkContext) -> Link:
        if offer != OFFER or context.handshake is None:
            raise TransportUnavailableError("that is no offer")
        places = msgspec.msgpack.decode(
            await context.handshake(OPEN), type=list[tuple[int, str, int]]
        )
        try:
            opened = {ident: (os.open(path, os.O_RDWR), size) for ident, path, size in places}
        except OSError as error:
            raise TransportUnavailableError(f"the volume is gone: {error}") from error
        return cls(opened, context)

    async def write(self, copies: Sequence[Copy]) -> None:
        await self.move(copies, write=True)

    async def read(self, copies: Sequence[Copy]) -> None:
        await self.move(copies, write=False)

    def close(self) -> None:
        self.closed = True
        while self.segments:
            os.close(self.segments.popitem()[1][0])

    async def move(self, copies: Sequence[Copy], *, write: bool) -> None:
        if self.closed:
            raise TransportError("this link was closed")
        for copy in copies:
            self.check(copy)
        stop = threading.Event()
        work = asyncio.ensure_future(asyncio.to_thread(self.work, copies, stop, write))
        try:
            await asyncio.shield(work)
        except asyncio.CancelledError:
            stop.set()
            await self.stopped(work)
            raise

    async def stopped(self, work: asyncio.Future[None]) -> None:
        await wait_ended(work)

    def check(self, copy: Copy) -> None:
        _, size = self.segments.get(copy.segment, (-1, -1))
        last = copy.offset + (copy.rows - 1) * copy.step if copy.rows else copy.offset
        if min(copy.offset, last, copy.nbytes) < 0 or max(copy.offset, last) + copy.nbytes > size:
            raise TransportError(f"{copy} is outside of the segment")

    def work(self, copies: Sequence[Copy], stop: threading.Event, write: bool) -> None:
        for copy in copies:
            fd = self.segments[copy.segment][0]
            for address, offset, nbytes in self.pieces(copy):
                if stop.is_set():
                    return
                self.piece(fd, address, offset, nbytes, write=write)

    def pieces(self, copy: Copy) -> Iterator[tuple[int, int, int]]:
        for row in range(copy.rows):
            here, there = copy.address + row * copy.stride, copy.offset + row * copy.step
            for at in range(0, copy.nbytes, _PIECE):
                yield here + at, there + at, min(_PIECE, copy.nbytes - at)

    def piece(self, fd: int, address: int, offset: int, nbytes: int, *, write: bool) -> None:
        memory = memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")
        if write:
            os.pwrite(fd, memory, offset)
        else:
            os.preadv(fd, [memory], offset)


def bid(context: LinkContext) -> Bid | Refusal:
    """That of the correct one."""
    return Bid(1e-3, 1e9, "a thread") if context.same_host else Refusal("it is on another host")


class Plugin:
    """An object with the hook, as an entry point may name it.

    Args:
        client, server: classes of the halves.
        name: that of its entry point.
        fields: further ones of the spec.
    """

    def __init__(
        self,
        client: type[Link] = SimpleLink,
        server: type[TransportServer] = Simple,
        bid: Callable[[LinkContext], Bid | Refusal] = bid,
        name: str = "broken",
        **fields: Any,
    ) -> None:
        self.name, self.fields = name, {"bid": bid, **fields}
        self.client, self.server = (f"{cls.__module__}:{cls.__name__}" for cls in (client, server))

    @hookimpl
    def torchstore_transport(self) -> TransportSpec:
        """See ``torchstore_core.contracts.hooks``."""
        return TransportSpec(self.name, client=self.client, server=self.server, **self.fields)


def named(name: str, classes: dict[str, Any]) -> Plugin:
    """The plug-in with a broken half of that name: ``plugin_X`` for the class ``X``.

    Raises:
        AttributeError: there is none.
    """
    half = classes.get(name.removeprefix("plugin_"))
    if not (name.startswith("plugin_") and isinstance(half, type)):
        raise AttributeError(name)
    return Plugin(server=half) if issubclass(half, TransportServer) else Plugin(half)


def __getattr__(name: str) -> Plugin:
    """``plugin_X``: the plug-in with the half ``X``."""
    return named(name, globals())
