"""Cuts what is written to a file into blocks, each with a hash, and into large aligned writes,
which need not end where blocks do. Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from torchstore_snapshot.format.hashes import BLOCK
from torchstore_snapshot.storage.base import Gathers, Writer

__all__ = ["SHORT_STEP", "STEP", "Block", "Gathered", "Run", "blocks_of", "tail"]

#: Bytes that are hashed and then written at a time: what was hashed is still in the cache when it
#: is written. Writes end at multiples of this in the file, so that the page cache gets huge pages,
#: which are cheaper to write and, above all, to map later.
STEP = 2 << 20
#: The same for who writes while a program goes on: a kernel that is not preempted lets nobody else
#: have the processor until what it was given at a time is in the page cache.
SHORT_STEP = 128 << 10


class Gathered:
    """Buffers that are written to a file, from ``start`` on, as soon as they reach a multiple of
    ``size``, which divides :data:`STEP`.
    """

    def __init__(self, writer: Writer, start: int, size: int = STEP) -> None:
        self._writer = writer
        self._start = start
        self._size = size
        self._nbytes = 0
        self._parts: list[memoryview] = []

    def steps(self, data: memoryview) -> Iterator[memoryview]:
        """Return the parts that ``data`` is to be added in. Each ends at a multiple, or with it."""
        while data.nbytes:
            step = data[: self._size - (self._start + self._nbytes) % self._size]
            yield step
            data = data[step.nbytes :]

    def add(self, step: memoryview) -> None:
        """Add one of :meth:`steps`. Its memory must stay as it is until everything is written."""
        self._parts.append(step)
        self._nbytes += step.nbytes
        if not (self._start + self._nbytes) % self._size:
            self.flush()

    def flush(self) -> None:
        """Write what has been added since the last multiple."""
        start, parts = self._start, self._parts
        self._start, self._nbytes, self._parts = start + self._nbytes, 0, []
        if len(parts) > 1 and isinstance(self._writer, Gathers):
            self._writer.write_parts(start, parts)
            return
        for part in parts:
            self._writer.write(start, part)
            start += part.nbytes


def tail(parts: Iterable[Any], nbytes: int) -> list[memoryview]:
    """Return the last ``nbytes`` bytes of buffers that follow each other.

    >>> [bytes(part) for part in tail([b"abc", b"", b"de"], 3)]
    [b'c', b'de']
    """
    found: list[memoryview] = []
    for part in reversed([memoryview(part) for part in parts]):
        if not nbytes:
            break
        some = part[max(part.nbytes - nbytes, 0) :]
        if some.nbytes:
            found.append(some)
            nbytes -= some.nbytes
    return found[::-1]


class Block(NamedTuple):
    """Bytes to be hashed: the parts that they are in, and where their hash goes, by ``number``."""

    parts: list[memoryview]
    found: list[bytes]
    number: int
    owner: Any

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


class Run:
    """Blocks that follow each other in a file and are hashed and written by one thread.

    Hashes begin and end where tensors do, writes at multiples of :data:`STEP`: so a run begins with
    what the run before has hashed, but not written.

    Args:
        start: where what it writes begins in the file.
        before: what has been hashed already, or needs no hash.
        owners: kept alive for ``before``.
    """

    def __init__(self, start: int, before: list[memoryview], owners: Sequence[Any] = ()) -> None:
        self.start, self.before, self.owners = start, before, owners
        self.blocks: list[Block] = []
        self.nbytes = 0
        self.end = self.stop = start + sum(part.nbytes for part in before)

    @property
    def full(self) -> bool:
        """Whether the next block is better hashed by another thread. A run that ends shortly behind
        a multiple leaves little to be written when it is not in the cache any more.
        """
        return self.nbytes >= BLOCK and (self.end % STEP <= STEP // 8 or self.nbytes >= 2 * BLOCK)

    def add(self, block: Block) -> None:
        self.blocks.append(block)
        self.nbytes += block.nbytes
        self.end = self.stop = self.end + block.nbytes

    def following(self) -> Run:
        """Return the next run, to which this one leaves what is behind the last multiple."""
        left = self.end % STEP
        if self.end - left <= self.start:
            left = 0
        self.stop = self.end - left
        parts = [part for block in self.blocks for part in block.parts]
        before = tail([*self.before, *parts], left)
        owners = [block.owner for block in self.blocks] if left else []
        return Run(self.stop, before, [*owners, *(self.owners if left else ())])


def blocks_of(parts: list[memoryview]) -> Iterator[list[memoryview]]:
    """Cut bytes that are in several pieces into blocks. No bytes are one empty block."""
    block: list[memoryview] = []
    room = BLOCK
    for part in parts:
        at = 0
        while at < part.nbytes:
            step = part[at : at + room]
            block.append(step)
            at, room = at + step.nbytes, room - step.nbytes
            if not room:
                yield block
                block, room = [], BLOCK
    if block or not any(part.nbytes for part in parts):
        yield block
