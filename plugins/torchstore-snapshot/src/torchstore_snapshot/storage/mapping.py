"""Mappings of files that keep nothing open, unlike those of :mod:`mmap`, which have a descriptor
each. Torch-free.
"""

from __future__ import annotations

import errno
import os
from typing import cast

from torchstore_core.machine.virtual_memory import map_private, populate_read

__all__ = ["map_file"]


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
    if offset + nbytes > os.fstat(file).st_size:
        raise OSError(errno.EINVAL, "the file ends before the end of the range")
    address, before, block = map_private(file, offset, nbytes)
    # Unread pages are an error here, where an access would end the process by SIGBUS.
    if populate and (code := populate_read(address - before, before + nbytes)):
        raise OSError(code, os.strerror(code))
    return memoryview(cast("bytearray", block)).cast("B")[before:]
