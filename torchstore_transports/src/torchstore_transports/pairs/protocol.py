"""The handshakes between a link and its server half. Torch-free."""

from __future__ import annotations

import msgspec

from torchstore_core.machine.networks import Network

__all__ = [
    "ENDED",
    "GOES_ON",
    "VERSION",
    "Hello",
    "Request",
    "Stop",
    "StoreCall",
    "Transfer",
    "Watch",
    "Welcome",
    "decode",
    "decode_welcome",
    "encode",
]

#: Changes whenever halves of different versions would misunderstand each other.
VERSION = 2
#: The answers to a :class:`Watch`.
ENDED, GOES_ON = b"ended", b"goes on"

Extent = tuple[int, int, int]


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """The link asks for a pair, which replaces its previous one.

    Args:
        version: see :data:`VERSION`.
        link: a random id of the link.
        namespace: the id of the link's network namespace.
        networks: the addresses at which the link may be reached.
        bound: whether the user has chosen these addresses; see ``addresses``.
    """

    version: int
    link: bytes
    namespace: str
    networks: tuple[Network, ...]
    bound: bool


class Welcome(msgspec.Struct, frozen=True, array_like=True):
    """The server half has begun to make its end of the pair.

    Args:
        pair: the number of the pair.
        address: the address of the link's host at which the link's end must listen.
    """

    pair: int
    address: str


class StoreCall(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """A call of the key-value store at which the ends of a pair meet; see ``rendezvous.Board``.

    Args:
        method: ``set``, ``wait`` or ``add``.
        value: the value, for ``set``.
        amount: the number to add, for ``add``.
    """

    pair: int
    method: str
    key: str
    value: bytes = b""
    amount: int = 0


class Transfer(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """The link begins to send (if ``into`` segments) or to receive these extents over a pair.

    Args:
        extents: segment, offset and number of bytes of each, in the order in which they move.
    """

    pair: int
    into: bool
    extents: list[Extent]


class Stop(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """The link has given up a pair. After the answer, no byte of it reaches a segment any more."""

    pair: int


class Watch(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """The link wants to know how the batch that is under way over a pair ends at the other end. The
    answer comes when it has ended there (:data:`ENDED`), or after a while (:data:`GOES_ON`); it is
    an error if the batch, the pair or the process of the server half did not live so long.
    """

    pair: int


Request = Hello | StoreCall | Transfer | Stop | Watch

encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Request).decode
decode_welcome = msgspec.msgpack.Decoder(Welcome).decode
