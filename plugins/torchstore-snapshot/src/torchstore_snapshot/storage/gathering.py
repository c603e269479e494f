"""Cuts what is written to a file into blocks, each with a hash, and into large aligned writes,
which need not end where blocks do. Torch-free.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from torchstore_snapshot.format.hashes import BLOCK
from torchstore_snapshot.storage.base import Gathers, Writer

__all__ = ["SHORT_STEP", "STEP", "Block", "Elsewhere", "Gathered", "Part", "Run", "blocks_of"]
__all__ += ["tail"]

#: Bytes that are hashed and then written at a time: what was hashed is still in the cache when it
#: is written. Writes end at multiples of this in the file, so that the page cache gets huge pages,
#: which are cheaper to write and, above all, to map later.
STEP = 2 << 20
#: The same for who writes while a program goes on: a kernel that is not preempted lets nobody else
#: have the processor until what it was given at a time is in the page cache.
SHORT_STEP = 128 << 10


class Elsewhere(ABC):
    """Bytes that are not in the memory of this host: what is on a device."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """How many there are."""

    @abstractmethod
    def __getitem__(self, part: slice) -> Elsewhere:
        """A range of them."""

    @abstractmethod
    def arrivals(self, windows: Iterable[Sequence[Part]]) -> Generator[memoryview, None, None]:
        """Return parts, some of which are of the same kind as this one, in memory of this host, one
        by one and in order. What has arrived stays until the next window is asked for.

        Args:
            windows: parts of at most :data:`STEP` bytes together (fewer if there is a budget).
        """


#: Bytes in memory, or elsewhere.
Part = memoryview | Elsewhere


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

    def steps(
        self, data: Part, arrivals: Iterator[memoryview] | None = None
    ) -> Iterator[memoryview]:
        """Return the parts that ``data`` is to be added in. Each ends at a multiple, or with it.

        Args:
            arrivals: the same parts in memory of this host, and those after them. None: ``data`` is
                in memory.
        """
        while data.nbytes:
            room = self._size - (self._start + self._nbytes) % self._size
            step = data if data.nbytes <= room else data[:room]
            if arrivals is not None:
                yield next(arrivals)
            elif isinstance(step, memoryview):
                yield step
            if step is data:
                return
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


def tail(parts: Sequence[Part], nbytes: int) -> list[Part]:
    """Return the last ``nbytes`` bytes of parts that follow each other.

    >>> [bytes(part) for part in tail([memoryview(data) for data in (b"abc", b"", b"de")], 3)]
    [b'c', b'de']
    """
    found: list[Part] = []
    for part in reversed(parts):
        if not nbytes:
            break
        some = part[max(part.nbytes - nbytes, 0) :]
        if some.nbytes:
            found.append(some)
            nbytes -= some.nbytes
    return found[::-1]


class Block(NamedTuple):
    """Bytes to be hashed: the parts that they are in, and where their hash goes, by ``number``."""

    parts: list[Part]
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

    def __init__(self, start: int, before: list[Part], owners: Sequence[Any] = ()) -> None:
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

    @property
    def elsewhere(self) -> Elsewhere | None:
        """One of the parts that are not in memory of this host; None if there is none."""
        return next((part for part in self._parts() if isinstance(part, Elsewhere)), None)

    def _parts(self) -> Iterator[Part]:
        yield from self.before
        for block in self.blocks:
            yield from block.parts

    def windows(self, size: int) -> Iterator[list[Part]]:
        """Return what is written at a time: all parts, cut at multiples of ``size`` in the file."""
        window: list[Part] = []
        at = self.start
        for part in self._parts():
            while part.nbytes:
                step = part[: size - at % size]
                window.append(step)
                at, part = at + step.nbytes, part[step.nbytes :]
                if not at % size:
                    yield window
                    window = []
        if window:
            yield window

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


def blocks_of(parts: Sequence[Part]) -> Iterator[list[Part]]:
    """Cut bytes that are in several pieces into blocks. No bytes are one empty block."""
    block: list[Part] = []
    room = BLOCK
    for part in parts:
        at = 0
        while at < part.nbytes:
            step = part[at : at + room] if at or part.nbytes > room else part
            block.append(step)
            at, room = at + step.nbytes, room - step.nbytes
            if not room:
                yield block
                block, room = [], BLOCK
    if block or not any(part.nbytes for part in parts):
        yield block
