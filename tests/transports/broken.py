"""A simple, correct transport, and transports that are wrong in one way each.

The client half opens the segment through the server half's descriptor, and moves bytes in a thread.
The other module of that kind, :mod:`tests.transports.broken_halves`, has those with a wrong server.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import msgspec

from torchstore_core.contracts.hooks import hookimpl
from torchstore_core.contracts.transport import (
    Bid,
    Copy,
    Link,
    LinkContext,
    Mapping,
    Refusal,
    Segment,
    ServerContext,
    TransportServer,
    TransportSpec,
)
from torchstore_core.errors import TransportError, TransportUnavailableError
from torchstore_core.machine.tasks import wait_ended
from torchstore_core.machine.virtual_memory import map_shared

OFFER = b"simple"
OPEN = b"open"
_PIECE = 64 << 10
_litter: list[Any] = []


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


# ---- bytes ----------------------------------------------------------------------------------


class Short(SimpleLink):
    """Writes one byte too few."""

    def pieces(self, copy: Copy) -> Iterator[tuple[int, int, int]]:
        for address, offset, nbytes in super().pieces(copy):
            yield address, offset, nbytes - (nbytes > 1)


class Long(SimpleLink):
    """Reads in words of 8 bytes."""

    def piece(self, fd: int, address: int, offset: int, nbytes: int, *, write: bool) -> None:
        size = nbytes if write else -(-nbytes // 8) * 8
        super().piece(fd, address, offset, size, write=write)


class Swapping(SimpleLink):
    """Exchanges the sources of two copies of the same size."""

    async def write(self, copies: Sequence[Copy]) -> None:
        known: dict[int, int] = {}
        swapped = list(copies)
        for at, copy in enumerate(copies):
            if (other := known.setdefault(copy.nbytes, at)) != at:
                swapped[at] = copy._replace(address=copies[other].address)
                swapped[other] = copies[other]._replace(address=copy.address)
                break
        await super().write(swapped)


class Few(SimpleLink):
    """Takes at most 4,096 copies a batch, and forgets the others."""

    async def write(self, copies: Sequence[Copy]) -> None:
        await super().write(copies[:4096])


class Strideless(SimpleLink):
    """Takes rows for one run."""

    def pieces(self, copy: Copy) -> Iterator[tuple[int, int, int]]:
        yield from super().pieces(copy._replace(nbytes=copy.nbytes * copy.rows, rows=1))


class Capped(SimpleLink):
    """Loses what is behind the first 16 MB of a copy."""

    def pieces(self, copy: Copy) -> Iterator[tuple[int, int, int]]:
        yield from super().pieces(copy._replace(nbytes=min(copy.nbytes, 16 << 20)))


class Clearing(SimpleLink):
    """Clears its source."""

    async def write(self, copies: Sequence[Copy]) -> None:
        await super().write(copies)
        for copy in copies:
            ctypes.memset(copy.address, 0, copy.nbytes * min(copy.rows, 1))


class Busy(SimpleLink):
    """Loses a batch while another one is under way."""

    under_way = False

    async def move(self, copies: Sequence[Copy], *, write: bool) -> None:
        if self.under_way:
            return
        self.under_way = True
        try:
            await super().move(copies, write=write)
        finally:
            self.under_way = False


class OneLoop(SimpleLink):
    """Waits on its first event loop, and does not say that it is bound to it."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.loop = asyncio.get_running_loop()

    async def move(self, copies: Sequence[Copy], *, write: bool) -> None:
        done = self.loop.create_future()
        self.loop.call_soon(done.set_result, None)
        await done
        await super().move(copies, write=write)


class Shared(SimpleLink):
    """Its mappings are not private."""

    def map(self, segment: int, offset: int, nbytes: int) -> Mapping:
        fd, size = self.segments[segment]
        base = map_shared(fd, size)
        block = (ctypes.c_char * size).from_address(base)
        _litter.append(block)
        return Mapping(base + offset, offset, nbytes, block)


