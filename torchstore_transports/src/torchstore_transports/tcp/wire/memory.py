"""Pieces of memory as buffers, for what compiled code cannot do (``tcp/wire/rows.py``): TLS,
checksums, and an installation without a compiler.

Short rows go through a buffer of the thread, one part at a time, so that the buffer stays in the
cache and its pages are never new.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from torchstore_core.machine.copying import Grid, copy_grids

__all__ = ["Piece", "incoming", "outgoing"]

# Shorter rows are packed, because passing each to the kernel takes longer than copying them.
_SHORT = 3 << 10
# Bytes of the buffer for packed rows. Each thread has one. Half of it is 10 to 40 % slower.
_BUFFER = 512 << 10
# Most views at once: as many as the kernel takes with one call.
_VIEWS = 1024

#: All memory of this process; a slice of it is a view of the memory at those addresses. Slicing
#: takes a tenth of the time of creating an array type for every length.
_MEMORY = memoryview((ctypes.c_ubyte * (1 << 62)).from_address(0)).cast("B")


_here = threading.local()


class Piece(NamedTuple):
    """``rows`` rows of ``nbytes`` bytes in memory, whose starts are ``stride`` bytes apart."""

    address: int
    nbytes: int
    rows: int
    stride: int


def outgoing(pieces: Iterable[Piece]) -> Iterator[list[memoryview]]:
    """Yield the bytes of the pieces, in order, as lists of buffers to send. Each list is only valid
    until the next one is requested, and only in the calling thread.
    """
    for views, grids in _parts(pieces):
        if grids:
            copy_grids(grids, stream=False)
        yield views


def incoming(pieces: Iterable[Piece]) -> Iterator[list[memoryview]]:
    """Yield lists of buffers, to be filled in order with the bytes of the pieces. Short rows are
    copied from the buffer when the next list is requested, so exhaust the iterator.
    """
    for views, grids in _parts(pieces):
        yield views
        if grids:
            swapped = [
                (to, of, nbytes, rows, step, dense) for of, to, nbytes, rows, dense, step in grids
            ]
            copy_grids(swapped, stream=False)


def _parts(pieces: Iterable[Piece]) -> Iterator[tuple[list[memoryview], list[Grid]]]:
    """Yield views of the pieces, with the copies of rows into the buffer that they require."""
    views: list[memoryview] = []
    grids: list[Grid] = []
    used = 0
    for piece in pieces:
        address, nbytes, rows, stride = piece
        if rows > 1 and nbytes < _SHORT:
            done = 0
            while done < rows:
                some = min(rows - done, (_BUFFER - used) // nbytes)
                if not some or len(views) >= _VIEWS:
                    yield views, grids
                    views, grids, used = [], [], 0
                    continue
                at = _buffer() + used
                grids.append((at, address + done * stride, nbytes, some, nbytes, stride))
                views.append(_MEMORY[at : at + some * nbytes])
                used += some * nbytes
                done += some
            continue
        for row in range(rows):
            if len(views) >= _VIEWS:
                yield views, grids
                views, grids, used = [], [], 0
            start = address + row * stride
            views.append(_MEMORY[start : start + nbytes])
    if views:
        yield views, grids


def _buffer() -> int:
    """Return the address of the calling thread's buffer."""
    buffer: ctypes.Array[ctypes.c_char] | None = getattr(_here, "buffer", None)
    if buffer is None:
        buffer = _here.buffer = ctypes.create_string_buffer(_BUFFER)
    return ctypes.addressof(buffer)
