"""The server's side of relays, through which clients on other hosts reach it.

A relay listens on a Unix socket of its host, so its clients are watched and served exactly as those
on the server's own host. It forwards their messages, without decoding them, over an *uplink*: two
calls of the distributed engine that take and return opaque bytes. Nothing listens on a network.

* ``exchange`` carries messages of clients, and returns the replies that are available at once.
  Everything that arrives together goes in one call, so a batch operation takes one call.
* ``poll`` waits for later replies, and for messages that are not replies. It also shows that the
  relay is alive: a relay that has been silent for :data:`EXPIRE_S` seconds is taken for dead,
  together with all its connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Collection
from typing import Protocol

import msgspec

from torchstore_core.errors import StoreClosedError
from torchstore_core.machine.processes import Process
from torchstore_core.machine.topology import Topology
from torchstore_core.wire import messages as m

log = logging.getLogger(__name__)

#: After this many seconds of silence a relay is taken for dead. A cable that was pulled for 5 s is
#: silent for up to 10: that is how long TCP waits before it tries again.
EXPIRE_S = 15.0
# A poll waits for this fraction of the limit, so that several polls in a row may be late.
_POLL = 2 / 15


class RelayRequest(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An event on one of a relay's connections: by default, the arrival of a message.

    Args:
        conn: the number of the connection.
        body: the message.
        closed: whether the connection has closed.
        died: whether the client's process has died; the connection may still be open.
        process: the client's process, if known; sent with the first message of a connection.
    """

    conn: int
    body: bytes = b""
    closed: bool = False
    died: bool = False
    process: Process | None = None


