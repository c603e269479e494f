"""Pieces of memory, as what a connection sends from and receives into.

Rows are sent from where they lie, and received into their places. Only rows so short that telling
the kernel of each would cost more than a copy go through a buffer.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import NamedTuple

from torchstore_core.machine.copying import Grid, copy_grids

__all__ = ["Incoming", "Piece", "outgoing"]

# Rows of fewer bytes are packed. Over the loopback that took rows of 64 bytes from 0.1 to 2 GB/s,
# and those of 1 KB from 1.5 to 3; from 4 KB on it loses.
_SHORT = 2 << 10

#: All memory of this process; a slice of it is a view of the memory at those addresses. Slicing
#: takes a tenth of the time that making an array type for every length does.
_MEMORY = memoryview((ctypes.c_ubyte * (1 << 62)).from_address(0)).cast("B")


class Piece(NamedTuple):
    """``rows`` rows of ``nbytes`` bytes, the starts of which are ``stride`` bytes apart."""

    address: int
    nbytes: int
    rows: int
    stride: int


def outgoing(pieces: Iterable[Piece]) -> list[memoryview]:
    """Return the bytes of the pieces, in order, as buffers to send."""
    views: list[memoryview] = []
    for piece in pieces:
        if _is_short(piece):
            buffer, grid = _packed(piece)
            copy_grids([grid], stream=False)
            views.append(memoryview(buffer).cast("B"))
        else:
            views += _rows(piece)
    return views


class Incoming:
    """Buffers for the bytes of pieces; :meth:`place` puts into place what does not lie there yet.

    Attributes:
        views: to be filled in this order.
    """

    def __init__(self, pieces: Iterable[Piece]) -> None:
        self.views: list[memoryview] = []
        self._grids: list[Grid] = []
        for piece in pieces:
            if _is_short(piece):
                buffer, (packed, address, nbytes, rows, dense, stride) = _packed(piece)
                self.views.append(memoryview(buffer).cast("B"))
                self._grids.append((address, packed, nbytes, rows, stride, dense))
            else:
                self.views += _rows(piece)

    def place(self) -> None:
        """All views have been filled."""
        if self._grids:
            copy_grids(self._grids, stream=False)


def _is_short(piece: Piece) -> bool:
    return piece.rows > 1 and piece.nbytes < _SHORT


def _packed(piece: Piece) -> tuple[ctypes.Array[ctypes.c_char], Grid]:
    """A buffer for a piece, and the rows to be copied to fill it."""
    address, nbytes, rows, stride = piece
    buffer = ctypes.create_string_buffer(nbytes * rows)
    return buffer, (ctypes.addressof(buffer), address, nbytes, rows, nbytes, stride)


def _rows(piece: Piece) -> list[memoryview]:
    address, nbytes, rows, stride = piece
    starts = [address + row * stride for row in range(rows)]
    return [_MEMORY[start : start + nbytes] for start in starts]
