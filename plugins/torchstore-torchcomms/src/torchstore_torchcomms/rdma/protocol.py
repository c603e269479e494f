"""What the two halves say to each other, in handshakes."""

from __future__ import annotations

import msgspec

from torchstore_core.errors import TransportError

__all__ = ["VERSION", "Goodbye", "Hello", "Move", "Region", "Request", "Welcome"]
__all__ += ["decode_request", "decode_welcome", "encode"]

#: Both halves must have the same.
VERSION = 1


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """A link begins a connection.

    Args:
        link: its name, chosen at random.
        address: what ``RdmaTransport.bind`` returned at the client.
    """

    version: int
    link: bytes
    address: bytes


class Welcome(msgspec.Struct, frozen=True, array_like=True):
    """The answer to :class:`Hello`: what ``bind`` returned at the volume."""

    address: bytes


class Region(msgspec.Struct, frozen=True, array_like=True):
    """Registered memory of the client, as ``RdmaMemory.to_remote_buffer`` describes it."""

    address: int
    nbytes: int
    key: str


class Move(msgspec.Struct, frozen=True, array_like=True, tag="move"):
    """The server half moves these bytes. The answer, which is empty, says that they have arrived.

    Args:
        into: from the client's memory into the segments; False: the reverse.
        copies: ``(region, offset in it, segment, offset in that, nbytes)``.
    """

    link: bytes
    into: bool
    regions: list[Region]
    copies: list[tuple[int, int, int, int, int]]


class Goodbye(msgspec.Struct, frozen=True, array_like=True, tag="goodbye"):
    """The link ends. The answer, which is empty, says that nothing of it moves any more."""

    link: bytes


Request = Hello | Move | Goodbye
_requests = msgspec.msgpack.Decoder(Request)
_welcomes = msgspec.msgpack.Decoder(Welcome)


def encode(message: Request | Welcome) -> bytes:
    """The bytes of a message."""
    return msgspec.msgpack.encode(message)


def decode_request(data: bytes) -> Request:
    """The message of a client.

    Raises:
        TransportError: it is none, or one of another version.
    """
    try:
        asked: Request = _requests.decode(data)
    except msgspec.DecodeError as error:
        raise TransportError(f"a handshake cannot be understood: {error}") from error
    if isinstance(asked, Hello) and asked.version != VERSION:
        raise TransportError(f"the client speaks version {asked.version}, this volume {VERSION}")
    return asked


def decode_welcome(data: bytes) -> Welcome:
    """The answer to a :class:`Hello`.

    Raises:
        TransportError: it is none.
    """
    try:
        return _welcomes.decode(data)
    except msgspec.DecodeError as error:
        raise TransportError(f"the volume's answer cannot be understood: {error}") from error
