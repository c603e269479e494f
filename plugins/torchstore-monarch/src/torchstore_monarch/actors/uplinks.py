"""Both ends of the uplinks of relays: how requests of clients on other hosts reach the server.

The requests travel through ports, which are the engine's channels for plain messages, and not as
calls of endpoints. A call makes a port for its answer, and is received by the event loop of the
actor; a message through a port that stays arrives in the thread of the relay or the server at once.
Nothing is told about a message that cannot be delivered: that the other end is dead shows in
``poll``, which is a call. Everything else that the server says comes through one port, in order,
with the number of the last request that the server has received.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Awaitable
from typing import Any

import msgspec
from monarch.actor import Channel

from torchstore_core.errors import StoreClosedError
from torchstore_core.server.remote.relay_server import RelayServer
from torchstore_monarch.protocol import encoded_error, result

log = logging.getLogger(__name__)

# No replies, encoded.
_NOTHING = msgspec.msgpack.encode([])


class RelayUplink:
    """A relay's end, an :class:`~torchstore_core.contracts.engine.Uplink`. All calls are made in
    the thread of the relay.

    Args:
        controller: the actor of the server.
    """

    def __init__(self, controller: Any) -> None:
        self._controller = controller
        self._token = b""
        self._there: Any = None
        self._numbers = itertools.count(1)
        self._waiting: deque[tuple[int, asyncio.Future[bytes]]] = deque()
        self._arrived: deque[bytes] = deque()
        self._error: Exception | None = None
        self._wanted: asyncio.Future[None] | None = None  # by the poll that waits
        self._tasks: list[asyncio.Task[None]] = []

    async def open(self, here: bytes, agent: str) -> None:
        """Introduce the relay to the server.

        Args:
            here: the encoded Topology of its host.
            agent: the path there of the socket of the ``Forwarder`` beside it.
        """
        back, answers = Channel.open()
        opened = await self._controller.open_uplink.call_one(here, agent, back)
        self._token, self._there = result(opened)
        self._there.return_undeliverable = False
        work = self._receive(answers), self._show_life()
        self._tasks = [asyncio.ensure_future(one) for one in work]

    def exchange(self, requests: bytes) -> Awaitable[bytes]:
        """Call ``RelayServer.exchange``."""
        number = next(self._numbers)
        waiting = asyncio.get_running_loop().create_future()
        self._waiting.append((number, waiting))
        try:
            self._there.send((self._token, number, requests))
        except Exception as error:  # noqa: BLE001 - whatever the engine raises, it ends the relay
            waiting.set_exception(error)
        return waiting

    async def poll(self) -> bytes:
        """Return what has come from the server; if nothing has, wait until something does, or until
        the server has answered a ``RelayServer.poll``.
        """
        if not (self._arrived or self._error):
            self._wanted = asyncio.get_running_loop().create_future()
            await self._wanted
        if self._arrived:
            return self._arrived.popleft()
        raise self._error or StoreClosedError("the server does not say anything any more")

    def close(self) -> None:
        """Receive nothing more. Idempotent."""
        for task in self._tasks:
            task.cancel()

    async def _show_life(self) -> None:
        try:
            while True:
                self._arrive(result(await self._controller.poll.call_one(self._token)))
        except Exception as error:  # noqa: BLE001 - whatever the engine raises, it ends the relay
            self._fail(error)

    async def _receive(self, answers: Any) -> None:
        try:
            while True:
                number, failure, replies = await answers.recv()
                received = result((failure, replies))
                while self._waiting and self._waiting[0][0] <= number:
                    _, waiting = self._waiting.popleft()
                    if not waiting.done():
                        waiting.set_result(_NOTHING)
                self._arrive(received)
        except Exception as error:  # noqa: BLE001 - whatever the engine raises, it ends the relay
            self._fail(error)

    def _arrive(self, replies: bytes) -> None:
        self._arrived.append(replies)
        self._wake()

    def _fail(self, error: Exception) -> None:
        self._error = error
        self._wake()

    def _wake(self) -> None:
        if self._wanted is not None and not self._wanted.done():
            self._wanted.set_result(None)


class _Back:
    """The way back to one relay.

    Args:
        port: for what the server says.
        agent: see :meth:`RelayUplink.open`.

    Attributes:
        received: the number of the last request.
    """

    def __init__(self, port: Any, agent: str) -> None:
        self._port = port
        self.agent = agent
        self.received = 0

    def send(self, replies: bytes, failure: bytes = b"") -> None:
        """Send replies to the relay, or what ends it."""
        try:
            self._port.send((self.received, failure, replies))
        except Exception as error:  # noqa: BLE001 - whatever the engine raises, others go on
            log.warning("a relay cannot be answered: %s", error)


class Uplinks:
    """The server's end of all uplinks. Everything runs in the thread of the server.

    Args:
        relay_server: answers the requests.
    """

    def __init__(self, relay_server: RelayServer) -> None:
        self._relay_server = relay_server
        self._back: dict[bytes, _Back] = {}
        self._here, self._requests = Channel.open()
        self._receiving = asyncio.ensure_future(self._receive())

    def open(self, here: bytes, agent: str, back: Any) -> tuple[bytes, Any]:
        """Call ``RelayServer.open``; return the token, and the port for requests.

        Args:
            here, agent: see :meth:`RelayUplink.open`.
            back: the port for the answers.
        """
        known = self._relay_server.tokens
        self._back = {token: one for token, one in self._back.items() if token in known}
        back.return_undeliverable = False
        made = _Back(back, agent)
        token = self._relay_server.open(here, made.send)
        self._back[token] = made
        return token, self._here

    def agent_of(self, peer: bytes) -> str | None:
        """Return the path of the socket of the ``Forwarder`` beside the relay of a client; None if
        it has none. ``peer``: see ``RelayServer.token_of``.
        """
        token = self._relay_server.token_of(peer)
        return None if token is None else self._back[token].agent

    def close(self) -> None:
        """Answer nothing more. Idempotent."""
        self._receiving.cancel()

    async def _receive(self) -> None:
        while True:
            token, number, requests = await self._requests.recv()
            back = self._back.get(token)
            if back is None:
                continue
            back.received = number
            try:
                replies = self._relay_server.exchange(token, requests)
            except Exception as error:  # noqa: BLE001 - passed to the relay
                back.send(b"", encoded_error(error))
            else:
                if replies != _NOTHING:
                    back.send(replies)
