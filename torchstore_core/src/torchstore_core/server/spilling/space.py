"""Which parts of a spill file are in use. This belongs to the event loop, and does no I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from torchstore_core.server.memory.allocator import Allocator
from torchstore_core.wire.volumes import spilling as orders
from torchstore_core.wire.volumes.spilling import Extent, spanned

#: A value is moved and checked in pieces of this many bytes.
PIECE = 8 << 20


class SpillSpace:
    """The space of one file.

    Args:
        capacity: the most bytes that the file may have.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._written_end = 0
        self._shared: Counter[int] = Counter()  # how many values have a part of a page, if several
        self._allocator = Allocator(capacity & -orders.PAGE)

    @property
    def used(self) -> int:
        """Bytes of the file that are in use."""
        return self._allocator.used

    @property
    def free(self) -> int:
        """Bytes that are left."""
        return self._allocator.free_bytes

    def reserve(self, head: int, nbytes: int) -> Extent | None:
        """Reserve room for a value, in one place if there is one that is large enough; None if the
        capacity is used up.
        """
        span = spanned(head, nbytes)
        if span > self.free:
            return None
        whole = self._allocator.allocate(span)
        runs = [(whole, span)] if whole is not None else self._gather(span)
        self._written_end = max(self._written_end, *(sum(run) for run in runs))
        return Extent(tuple(runs), head, nbytes)

    def reserve_together(self, sizes: Sequence[int]) -> tuple[Extent, list[Extent]] | None:
        """Reserve one place for small values, which lie there one after the other: all of it, and
        where each of them lies. None if there is no place that is large enough.
        """
        nbytes = sum(sizes)
        if len(sizes) == 1:
            extent = self.reserve(0, nbytes)
            return None if extent is None else (extent, [extent])
        start = self._allocator.allocate(spanned(0, nbytes))
        if start is None:
            return None
        whole = Extent(((start, spanned(0, nbytes)),), 0, nbytes)
        self._written_end = max(self._written_end, start + whole.span)
        parts: list[Extent] = []
        at = 0
        for size in sizes:
            head = at % orders.PAGE
            parts.append(Extent(((start + at - head, spanned(head, size)),), head, size))
            at += size
        self._share(parts)
        return whole, parts

    def _share(self, extents: Iterable[Extent]) -> None:
        """Note the pages of which several of these have parts."""
        counts = Counter(page for extent in extents for page in _ends(extent))
        self._shared.update({page: count for page, count in counts.items() if count > 1})

    def _gather(self, span: int) -> list[tuple[int, int]]:
        """Allocate the largest free ranges that have ``span`` bytes together."""
        runs: list[tuple[int, int]] = []
        for _, size in sorted(self._allocator.free_ranges(), key=lambda one: -one[1]):
            offset = self._allocator.allocate(min(size, span))
            if offset is not None:
                runs.append((offset, min(size, span)))
                span -= runs[-1][1]
            if not span:
                break
        return runs

    def occupy(self, extents: Iterable[Extent], file_size: int) -> None:
        """Only these parts of the file of an earlier life are in use; it has so many bytes."""
        extents = list(extents)
        self._shared.clear()
        self._share(extents)
        free: list[tuple[int, int]] = []
        end = 0
        for offset, size in sorted(run for extent in extents for run in extent.runs):
            if offset > end:
                free.append((end, offset - end))
            end = max(end, offset + size)
        capacity = self._allocator.capacity
        if capacity > end:
            free.append((end, capacity - end))
        self._allocator = Allocator.with_free(capacity, free, end)
        self._written_end = max(end, file_size)

    def release(self, extent: Extent) -> Sequence[tuple[int, int]]:
        """Let the room of a value be used again, except pages that it shares with others. Returns
        the parts of the file that are not in use any more, as (offset, bytes).
        """
        kept = [page for page in _ends(extent) if page in self._shared]
        if not kept:
            self._allocator.free(extent.runs)
            return extent.runs
        [(start, size)] = extent.runs
        end = start + size
        for page in kept:
            self._shared[page] -= 1
            if self._shared[page] == 1:  # it is no longer shared
                del self._shared[page]
            if page == start:
                start += orders.PAGE
            else:
                end -= orders.PAGE
        freed = [(start, end - start)] if end > start else []
        self._allocator.free(freed)
        return freed

    def take_tail(self) -> tuple[int, int] | None:
        """Reserve what was written once, but is not in use now, at the end of the file: its offset
        and size. None if there is nothing.
        """
        if self._allocator.used_end >= self._written_end:
            return None
        return self._allocator.take_tail()

    def return_tail(self, tail: tuple[int, int]) -> None:
        """Let a tail that was cut be used again."""
        self._written_end = tail[0]
        self._allocator.free([tail])


def _ends(extent: Extent) -> tuple[int, ...]:
    """The pages of which others may have parts, too: the first and the last, if it is small."""
    if len(extent.runs) > 1 or extent.span > PIECE:
        return ()
    [(start, size)] = extent.runs
    return (start, start + size - orders.PAGE) if size > orders.PAGE else (start,)
