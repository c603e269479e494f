"""Server half of ``monarch-rpc``: access to a volume's memory, for the endpoints of its actor."""

from __future__ import annotations

import asyncio
import os
import secrets
import threading
from collections.abc import Sequence

from torchstore_core.errors import TransportError, TransportUnavailableError
from torchstore_monarch.actors.hosting import HostedServer
from torchstore_monarch.rpc.wire import GREETING, Place

__all__ = ["RpcServer"]


_TICKET_BYTES = 16


class RpcServer(HostedServer):
    """Reads and writes segments for :class:`HostActor`'s endpoints.

    A call that the engine delivers late must not write for a client that has been disconnected. So
    each client gets a ticket, which every request carries, and which is valid until the client is
    disconnected.
    """

    def __init__(self) -> None:
        super().__init__()
        self._tickets: dict[bytes, bytes] = {}  # by client
        # Endpoints run on the actor's event loop, everything else on the volume's loop.
        self._lock = threading.Lock()

    async def handshake(self, peer: bytes, request: bytes) -> bytes:
        if request != GREETING:
            raise TransportUnavailableError("that is no client of this version of monarch-rpc")
        with self._lock:
            return self._tickets.setdefault(peer, secrets.token_bytes(_TICKET_BYTES))

    async def disconnect(self, peer: bytes) -> None:
        if peer in self._tickets:
            await asyncio.to_thread(self._forget, peer)  # a write may hold the lock

    def _forget(self, peer: bytes) -> None:
        with self._lock:
            self._tickets.pop(peer, None)

    def _check(self, ticket: bytes) -> None:
        if ticket not in self._tickets.values():
            raise TransportError("the volume has disconnected this client; connect again")

    def read(self, ticket: bytes, places: Sequence[Place]) -> bytes:
        """Return the bytes of all places, one after the other. Raises TransportError."""
        with self._lock:
            self._check(ticket)
        parts = [self._read(*place) for place in places]
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def write(self, ticket: bytes, places: Sequence[Place], data: bytes) -> int:
        """Write ``data`` to the places, one after the other. Raises TransportError."""
        with self._lock:
            self._check(ticket)
            return self._write(places, data)

    def _write(self, places: Sequence[Place], data: bytes) -> int:
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
