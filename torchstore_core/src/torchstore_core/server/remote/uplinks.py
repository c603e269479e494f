"""Relays: how clients on other hosts reach the server, over whatever connects the hosts.

A relay listens on a Unix socket of its host, so that its clients are watched and served exactly as
those of the server's own host. What they say goes, as it came, over an *uplink*: two calls of the
distributed engine, each taking and giving opaque bytes. Nothing listens on a network for it.

* ``exchange``: what connections have said, for what is answered at once. One call for everything
  that arrived together, so one for a batch operation.
* ``poll``: waits for what the server says later or unasked. It is also the sign of life: a relay
  that is not heard for :data:`EXPIRE_S` seconds is taken for dead, with all its connections.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from typing import TYPE_CHECKING

import msgspec

from torchstore_core.errors import StoreClosedError
from torchstore_core.machine.processes import Process
from torchstore_core.machine.topology import Topology
from torchstore_core.server.serving.conversation import Conversation

if TYPE_CHECKING:
    from torchstore_core.server.server import Server

__all__ = ["EXPIRE_S", "Said", "SaidList", "Told", "ToldList", "Uplinks"]

log = logging.getLogger(__name__)

#: A relay that was not heard for so long is dead, seconds.
EXPIRE_S = 15.0
# A poll waits for something to tell for this part of it: several of them may be late.
_POLL = 2 / 15


class Said(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """From a relay: what came on connection ``conn``.

    ``closed``: nothing more will. ``died``: its process is dead, though the pipe may be open.
    ``process``: with the first of a connection: whose it is, if that is known.
    """

    conn: int
    body: bytes = b""
    closed: bool = False
    died: bool = False
    process: Process | None = None


class Told(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """To a relay: a frame for connection ``conn``; ``close``: close it once that is sent."""

    conn: int
    frame: bytes = b""
    close: bool = False


SaidList = msgspec.msgpack.Decoder(list[Said])
ToldList = msgspec.msgpack.Decoder(list[Told])


class _Relayed:
    """Server side of one relay: a conversation for each of its connections."""

    def __init__(self, server: Server, here: Topology, expire_s: float) -> None:
        self._server = server
        self.expire_s = expire_s
        self._poll_s = expire_s * _POLL
        self.here = here
        self.heard = time.monotonic()
        self._conversations: dict[int, Conversation] = {}
        self._outbox: list[Told] = []
        self._filled = asyncio.Event()

    def exchange(self, said: list[Said]) -> list[Told]:
        self.heard = time.monotonic()
        for one in said:
            conversation = self._conversations.get(one.conn)
            if conversation is None and not (one.closed or one.died):
                conversation = self._open(one.conn, one.process)
            if conversation is None:
                continue
            if one.died:
                conversation.process_died()
            elif one.closed:
                del self._conversations[one.conn]
                conversation.ended()
            else:
                conversation.hear(one.body)
        told, self._outbox = self._outbox, []
        self._filled.clear()
        return told

    def _open(self, conn: int, process: Process | None) -> Conversation:
        def write(frame: bytearray) -> None:
            if conn in self._conversations:
                self._outbox.append(Told(conn, bytes(frame)))
                self._filled.set()

        def end() -> None:
            conversation = self._conversations.pop(conn, None)
            if conversation is not None:
                self._outbox.append(Told(conn, b"", True))
                self._filled.set()
                conversation.ended()

        made = Conversation(self._server, write, end, self.here, process)
        self._conversations[conn] = made
        return made

    async def poll(self) -> list[Told]:
        self.heard = time.monotonic()
        try:
            await asyncio.wait_for(self._filled.wait(), self._poll_s)
        except TimeoutError:
            return []
        told, self._outbox = self._outbox, []
        self._filled.clear()
        return told

    def close(self, why: str) -> None:
        """It is gone; what spoke through it may live."""
        self._filled.set()  # a poll that waits ends
        conversations = list(self._conversations.values())
        self._conversations.clear()
        for conversation in conversations:
            conversation.cut_off(why)


class Uplinks:
    """The server's side of all uplinks. Everything here runs on the server's event loop.

    Args:
        server: that answers.
        expire_s: see :data:`EXPIRE_S`.
    """

    def __init__(self, server: Server, *, expire_s: float = EXPIRE_S) -> None:
        self._server = server
        self._expire_s = expire_s
        self._relays: dict[bytes, _Relayed] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._look()

    def open(self, here: bytes, expire_s: float | None = None) -> bytes:
        """A relay announces itself (its Topology, msgpack): the token of its uplink.

        Args:
            expire_s: a patience of its own; None: that of all.

        Raises:
            msgspec.DecodeError: that is no Topology.
        """
        topology = msgspec.msgpack.decode(here, type=Topology)
        relay = _Relayed(self._server, topology, expire_s or self._expire_s)
        token = secrets.token_bytes(16)
        self._relays[token] = relay
        return token

    def exchange(self, token: bytes, said: bytes) -> bytes:
        """See the module. ``said`` is a list of :class:`Said`, the answer one of :class:`Told`.

        Raises:
            StoreClosedError: the relay was taken for dead, or never opened.
            msgspec.DecodeError: unreadable.
        """
        return msgspec.msgpack.encode(self._relay(token).exchange(SaidList.decode(said)))

    async def poll(self, token: bytes) -> bytes:
        """See the module; raises as :meth:`exchange`."""
        return msgspec.msgpack.encode(await self._relay(token).poll())

    def close(self, token: bytes | None = None, why: str = "its relay has closed") -> None:
        """One uplink, or all of them, are over."""
        if token is None:
            if self._timer is not None:
                self._timer.cancel()
            tokens = list(self._relays)
        else:
            tokens = [token]
        for one in tokens:
            relay = self._relays.pop(one, None)
            if relay is not None:
                relay.close(why)

    def _relay(self, token: bytes) -> _Relayed:
        relay = self._relays.get(token)
        if relay is None:
            raise StoreClosedError("this relay is unknown here: it was silent for too long")
        return relay

    def close_silent(self, part: float = 1.0) -> None:
        """Give up relays that have been silent for that part of their patience."""
        now = time.monotonic()
        for token, relay in list(self._relays.items()):
            silent = now - relay.heard
            if silent > part * relay.expire_s:
                log.warning("the relay on %s is silent: it is given up", relay.here.hostname)
                self.close(token, f"its relay was silent for {silent:.1f} s")

    def _look(self) -> None:
        self.close_silent()
        self._timer = asyncio.get_running_loop().call_later(self._expire_s / 15, self._look)
