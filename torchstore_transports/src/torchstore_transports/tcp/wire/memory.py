"""Pieces of memory, as what a connection sends from and receives into.

Rows are sent from where they lie, and received into their places. Only rows so short that telling
the kernel of each would cost more than a copy go through a buffer, a part of it at a time, so that
what is in it stays in the cache and its pages are never new.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from torchstore_core.machine.copying import Grid, copy_grids
from torchstore_transports.tcp.wire.connection import Connection
from torchstore_transports.tcp.wire.protocol import checksum
from torchstore_transports.tcp.wire.scattered import memory

__all__ = ["Piece", "receive", "send"]

# Rows of fewer bytes are packed, and those of a few more where each needs an object.
_SHORT = 2048
_PACKED = 2 << 10
# Fewer bytes of rows are not worth a system call of their own.
_WORTH_A_CALL = 64 << 10
# Bytes of the buffer for that. Each thread has one.
_BUFFER = 512 << 10
# Most views at once: as many as the kernel takes with one call.
_VIEWS = 1024

_here = threading.local()


class Piece(NamedTuple):
    """``rows`` rows of ``nbytes`` bytes, the starts of which are ``stride`` bytes apart."""

    address: int
    nbytes: int
    rows: int
    stride: int


def send(connection: Connection, pieces: Iterable[Piece], *, check: bool = False) -> int:
    """Send the bytes of the pieces, in order.

    Args:
        check: do not send, but return the CRC-32 of what would be sent.

    Raises:
        OSError: see :class:`Connection`.
    """
    crc = 0
    for part in _parts(pieces, whole_rows=not (check or connection.encrypted)):
        if isinstance(part, Piece):
            connection.send_rows(*part)
            continue
        views, grids = part
        if grids:
            copy_grids(grids, stream=False)
        if check:
            crc = checksum(views, crc)
        else:
            connection.send(views)
    return crc


def receive(connection: Connection, pieces: Iterable[Piece], *, check: bool = False) -> int:
    """Receive the bytes of the pieces, in order, into their places.

    Args:
        check: return the CRC-32 of what has come.

    Raises:
        OSError: see :class:`Connection`.
    """
    crc = 0
    for part in _parts(pieces, whole_rows=not (check or connection.encrypted)):
        if isinstance(part, Piece):
            connection.receive_rows(*part)
            continue
        views, grids = part
        connection.receive(views)
        if check:
            crc = checksum(views, crc)
        if grids:
            back = [(to, of, n, rows, step, dense) for of, to, n, rows, dense, step in grids]
            copy_grids(back, stream=True)
    return crc


def _parts(
    pieces: Iterable[Piece], *, whole_rows: bool
) -> Iterator[Piece | tuple[list[memoryview], list[Grid]]]:
    """Cut pieces into those whose rows the kernel is told of (``whole_rows``), and views of all
    others, with those copies of rows into the buffer that the views need.
    """
    views: list[memoryview] = []
    grids: list[Grid] = []
    used = 0
    for piece in pieces:
        address, nbytes, rows, stride = piece
        if whole_rows and rows > 1 and nbytes >= _SHORT and nbytes * rows >= _WORTH_A_CALL:
            if views:
                yield views, grids
                views, grids, used = [], [], 0
            yield piece
            continue
        done = 0
        while done < rows:
            packed = rows > 1 and nbytes < _PACKED
            some = min(rows - done, (_BUFFER - used) // nbytes if packed else 1)
            if not some or len(views) >= _VIEWS:
                yield views, grids
                views, grids, used = [], [], 0
                continue
            start = address + done * stride
            if packed:
                at = _buffer() + used
                grids.append((at, start, nbytes, some, nbytes, stride))
                start = at
                used += some * nbytes
            views.append(memory(start, some * nbytes))
            done += some
    if views:
        yield views, grids


def _buffer() -> int:
    """The address of the calling thread's buffer."""
    buffer: ctypes.Array[ctypes.c_char] | None = getattr(_here, "buffer", None)
    if buffer is None:
        buffer = _here.buffer = ctypes.create_string_buffer(_BUFFER)
    return ctypes.addressof(buffer)
