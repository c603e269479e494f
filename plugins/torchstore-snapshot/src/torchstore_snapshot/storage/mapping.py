"""Mappings of files that keep nothing open, unlike those of :mod:`mmap`, which have a descriptor
each, and that other processes may truncate. Torch-free.
"""

from __future__ import annotations

import errno
import os
from typing import cast

from torchstore_core.machine.bus_errors import Guard, can_guard
from torchstore_core.machine.virtual_memory import map_private
from torchstore_snapshot.storage.base import Mapping

__all__ = ["map_file"]


def map_file(file: int, nbytes: int) -> Mapping:
    """Map an open file, of which nothing is read by that.

    Args:
        file: the descriptor.
        nbytes: how many bytes from its beginning, above 0.

    Raises:
        OSError: it cannot be mapped, or not so that losing it would leave the process alive.
    """
    if not can_guard():
        raise OSError(errno.ENOSYS, "mapped files cannot be guarded without the compiled module")
    if nbytes > os.fstat(file).st_size:
        raise OSError(errno.EINVAL, "the file ends before the end of the range")
    address, _, block = map_private(file, 0, nbytes)
    guard = Guard(address, nbytes, block)
    return Mapping(memoryview(cast("bytearray", block)).cast("B"), guard)
