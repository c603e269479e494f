"""Both ends of the uplinks of relays: how requests of clients on other hosts reach the server.

The requests travel through ports, which are the engine's channels for plain messages, and not as
calls of endpoints. A call makes a port for its answer, and is received by the event loop of the
actor; a message through a port that stays arrives in the thread of the relay or the server at once.
Nothing is told about a message that cannot be delivered: that the other end is dead shows in
``poll``, which is a call.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable
from typing import Any

from monarch.actor import Channel

from torchstore_core.server.remote.relay_server import RelayServer
from torchstore_monarch.protocol import encoded_error, result

__all__ = ["RelayUplink", "Uplinks"]

log = logging.getLogger(__name__)


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
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[bytes]] = {}
        self._receiving: asyncio.Task[None] | None = None

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
        self._receiving = asyncio.ensure_future(self._receive(answers))

    def exchange(self, requests: bytes) -> Awaitable[bytes]:
        """Call ``RelayServer.exchange``."""
        number = next(self._numbers)
        waiting = asyncio.get_running_loop().create_future()
        self._waiting[number] = waiting
        try:
            self._there.send((self._token, number, requests))
        except Exception as error:  # noqa: BLE001 - whatever the engine raises, it ends the relay
            waiting.set_exception(error)
        return waiting

    async def poll(self) -> bytes:
        """Call ``RelayServer.poll``."""
        answer: tuple[bytes, bytes | None] = await self._controller.poll.call_one(self._token)
        return result(answer)

    def close(self) -> None:
        """Receive nothing more. Idempotent."""
        if self._receiving is not None:
            self._receiving.cancel()

    async def _receive(self, answers: Any) -> None:
        try:
            while True:
                number, failure, replies = await answers.recv()
                waiting = self._waiting.pop(number)
                if waiting.done():  # nobody waits any more
                    continue
                try:
                    waiting.set_result(result((failure, replies)))
                except Exception as error:  # noqa: BLE001 - passed to who waits
                    waiting.set_exception(error)
        except Exception as error:  # noqa: BLE001 - whatever the engine raises, it ends the relay
            for waiting in self._waiting.values():
                if not waiting.done():
                    waiting.set_exception(error)


class Uplinks:
    """The server's end of all uplinks. Everything runs in the thread of the server.

    Args:
        relay_server: answers the requests.
    """

    def __init__(self, relay_server: RelayServer) -> None:
        self._relay_server = relay_server
        self._back: dict[bytes, Any] = {}
        self._agents: dict[bytes, str] = {}
        self._here, self._requests = Channel.open()
        self._receiving = asyncio.ensure_future(self._receive())

    def open(self, here: bytes, agent: str, back: Any) -> tuple[bytes, Any]:
        """Call ``RelayServer.open``; return the token, and the port for requests.

        Args:
            here, agent: see :meth:`RelayUplink.open`.
            back: the port for the answers.
        """
        known = self._relay_server.tokens
        self._back = {token: port for token, port in self._back.items() if token in known}
        self._agents = {token: agent for token, agent in self._agents.items() if token in known}
        token = self._relay_server.open(here)
        back.return_undeliverable = False
        self._back[token], self._agents[token] = back, agent
        return token, self._here

    def agent_of(self, peer: bytes) -> str | None:
        """Return the path of the socket of the ``Forwarder`` beside the relay of a client; None if
        it has none. ``peer``: see ``RelayServer.token_of``.
        """
        token = self._relay_server.token_of(peer)
        return None if token is None else self._agents.get(token)

    def close(self) -> None:
        """Answer nothing more. Idempotent."""
        self._receiving.cancel()

    async def _receive(self) -> None:
        while True:
            token, number, requests = await self._requests.recv()
            back = self._back.get(token)
            if back is None:
                continue
            answer = self._answer(token, requests)
            try:
                back.send((number, *answer))
            except Exception as error:  # noqa: BLE001 - whatever the engine raises, others go on
                log.warning("a relay cannot be answered: %s", error)

    def _answer(self, token: bytes, requests: bytes) -> tuple[bytes, bytes | None]:
        try:
            return b"", self._relay_server.exchange(token, requests)
        except Exception as error:  # noqa: BLE001 - passed to the relay
            return encoded_error(error), None
