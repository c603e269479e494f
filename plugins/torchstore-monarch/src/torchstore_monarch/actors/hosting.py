"""The server halves in this process, for the endpoints of the actor that hosts their volumes."""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, ClassVar, NamedTuple, Self

import msgspec

from torchstore_core.contracts.transport import Segment, ServerContext, TransportServer
from torchstore_core.errors import TransportError, TransportUnavailableError
from torchstore_monarch.protocol import Offer

_TICKET_BYTES = 16


class Host(NamedTuple):
    """The actor that hosts volumes, as their server halves see it.

    Args:
        store_id: of the volumes' store, see ``protocol.FoundStore``.
        agent_of: returns the path of the socket, on a client's host, of the agent that forwards
            what the client asks; its argument is the ``peer`` of a handshake. Raises
            TransportNotReadyError if nobody can say.
    """

    store_id: str
    agent_of: Callable[[bytes], Awaitable[str]]


_host: ContextVar[Host | None] = ContextVar("host", default=None)


@contextmanager
def hosting(host: Host) -> Iterator[None]:
    """A context in which volumes are started by an actor whose endpoints serve them."""
    token = _host.set(host)
    try:
        yield
    finally:
        _host.reset(token)


class _Client:
    """Whoever has a ticket. Its lock is held while its bytes are written."""

    def __init__(self) -> None:
        self.ticket = secrets.token_bytes(_TICKET_BYTES)
        self.lock = threading.Lock()
        self.gone = False

    def end(self) -> None:
        """Nothing is written for it afterwards. Blocks."""
        with self.lock:
            self.gone = True


class HostedServer(TransportServer):
    """A server half that works through the endpoints of the actor that hosts its volume.

    A call that the engine delivers late must not write for a client that has been disconnected. So
    each client gets a ticket, which every call carries, and which is valid until the client is
    disconnected. Endpoints run on the actor's event loop and in threads, everything else on the
    volume's loop.

    Attributes:
        greeting: the handshake of its clients, with the version of their protocol. Halves of
            different versions refuse each other.
    """

    greeting: ClassVar[bytes]
    _here: ClassVar[dict[str, Any]]

    def __init_subclass__(cls) -> None:
        cls._here = {}

    @classmethod
    def of(cls, volume_id: str) -> Self:
        """Return the server half of a volume of this process.

        Raises:
            TransportError: the volume is not in this process.
        """
        found: Self | None = cls._here.get(volume_id)
        if found is None:
            raise TransportError(f"volume {volume_id} is not in this process")
        return found

    def __init__(self) -> None:
        self._segments: dict[int, Segment] = {}
        self._volume_id = ""
        self._clients: dict[bytes, _Client] = {}  # by peer
        self._host: Host | None = None

    async def start(self, context: ServerContext, segments: Sequence[Segment]) -> bytes:
        self._host = _host.get()
        if self._host is None:
            raise TransportUnavailableError("only in a Monarch job: no actor hosts the volume")
        self._segments = {segment.id: segment for segment in segments}
        self._volume_id = context.volume_id
        self._here[context.volume_id] = self
        return msgspec.msgpack.encode(Offer(self._host.store_id, context.volume_id))

    async def close(self) -> None:
        if self._here.get(self._volume_id) is self:  # otherwise another one has taken its place
            del self._here[self._volume_id]
        clients, self._clients = list(self._clients.values()), {}
        for client in clients:  # what is being written would go to whatever has its descriptor next
            await asyncio.to_thread(client.end)
        self._segments = {}

    async def handshake(self, peer: bytes, request: bytes) -> bytes:
        if request != self.greeting:
            raise TransportUnavailableError(
                f"that is no client of {self.greeting.decode()}: the versions differ"
            )
        client = self._clients.get(peer)
        if client is None or client.gone:
            client = self._clients[peer] = _Client()
        return client.ticket

    async def disconnect(self, peer: bytes) -> None:
        client = self._clients.get(peer)
        if client is not None:
            await asyncio.to_thread(client.end)
            if self._clients.get(peer) is client:
                del self._clients[peer]

    def admitted(self, ticket: bytes) -> _Client:
        """Return the client with that ticket.

        Raises:
            TransportError: it was disconnected.
        """
        for client in list(self._clients.values()):
            if client.ticket == ticket and not client.gone:
                return client
        raise TransportError("the volume has disconnected this client; connect again")

    @contextmanager
    def writing(self, ticket: bytes) -> Iterator[None]:
        """A context in which bytes of a client are written: ``disconnect`` waits for its end.

        Raises:
            TransportError: the client was disconnected.
        """
        client = self.admitted(ticket)
        with client.lock:
            self.admitted(ticket)
            yield

    def checked(self, segment: int, offset: int, nbytes: int) -> Segment:
        """Return the segment, if these bytes are in it.

        Raises:
            TransportError: the bytes are not in the segment.
        """
        found = self._segments.get(segment)
        if found is None or offset < 0 or nbytes < 0 or offset + nbytes > found.nbytes:
            raise TransportError(f"{nbytes} bytes at {offset} are not in segment {segment}")
        return found
