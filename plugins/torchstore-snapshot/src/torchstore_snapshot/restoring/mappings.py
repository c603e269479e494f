"""Brings ranges of mapped files into memory, and reports what cannot be read."""

from __future__ import annotations

import ctypes

__all__ = ["address_of", "populate"]

# Fills the page tables of a mapping, without making private copies, and reports what cannot be read
# as an error, where an access would end the process by SIGBUS. Since Linux 5.14; EINVAL before.
_MADV_POPULATE_READ = 22

_madvise = ctypes.CDLL(None, use_errno=True).madvise
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def address_of(memory: memoryview) -> int:
    """Return where a writable, contiguous buffer begins."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def populate(memory: memoryview) -> bool:
    """Read a mapped range that begins at a page, and fill its page tables. Returns False if that
    is not possible: the file is shorter by now, its device fails, or the kernel is too old.
    """
    return bool(_madvise(address_of(memory), memory.nbytes, _MADV_POPULATE_READ) == 0)
