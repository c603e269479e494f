"""Server half of ``monarch-rpc``: access to a volume's memory, for the endpoints of its actor."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence

import msgspec

from torchstore_core.errors import TransportError, TransportUnavailableError
from torchstore_monarch.actors.hosting import HostedServer
from torchstore_monarch.rpc.wire import GREETING, Admission, Place
from torchstore_monarch.threads import where_it_fits


class RpcServer(HostedServer):
    """Reads and writes segments for :class:`HostActor`'s endpoints."""

    greeting = GREETING

    async def handshake(self, peer: bytes, request: bytes) -> bytes:
        ticket = await super().handshake(peer, request)
        if self._host is None:
            raise TransportUnavailableError("no actor hosts the volume")
        return msgspec.msgpack.encode(Admission(ticket, await self._host.agent_of(peer)))

    async def read(self, ticket: bytes, places: Sequence[Place]) -> bytes:
        """Return the bytes of all places, one after the other. Raises TransportError."""
        self.admitted(ticket)
        work = functools.partial(self._read_all, places)
        return await where_it_fits(sum([nbytes for _, _, nbytes in places]), work)

    async def write(self, ticket: bytes, places: Sequence[Place], data: bytes) -> int:
        """Write ``data`` to the places, one after the other. Raises TransportError."""

        def work() -> int:
            with self.writing(ticket):
                return self._write(places, data)

        return await where_it_fits(len(data), work)

    def _read_all(self, places: Sequence[Place]) -> bytes:
        parts = [self._read(*place) for place in places]
        return parts[0] if len(parts) == 1 else b"".join(parts)

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
