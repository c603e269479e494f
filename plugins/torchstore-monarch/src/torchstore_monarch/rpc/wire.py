"""The protocol between a client and the agent of its host, on the agent's socket.

A request is a frame (little-endian u32 length, msgpack :class:`RpcRequest`), followed by the bytes
if it is a write. The responses come in the order of the requests: a frame with
:class:`RpcResponse`, followed by the bytes if it was a read that succeeded.
"""

from __future__ import annotations

import msgspec

#: Largest request in bytes. Each request is one endpoint call.
CHUNK = 8 << 20
#: The client's handshake, with the version of this protocol.
GREETING = b"monarch-rpc 3"

#: Segment, offset, bytes.
Place = tuple[int, int, int]


class Admission(msgspec.Struct, frozen=True, array_like=True):
    """The volume's answer to the handshake.

    Args:
        ticket: what lets the client's requests in.
        agent: the path of the socket of the agent of the client's host.
    """

    ticket: bytes
    agent: str


class RpcRequest(msgspec.Struct, frozen=True, array_like=True):
    """A request to read or write these places of a volume, in order; ``nbytes`` bytes in all.

    ``ticket``: see :class:`Admission`.
    """

    volume: str
    places: list[Place]
    nbytes: int
    write: bool
    ticket: bytes


class RpcResponse(msgspec.Struct, frozen=True, array_like=True):
    """The outcome of a request. ``error``: why it failed; empty if it succeeded."""

    error: str = ""
