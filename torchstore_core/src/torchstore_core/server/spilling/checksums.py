"""A checksum of memory that keeps up with fast disks. Torch-free.

It detects damage, not malice, and is only ever compared by the installation that has computed it:
the compiled module and the fallback compute different sums.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable

try:
    from torchstore_core._native import checksum as _native_checksum
except ImportError:  # not compiled for this platform
    _native_checksum = zlib.crc32
_checksum: Callable[[memoryview], int] = _native_checksum


def checksum(data: memoryview) -> int:
    """Return the checksum of a contiguous buffer. The interpreter's lock is released meanwhile.

    >>> checksum(memoryview(b"abc")) == checksum(memoryview(b"abc"))
    True
    >>> checksum(memoryview(b"abc")) == checksum(memoryview(b"abd"))
    False
    """
    return _checksum(data)
