"""The bytes of an encoded object, in several buffers: large ones are not copied to join them."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

from torchstore_core.machine.copying import Run

#: Buffers of at least so many bytes remain apart. Pickle, too, writes these outside of its frames.
LARGE = 64 << 10


class Pieces:
    """Buffers which together are the bytes of an object. Those that can be written to are memory of
    the user's objects, which keep their size as long as this lives.
    """

    __slots__ = ("_buffers", "_nbytes")

    def __init__(self, buffers: Iterable[bytes | memoryview]) -> None:
        # The address of memory is only given away by what may write to it, or is a bytes object.
        self._buffers = [
            bytes(buffer) if type(buffer) is memoryview and buffer.readonly else buffer
            for buffer in buffers
            if len(buffer)
        ]
        self._nbytes = sum(map(len, self._buffers))

    def __len__(self) -> int:
        return self._nbytes

    def joined(self) -> bytes:
        """The bytes, copied into one object."""
        return b"".join(self._buffers)

    def runs(self, offset: int) -> list[Run]:
        """The address of each buffer, its offset if the first is at ``offset``, and its size."""
        found: list[Run] = []
        for buffer in self._buffers:
            found.append((address_of(buffer), offset, len(buffer)))
            offset += len(buffer)
        return found


def address_of(buffer: bytes | memoryview) -> int:
    """The address of the first byte of a bytes object, or of a writable buffer with some bytes."""
    if isinstance(buffer, bytes):
        return ctypes.cast(ctypes.c_char_p(buffer), ctypes.c_void_p).value or 0
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))
