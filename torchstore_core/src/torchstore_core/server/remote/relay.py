"""The relay: a Unix socket on a host where the server is not. See ``server.relaying``."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import msgspec

from torchstore_core.contracts.engine import Uplink
from torchstore_core.errors import ProtocolError
from torchstore_core.machine.directories import PrivateDirectory
from torchstore_core.machine.processes import Process, pid_namespace
from torchstore_core.server.remote.uplinks import EXPIRE_S, Said, Told, ToldList
from torchstore_core.server.serving.frames import ClientSocket
from torchstore_core.server.serving.listening import Listener, speaking
from torchstore_core.wire import messages as m

__all__ = ["Relay"]

log = logging.getLogger(__name__)

# A relay gives up after this part of ``expire_s``: it must do so before the server does.
_GIVE_UP = 2 / 3


class Relay:
    """Listens for clients of this host and carries what they say.

    Args:
        uplink: open.
        directory: where to put the socket.
        lost: called once when the server cannot be reached any more.
        before_close: see ``Server.before_close``.
        expire_s: the one of the server's :class:`~torchstore_core.server.remote.uplinks.Uplinks`.
            When a poll is not answered for two thirds of it, the server is gone.
    """

    def __init__(
        self,
        uplink: Uplink,
        directory: PrivateDirectory,
        lost: Callable[[], None] = lambda: None,
        before_close: Callable[[int], Awaitable[None]] | None = None,
        *,
        expire_s: float = EXPIRE_S,
    ) -> None:
        self._uplink = uplink
        self._directory = directory
        self._lost = lost
        self.before_close = before_close
        self._ids = itertools.count(1)
        self._pipes: dict[int, _Pipe] = {}
        self._listener = Listener(speaking(lambda pid: _Pipe(self, pid)))
        self._tasks: set[asyncio.Task[None]] = set()
        self._outbox: list[Said] = []
        self._patience_s = expire_s * _GIVE_UP
        self._alive_until = time.monotonic() + self._patience_s
        self._closed = False

    async def start(self) -> str:
        """Begin to listen; the address to connect to."""
        path = self._directory.control
        self._listener.open(path)
        self._spawn(self._poll())
        return f"unix:{path}"

    @property
    def valid(self) -> bool:
        """Whether the server surely still keeps what clients here hold."""
        return not self._closed and time.monotonic() < self._alive_until

    def close(self) -> None:
        """Stop; every connection ends. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._listener.close()
        for pipe in list(self._pipes.values()):
            pipe.close()
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()

    # ---- pipes ----------------------------------------------------------------------------

    def opened(self, pipe: _Pipe) -> int:
        """A client has connected: the number of the connection."""
        conn = next(self._ids)
        self._pipes[conn] = pipe
        return conn

    def say(self, said: Said) -> None:
        """Carry it, together with what else comes in this turn of the loop."""
        if self._closed:
            return
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outbox.append(said)

    def ended(self, conn: int) -> None:
        """A connection has closed."""
        self._pipes.pop(conn, None)
        self._listener.freed()
        self.say(Said(conn, closed=True))

    # ---- the uplink -----------------------------------------------------------------------

    def _flush(self) -> None:
        said, self._outbox = self._outbox, []
        if said and not self._closed:
            started = time.monotonic()
            self._spawn(self._hear(self._uplink.exchange(msgspec.msgpack.encode(said)), started))

    async def _poll(self) -> None:
        while not self._closed:
            try:
                async with asyncio.timeout(self._patience_s):
                    await self._hear(self._uplink.poll(), time.monotonic())
            except TimeoutError:  # an engine may wait for ever for what is dead
                self._give_up(TimeoutError(f"it was silent for {self._patience_s} s"))

    async def _hear(self, answer: Awaitable[bytes], started: float) -> None:
        try:
            told = ToldList.decode(await answer)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever the engine raises, the server is gone
            self._give_up(error)
            return
        self._alive_until = max(self._alive_until, started + self._patience_s)
        for one in told:
            self._tell(one)

    def _tell(self, one: Told) -> None:
        pipe = self._pipes.get(one.conn)
        if pipe is None:
            return
        if one.frame:
            pipe.write(one.frame)
        if one.close:
            pipe.close()

    def _give_up(self, error: Exception) -> None:
        if not self._closed:
            log.info("the server cannot be reached any more: %s", error)
            self.close()
            self._lost()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class _Pipe(ClientSocket):
    """A client's connection to the relay."""

    def __init__(self, relay: Relay, pid: int) -> None:
        super().__init__(m.MAX_FRAME, pid, relay)
        self._relay = relay
        self._conn = 0
        self._process: Process | None = None  # until the server knows it

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._conn = self._relay.opened(self)
        self._process = Process(self.pid, pid_namespace()) if self.pid else None
        self.watch()

    def received(self, bodies: list[bytes]) -> None:
        """Have them carried."""
        for body in bodies:
            self._relay.say(Said(self._conn, body, process=self._process))
            self._process = None

    def unreadable(self, error: ProtocolError) -> None:
        """Close."""
        log.warning("a client sent something unreadable: %s", error)
        self.close()

    def process_died(self) -> None:
        """Have the server told."""
        self._relay.say(Said(self._conn, died=True))

    def left_behind(self, bodies: list[bytes]) -> None:
        """Have the server told of what the client gave back before it left, too."""
        self.received(bodies)

    def ended(self) -> None:
        """Have the server told."""
        self._relay.ended(self._conn)
