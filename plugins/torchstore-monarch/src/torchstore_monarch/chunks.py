"""What one call of the engine moves."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from torchstore_core.contracts.transport import Copy

#: Most pieces of one call.
PIECES = 4096

# A call that takes longer is too large, since progress only shows at its end; one that takes less
# than an eighth of that may be larger.
_LONG_S = 0.4
_QUICK_S = _LONG_S / 8


class ChunkSize:
    """Grows while calls are quick, because each has its cost; shrinks where the network is slow, so
    that a slow transfer can be told from one that stands still.

    Args:
        least: the smallest size in bytes, with which it begins.
        most: the largest.

    >>> size = ChunkSize(1 << 20, 8 << 20)
    >>> size.record(1 << 20, seconds=0.01)
    >>> size.record(2 << 20, seconds=0.02)
    >>> size.nbytes >> 20
    4
    >>> size.record(4 << 20, seconds=1.0)
    >>> size.nbytes >> 20
    2
    """

    def __init__(self, least: int, most: int) -> None:
        self._least = least
        self._most = most
        #: The size of the next call.
        self.nbytes = least

    def record(self, nbytes: int, seconds: float) -> None:
        """A call with that many bytes took so long."""
        if seconds > _LONG_S:
            self.nbytes = max(self._least, min(self.nbytes, nbytes) // 2)
        elif seconds < _QUICK_S and nbytes >= self.nbytes:
            self.nbytes = min(self._most, 2 * self.nbytes)


class Chunk(NamedTuple):
    """The pieces of one call, their size in bytes, and how many copies of the batch, counted from
    the first, are complete when this call and all before it have moved theirs.
    """

    pieces: list[Copy]
    nbytes: int
    done: int


def chunks(copies: Sequence[Copy], limit: Callable[[], int]) -> Iterator[Chunk]:
    """Cut a batch into chunks of at most :data:`PIECES` pieces, and of as many bytes as ``limit``
    returns for each of them.

    >>> batch = [Copy(4096, 0, 0, 5), Copy(8192, 0, 64, 3)]
    >>> for chunk in chunks(batch, lambda: 4):
    ...     print([(one.offset, one.nbytes) for one in chunk.pieces], chunk.nbytes, chunk.done)
    [(0, 4)] 4 0
    [(4, 1), (64, 3)] 4 2
    """
    pieces: list[Copy] = []
    total, most = 0, limit()
    for index, copy in enumerate(copies):
        at = 0
        while at < copy.nbytes:
            size = min(copy.nbytes - at, most - total)
            pieces.append(Copy(copy.address + at, copy.segment, copy.offset + at, size))
            at += size
            total += size
            if total == most or len(pieces) == PIECES:
                yield Chunk(pieces, total, index + (at == copy.nbytes))
                pieces, total, most = [], 0, limit()
    if pieces:
        yield Chunk(pieces, total, len(copies))


def memory_of(copy: Copy) -> memoryview:
    """The memory of this process that a copy moves bytes from, or to."""
    return memoryview((ctypes.c_char * copy.nbytes).from_address(copy.address)).cast("B")
