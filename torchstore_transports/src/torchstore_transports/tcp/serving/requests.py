"""Serving a client's requests on one connection, in its thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import groupby
from typing import NamedTuple

from torchstore_core.contracts.transport import Segment
from torchstore_core.errors import ProtocolError
from torchstore_core.machine.virtual_memory import map_shared, unmap
from torchstore_transports.tcp.wire.connection import Connection
from torchstore_transports.tcp.wire.memory import Piece, incoming, outgoing
from torchstore_transports.tcp.wire.protocol import (
    ANSWER,
    EXTENT,
    EXTENTS_MAX,
    FAILED,
    OK,
    READ,
    REQUEST,
    REQUEST_BYTES_MAX,
    TEXT_MAX,
    WRITE,
    Extent,
    check_extents,
    checksum,
    extents_of,
)

__all__ = ["Segments", "serve"]

# From this size on, the kernel sends pages of a segment directly; below it, a call for each run
# would cost more than a copy.
_SEND_FILE = 64 << 10


class _Request(NamedTuple):
    write: bool
    checked: bool
    crc: int
    nbytes: int
    extents: list[Extent]


class Segments:
    """The segments of a volume, mapped when a client first uses them. Thread-safe."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self.sizes: Mapping[int, int] = {one.id: one.nbytes for one in segments}
        self._segments = {one.id: one for one in segments}
        self._addresses: dict[int, int] = {}
        self._lock = threading.Lock()

    def fd(self, segment: int) -> int:
        """Return the descriptor of a segment."""
        return self._segments[segment].fd

    def pieces(self, extents: Iterable[Extent]) -> Iterator[Piece]:
        """Yield the memory of extents.

        Raises:
            OSError: a segment cannot be mapped.
        """
        for segment, offset, nbytes, rows, step in extents:
            yield Piece(self._address(segment) + offset, nbytes, rows, step)

    def _address(self, segment: int) -> int:
        with self._lock:
            address = self._addresses.get(segment)
            if address is None:
                _, fd, nbytes = self._segments[segment]
                address = self._addresses[segment] = map_shared(fd, nbytes)
            return address

    def close(self) -> None:
        """Unmap everything. No thread may use the segments any more."""
        while self._addresses:
            segment, address = self._addresses.popitem()
            unmap(address, self.sizes[segment])


def serve(connection: Connection, using: Callable[[int], AbstractContextManager[Segments]]) -> None:
    """Answer requests until the client closes the connection.

    Args:
        using: a context in which bytes of the volume of that number may move; raises ProtocolError
            if the client has not been let in to the volume.

    Raises:
        OSError: the connection has broken, or was shut.
    """
    head = memoryview(bytearray(REQUEST.size))
    while connection.receive_first(head):
        try:
            with using(REQUEST.unpack(head)[2]) as segments:
                request = _received(connection, head, segments)
                if request.write:
                    _write(connection, request, segments)
                else:
                    _read(connection, request, segments)
        except ProtocolError as error:
            text = error.message.encode()[:TEXT_MAX]
            connection.send([memoryview(ANSWER.pack(FAILED, 0, 0, 0, len(text)) + text)])
            # Closed with unread bytes, the connection would be reset: the text might not arrive.
            connection.drain(REQUEST_BYTES_MAX)
            return


def _received(connection: Connection, head: memoryview, segments: Segments) -> _Request:
    """Receive the rest of a request, and check it.

    Raises:
        ProtocolError: the request is invalid; further bytes on the connection have no meaning.
    """
    operation, checked, _, count, nbytes, crc = REQUEST.unpack(head)
    if operation not in (READ, WRITE) or count > EXTENTS_MAX or nbytes > REQUEST_BYTES_MAX:
        raise ProtocolError(f"operation {operation} with {count} extents of {nbytes} bytes")
    packed = bytearray(count * EXTENT.size)
    connection.receive([memoryview(packed)])
    extents = extents_of(packed)
    check_extents(extents, segments.sizes, nbytes)
    return _Request(operation == WRITE, bool(checked), crc, nbytes, extents)


def _write(connection: Connection, request: _Request, segments: Segments) -> None:
    pieces = [*segments.pieces(request.extents)]
    crc = 0
    if request.checked:
        for views in incoming(pieces):
            connection.receive(views)
            crc = checksum(views, crc)
    else:
        connection.receive_pieces(pieces)
    if request.checked and crc != request.crc:
        raise ProtocolError("bytes were damaged on their way: their checksum is wrong")
    connection.send([memoryview(ANSWER.pack(OK, 0, 0, 0, 0))])


def _read(connection: Connection, request: _Request, segments: Segments) -> None:
    crc = 0
    if request.checked:
        for views in outgoing(segments.pieces(request.extents)):
            crc = checksum(views, crc)
    head = memoryview(ANSWER.pack(OK, request.checked, 0, crc, request.nbytes))
    connection.send([head], more=bool(request.extents))
    for copied, extents in groupby(
        request.extents, lambda one: connection.copies or one.nbytes < _SEND_FILE
    ):
        if copied:
            connection.send_pieces([*segments.pieces(extents)])
            continue
        for segment, offset, nbytes, rows, step in extents:
            for row in range(rows):
                connection.send_file(segments.fd(segment), offset + row * step, nbytes)
