"""What a client and the agent of its host say on the agent's socket.

A request is a frame (little-endian u32 length, msgpack :class:`RpcRequest`), followed by the bytes
if it is a write. The responses come in the order of the requests: a frame with
:class:`RpcResponse`, followed by the bytes if it was a read that went well.
"""

from __future__ import annotations

import msgspec

__all__ = [
    "AGENT",
    "CHUNK",
    "GREETING",
    "HEADER",
    "PIECES",
    "Place",
    "RpcRequest",
    "RpcResponse",
    "frame",
]

#: Name of an agent's socket, in the directory of the control socket beside it.
AGENT = "agent.sock"
#: Largest request, bytes: one endpoint call each.
CHUNK = 8 << 20
#: Most pieces in one request.
PIECES = 4096
HEADER = 4
#: What a client says in its handshake, and the version of what is said here. Halves of different
#: versions do not talk to each other.
GREETING = b"monarch-rpc 2"

#: Segment, offset, bytes.
Place = tuple[int, int, int]


class RpcRequest(msgspec.Struct, frozen=True, array_like=True):
    """Read or write these places of a volume, in order; ``nbytes`` bytes in all.

    ``ticket``: what the volume has answered to the client's handshake.
    """

    volume: str
    places: list[Place]
    nbytes: int
    write: bool
    ticket: bytes


class RpcResponse(msgspec.Struct, frozen=True, array_like=True):
    """``error``: why it failed; empty if it went well."""

    error: str = ""


def frame(message: msgspec.Struct) -> bytes:
    """One whole frame."""
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(HEADER, "little") + body
