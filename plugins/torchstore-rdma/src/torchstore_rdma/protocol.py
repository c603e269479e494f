"""What the two halves say to each other, in handshakes."""

from __future__ import annotations

import msgspec

from torchstore_rdma.fabric import Place

__all__ = ["Exposed", "Goodbye", "Hello", "Met", "Request", "Wake", "Welcome"]


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """A client begins a connection.

    Args:
        connection: its name, chosen at random by the client.
        alive: the connections of this client that it has not given up; all others end now.
        place: where the client runs.
        need: how many bytes of the segments it wants to reach.
    """

    connection: str
    alive: list[str]
    place: Place
    need: int


class Exposed(msgspec.Struct, frozen=True, array_like=True):
    """A segment as the connection reaches it: ``[address, address + end)`` of the server half's
    memory is registered; the whole segment has ``nbytes`` bytes.
    """

    segment: int
    address: int
    end: int
    nbytes: int


class Welcome(msgspec.Struct, frozen=True, array_like=True):
    """The answer to :class:`Hello`.

    Args:
        metadata: of the library, about the agent that serves this connection.
        exposed: the segments.
        place: where the server half runs.
    """

    metadata: bytes
    exposed: list[Exposed]
    place: Place


class Met(msgspec.Struct, frozen=True, array_like=True, tag="met"):
    """The first transfer of a connection has ended: nobody else has to connect to its agents."""

    connection: str


class Goodbye(msgspec.Struct, frozen=True, array_like=True, tag="goodbye"):
    """The client gives a connection up. The answer, which is empty, says that it has ended: no byte
    moves through it any more.
    """

    connection: str


class Wake(msgspec.Struct, frozen=True, array_like=True, tag="wake"):
    """A transfer has begun that needs the server half, after a time without any."""


Request = Hello | Met | Goodbye | Wake
