"""Brings ranges of mapped files into memory, and reports what cannot be read. Torch-free."""

from __future__ import annotations

import ctypes
import mmap

__all__ = ["address_of", "expect_ranges", "populate"]

# Fills the page tables of a mapping, without making private copies, and reports what cannot be read
# as an error, where an access would end the process by SIGBUS. Since Linux 5.14; EINVAL before.
_MADV_POPULATE_READ = 22

_madvise = ctypes.CDLL(None, use_errno=True).madvise
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def address_of(memory: memoryview) -> int:
    """Return where a writable, contiguous buffer begins."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def expect_ranges(memory: memoryview) -> None:
    """Say that only some ranges of a mapped file will be read, so that nothing beside them is read
    ahead, which may be megabytes for each. ``memory`` is the file from its beginning.
    """
    _madvise(address_of(memory), memory.nbytes, mmap.MADV_RANDOM)


def populate(memory: memoryview) -> bool:
    """Read a mapped range that begins at a page, and fill its page tables. Returns False if that
    is not possible: the file is shorter by now, its device fails, or the kernel is too old.
    """
    address, nbytes = address_of(memory), memory.nbytes
    _madvise(address, nbytes, mmap.MADV_WILLNEED)  # in large requests, whatever else is expected
    return bool(_madvise(address, nbytes, _MADV_POPULATE_READ) == 0)
