"""Cutting a batch of copies into units: what one request moves, and its place in local memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from torchstore_core.contracts.transport import Copy
from torchstore_core.errors import TransportError
from torchstore_transports.tcp.wire.memory import Piece
from torchstore_transports.tcp.wire.protocol import EXTENT, EXTENTS_MAX, Extent

__all__ = ["Unit", "cut"]

_OFFSET_END = 1 << 63
_SEGMENT_END = 1 << 32
_ROWS_MAX = (1 << 32) - 1


class Unit(NamedTuple):
    """The part of a batch that one request moves.

    Args:
        first: index of the first copy of which the unit contains bytes.
        following: index of the first copy that is incomplete after this unit and those before it.
        extents: the bytes' places in segments, packed, in the order of the bytes.
        pieces: the bytes' places in local memory.
    """

    first: int
    following: int
    extents: bytes
    nbytes: int
    pieces: tuple[Piece, ...]


class _Cutter:
    """Collects pieces until a unit is full. Bytes that are adjacent in a segment become one extent,
    even if they are apart in local memory.
    """

    def __init__(self, limit: Callable[[], int]) -> None:
        self._limit = limit
        self.begin(0)

    def begin(self, first: int) -> None:
        self.first = first
        self.room = self.limit = self._limit()
        self._extents: list[Extent] = []
        self._pieces: list[Piece] = []

    @property
    def full(self) -> bool:
        most = max(len(self._extents), len(self._pieces))
        return self.room <= 0 or most >= EXTENTS_MAX

    @property
    def empty(self) -> bool:
        return not self._pieces

    def add(self, piece: Piece, segment: int, offset: int, step: int) -> None:
        address, nbytes, rows, stride = piece
        self.room -= nbytes * rows
        self._pieces.append(Piece(address, nbytes * rows, 1, 0) if stride == nbytes else piece)
        if rows == 1 or step == nbytes:
            nbytes, rows, step = nbytes * rows, 1, 0
            if self._extents:
                last = self._extents[-1]
                if (last.segment, last.rows, last.offset + last.nbytes) == (segment, 1, offset):
                    self._extents[-1] = last._replace(nbytes=last.nbytes + nbytes)
                    return
        self._extents.append(Extent(segment, offset, nbytes, rows, step))

    def unit(self, following: int) -> Unit:
        packed = b"".join([EXTENT.pack(*extent) for extent in self._extents])
        return Unit(self.first, following, packed, self.limit - self.room, tuple(self._pieces))


def cut(copies: Sequence[Copy], limit: Callable[[], int]) -> Iterator[Unit]:
    """Yield units that together contain all bytes of the copies, in order.

    Args:
        limit: called for each unit; returns its size in bytes, which the unit may exceed by less
            than a row.

    Raises:
        TransportError: a copy is invalid.
    """
    cutter = _Cutter(limit)
    for at, copy in enumerate(copies):
        for piece, offset, last in _parts(copy, cutter):
            cutter.add(piece, copy.segment, offset, copy.step)
            if cutter.full:
                unit = cutter.unit(at + 1 if last else at)
                yield unit
                cutter.begin(unit.following)
    if not cutter.empty:
        yield cutter.unit(len(copies))


def _parts(copy: Copy, cutter: _Cutter) -> Iterator[tuple[Piece, int, bool]]:
    """Yield the parts of a copy that fit into the rest of a unit: memory, offset in the segment,
    and whether it is the last part. A row is only divided if it is larger than a unit.
    """
    address, segment, offset, nbytes = copy
    rows, stride, step = copy.rows, copy.stride, copy.step
    if nbytes < 0 or rows < 0 or not 0 <= segment < _SEGMENT_END:
        raise TransportError(f"a copy that makes no sense: {copy}")
    if not nbytes or not rows:
        return
    last = offset + (rows - 1) * step
    if min(offset, last) < 0 or max(offset, last) + nbytes > _OFFSET_END:
        raise TransportError(f"[{offset}, +{nbytes}) is outside segment {segment}")
    if rows == 1 or stride == step == nbytes:
        nbytes, rows, stride, step = nbytes * rows, 1, 0, 0
    row = 0
    while row < rows:
        if nbytes > cutter.limit or rows == 1:
            done = 0
            while done < nbytes:
                size = min(nbytes - done, cutter.room)
                here, there = address + row * stride + done, offset + row * step + done
                done += size
                yield Piece(here, size, 1, 0), there, row + 1 == rows and done == nbytes
            row += 1
            continue
        some = min(rows - row, max(1, cutter.room // nbytes), _ROWS_MAX)
        here, there = address + row * stride, offset + row * step
        row += some
        yield Piece(here, nbytes, some, stride), there, row == rows