# ---- cancels --------------------------------------------------------------------------------


class MovesOn(SimpleLink):
    """Raises when it is cancelled, and moves the rest all the same."""

    async def stopped(self, work: asyncio.Future[None]) -> None:
        return

    def work(self, copies: Sequence[Copy], stop: threading.Event, write: bool) -> None:
        files = {copy.segment: os.dup(self.segments[copy.segment][0]) for copy in copies}
        time.sleep(0.002)
        for copy in copies:
            for address, offset, nbytes in self.pieces(copy):
                self.piece(files[copy.segment], address, offset, nbytes, write=write)
        for fd in files.values():
            os.close(fd)


class Patient(SimpleLink):
    """A cancelled transfer waits for something that does not come."""

    async def stopped(self, work: asyncio.Future[None]) -> None:
        await super().stopped(work)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.Event().wait(), 1.5)


class Polite(SimpleLink):
    """Asks its server half before each transfer, and waits for the answer, cancelled or not."""

    async def move(self, copies: Sequence[Copy], *, write: bool) -> None:
        if self.closed:
            raise TransportError("this link was closed")
        asking = asyncio.ensure_future(self.ask())
        cancelled = await wait_ended(asking, 4.0)
        if not asking.done():
            asking.cancel()
        if cancelled:
            raise asyncio.CancelledError
        asking.result()
        await super().move(copies, write=write)

    async def ask(self) -> None:
        if self.context.handshake is not None:
            await self.context.handshake(OPEN)


class Plain(Polite):
    """Raises what the socket raises, when its server half is gone."""

    async def ask(self) -> None:
        try:
            await super().ask()
        except TransportError as error:
            raise ConnectionResetError(str(error)) from error


# ---- refusals -------------------------------------------------------------------------------


class Trusting(SimpleLink):
    """Does not look at ranges."""

    def check(self, copy: Copy) -> None:
        return

    def piece(self, fd: int, address: int, offset: int, nbytes: int, *, write: bool) -> None:
        with contextlib.suppress(OSError, OverflowError):
            super().piece(fd, address, offset, nbytes, write=write)

    def work(self, copies: Sequence[Copy], stop: threading.Event, write: bool) -> None:
        super().work([copy for copy in copies if copy.segment in self.segments], stop, write)


class Unsigned(SimpleLink):
    """Forgets that a sum overflows in 64 bits."""

    def check(self, copy: Copy) -> None:
        if copy.offset < 0:
            raise TransportError("a negative offset")
        end = (copy.offset + copy.nbytes) % 2**64
        super().check(copy._replace(offset=end, nbytes=0))

    def piece(self, fd: int, address: int, offset: int, nbytes: int, *, write: bool) -> None:
        if 0 <= offset < 2**63:
            super().piece(fd, address, offset, nbytes, write=write)


class Untyped(SimpleLink):
    """Raises ValueError where a place is outside."""

    def check(self, copy: Copy) -> None:
        try:
            super().check(copy)
        except TransportError as error:
            raise ValueError(error.message) from error


class Boasting(SimpleLink):
    """Says that all copies of a failed batch have arrived."""

    async def move(self, copies: Sequence[Copy], *, write: bool) -> None:
        try:
            await super().move(copies, write=write)
        except TransportError as error:
            raise TransportError(error.message, details={"done": len(copies)}) from error


class Undecided(SimpleLink):
    """Fails over an offer that it cannot decode."""

    @classmethod
    async def connect(cls, offer: bytes, context: LinkContext) -> Link:
        if offer.decode() != OFFER.decode():
            raise ValueError("that is no offer")
        return await super().connect(offer, context)


# ---- ends -----------------------------------------------------------------------------------


class Open(SimpleLink):
    """Works on after it was closed."""

    def close(self) -> None:
        return


class Once(SimpleLink):
    """Cannot be closed twice."""

    def close(self) -> None:
        if self.closed:
            raise ValueError("it is closed already")
        super().close()


