"""Server half of ``monarch-rpc``: the volume's memory, for the endpoints of the actor it is in."""

from __future__ import annotations

import os
from collections.abc import Sequence

from torchstore_core.contracts.transport import Segment, ServerContext, TransportServer
from torchstore_core.errors import TransportError, TransportUnavailableError
from torchstore_monarch.hosting import Hosted, is_hosting
from torchstore_monarch.rpc.wire import Place

__all__ = ["RpcServer"]


class RpcServer(TransportServer):
    """Reads and writes segments for :class:`HostActor`'s endpoints."""

    hosted: Hosted[RpcServer] = Hosted()

    def __init__(self) -> None:
        self._segments: dict[int, Segment] = {}
        self._volume_id = ""

    async def start(self, context: ServerContext, segments: Sequence[Segment]) -> bytes:
        if not is_hosting():
            raise TransportUnavailableError("this server is not hosted by a Monarch actor")
        self._segments = {segment.id: segment for segment in segments}
        self._volume_id = context.volume_id
        self.hosted.add(context.volume_id, self)
        return context.volume_id.encode()

    async def close(self) -> None:
        self._segments = {}
        self.hosted.remove(self._volume_id, self)

    def read(self, places: Sequence[Place]) -> bytes:
        """The bytes of all places, one after the other; raises TransportError."""
        parts = [self._read(*place) for place in places]
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def write(self, places: Sequence[Place], data: bytes) -> int:
        """Put ``data`` into the places, one after the other; raises TransportError."""
        view = memoryview(data)
        for segment, offset, nbytes in places:
            fd = self._checked(segment, offset, nbytes)
            part, view = view[:nbytes], view[nbytes:]
            if len(part) != nbytes:
                raise TransportError(f"{nbytes} bytes were announced, {len(part)} came")
            while part:
                done = os.pwrite(fd, part, offset)
                part, offset = part[done:], offset + done
        return len(data)

    def _read(self, segment: int, offset: int, nbytes: int) -> bytes:
        data = os.pread(self._checked(segment, offset, nbytes), nbytes, offset)
        if len(data) != nbytes:
            raise TransportError(f"{nbytes} bytes were wanted at {offset}, {len(data)} are there")
        return data

    def _checked(self, segment: int, offset: int, nbytes: int) -> int:
        found = self._segments.get(segment)
        if found is None or offset < 0 or nbytes < 0 or offset + nbytes > found.nbytes:
            raise TransportError(f"{nbytes} bytes at {offset} are not in segment {segment}")
        return found.fd
