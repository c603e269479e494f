"""A checksum of memory that keeps up with fast disks. Torch-free.

It detects damage, not malice, and is only ever compared by the installation that has computed it:
the compiled module and the fallback compute different sums.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable

from torchstore_core.machine.copying import compiled

_checksum: Callable[[memoryview], int] = compiled("checksum") or zlib.crc32


def checksum(data: memoryview) -> int:
    """Return the checksum of a contiguous buffer. The interpreter's lock is released meanwhile.

    >>> checksum(memoryview(b"abc")) == checksum(memoryview(b"abc"))
    True
    >>> checksum(memoryview(b"abc")) == checksum(memoryview(b"abd"))
    False
    """
    return _checksum(data)