class Slow(SimpleLink):
    """Blocks in close."""

    def close(self) -> None:
        if not self.closed:
            time.sleep(0.4)
        super().close()


class Abrupt(SimpleLink):
    """Raises OSError after it was closed."""

    async def move(self, copies: Sequence[Copy], *, write: bool) -> None:
        if self.closed:
            raise OSError("bad file descriptor")
        await super().move(copies, write=write)


class Descriptors(SimpleLink):
    """Keeps a descriptor for each link."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        _litter.append(os.open(os.devnull, os.O_RDONLY))


class Hasty(SimpleLink):
    """Opens the segments, and then asks for something else before it has a link to close."""

    @classmethod
    async def connect(cls, offer: bytes, context: LinkContext) -> Link:
        made = await super().connect(offer, context)
        await asyncio.sleep(0.2)
        return made


class Threads(SimpleLink):
    """Keeps a thread for each link."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        ends = threading.Event()
        _litter.append(ends)
        threading.Thread(target=ends.wait, daemon=True).start()


class Mappings(SimpleLink):
    """Keeps a mapping for each link."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        for fd, size in self.segments.values():
            map_shared(fd, size)


class Children(SimpleLink):
    """Keeps a process for each link."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        program = "import sys; sys.stdin.read()"
        _litter.append(subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE))


def clean() -> None:
    """Undo what the last ones have left."""
    while _litter:
        left = _litter.pop()
        if isinstance(left, int):
            os.close(left)
        elif isinstance(left, threading.Event):
            left.set()
        elif isinstance(left, subprocess.Popen):
            left.communicate()


# ---- descriptors ----------------------------------------------------------------------------


def bid(context: LinkContext) -> Bid | Refusal:
    """That of the correct one."""
    return Bid(1e-3, 1e9, "a thread") if context.same_host else Refusal("it is on another host")


class Plugin:
    """An object with the hook, as an entry point may name it."""

    def __init__(self, client: str = "SimpleLink", server: str = "Simple", **fields: Any) -> None:
        halves = [half if ":" in half else f"{__name__}:{half}" for half in (client, server)]
        self.fields = {"bid": bid, "client": halves[0], "server": halves[1], **fields}

    @hookimpl
    def torchstore_transport(self) -> TransportSpec:
        """See ``torchstore_core.contracts.hooks``."""
        return TransportSpec("broken", **self.fields)


class Heavy(Plugin):
    """Its hook imports torch."""

    @hookimpl
    def torchstore_transport(self) -> TransportSpec:
        import torch

        return TransportSpec("broken", max_bytes=torch.iinfo(torch.int64).max, **self.fields)


def plugin_of(name: str) -> Plugin:
    """That of a client half in this module."""
    return Plugin(name)


_moods = iter(range(1 << 60))
BIDS: dict[str, Any] = {
    "nan": lambda _: Bid(float("nan"), 1e9, "?"),
    "negative": lambda _: Bid(-1.0, 1e9, "?"),
    "infinite": lambda _: Bid(1.0, float("inf"), "?"),
    "nothing": lambda _: Bid(1.0, 0.0, "?"),
    "silent": lambda _: Bid(1.0, 1e9, ""),
    "wordless": lambda context: Refusal("") if not context.same_host else bid(context),
    "none": lambda _: None,
    "moody": lambda _: Bid(1.0 + next(_moods) // 40, 1e9, "?"),
    "slow": lambda context: (time.sleep(0.005), bid(context))[1],
}


def __getattr__(name: str) -> Plugin:
    """``plugin_X``: the plug-in with the client half ``X``; ``bid_x``: that with the bid ``x``."""
    kind, _, which = name.partition("_")
    if kind == "plugin" and which in globals():
        return Plugin(which)
    if kind == "bid" and which in BIDS:
        return Plugin(bid=BIDS[which])
    if name == "heavy":
        return Heavy()
    raise AttributeError(name)
