"""Server half of ``tcp``: serves segments to the clients that the store has let in."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from torchstore_core.contracts.transport import Segment, ServerContext, TransportServer
from torchstore_core.errors import ConfigurationError, TransportError, TransportUnavailableError
from torchstore_core.machine.networks import namespace_id, reachable
from torchstore_transports.tcp.serving.addresses import addresses_for
from torchstore_transports.tcp.serving.port import Port
from torchstore_transports.tcp.serving.requests import Segments
from torchstore_transports.tcp.wire.authentication import certificates, encryption
from torchstore_transports.tcp.wire.protocol import VERSION, Greeting, Offer, Welcome, decode

__all__ = ["TcpServer"]


class TcpServer(TransportServer):
    """The server half of one volume. All those in this process share a :class:`Port`."""

    def __init__(self) -> None:
        self._segments = Segments(())
        self._port: Port | None = None
        self._number = 0
        self._encrypted = False

    async def start(self, context: ServerContext, segments: Sequence[Segment]) -> bytes:
        secure, here = encryption(server=True), reachable()
        self._encrypted = secure is not None
        self._segments = Segments(segments)
        self._port, self._number = Port.serving(certificates(), secure, self._segments)
        return msgspec.msgpack.encode(Offer(VERSION, namespace_id(), here, self._encrypted))

    async def handshake(self, peer: bytes, request: bytes) -> bytes:
        client = decode(request, Greeting, "a greeting")
        if self._port is None:
            raise TransportUnavailableError("tcp is not served any more")
        if client.version != VERSION:
            raise TransportUnavailableError(
                f"the client speaks version {client.version} of tcp, the volume {VERSION}"
            )
        try:
            addresses = addresses_for(client)
            endpoints, admission = self._port.let_in(peer, self._number, addresses)
        except (ConfigurationError, OSError) as error:
            raise TransportError(f"the volume does not know where to listen: {error}") from error
        welcome = Welcome(tuple(endpoints), *admission, self._encrypted, self._number)
        return msgspec.msgpack.encode(welcome)

    async def disconnect(self, peer: bytes) -> None:
        port = self._port
        if port is not None and port.met(peer, self._number):
            await asyncio.to_thread(port.forget, peer, self._number)

    async def close(self) -> None:
        port, self._port = self._port, None
        if port is None:
            return
        await asyncio.to_thread(port.remove, self._number)
        self._segments.close()
