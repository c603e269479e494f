"""Server half of ``monarch-rpc``: the volume's memory, for the endpoints of the actor it is in."""

from __future__ import annotations

import os
from collections.abc import Sequence

from torchstore_core.errors import TransportError
from torchstore_monarch.actors.hosting import HostedServer
from torchstore_monarch.rpc.wire import Place

__all__ = ["RpcServer"]


class RpcServer(HostedServer):
    """Reads and writes segments for :class:`HostActor`'s endpoints."""

    def read(self, places: Sequence[Place]) -> bytes:
        """The bytes of all places, one after the other; raises TransportError."""
        parts = [self._read(*place) for place in places]
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def write(self, places: Sequence[Place], data: bytes) -> int:
        """Put ``data`` into the places, one after the other; raises TransportError."""
        view = memoryview(data)
        for segment, offset, nbytes in places:
            fd = self.checked(segment, offset, nbytes).fd
            part, view = view[:nbytes], view[nbytes:]
            if len(part) != nbytes:
                raise TransportError(f"{nbytes} bytes were announced, {len(part)} came")
            while part:
                done = os.pwrite(fd, part, offset)
                part, offset = part[done:], offset + done
        return len(data)

    def _read(self, segment: int, offset: int, nbytes: int) -> bytes:
        data = os.pread(self.checked(segment, offset, nbytes).fd, nbytes, offset)
        if len(data) != nbytes:
            raise TransportError(f"{nbytes} bytes were wanted at {offset}, {len(data)} are there")
        return data
