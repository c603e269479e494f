"""Client halves that refuse too little, or leave something behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec
from tests.transports.kit.broken.simple import OFFER, Plugin, SimpleLink, named

from torchstore_core.contracts.transport import Copy, Link, LinkContext
from torchstore_core.errors import TransportError
from torchstore_core.machine.virtual_memory import map_shared

_litter: list[Any] = []
_remembered: list[SimpleLink] = []


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
        super().check(msgspec.structs.replace(copy, offset=end, nbytes=0))

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


class Silent(SimpleLink):
    """Waits for ever for an answer to an offer that it does not know."""

    @classmethod
    async def connect(cls, offer: bytes, context: LinkContext) -> Link:
        if offer != OFFER:
            await asyncio.Event().wait()
        return await super().connect(offer, context)


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


class Remembered(SimpleLink):
    """Is bound to its event loop, and stays when that has gone."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        _remembered.append(self)


class Limited(SimpleLink):
    """Takes less than it says."""

    async def move(self, copies: Sequence[Copy], *, write: bool) -> None:
        if sum(copy.nbytes for copy in copies) > 500:
            raise TransportError("that is too much")
        await super().move(copies, write=write)


class OnceShown(SimpleLink):
    """Is shown the segments of a volume once, and does not notice that the half has died."""

    shown: ClassVar[dict[bytes, bytes]] = {}

    @classmethod
    async def connect(cls, offer: bytes, context: LinkContext) -> Link:
        async def handshake(request: bytes) -> bytes:
            if request not in cls.shown and context.handshake is not None:
                cls.shown[request] = await context.handshake(request)
            return cls.shown[request]

        try:
            return await super().connect(
                offer, msgspec.structs.replace(context, handshake=handshake)
            )
        except TransportError as error:
            raise OSError("that half is dead") from error


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


class Failing(SimpleLink):
    """Keeps a descriptor for each transfer that fails."""

    async def move(self, copies: Sequence[Copy], *, write: bool) -> None:
        try:
            await super().move(copies, write=write)
        except TransportError:
            _litter.append(os.open(os.devnull, os.O_RDONLY))
            raise


class Leaving(SimpleLink):
    """Keeps a descriptor for each transfer that is cancelled."""

    async def stopped(self, work: asyncio.Future[None]) -> None:
        await super().stopped(work)
        _litter.append(os.open(os.devnull, os.O_RDONLY))


class Together(SimpleLink):
    """Closes all links that the process has, and so ends what they move."""

    ever: ClassVar[int] = 0

    async def move(self, copies: Sequence[Copy], *, write: bool) -> None:
        closed = Together.ever
        await super().move(copies, write=write)
        if Together.ever != closed:
            raise TransportError("another link was closed")

    def close(self) -> None:
        super().close()
        Together.ever += 1


def clean() -> None:
    """Undo what the last ones have left."""
    OnceShown.shown.clear()
    while _remembered:
        _remembered.pop().close()
    while _litter:
        left = _litter.pop()
        if isinstance(left, int):
            os.close(left)
        elif isinstance(left, threading.Event):
            left.set()
        elif isinstance(left, subprocess.Popen):
            left.communicate()


plugin_Remembered = Plugin(Remembered, loop_bound=True)
plugin_Limited = Plugin(Limited, max_bytes=1000)
plugin_limited = Plugin(Limited, name="limited", max_bytes=1000)
plugin_Apart = Plugin(OnceShown, isolated=True, offer=lambda: OFFER)


def __getattr__(name: str) -> Plugin:
    """``plugin_X``: the plug-in with the half ``X``."""
    return named(name, globals())
