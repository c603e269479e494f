"""Client halves that move wrong bytes, or some that they should not move any more."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import msgspec
from tests.transports.kit.broken.simple import OPEN, Plugin, Simple, SimpleLink, named

from torchstore_core.contracts.transport import Copy, Link, LinkContext, Mapping, Memory, Window
from torchstore_core.errors import TransportError
from torchstore_core.machine.tasks import wait_ended
from torchstore_core.machine.virtual_memory import map_private, map_shared
from torchstore_core.testing.timers import ends_within

_kept: list[Any] = []


class Short(SimpleLink):
    """Writes one byte too few."""

    def pieces(self, copy: Copy) -> Iterator[tuple[int, int, int]]:
        for address, offset, nbytes in super().pieces(copy):
            yield address, offset, nbytes - (nbytes > 1)


class Unregistered(Simple):
    """Correct: keeps no pages."""

    def registered(self, segment: int) -> int:
        return 0


class Narrow(SimpleLink):
    """Sends offsets as 32 bits."""

    def piece(self, fd: int, address: int, offset: int, nbytes: int, *, write: bool) -> None:
        super().piece(fd, address, offset % 2**32, nbytes, write=write)


class Thrifty(SimpleLink):
    """Does not write pieces of zeros, as if there were nothing else in a segment before."""

    def piece(self, fd: int, address: int, offset: int, nbytes: int, *, write: bool) -> None:
        if not write or any(ctypes.string_at(address, nbytes)):
            super().piece(fd, address, offset, nbytes, write=write)


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
                swapped[at] = msgspec.structs.replace(copy, address=copies[other].address)
                swapped[other] = msgspec.structs.replace(copies[other], address=copy.address)
                break
        await super().write(swapped)


class Few(SimpleLink):
    """Takes at most 4,096 copies a batch, and forgets the others."""

    async def write(self, copies: Sequence[Copy]) -> None:
        await super().write(copies[:4096])


class Strideless(SimpleLink):
    """Takes rows for one run."""

    def pieces(self, copy: Copy) -> Iterator[tuple[int, int, int]]:
        yield from super().pieces(
            msgspec.structs.replace(copy, nbytes=copy.nbytes * copy.rows, rows=1)
        )


class Absolute(SimpleLink):
    """Forgets the sign of a size."""

    async def move(self, copies: Sequence[Copy], *, write: bool) -> None:
        positive = [msgspec.structs.replace(copy, nbytes=abs(copy.nbytes)) for copy in copies]
        await super().move(positive, write=write)


class Deviceless(SimpleLink):
    """Says that it reaches memory of a device, and leaves it out."""

    devices: ClassVar[frozenset[str]] = frozenset({"cpu"})

    async def move(self, copies: Sequence[Copy], *, write: bool) -> None:
        await super().move([copy for copy in copies if not copy.device], write=write)


class Capped(SimpleLink):
    """Loses what is behind the first 128 MiB of a copy."""

    most = 128 << 20

    def pieces(self, copy: Copy) -> Iterator[tuple[int, int, int]]:
        yield from super().pieces(msgspec.structs.replace(copy, nbytes=min(copy.nbytes, self.most)))


class Cut(Capped):
    """Loses what is behind the first MiB."""

    most = 1 << 20


class First(SimpleLink):
    """Takes every segment for the first."""

    def work(self, copies: Sequence[Copy], stop: threading.Event, write: bool) -> None:
        super().work([msgspec.structs.replace(one, segment=0) for one in copies], stop, write)


class Grown(SimpleLink):
    """Does not reach what it needs of a segment later, when that has grown."""

    known = 0

    def pieces(self, copy: Copy) -> Iterator[tuple[int, int, int]]:
        self.known = self.known or copy.offset + (200 << 20)
        yield from [one for one in super().pieces(copy) if one[1] < self.known]


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
        _kept.append(block)
        return Mapping(base + offset, offset, nbytes, block)


class Blind(SimpleLink):
    """Its windows are private."""

    def window(self, segment: int) -> Window:
        fd, size = self.segments[segment]
        address, _, block = map_private(fd, 0, size)
        _kept.append(block)
        return Window(address, size)

    def prepare(self, segment: int, offset: int, nbytes: int, *, fresh: bool) -> None:
        return


class Stale(SimpleLink):
    """Goes on with the pages that it has registered, as a device does."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.registered: dict[int, Any] = {}

    async def write_from(self, copies: Sequence[Copy], memory: Sequence[Memory]) -> None:
        whose = {one.address: one.owner for one in memory}
        for copy in copies:
            kept = self.registered.get(copy.address)
            if kept is not None and kept[0] is whose.get(copy.address):
                copy = msgspec.structs.replace(copy, address=ctypes.addressof(kept[1]))
            await self.write([copy])

    async def read_into(self, copies: Sequence[Copy], memory: Sequence[Memory]) -> None:
        await self.read(copies)
        for one in memory:
            pages = ctypes.create_string_buffer(ctypes.string_at(one.address, one.nbytes))
            self.registered[one.address] = one.owner, pages


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
        nothing = asyncio.get_running_loop().create_future()
        await ends_within(nothing, 2.0)  # a time that is as late as that of the kit


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


