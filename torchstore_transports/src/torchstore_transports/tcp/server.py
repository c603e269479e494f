"""Server half of ``tcp``: serves segments to the clients that the store has let in."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from torchstore_core.contracts.transport import Segment, ServerContext, TransportServer
from torchstore_core.errors import ConfigurationError, TransportError, TransportUnavailableError
from torchstore_core.machine.networks import namespace_id, networks
from torchstore_transports.tcp.serving.addresses import addresses_for
from torchstore_transports.tcp.serving.listening import Listeners
from torchstore_transports.tcp.serving.peers import Peers
from torchstore_transports.tcp.serving.requests import Segments
from torchstore_transports.tcp.wire.authentication import encryption
from torchstore_transports.tcp.wire.protocol import VERSION, Greeting, Offer, Welcome, decode

__all__ = ["TcpServer"]


class TcpServer(TransportServer):
    """Listens only while there are clients, and only at addresses at which one of them is met."""

    def __init__(self) -> None:
        self._segments = Segments(())
        self._peers = Peers(self._segments, None)
        self._listeners = Listeners(self._peers.take)
        self._encrypted = False
        self._closed = False

    async def start(self, context: ServerContext, segments: Sequence[Segment]) -> bytes:
        try:
            secure = encryption(server=True)
            here = networks()
        except (ConfigurationError, OSError) as error:
            raise TransportUnavailableError(f"tcp cannot be served: {error}") from error
        self._encrypted = secure is not None
        self._segments = Segments(segments)
        self._peers = Peers(self._segments, secure)
        self._listeners = Listeners(self._peers.take)
        return msgspec.msgpack.encode(Offer(VERSION, namespace_id(), here, self._encrypted))

    async def handshake(self, peer: bytes, request: bytes) -> bytes:
        client = decode(request, Greeting, "a greeting")
        if self._closed:
            raise TransportUnavailableError("tcp is not served any more")
        if client.version != VERSION:
            raise TransportUnavailableError(
                f"the client speaks version {client.version} of tcp, the volume {VERSION}"
            )
        try:
            endpoints = self._listeners.open(addresses_for(client))
        except (ConfigurationError, OSError) as error:
            raise TransportError(f"the volume does not know where to listen: {error}") from error
        if not endpoints:
            raise TransportUnavailableError("the volume has no address that the client reaches")
        ticket, secret = self._peers.let_in(peer)
        welcome = Welcome(tuple(endpoints), ticket, secret, self._encrypted)
        return msgspec.msgpack.encode(welcome)

    async def disconnect(self, peer: bytes) -> None:
        if peer not in self._peers:
            return
        await asyncio.to_thread(self._peers.forget, peer)
        if not self._peers:
            # At once and on this event loop, so that no handshake comes between.
            self._listeners.close()

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._listeners.close()
        await asyncio.to_thread(self._peers.close)
        self._segments.close()
