"""The messages between the two halves of ``tcp``, in handshakes and on connections.

Handshakes are msgpack. An authenticated connection carries requests, which are answered in turn. A
request is a fixed header and packed extents, followed by the bytes if it is a write. An answer is a
fixed header, followed by the bytes if it was a read that succeeded, or by an error text.

The receiver of a message checks all of it before it touches memory.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Mapping
from typing import NamedTuple, TypeVar

import msgspec

from torchstore_core.errors import ProtocolError, TransportUnavailableError
from torchstore_core.machine.networks import Network

__all__ = [
    "ANSWER",
    "EXTENT",
    "EXTENTS_MAX",
    "FAILED",
    "OK",
    "READ",
    "READ_BYTES",
    "REQUEST",
    "REQUEST_BYTES_MAX",
    "TEXT_MAX",
    "VERSION",
    "VOLUMES_MAX",
    "WRITE",
    "WRITE_BYTES",
    "Endpoint",
    "Extent",
    "Greeting",
    "Offer",
    "Welcome",
    "check_extents",
    "checksum",
    "decode",
    "extents_of",
]

T = TypeVar("T")

#: Version of everything in this module. Halves of different versions refuse each other.
VERSION = 2

#: Largest number of bytes that a client reads with one request. Each request costs about 75 µs in
#: which the stream receives nothing; an answer can be cut off at any byte.
READ_BYTES = 16 << 20
#: Largest number of bytes that a client writes with one request. A cancelled write waits for the
#: requests that it has begun.
WRITE_BYTES = 8 << 20
#: Largest number of bytes that a server accepts in one request.
REQUEST_BYTES_MAX = 64 << 20
#: Largest number of extents in a request.
EXTENTS_MAX = 1024
#: Longest error text, in bytes.
TEXT_MAX = 4096

READ, WRITE = 1, 2
OK, FAILED = 0, 1

#: Largest number that a volume can have.
VOLUMES_MAX = (1 << 16) - 1

#: Operation, whether bytes are checked, number of the volume, number of extents, number of bytes,
#: CRC-32 of the bytes of a write.
REQUEST = struct.Struct("<BBHIQI")
#: Outcome, whether the bytes are checked, unused, CRC-32 of the bytes that follow, their number.
ANSWER = struct.Struct("<BBHIQ")
#: Segment, offset, bytes per row, number of rows, bytes between the starts of rows.
EXTENT = struct.Struct("<IQQIq")


class Offer(msgspec.Struct, frozen=True, array_like=True):
    """What every client learns about a server half: nothing that would help a stranger.

    Args:
        version: the :data:`VERSION` of the server half.
        namespace: the id of the server half's network namespace.
        networks: the addresses of its host.
        encrypted: whether it accepts only connections with TLS.
    """

    version: int
    namespace: str
    networks: tuple[Network, ...]
    encrypted: bool = False


class Greeting(msgspec.Struct, frozen=True, array_like=True):
    """The request of a handshake: where the client is, which determines where the server half
    listens.
    """

    version: int
    namespace: str
    networks: tuple[Network, ...]


#: An address and a port.
Endpoint = tuple[str, int]


class Welcome(msgspec.Struct, frozen=True, array_like=True):
    """The answer to a handshake.

    Args:
        endpoints: where the server half listens, the best first.
        ticket: identifies the client on its connections, which serve all volumes of the process
            that it has been let in to.
        secret: proves to each half that the other one took part in the handshake.
        encrypted: whether connections use TLS.
        volume: the number by which requests name the volume.
    """

    endpoints: tuple[Endpoint, ...]
    ticket: bytes
    secret: bytes
    encrypted: bool
    volume: int


def decode(data: bytes, kind: type[T], what: str) -> T:
    """Decode a message of a handshake.

    Raises:
        TransportUnavailableError: the data is not such a message.
    """
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except msgspec.DecodeError as error:
        raise TransportUnavailableError(f"not {what} of tcp: {error}") from error


def checksum(parts: Iterable[memoryview], crc: int = 0) -> int:
    """Return the CRC-32 of all parts, continued from ``crc``, that of the bytes before them."""
    for part in parts:
        crc = zlib.crc32(part, crc)
    return crc


class Extent(NamedTuple):
    """``rows`` rows of ``nbytes`` bytes in a segment, whose starts are ``step`` bytes apart."""

    segment: int
    offset: int
    nbytes: int
    rows: int
    step: int


def extents_of(packed: bytes | bytearray) -> list[Extent]:
    """Unpack the extents of a request."""
    return [Extent._make(fields) for fields in EXTENT.iter_unpack(packed)]


def check_extents(extents: Iterable[Extent], sizes: Mapping[int, int], nbytes: int) -> None:
    """Check a request before any part of it is executed.

    Args:
        sizes: the sizes of the segments in bytes.
        nbytes: the total that the extents must have.

    Raises:
        ProtocolError: an extent is outside its segment, or the total is wrong.
    """
    total = 0
    for segment, offset, row, rows, step in extents:
        size = sizes.get(segment)
        if size is None:
            raise ProtocolError(f"there is no segment {segment}")
        last = offset + (rows - 1) * step
        if row < 1 or rows < 1 or min(offset, last) < 0 or max(offset, last) + row > size:
            raise ProtocolError(
                f"{rows} rows of {row} bytes from {offset}, {step} bytes apart, are not inside "
                f"segment {segment} of {size} bytes"
            )
        total += row * rows
    if total != nbytes:
        raise ProtocolError(f"{nbytes} bytes were announced for extents of {total}")
