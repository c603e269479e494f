"""Sending and receiving many rows of memory with one system call, without an object for each row.

``socket.sendmsg`` wants a buffer object for every row, which costs more than the kernel's copy of
it. Here the kernel's own list of addresses is written at once.
"""

from __future__ import annotations

import ctypes
import errno
import os
from array import array

__all__ = ["ROWS_MAX", "memory", "receive_rows", "send_rows"]

#: Most rows of one call.
ROWS_MAX = 1024


class _Message(ctypes.Structure):
    """``struct msghdr``."""

    _fields_ = (
        ("name", ctypes.c_void_p),
        ("name_bytes", ctypes.c_uint32),
        ("vectors", ctypes.c_void_p),
        ("count", ctypes.c_size_t),
        ("control", ctypes.c_void_p),
        ("control_bytes", ctypes.c_size_t),
        ("flags", ctypes.c_int),
    )


_libc = ctypes.CDLL(None, use_errno=True)
for _call in (_libc.sendmsg, _libc.recvmsg):
    _call.argtypes = (ctypes.c_int, ctypes.POINTER(_Message), ctypes.c_int)
    _call.restype = ctypes.c_ssize_t


# All memory of this process; a slice of it is a view of the memory at those addresses. Slicing
# takes a tenth of the time that making an array type for every length does.
_MEMORY = memoryview((ctypes.c_ubyte * (1 << 62)).from_address(0)).cast("B")


def memory(address: int, nbytes: int) -> memoryview:
    """The memory there, as a buffer."""
    return _MEMORY[address : address + nbytes]


def send_rows(fd: int, address: int, nbytes: int, rows: int, stride: int, flags: int) -> int:
    """Send up to :data:`ROWS_MAX` rows of ``nbytes`` bytes, the starts of which are ``stride``
    bytes apart; how many bytes went. Releases the interpreter's lock.

    Raises:
        OSError: as ``socket.sendmsg`` does.
    """
    return _transfer(_libc.sendmsg, fd, address, nbytes, rows, stride, flags)


def receive_rows(fd: int, address: int, nbytes: int, rows: int, stride: int, flags: int) -> int:
    """Receive into rows as :func:`send_rows` sends them; how many bytes came, 0 at the end."""
    return _transfer(_libc.recvmsg, fd, address, nbytes, rows, stride, flags)


def _transfer(
    call: ctypes._NamedFuncPointer,
    fd: int,
    address: int,
    nbytes: int,
    rows: int,
    stride: int,
    flags: int,
) -> int:
    rows = min(rows, ROWS_MAX)
    vectors = array("Q", [nbytes]) * (2 * rows)
    if stride > 0:
        vectors[::2] = array("Q", range(address, address + rows * stride, stride))
    else:
        vectors[::2] = array("Q", [address + row * stride for row in range(rows)])
    message = _Message(None, 0, vectors.buffer_info()[0], rows, None, 0, 0)
    while True:
        done: int = call(fd, ctypes.byref(message), flags)
        if done >= 0:
            return done
        code = ctypes.get_errno()
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))
