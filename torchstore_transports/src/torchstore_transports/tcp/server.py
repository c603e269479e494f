"""Server half of ``tcp``: serves segments to the clients that the store has let in."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from torchstore_core.contracts.transport import Segment, ServerContext, TransportServer
from torchstore_core.errors import ConfigurationError, TransportError, TransportUnavailableError
from torchstore_core.machine.networks import Network, namespace_id, reachable
from torchstore_transports.tcp.serving.addresses import addresses_for
from torchstore_transports.tcp.wire.authentication import certificates, encryption
from torchstore_transports.tcp.wire.protocol import VERSION, Greeting, Offer, Welcome, decode

if TYPE_CHECKING:
    from torchstore_transports.tcp.serving.port import Port
    from torchstore_transports.tcp.serving.requests import Segments

__all__ = ["TcpServer"]


class TcpServer(TransportServer):
    """The server half of one volume. All those in this process share a :class:`Port`, from the
    first client on: only then is loaded what serves, so that a store on one host need not have it
    in memory.
    """

    def __init__(self) -> None:
        self._segments: Sequence[Segment] | None = None  # while it is served
        self._certificates: tuple[str, ...] = ()
        self._secure: ssl.SSLContext | None = None
        self._mapped: Segments | None = None
        self._port: Port | None = None
        self._number = 0
        self._told: tuple[Network, ...] = ()

    async def start(self, context: ServerContext, segments: Sequence[Segment]) -> bytes:
        self._secure, self._certificates = encryption(server=True), certificates()
        here = reachable(context.told)
        self._segments, self._told = segments, context.told
        return msgspec.msgpack.encode(Offer(VERSION, namespace_id(), here, self._encrypted))

    async def handshake(self, peer: bytes, request: bytes) -> bytes:
        client = decode(request, Greeting, "a greeting")
        if self._segments is None:
            raise TransportUnavailableError("tcp is not served any more")
        if client.version != VERSION:
            raise TransportUnavailableError(
                f"the client speaks version {client.version} of tcp, the volume {VERSION}"
            )
        try:
            addresses = addresses_for(client, self._told)
            port = self._port or self._open(self._segments)
            endpoints, admission = port.let_in(peer, self._number, addresses)
        except (ConfigurationError, OSError) as error:
            raise TransportError(f"the volume cannot listen: {error}") from error
        welcome = Welcome(tuple(endpoints), *admission, self._encrypted, self._number)
        return msgspec.msgpack.encode(welcome)

    async def disconnect(self, peer: bytes) -> None:
        port = self._port
        if port is not None and port.met(peer, self._number):
            await asyncio.to_thread(port.forget, peer, self._number)

    async def close(self) -> None:
        port, self._port, self._segments = self._port, None, None
        if port is not None:
            await asyncio.to_thread(port.remove, self._number)
        if self._mapped is not None:
            self._mapped.close()

    @property
    def _encrypted(self) -> bool:
        return self._secure is not None

    def _open(self, segments: Sequence[Segment]) -> Port:
        from torchstore_transports.tcp.serving.port import Port
        from torchstore_transports.tcp.serving.requests import Segments

        self._mapped = Segments(segments)
        port, self._number = Port.serving(self._certificates, self._secure, self._mapped)
        self._port = port
        return port
