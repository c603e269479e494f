"""Brings ranges of mapped files into memory, and reports what cannot be read. Torch-free."""

from __future__ import annotations

import bisect
import ctypes
import functools
import mmap
from collections.abc import Iterator, Sequence
from pathlib import Path

from torchstore_snapshot.storage.base import Mapping

__all__ = ["MappedFile", "address_of"]

# Fills the page tables of a mapping, without making private copies, and reports what cannot be read
# as an error, where an access would read zeros. Since Linux 5.14; EINVAL before.
_MADV_POPULATE_READ = 22
# Since Linux 6.1, where there are huge pages; EINVAL otherwise.
_MADV_COLLAPSE = 25
_HUGE_PAGE_SIZE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
# The page cache has no larger pages.
_HUGE_PAGE_MAX = 32 << 20
# Bytes that are read ahead at a time: a request for more may be cut, down to this where the kernel
# has its usual settings, and what is left would be read page by page.
_READ_AHEAD = 128 << 10

_madvise = ctypes.CDLL(None, use_errno=True).madvise
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def address_of(memory: memoryview) -> int:
    """Return where a writable, contiguous buffer begins."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


@functools.cache
def _huge_page() -> int:
    """Bytes of the huge pages in which the kernel reads a mapped file if it is told to; 1 if it
    knows no such advice.
    """
    if _madvise(None, 0, _MADV_COLLAPSE):
        return 1
    try:
        size = int(_HUGE_PAGE_SIZE.read_text())
    except (OSError, ValueError):
        return 1
    return size if size <= _HUGE_PAGE_MAX else 1


class MappedFile:
    """A file that is mapped from its beginning, of which nothing has been read by that.

    It is read in huge pages as far as possible, because what is in such pages is mapped in a tenth
    of the time.

    Args:
        mapping: of the file.
        ranges: the first byte and the end of each range of which everything will be read, in order
            and without overlaps. Nothing beside them is read ahead, which may be megabytes for
            each. None: all of the file.
    """

    def __init__(self, mapping: Mapping, ranges: Sequence[tuple[int, int]] | None = None) -> None:
        self.memory = memory = mapping.memory
        self._guard = mapping.guard
        self._address = address_of(memory)
        huge = _huge_page()
        # Of which the kernel reads all huge pages by itself.
        self._inner: list[tuple[int, int]] = []
        if huge > 1:
            _madvise(self._address, memory.nbytes, mmap.MADV_HUGEPAGE)
            for begin, end in ((0, memory.nbytes + huge),) if ranges is None else ranges:
                first, last = -(-begin // huge) * huge, end // huge * huge
                if first < last:
                    self._inner.append((first, last))
        if ranges is not None:
            _madvise(self._address, memory.nbytes, mmap.MADV_RANDOM)

    @property
    def lost(self) -> bool:
        """Whether zeros were read in the place of bytes that are gone."""
        return self._guard.lost

    def populate(self, begin: int, end: int) -> bool:
        """Read a range, and fill its page tables. Returns False if that is not possible: the file
        is shorter by now, its device fails, or the kernel is too old.
        """
        begin -= begin % mmap.PAGESIZE
        for first, last in self._outside(begin, end):
            for start in range(first, last, _READ_AHEAD):
                nbytes = min(_READ_AHEAD, last - start)
                _madvise(self._address + start, nbytes, mmap.MADV_WILLNEED)
        return not _madvise(self._address + begin, end - begin, _MADV_POPULATE_READ)

    def _outside(self, begin: int, end: int) -> Iterator[tuple[int, int]]:
        """The parts of a range that are not read in huge pages."""
        for first, last in self._inner[bisect.bisect_right(self._inner, begin, key=_end_of) :]:
            if first >= end or begin >= end:
                break
            if begin < first:
                yield begin, first
            begin = last
        if begin < end:
            yield begin, end


def _end_of(each: tuple[int, int]) -> int:
    return each[1]
