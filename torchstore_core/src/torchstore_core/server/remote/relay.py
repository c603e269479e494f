"""A relay: stands in for the server on a host without one. See :mod:`.relay_server`."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Callable

import msgspec

from torchstore_core.contracts.engine import Uplink
from torchstore_core.errors import ProtocolError
from torchstore_core.machine.directories import PrivateDirectory
from torchstore_core.machine.processes import Process, pid_namespace
from torchstore_core.machine.tasks import begin
from torchstore_core.server.remote.relay_server import (
    EXPIRE_S,
    RelayReplies,
    RelayRequest,
)
from torchstore_core.server.serving.frames import ClientSocket
from torchstore_core.server.serving.listening import Listener, speaking
from torchstore_core.wire import messages as m

log = logging.getLogger(__name__)

# A relay gives up after this fraction of ``expire_s``, which must be before the server does.
_GIVE_UP = 2 / 3


class Relay:
    """Accepts the clients of this host, and forwards what they send to the server.

    Args:
        uplink: the connection to the server, already open.
        directory: where to put the socket.
        lost: called once, when the server can no longer be reached.
        expire_s: the same value as that of the server's ``RelayServer``. If a poll is not answered
            for two thirds of it, the server is taken for dead.
        clock: the clock of the event loop, in seconds.

    Attributes:
        before_close: see ``serving.frames.Host``.
    """

    def __init__(
        self,
        uplink: Uplink,
        directory: PrivateDirectory,
        lost: Callable[[], None] = lambda: None,
        *,
        expire_s: float = EXPIRE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._uplink = uplink
        self._directory = directory
        self._lost = lost
        self.before_close: Callable[[int], Awaitable[None]] | None = None
        self._ids = itertools.count(1)
        self._clients: dict[int, _Client] = {}
        self._listener = Listener(speaking(lambda pid: _Client(self, pid)))
        self._tasks: set[asyncio.Task[None]] = set()
        self._outbox: list[RelayRequest] = []
        self._patience_s = expire_s * _GIVE_UP
        self._clock = clock
        self._alive_until = clock() + self._patience_s
        self._closed = False

    async def start(self) -> str:
        """Start listening; returns the address to connect to."""
        path = self._directory.control
        self._listener.open(path)
        begin(self._poll(), self._tasks)
        return f"unix:{path}"

    @property
    def valid(self) -> bool:
        """Whether the server is certain to still keep what the clients of this host hold."""
        return not self._closed and self._clock() < self._alive_until

    def close(self) -> None:
        """Stop listening, and close every connection. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._listener.close()
        for client in list(self._clients.values()):
            client.close()
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()

    # ---- clients --------------------------------------------------------------------------

    def client_connected(self, client: _Client) -> int:
        """Register a new connection; returns its number."""
        conn = next(self._ids)
        self._clients[conn] = client
        return conn

    def client_gone(self, conn: int) -> None:
        """Forget a connection that has closed, and tell the server."""
        self._clients.pop(conn, None)
        self._listener.freed()
        self.send(RelayRequest(conn, closed=True))

    def send(self, request: RelayRequest) -> None:
        """Send a request to the server, together with all others of this event loop turn."""
        if self._closed:
            return
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outbox.append(request)

    # ---- the uplink -----------------------------------------------------------------------

    def _flush(self) -> None:
        requests, self._outbox = self._outbox, []
        if requests and not self._closed:
            started = self._clock()
            answer = self._uplink.exchange(msgspec.msgpack.encode(requests))
            begin(self._receive(answer, started), self._tasks)

    async def _poll(self) -> None:
        while not self._closed:
            started = self._clock()
            answer = asyncio.ensure_future(self._uplink.poll())
            try:
                if await self._answered(answer):
                    await self._receive(answer, started)
                else:  # an engine may wait for a dead process for ever
                    self._give_up(TimeoutError(f"it was silent for {self._patience_s} s"))
            finally:
                answer.cancel()

    async def _answered(self, answer: asyncio.Future[bytes]) -> bool:
        """Wait for an answer; whether it has come in time. That begins anew while the uplink is
        paused.
        """
        while True:
            await asyncio.wait([answer], timeout=self._patience_s)
            if answer.done():
                return True
            if not self._uplink.paused:
                return False

    async def _receive(self, answer: Awaitable[bytes], started: float) -> None:
        """Carry out the server's replies to a call that was made at ``started``."""
        try:
            replies = RelayReplies.decode(await answer)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever the engine raises, the server is gone
            self._give_up(error)
            return
        self._alive_until = max(self._alive_until, started + self._patience_s)
        for reply in replies:
            client = self._clients.get(reply.conn)
            if client is not None and reply.frame:
                client.write(reply.frame)
            if client is not None and reply.close:
                client.close()

    def _give_up(self, error: Exception) -> None:
        if not self._closed:
            log.info("the server cannot be reached any more: %s", error)
            self.close()
            self._lost()


class _Client(ClientSocket):
    """A client's connection to the relay."""

    def __init__(self, relay: Relay, pid: int) -> None:
        super().__init__(m.MAX_FRAME, pid, relay)
        self._relay = relay
        self._conn = 0
        self._process: Process | None = None  # sent to the server with the first message

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._conn = self._relay.client_connected(self)
        self._process = Process(self.pid, pid_namespace()) if self.pid else None
        self.watch()

    def received(self, bodies: list[bytes]) -> None:
        """Forward messages to the server."""
        for body in bodies:
            self._relay.send(RelayRequest(self._conn, body, process=self._process))
            self._process = None

    def unreadable(self, error: ProtocolError) -> None:
        """Close the connection of a client that sends invalid data."""
        log.warning("a client sent something unreadable: %s", error)
        self.close()

    def process_died(self) -> None:
        """Tell the server that the client's process has died."""
        self._relay.send(RelayRequest(self._conn, died=True))

    def left_behind(self, bodies: list[bytes]) -> None:
        """Forward what the client sent before it left, so that aborts and releases take effect."""
        self.received(bodies)

    def ended(self) -> None:
        """Tell the server that the connection has closed."""
        self._relay.client_gone(self._conn)
