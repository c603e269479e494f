"""Client half of ``files``: reads and writes the segments' files in a thread."""

from __future__ import annotations

import asyncio
import ctypes
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar

import msgspec

from torchstore_core.contracts.transport import Copy, Link, LinkContext
from torchstore_core.errors import TransportError, TransportUnavailableError
from torchstore_core.machine.tasks import wait_ended
from torchstore_files.server import OFFER, WHERE, Place

# ``os.pwritev`` or ``os.preadv``.
_Move = Callable[[int, list[memoryview], int], int]
# A cancelled transfer stops after a piece.
_PIECE = 1 << 20


class FilesLink(Link):
    """Has the segments open. Takes rows, which cost no more here than copies of their own."""

    rows: ClassVar[bool] = True

    def __init__(self, files: dict[int, tuple[int, int]]) -> None:
        self._files = files  # descriptor and size, by segment
        self._lock = threading.Lock()  # a link may be used by several event loops
        self._transfers = 0
        self._closed = False

    @classmethod
    async def connect(cls, offer: bytes, context: LinkContext) -> FilesLink:
        if offer != OFFER or context.handshake is None:
            raise TransportUnavailableError("not an offer of files")
        places = msgspec.msgpack.decode(await context.handshake(WHERE), type=list[Place])
        files: dict[int, tuple[int, int]] = {}
        try:
            for place in places:
                files[place.segment] = os.open(place.path, os.O_RDWR | os.O_CLOEXEC), place.nbytes
        except OSError as error:
            cls(files).close()
            raise TransportUnavailableError(f"cannot open the volume's memory: {error}") from error
        return cls(files)

    async def write(self, copies: Sequence[Copy]) -> None:
        await self._transfer(copies, os.pwritev)

    async def read(self, copies: Sequence[Copy]) -> None:
        await self._transfer(copies, os.preadv)

    def close(self) -> None:
        """Closes the files now, or when the last transfer ends: its thread still uses them."""
        with self._lock:
            self._closed = True
            while self._files and not self._transfers:
                os.close(self._files.popitem()[1][0])

    async def _transfer(self, copies: Sequence[Copy], move: _Move) -> None:
        """Move a batch in a thread. When this raises, the thread has stopped."""
        for copy in copies:
            self._check(copy)
        with self._lock:
            if self._closed:
                raise TransportError("this link was closed")
            self._transfers += 1
        stop = threading.Event()
        work = asyncio.ensure_future(asyncio.to_thread(self._work, copies, move, stop))
        try:
            await asyncio.shield(work)
        except asyncio.CancelledError:
            stop.set()
            await wait_ended(work)
            raise
        finally:
            with self._lock:
                self._transfers -= 1
            if self._closed:
                self.close()

    def _check(self, copy: Copy) -> None:
        _, size = self._files.get(copy.segment, (-1, -1))
        last = copy.offset + max(copy.rows - 1, 0) * copy.step
        first, end = min(copy.offset, last), max(copy.offset, last) + copy.nbytes
        if first < 0 or copy.nbytes < 0 or end > size:
            raise TransportError(f"{copy} is not inside of a segment")

    def _work(self, copies: Sequence[Copy], move: _Move, stop: threading.Event) -> None:
        for copy in copies:
            fd = self._files[copy.segment][0]
            for address, offset, nbytes in _pieces(copy):
                memory = memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")
                while memory:
                    if stop.is_set():
                        return
                    try:
                        done = move(fd, [memory], offset)
                    except OSError as error:
                        raise TransportError(f"the volume's memory: {error}") from error
                    memory, offset = memory[done:], offset + done


def _pieces(copy: Copy) -> Iterator[tuple[int, int, int]]:
    """Address, offset and size of every piece of every row."""
    for row in range(copy.rows):
        address, offset = copy.address + row * copy.stride, copy.offset + row * copy.step
        for at in range(0, copy.nbytes, _PIECE):
            yield address + at, offset + at, min(_PIECE, copy.nbytes - at)
