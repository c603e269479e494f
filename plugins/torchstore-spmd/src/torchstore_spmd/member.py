"""Membership in a server, which runs as long as it has members; see ``server.members``."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import weakref

from torchstore_core.clients.session.handshake import Ranks, client_facts, handshake
from torchstore_core.contracts.engine import MEMBER_ROLE
from torchstore_core.errors import ProtocolError
from torchstore_core.machine import topology
from torchstore_core.wire import messages as m
from torchstore_core.wire.framing import FrameReader, decode_reply, encode

__all__ = ["Member"]

log = logging.getLogger(__name__)

_LEAVE = 2  # the id of the request; 1 is the handshake
_RECEIVE = 1 << 16
_LEAST_S = 0.1


class Member:
    """A session that keeps the server running; made by :meth:`join`.

    It is separate from a client's session, which may be dropped and opened again, may belong to a
    child process, and lives as long as a zero-copy tensor. This one lasts until the member leaves
    or its process ends. A forked child does not share it.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        _open.add(self)

    @classmethod
    async def join(cls, address: str, ranks: Ranks, timeout: float) -> Member:
        """Become a member.

        Raises:
            StoreClosedError: the server is gone, or is ending because its last member has left.
            StoreTimeoutError: the server does not answer within ``timeout`` seconds.
            ProtocolError: what listens there is no store of this version.
        """
        here = topology.probe()
        facts = client_facts({}, here, ranks, MEMBER_ROLE)
        sock, _ = await handshake(address, b"", facts, here, max(_LEAST_S, timeout))
        return cls(sock)

    @property
    def server_ended(self) -> bool:
        """Whether the server has closed the session, which it does only when it ends."""
        try:
            while self._sock.recv(_RECEIVE, socket.MSG_DONTWAIT):
                pass  # notices to all sessions
        except ConnectionResetError:
            return True
        except OSError:  # nothing has arrived; or the socket is closed, in a forked child
            return False
        return True

    async def leave(self, timeout: float) -> bool:
        """Leave. Return whether this was the last member, so that the server ends or has ended.

        If the server does not answer within ``timeout`` seconds, leave without an answer: the
        server notices that this process has gone, and ends by itself when it has no members left.
        """
        loop = asyncio.get_running_loop()
        reader = FrameReader(m.MAX_FRAME)
        try:
            async with asyncio.timeout(timeout):
                await loop.sock_sendall(self._sock, encode(m.Shutdown(_LEAVE)))
                while data := await loop.sock_recv(self._sock, _RECEIVE):
                    for body in reader.feed(data):
                        reply = decode_reply(body)
                        if isinstance(reply, m.Flags) and reply.id == _LEAVE:
                            return reply.flags == [True]
                return True
        except TimeoutError:
            log.warning("the server did not answer within %g s that this rank leaves", timeout)
            return False
        except (OSError, ProtocolError) as error:
            log.debug("leaving: %s", error)
            return True
        finally:
            self.close()

    def close(self) -> None:
        """Close the connection, without telling the server anything."""
        _open.discard(self)
        self._sock.close()


_open: weakref.WeakSet[Member] = weakref.WeakSet()


def _after_in_child() -> None:
    for member in list(_open):
        member.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_in_child)
