"""Mappings of files that keep nothing open, unlike those of :mod:`mmap`, which have a descriptor
each. Torch-free.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import weakref

__all__ = ["map_file"]

# Fills the page tables of a mapping, without making private copies, and reports what cannot be read
# as an error, where an access would end the process by SIGBUS. Since Linux 5.14; EINVAL before.
_MADV_POPULATE_READ = 22

_libc = ctypes.CDLL(None, use_errno=True)
_mmap = _libc.mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int64,
]
_munmap = _libc.munmap
_munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_madvise = _libc.madvise
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_FAILED = ctypes.c_void_p(-1).value


def map_file(file: int, offset: int, nbytes: int, *, populate: bool) -> memoryview:
    """Return a writable buffer with private memory that shows a range of an open file, also after
    the file was closed. It is unmapped when nothing refers to it any more.

    Args:
        file: the descriptor.
        offset: any; ``nbytes`` is above 0.
        populate: read everything now.

    Raises:
        OSError: it cannot be mapped, or, with ``populate``, not everything could be read.
    """
    start = offset - offset % mmap.ALLOCATIONGRANULARITY
    length = offset + nbytes - start
    if length > os.fstat(file).st_size - start:
        raise OSError(errno.EINVAL, "the file ends before the end of the range")
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    address = _mmap(None, length, protection, mmap.MAP_PRIVATE, file, start)
    if address is None or address == _FAILED:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    mapped = (ctypes.c_char * length).from_address(address)
    # Not at the end of the process: what still refers to the memory then may still be read.
    weakref.finalize(mapped, _munmap, address, length).atexit = False
    if populate and _madvise(address, length, _MADV_POPULATE_READ) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return memoryview(mapped).cast("B")[offset - start :]