class RelayReply(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An instruction to a relay: send ``frame`` on connection ``conn``, then maybe close it."""

    conn: int
    frame: bytes = b""
    close: bool = False


RelayRequests = msgspec.msgpack.Decoder(list[RelayRequest])
RelayReplies = msgspec.msgpack.Decoder(list[RelayReply])


class Conversing(Protocol):
    """The server's side of one connection: a ``Conversation`` of this process, or a ``Line`` to the
    process that has it.
    """

    def handle(self, body: bytes) -> None:
        """A message has come."""

    def process_died(self) -> None:
        """The client's process has died."""

    def ended(self) -> None:
        """The connection has closed. Idempotent."""

    def relay_lost(self, why: str) -> None:
        """The relay is gone. Idempotent."""


class Converse(Protocol):
    """Begins a conversation."""

    def __call__(
        self, write: Callable[[bytearray], None], end: Callable[[], None], via: m.Via
    ) -> Conversing:
        """Begin one. ``write`` sends a frame to the client; ``end`` closes its connection."""


class _RemoteRelay:
    """The server's side of one relay, with a conversation for each of its connections."""

    def __init__(
        self,
        converse: Converse,
        topology: Topology,
        expire_s: float,
        clock: Callable[[], float],
        push: Callable[[bytes], None] | None,
    ) -> None:
        self._converse = converse
        self._push = push
        self._name = secrets.token_bytes(8)
        self._clock = clock
        self.expire_s = expire_s
        self._poll_s = expire_s * _POLL
        self.topology = topology
        self.last_heard = self._clock()
        self._conversations: dict[int, Conversing] = {}
        self._outbox: list[RelayReply] = []
        self._filled = asyncio.Event()
        self._exchanging = False
        self._closed = ""  # why, once it is

    def exchange(self, requests: list[RelayRequest]) -> list[RelayReply]:
        self.last_heard = self._clock()
        self._exchanging = True
        try:
            for one in requests:
                self._handle(one)
        except BaseException:
            self._filled.set()  # a poll will return the replies so far
            raise
        finally:
            self._exchanging = False
        return self._take_outbox()

    def _handle(self, one: RelayRequest) -> None:
        conversation = self._conversations.get(one.conn)
        if conversation is None and not (one.closed or one.died):
            conversation = self._open(one.conn, one.process)
        if conversation is None:
            return
        if one.died:
            conversation.process_died()
        elif one.closed:
            del self._conversations[one.conn]
            conversation.ended()
        else:
            conversation.handle(one.body)

    def carries(self, peer: bytes) -> bool:
        """Whether a client reaches the server through this relay."""
        return peer.startswith(self._name)

    async def poll(self) -> list[RelayReply]:
        self.last_heard = self._clock()
        try:
            await asyncio.wait_for(self._filled.wait(), self._poll_s)
        except TimeoutError:
            return []
        if self._closed and not self._outbox:
            raise StoreClosedError(self._closed)
        return self._take_outbox()

    def close(self, why: str) -> None:
        """End all conversations of a relay that is gone; its clients may still be running."""
        self._closed = why
        self._filled.set()  # ends a poll that is waiting
        conversations = list(self._conversations.values())
        self._conversations.clear()
        for conversation in conversations:
            conversation.relay_lost(why)

    def _open(self, conn: int, process: Process | None) -> Conversing:
        def write(frame: bytearray) -> None:
            if conn in self._conversations:
                self._send(RelayReply(conn, bytes(frame)))

        def end() -> None:
            conversation = self._conversations.pop(conn, None)
            if conversation is not None:
                self._send(RelayReply(conn, close=True))
                conversation.ended()

        made = self._converse(write, end, m.Via(self.topology, process, self._name))
        self._conversations[conn] = made
        return made

    def _send(self, reply: RelayReply) -> None:
        self._outbox.append(reply)
        if self._exchanging:  # which returns it
            return
        if self._push is None:
            self._filled.set()
        elif len(self._outbox) == 1:
            asyncio.get_running_loop().call_soon(self._push_outbox, self._push)

    def _push_outbox(self, push: Callable[[bytes], None]) -> None:
        if self._outbox:
            push(msgspec.msgpack.encode(self._take_outbox()))

    def _take_outbox(self) -> list[RelayReply]:
        replies, self._outbox = self._outbox, []
        self._filled.clear()
        return replies


class RelayServer:
    """The server's side of all relays of a store. Everything runs on the server's event loop.

    Args:
        converse: begins the conversation of each connection.
        expire_s: see :data:`EXPIRE_S`.
        clock: the clock of the event loop, in seconds.
    """

    def __init__(
        self,
        converse: Converse,
        *,
        expire_s: float = EXPIRE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._converse = converse
        self._clock = clock
        self._expire_s = expire_s
        self._relays: dict[bytes, _RemoteRelay] = {}
        self._untold: set[bytes] = set()  # relays that do not know yet that this has ended
        self._told = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._suspended = False
        self._check()

    @property
    def tokens(self) -> Collection[bytes]:
        """The tokens of the uplinks that are open."""
        return self._relays.keys()

    def open(self, topology: bytes, push: Callable[[bytes], None] | None = None) -> bytes:
        """Open an uplink for a relay; returns the uplink's token.

        Args:
            topology: the encoded Topology of the relay's host.
            push: sends the relay what ``poll`` would return, in order, for engines that can; then
                ``poll`` only shows that the relay is alive.

        Raises:
            msgspec.DecodeError: ``topology`` cannot be decoded.
        """
        there = msgspec.msgpack.decode(topology, type=Topology)
        token = secrets.token_bytes(16)
        self._relays[token] = _RemoteRelay(self._converse, there, self._expire_s, self._clock, push)
        return token

    def exchange(self, token: bytes, requests: bytes) -> bytes:
        """Handle an encoded list of :class:`RelayRequest`; returns one of :class:`RelayReply`.

        Raises:
            StoreClosedError: the relay was taken for dead, or never opened an uplink.
            msgspec.DecodeError: ``requests`` cannot be decoded.
        """
        return msgspec.msgpack.encode(self._relay(token).exchange(RelayRequests.decode(requests)))

    def heard(self, token: bytes) -> None:
        """The relay has shown that it is alive, without a call."""
        if token in self._relays:
            self._relays[token].last_heard = self._clock()

    async def poll(self, token: bytes) -> bytes:
        """Wait for replies; returns an encoded list of :class:`RelayReply`, which may be empty.

        Raises:
            StoreClosedError: as for :meth:`exchange`, or the uplink was closed meanwhile.
        """
        try:
            return msgspec.msgpack.encode(await self._relay(token).poll())
        except StoreClosedError:
            self._untold.discard(token)
            if not self._untold:
                self._told.set()
            raise

    def token_of(self, peer: bytes) -> bytes | None:
        """Return the token of the uplink through which a client has reached the server; None if it
        has reached the server itself, or the uplink is closed.

        Args:
            peer: the id by which transports know the client, see ``TransportServer.handshake``.
        """
        return next((token for token, one in self._relays.items() if one.carries(peer)), None)

    async def end(self, why: str, timeout: float) -> None:
        """Close all uplinks, and wait until every relay has been told so in answer to a poll; after
        that none calls any more. A relay that does not poll within ``timeout`` seconds is not told.
        """
        self._untold.update(self._relays)
        self._told.clear()
        self.close(why=why)
        if self._untold:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._told.wait(), timeout)

    def close(self, token: bytes | None = None, why: str = "its relay has closed") -> None:
        """Close the uplink ``token`` (None: all uplinks)."""
        if token is None and self._timer is not None:
            self._timer.cancel()
        for one in list(self._relays) if token is None else [token]:
            relay = self._relays.pop(one, None)
            if relay is not None:
                relay.close(why)

    def suspend(self) -> None:
        """From now on no relay can be heard, whether it lives or not, so none is given up."""
        self._suspended = True

    def resume(self) -> None:
        """Relays can be heard again; each has as much time for that as if it had just been."""
        self._suspended = False
        for relay in self._relays.values():
            relay.last_heard = self._clock()

    def close_silent(self, part: float = 1.0) -> None:
        """Give up all relays that have been silent for more than ``part`` of their limit."""
        if self._suspended:
            return
        now = self._clock()
        for token, relay in self._relays.copy().items():
            silent = now - relay.last_heard
            if silent > part * relay.expire_s:
                log.warning("the relay on %s is silent: it is given up", relay.topology.hostname)
                self.close(token, f"its relay was silent for {silent:.1f} s")

    def _relay(self, token: bytes) -> _RemoteRelay:
        relay = self._relays.get(token)
        if relay is None:
            raise StoreClosedError("this relay is unknown here: it was silent for too long")
        return relay

    def _check(self) -> None:
        self.close_silent()
        self._timer = asyncio.get_running_loop().call_later(self._expire_s / 15, self._check)
