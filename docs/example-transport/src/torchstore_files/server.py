"""Server half of ``files``: tells clients where the segments are."""

from __future__ import annotations

import os
from collections.abc import Sequence

import msgspec

from torchstore_core.contracts.transport import Segment, ServerContext, TransportServer
from torchstore_core.errors import TransportError

OFFER = b"files-1"
WHERE = b"where"


class Place(msgspec.Struct, frozen=True, array_like=True):
    """A segment, the file that is its memory, and its size in bytes."""

    segment: int
    path: str
    nbytes: int


class FilesServer(TransportServer):
    """Answers one kind of handshake."""

    def __init__(self) -> None:
        self._places: list[Place] = []

    async def start(self, context: ServerContext, segments: Sequence[Segment]) -> bytes:
        self._places = [
            Place(segment.id, f"/proc/{os.getpid()}/fd/{segment.fd}", segment.nbytes)
            for segment in segments
        ]
        return OFFER

    async def handshake(self, peer: bytes, request: bytes) -> bytes:
        if request != WHERE:
            raise TransportError("files: not a request that this server half knows")
        return msgspec.msgpack.encode(self._places)

    async def close(self) -> None:
        self._places = []
