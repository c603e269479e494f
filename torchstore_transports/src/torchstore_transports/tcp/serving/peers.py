"""The clients that a server half has let in, and their connections."""

from __future__ import annotations

import logging
import secrets
import socket
import ssl
import threading
import time
from typing import NamedTuple

from torchstore_transports.tcp.serving.requests import Segments, serve
from torchstore_transports.tcp.wire.authentication import (
    GREETING_S,
    SECRET_BYTES,
    TICKET_BYTES,
    RefusedError,
    accept,
    answer,
)
from torchstore_transports.tcp.wire.connection import Connection, tune

__all__ = ["UNKNOWN_MAX", "Peers"]

log = logging.getLogger(__name__)

#: Most connections that have not been authenticated yet; for one more, the oldest is closed.
UNKNOWN_MAX = 64
_CONNECTIONS_MAX = 32  # of one client
_LOG_EVERY_S = 60.0


class _Peer(NamedTuple):
    ticket: bytes
    secret: bytes
    connections: dict[Connection, threading.Thread]


class _Refusals:
    """Counts refused connections, and says so once a minute at most."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._next = 0.0

    def add(self, address: str, why: object) -> None:
        with self._lock:
            self._count += 1
            now = time.monotonic()
            if now < self._next:
                return
            self._next = now + _LOG_EVERY_S
            count, self._count = self._count, 0
        more = f", and {count - 1} others since the last message" if count > 1 else ""
        log.warning("tcp: refused a connection from %s (%s)%s", address, why, more)


class Peers:
    """Every connection has a thread, which first greets and then serves it.

    Args:
        segments: what they may read and write.
        secure: for TLS; None without it.
    """

    def __init__(self, segments: Segments, secure: ssl.SSLContext | None) -> None:
        self._segments = segments
        self._secure = secure
        self._lock = threading.Lock()
        self._peers: dict[bytes, _Peer] = {}
        self._by_ticket: dict[bytes, _Peer] = {}
        self._unknown: dict[threading.Thread, socket.socket] = {}
        self._refusals = _Refusals()

    def __bool__(self) -> bool:
        return bool(self._peers)

    def __contains__(self, peer: object) -> bool:
        return peer in self._peers

    def let_in(self, peer: bytes) -> tuple[bytes, bytes]:
        """The ticket and the secret of a client, the same ones until it is forgotten."""
        with self._lock:
            known = self._peers.get(peer)
            if known is None:
                ticket, secret = (
                    secrets.token_bytes(TICKET_BYTES),
                    secrets.token_bytes(SECRET_BYTES),
                )
                known = self._peers[peer] = self._by_ticket[ticket] = _Peer(ticket, secret, {})
            return known.ticket, known.secret

    def forget(self, peer: bytes) -> None:
        """End all connections of a client. When this returns, none of its bytes moves any more.
        Blocks, as long as its threads need to notice.
        """
        with self._lock:
            known = self._peers.pop(peer, None)
            if known is None:
                return
            del self._by_ticket[known.ticket]
            threads = list(known.connections.values())
            for connection in known.connections:
                connection.shut()
        for thread in threads:
            thread.join()

    def close(self) -> None:
        """Forget everybody, and end the connections of those who are still unknown. Blocks."""
        for peer in list(self._peers):
            self.forget(peer)
        with self._lock:
            unknown = list(self._unknown.items())
        for _, sock in unknown:
            _shut(sock)
        for thread, _ in unknown:
            thread.join()

    def take(self, sock: socket.socket) -> None:
        """Greet whoever has connected, in a thread. Does not block."""
        thread = threading.Thread(
            target=self._run, args=(sock,), name="torchstore-tcp-serve", daemon=True
        )
        with self._lock:
            if len(self._unknown) >= UNKNOWN_MAX:
                _shut(self._unknown.pop(next(iter(self._unknown))))
            self._unknown[thread] = sock
        try:
            thread.start()
        except RuntimeError as error:  # the limit of threads
            with self._lock:
                self._unknown.pop(thread, None)
            sock.close()
            self._refusals.add("?", error)

    # ---- a thread -------------------------------------------------------------------------

    def _run(self, sock: socket.socket) -> None:
        address = "?"
        deadline = time.monotonic() + GREETING_S
        greeted = sock
        try:
            address = str(sock.getpeername()[0])
            tune(sock)
            if self._secure is not None:
                greeted = self._encrypted(sock, self._secure)
            peer, connection = self._entered(greeted, deadline)
        except OSError as error:
            self._refusals.add(address, error)
            greeted.close()
            return
        finally:
            with self._lock:
                self._unknown.pop(threading.current_thread(), None)
        try:
            serve(connection, self._segments)
        except OSError as error:
            log.debug("tcp: a connection of %s has ended: %s", address, error)
        finally:
            connection.close()
            with self._lock:
                peer.connections.pop(connection, None)

    def _encrypted(self, sock: socket.socket, secure: ssl.SSLContext) -> ssl.SSLSocket:
        sock.settimeout(GREETING_S)
        wrapped = secure.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        with self._lock:
            if threading.current_thread() in self._unknown:
                self._unknown[threading.current_thread()] = wrapped
        try:
            wrapped.do_handshake()
        except BaseException:
            wrapped.close()
            raise
        return wrapped

    def _entered(self, sock: socket.socket, deadline: float) -> tuple[_Peer, Connection]:
        """Greet, and enter the connection among those of its client."""
        ticket = answer(sock, self._secret_of, deadline)
        with self._lock:
            peer = self._by_ticket.get(ticket)
            if peer is None:
                raise RefusedError("its ticket is not valid any more")
            if len(peer.connections) >= _CONNECTIONS_MAX:
                raise RefusedError(f"it has {_CONNECTIONS_MAX} connections already")
            connection = Connection(sock)
            peer.connections[connection] = threading.current_thread()
        try:
            accept(sock)
        except OSError:
            with self._lock:
                del peer.connections[connection]
            raise
        return peer, connection

    def _secret_of(self, ticket: bytes) -> bytes | None:
        with self._lock:
            known = self._by_ticket.get(ticket)
            return None if known is None else known.secret


def _shut(sock: socket.socket) -> None:
    try:
        # Not that of SSLSocket, which would take the session away from the thread that uses it.
        socket.socket.shutdown(sock, socket.SHUT_RDWR)
    except OSError:  # it has ended by itself
        log.debug("a connection ended before it was closed")
