"""The bytes of an encoded object, in several buffers: large ones are not copied to join them, and
readers need not copy those that are aside.
"""

from __future__ import annotations

import ctypes
import struct
import sys
from collections.abc import Callable, Iterable, Sequence

from torchstore_core.errors import UnsupportedValueError
from torchstore_core.machine.copying import Run

Buffer = bytes | bytearray | memoryview
#: Buffers of at least so many bytes remain apart. Pickle, too, writes these outside of its frames.
LARGE = 64 << 10
# Where buffers that are aside may begin: as what is stored by itself.
_ALIGNMENT = 64
_NUMBER = struct.Struct("<Q")


class Pieces:
    """Buffers which together are the bytes of an object. Those that can be written to are memory of
    the user's objects.
    """

    __slots__ = ("_buffers", "_sizes", "_views")

    def __init__(self, buffers: Iterable[Buffer]) -> None:
        # The address of memory is only given away by what may write to it, or is a bytes object.
        self._buffers = [
            bytes(buffer) if type(buffer) is memoryview and buffer.readonly else buffer
            for buffer in buffers
            if len(buffer)
        ]
        self._sizes = [len(buffer) for buffer in self._buffers]
        self._views: list[memoryview] = []

    def __len__(self) -> int:
        return sum(self._sizes)

    def joined(self) -> bytes:
        """The bytes, copied into one object."""
        return b"".join(self._buffers)

    def check(self, key: str) -> None:
        """Check again after other tasks may have run.

        Raises:
            UnsupportedValueError: a tensor's memory was freed or moved; the error names ``key``.
        """
        for buffer in self._buffers:
            if type(buffer) is memoryview and type(owner := _owner_of(buffer)) is _Memory:
                there: Callable[[str], int] | None = owner.there  # type: ignore[attr-defined]
                if there is not None and there(key) != ctypes.addressof(owner):
                    raise UnsupportedValueError(
                        f"{key!r}: the storage of a tensor in it was resized while it was put; "
                        "leave it alone until the put has returned",
                        key=key,
                    )

    def runs(self, key: str, offset: int) -> list[Run]:
        """The address of each buffer, its offset if the first is at ``offset``, and its size. No
        bytearray can be resized then, until :meth:`release`.

        Raises:
            UnsupportedValueError: a buffer was resized or freed before; the error names ``key``.
        """
        self.check(key)
        found: list[Run] = []
        for buffer, size in zip(self._buffers, self._sizes, strict=True):
            if isinstance(buffer, bytearray):
                buffer = memoryview(buffer)
                self._views.append(buffer)
            if len(buffer) != size:
                raise UnsupportedValueError(
                    f"{key!r}: a bytearray was resized while it was put; leave it alone until the "
                    "put has returned",
                    key=key,
                )
            found.append((address_of(buffer), offset, size))
            offset += size
        return found

    def release(self) -> None:
        """The buffers have been copied, or will not be."""
        views, self._views = self._views, []
        for view in views:
            view.release()


def with_aside(encoded: Iterable[Buffer], aside: Sequence[Buffer]) -> Pieces:
    """The bytes of an object, some of whose buffers are ``aside``: first these, each from a
    multiple of 64 bytes on, then what is encoded; at the end the size of each of them and of what
    is encoded, and how many of them there are, as 64-bit little-endian numbers.
    """
    buffers: list[Buffer] = []
    for buffer in aside:
        buffers += buffer, bytes(-len(buffer) % _ALIGNMENT)
    others = list(encoded)
    sizes = [*map(len, aside), sum(map(len, others)), len(aside)]
    return Pieces([*buffers, *others, struct.pack(f"<{len(sizes)}Q", *sizes)])


def without_aside(data: Buffer) -> tuple[memoryview, list[memoryview]]:
    """What is encoded, and the buffers that are aside, in the bytes of :func:`with_aside`.

    Raises:
        ValueError: these are none of those.
    """
    view = memoryview(data)
    numbers = view.nbytes // _NUMBER.size
    (count,) = _NUMBER.unpack(view[-_NUMBER.size :]) if numbers else (0,)
    if count + 2 > numbers:
        raise ValueError(f"{view.nbytes} bytes have no table of {count} buffers")
    end = view.nbytes - (count + 2) * _NUMBER.size
    *sizes, encoded, _ = struct.unpack_from(f"<{count + 2}Q", view, end)
    found: list[memoryview] = []
    start = 0
    for size in sizes:
        found.append(view[start : start + size])
        start += size + -size % _ALIGNMENT
    if start + encoded != end:
        raise ValueError(
            f"{count} buffers and what is encoded take {end} bytes, not {start + encoded}"
        )
    return view[start:end], found


def utf8_of(text: str) -> Buffer:
    """The bytes of a text in UTF-8: its own memory if it is ASCII, which must not be written to.

    Raises:
        UnicodeEncodeError: it has surrogates.
    """
    if not text.isascii():
        return text.encode()
    return memory_of(text, _as_utf8(text, None), len(text))


def memory_of(
    owner: object, address: int, nbytes: int, there: Callable[[str], int] | None = None
) -> memoryview:
    """Memory of ``owner``, which lives as long as this.

    Args:
        there: the address, if it can change, of a value under a key that an error is to name.
    """
    memory = _Memory.from_address(address)
    memory.of = owner  # type: ignore[attr-defined]  # keeps it alive
    memory.there = there  # type: ignore[attr-defined]
    return memoryview(memory)[:nbytes].cast("B")


def is_of_array(memory: memoryview) -> bool:
    """Whether this is memory of an array of numpy, or of :func:`memory_of`."""
    owner, numpy = _owner_of(memory), sys.modules.get("numpy")
    return type(owner) is _Memory or (numpy is not None and type(owner) is numpy.ndarray)


def _owner_of(memory: memoryview) -> object:
    owner: object = memory.obj
    while isinstance(owner, memoryview):  # a view of a pickle's buffer
        owner = owner.obj
    return owner


# Of any size, because making a type for each takes longer than all the rest.
_Memory = ctypes.c_ubyte * sys.maxsize


_as_utf8 = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p)(
    ("PyUnicode_AsUTF8AndSize", ctypes.pythonapi)
)


def address_of(buffer: bytes | memoryview) -> int:
    """The address of the first byte of a bytes object, or of a writable buffer with some bytes."""
    if isinstance(buffer, bytes):
        return ctypes.cast(ctypes.c_char_p(buffer), ctypes.c_void_p).value or 0
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))