class Deaf(SimpleLink):
    """Asks its server half before each transfer, and takes a deadline's end for the answer."""

    async def move(self, copies: Sequence[Copy], *, write: bool) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            if self.context.handshake is not None:
                await self.context.handshake(OPEN)
            await super().move(copies, write=write)


class Plain(Polite):
    """Raises what the socket raises, when its server half is gone."""

    async def ask(self) -> None:
        try:
            await super().ask()
        except TransportError as error:
            raise ConnectionResetError(str(error)) from error


class Lingering(Polite):
    """Raises at once for a batch that fails, and moves what is good of it a little later."""

    async def move(self, copies: Sequence[Copy], *, write: bool) -> None:
        try:
            await super().move(copies, write=write)
        except TransportError:
            good = [copy for copy in copies if self.is_good(copy)]
            later = MovesOn(
                {n: (os.dup(fd), size) for n, (fd, size) in self.segments.items()}, self
            )
            threading.Timer(0.2, later.work, (good, threading.Event(), write)).start()
            raise

    def is_good(self, copy: Copy) -> bool:
        try:
            self.check(copy)
        except TransportError:
            return False
        return True


class Belated(Polite):
    """Asks its server half before each transfer, and moves when the answer comes, whoever waits."""

    async def move(self, copies: Sequence[Copy], *, write: bool) -> None:
        later = MovesOn(
            {n: (os.dup(fd), size) for n, (fd, size) in self.segments.items()}, self.context
        )

        async def when_asked() -> None:
            await self.ask()
            later.work(copies, threading.Event(), write)
            later.close()

        _kept.append(asyncio.ensure_future(when_asked()))
        await asyncio.shield(_kept[-1])


class Opening(SimpleLink):
    """Opens what it was shown for each transfer, whether its client was disconnected or not."""

    @classmethod
    async def connect(cls, offer: bytes, context: LinkContext) -> Link:
        made = await super().connect(offer, context)
        assert isinstance(made, Opening)
        assert context.handshake is not None
        made.shown = msgspec.msgpack.decode(await context.handshake(OPEN))
        made.leave()
        return made

    def leave(self) -> None:
        while self.segments:
            os.close(self.segments.popitem()[1][0])

    async def move(self, copies: Sequence[Copy], *, write: bool) -> None:
        self.segments = {ident: (os.open(path, os.O_RDWR), n) for ident, path, n in self.shown}
        try:
            await super().move(copies, write=write)
        finally:
            self.leave()


plugin_strideless = Plugin(Strideless, name="strideless")
plugin_cut = Plugin(Cut, name="cut")


plugin_Narrow = Plugin(Narrow, Unregistered)


def __getattr__(name: str) -> Plugin:
    """``plugin_X``: the plug-in with the half ``X``."""
    return named(name, globals())
