"""Allocates byte ranges in one segment, lowest address first, so that warm pages are reused.

This is pure bookkeeping and never touches memory. Free ranges are merged with their neighbours and
filed by power-of-two size; each file is a heap, ordered by address.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

from torchstore_core.wire.columns import ALIGNMENT, in_a_row

__all__ = ["ALIGNMENT", "Allocator", "rounded"]

# From so many values on it is worth while to find out whether they lie one after the other.
_MANY = 8


def rounded(nbytes: int) -> int:
    """Return ``nbytes`` rounded up to the alignment.

    >>> rounded(0), rounded(1), rounded(64), rounded(65)
    (0, 64, 64, 128)
    """
    return (nbytes + ALIGNMENT - 1) & -ALIGNMENT


class Allocator:
    """Allocates and frees ranges of ``[0, capacity)``.

    Args:
        capacity: in bytes.
        grow: says how far the memory may be used if it cannot all be relied on: called with the end
            of a range that lies beyond what it returned before, it returns the new limit. If that
            is less than asked for, the range is not allocated. It may raise, if it cannot say yet;
            then nothing is allocated either.

    >>> a = Allocator(192)
    >>> a.allocate(100), a.allocate(64), a.allocate(1), a.used
    (0, 128, None, 192)
    >>> a.free([(0, 128)]); a.allocate(1), a.high_water
    (0, 192)
    """

    __slots__ = (
        "_assured",
        "_by_end",
        "_by_start",
        "_files",
        "_files_in_use",
        "_grow",
        "capacity",
        "high_water",
        "refused",
        "used",
    )

    def __init__(self, capacity: int, grow: Callable[[int], int] | None = None) -> None:
        self.capacity = capacity & -ALIGNMENT
        self._grow = grow
        # Ranges that end at most here need not ask ``grow``.
        self._assured = self.capacity if grow is None else 0
        #: Whether ``grow`` is why the last allocation that failed did so.
        self.refused = False
        self.used = 0
        #: End of the highest range that was ever allocated.
        self.high_water = 0
        self._by_start: dict[int, int] = {}  # start -> size of a free range
        self._by_end: dict[int, int] = {}  # end -> start
        # File k: starts of free ranges of 2**k <= size < 2**(k+1). Entries may be stale; a start
        # is current if its size in _by_start belongs to file k.
        self._files: dict[int, list[int]] = defaultdict(list)
        self._files_in_use = 0  # bit k: file k has entries
        if self.capacity:
            self._insert(0, self.capacity)

    @classmethod
    def with_free(
        cls, capacity: int, free: Iterable[tuple[int, int]], high_water: int
    ) -> Allocator:
        """An allocator of which only these ranges (offset, size) are free.

        >>> Allocator.with_free(256, [(64, 128)], 192).allocate(1)
        64
        """
        made = cls(0)
        made._assured = capacity
        made.capacity = made.used = capacity & -ALIGNMENT
        made.high_water = high_water
        for start, size in free:
            made.used -= size
            made._insert(start, size)
        return made

    @property
    def free_bytes(self) -> int:
        """Bytes that are not allocated (possibly fragmented)."""
        return self.capacity - self.used

    @property
    def largest_free(self) -> int:
        """Size in bytes of the largest range that a single allocation can get."""
        return max(self._by_start.values(), default=0)

    @property
    def pieces(self) -> int:
        """The number of free ranges."""
        return len(self._by_start)

    @property
    def used_end(self) -> int:
        """End of the highest range that is currently allocated."""
        return self._by_end.get(self.capacity, self.capacity)

    def allocate(self, nbytes: int) -> int | None:
        """Allocate ``rounded(nbytes)`` bytes; returns the offset, or None if no free range fits."""
        size = max(rounded(nbytes), ALIGNMENT)
        if size > self.capacity - self.used:
            self.refused = False
            return None
        best = self._exact_file(size)
        k = size.bit_length()
        files = self._files_in_use >> k << k
        while files:  # usually, very few of them have entries
            lowest = files & -files
            files ^= lowest
            top = self._top(lowest.bit_length() - 1)
            if top is not None and (best is None or top < best):
                best = top
        if best is None or (best + size > self._assured and not self._assure(best, size)):
            self.refused = best is not None
            return None
        have = self._by_start.pop(best)
        del self._by_end[best + have]
        if have > size:
            self._insert(best + size, have - size)
        self.used += size
        self.high_water = max(self.high_water, best + size)
        return best

    def allocate_all(self, total: int, sizes: Sequence[int]) -> list[int] | None:
        """Allocate one contiguous run for all sizes if there is room for it, else a piece for each.
        The pieces are allocated in order, so that they lie together as far as possible; if some do
        not fit, the largest are allocated first. Returns the offsets, in the order of the sizes, or
        None if that fails, too; then nothing is allocated.

        Args:
            total: the sum of the rounded sizes.

        >>> a = Allocator(256)
        >>> a.allocate_all(192, [100, 1]), a.allocate_all(128, [64, 64])
        ([0, 128], None)
        """
        if not sizes:
            return []
        start = self.allocate(total)
        if start is not None:
            return in_a_row(start, sizes)
        pieces = self._allocate_each(sizes)
        if pieces is None and len(sizes) > 1 and max(sizes) <= self.largest_free:
            largest_first = sorted(range(len(sizes)), key=lambda at: -sizes[at])
            found = self._allocate_each([sizes[at] for at in largest_first])
            if found is not None:
                pieces = [offset for _, offset in sorted(zip(largest_first, found, strict=True))]
        return pieces

    def _allocate_each(self, sizes: Sequence[int]) -> list[int] | None:
        """Allocate a range for each size. Returns None and changes nothing if one does not fit."""
        pieces: list[int] = []
        try:
            for size in sizes:
                offset = self.allocate(size)
                if offset is None:
                    break
                pieces.append(offset)
        finally:
            if len(pieces) < len(sizes):
                self.free(zip(pieces, sizes, strict=False))
        return pieces if len(pieces) == len(sizes) else None

    def take(self, offset: int, nbytes: int) -> None:
        """Allocate ``rounded(nbytes)`` bytes at this offset, which are free.

        >>> a = Allocator(256)
        >>> a.take(64, 100); a.free_ranges()
        [(0, 64), (192, 64)]
        """
        size = max(rounded(nbytes), ALIGNMENT)
        start = max(start for start in self._by_start if start <= offset)
        have = self._by_start.pop(start)
        del self._by_end[start + have]
        if offset > start:
            self._insert(start, offset - start)
        if start + have > offset + size:
            self._insert(offset + size, start + have - offset - size)
        self.used += size
        self.high_water = max(self.high_water, offset + size)

    def take_tail(self) -> tuple[int, int] | None:
        """Allocate the whole free range that ends at the capacity, as ``(offset, nbytes)``.

        >>> a = Allocator(256)
        >>> a.allocate(64), a.take_tail(), a.take_tail()
        (0, (64, 192), None)
        """
        start = self._by_end.pop(self.capacity, None)
        if start is None:
            return None
        size = self._by_start.pop(start)
        self.used += size
        return start, size

    def free(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Free ``(offset, nbytes)`` ranges: whole allocations or any aligned part of one."""
        start = end = -1
        for offset, nbytes in sorted(ranges):
            size = (nbytes + ALIGNMENT - 1) & -ALIGNMENT or ALIGNMENT
            if offset == end:  # values that were put together are freed together: merge first
                end += size
                continue
            if end > start:
                self.used -= end - start
                self._merge(start, end - start)
            start, end = offset, offset + size
        if end > start:
            self.used -= end - start
            self._merge(start, end - start)

    def free_all(self, offsets: Sequence[int], sizes: Sequence[int]) -> None:
        """Free whole allocations: :meth:`free` in columns.

        >>> a = Allocator(256)
        >>> a.free_all(a.allocate_all(192, [100, 64]), [100, 64]); a.used
        0
        """
        if len(offsets) >= _MANY and min(sizes) and in_a_row(offsets[0], sizes) == offsets:
            offsets, sizes = offsets[:1], [offsets[-1] + sizes[-1] - offsets[0]]
        self.free(zip(offsets, sizes, strict=True))

    def ask_again(self) -> None:
        """Ask ``grow`` before the next allocation: memory was returned to the system."""
        if self._grow is not None:
            self._assured = 0

    @property
    def grow(self) -> Callable[[int], int] | None:
        """Says how far the memory may be used."""
        return self._grow

    @property
    def assured(self) -> int:
        """Ranges that end at most here need not ask ``grow``."""
        return self._assured

    def ask(self, grow: Callable[[int], int] | None, assured: int) -> None:
        """From now on, ask this one, but not for ranges that end at most at ``assured``."""
        self._grow, self._assured = grow, assured

    def _assure(self, start: int, size: int) -> bool:
        """Ask for the limit to be moved to the end of a range; returns whether it was."""
        if self._grow is not None:
            self._assured = self._grow(start + size)
        return start + size <= self._assured

    def free_ranges(self) -> list[tuple[int, int]]:
        """Return all free ranges as ``(offset, size)``, sorted by address."""
        return sorted(self._by_start.items())

    def _merge(self, start: int, size: int) -> None:
        before = self._by_end.pop(start, None)
        if before is not None:
            del self._by_start[before]
            size += start - before
            start = before
        after = self._by_start.pop(start + size, None)
        if after is not None:
            del self._by_end[start + size + after]
            size += after
        self._insert(start, size)

    def _insert(self, start: int, size: int) -> None:
        self._by_start[start] = size
        self._by_end[start + size] = start
        k = size.bit_length() - 1
        file = self._files[k]
        if len(file) > 64 and len(file) > 2 * len(self._by_start):
            current = {s for s in file if self._filed(s, k)}
            file[:] = current
            heapq.heapify(file)
        heapq.heappush(file, start)
        self._files_in_use |= 1 << k

    def _filed(self, start: int, k: int) -> bool:
        return self._by_start.get(start, 0).bit_length() - 1 == k

    def _top(self, k: int) -> int | None:
        file = self._files[k]
        while file and not self._filed(file[0], k):
            heapq.heappop(file)
        if file:
            return file[0]
        self._files_in_use &= ~(1 << k)
        return None

    def _exact_file(self, size: int) -> int | None:
        """Return the lowest start of a range that fits, from the one file in which some ranges are
        too small for ``size``.
        """
        k = size.bit_length() - 1
        top = self._top(k)
        if top is None or self._by_start[top] >= size:
            return top
        file = self._files[k]
        get = self._by_start.get
        fits = (s for s in file if get(s, 0) >= size and self._filed(s, k))
        return min(fits, default=None)
