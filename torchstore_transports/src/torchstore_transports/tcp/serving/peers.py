"""The clients that have been let in, and their connections."""

from __future__ import annotations

import logging
import secrets
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

from torchstore_core.errors import ProtocolError
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

__all__ = ["UNKNOWN_MAX", "Admission", "Peers"]

log = logging.getLogger(__name__)

#: Most connections that are not authenticated yet; one more has the oldest closed.
UNKNOWN_MAX = 64
_CONNECTIONS_MAX = 32  # of one client
_LOG_EVERY_S = 60.0


class Admission(NamedTuple):
    """What a client shows on its connections to be let in."""

    ticket: bytes
    secret: bytes


class _Peer:
    """A client: the volumes that it has been let in to, and its connections."""

    def __init__(self, changed: threading.Condition) -> None:
        self.admission = Admission(
            secrets.token_bytes(TICKET_BYTES), secrets.token_bytes(SECRET_BYTES)
        )
        self.connections: dict[Connection, threading.Thread] = {}
        self.volumes: dict[int, Segments] = {}
        self._changed = changed
        self._busy: dict[Connection, int] = {}

    @contextmanager
    def using(self, connection: Connection, volume: int) -> Iterator[Segments]:
        """A context in which bytes move between a volume and a connection of the client.

        Raises:
            ProtocolError: the client has not been let in to the volume.
        """
        with self._changed:
            segments = self.volumes.get(volume)
            if segments is None:
                raise ProtocolError(f"this client has not been let in to volume {volume}")
            self._busy[connection] = volume
        try:
            yield segments
        finally:
            with self._changed:
                del self._busy[connection]
                self._changed.notify_all()

    def end(self, volume: int) -> None:
        """Let the client in to a volume no longer, and wait until nothing moves. Connections that
        are not at work on the volume stay open.
        """
        with self._changed:
            self.volumes.pop(volume, None)
            for connection in self._at(volume):
                connection.shut()
            while self._at(volume):
                self._changed.wait()

    def _at(self, volume: int) -> list[Connection]:
        return [connection for connection, one in self._busy.items() if one == volume]


class _Refusals:
    """Counts refused connections, and logs a message once a minute at most."""

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
    """The clients of all volumes. Each connection has a thread, which greets and then serves it.

    Args:
        secure: the TLS context; None: no TLS.
    """

    def __init__(self, secure: ssl.SSLContext | None) -> None:
        self._secure = secure
        self._lock = threading.Condition()
        self._peers: dict[bytes, _Peer] = {}
        self._by_ticket: dict[bytes, _Peer] = {}
        self._unknown: dict[threading.Thread, socket.socket] = {}
        self._refusals = _Refusals()

    def __bool__(self) -> bool:
        return bool(self._peers)

    def met(self, peer: bytes, volume: int) -> bool:
        """Return whether a client has been let in to a volume."""
        with self._lock:
            known = self._peers.get(peer)
            return known is not None and volume in known.volumes

    def of(self, volume: int) -> list[bytes]:
        """Return the clients that have been let in to a volume."""
        with self._lock:
            return [peer for peer, known in self._peers.items() if volume in known.volumes]

    def let_in(self, peer: bytes, volume: int, segments: Segments) -> Admission:
        """Let a client in to a volume. Return what it has to show on its connections, which stays
        the same until the client is forgotten.

        Args:
            segments: the segments of the volume.
        """
        with self._lock:
            known = self._peers.get(peer)
            if known is None:
                known = self._peers[peer] = _Peer(self._lock)
                self._by_ticket[known.admission.ticket] = known
            known.volumes[volume] = segments
            return known.admission

    def forget(self, peer: bytes, volume: int) -> None:
        """End what a client has under way in a volume, and all of its connections if that was the
        last of its volumes. When this returns, none of its bytes moves there any more. Blocks until
        the client's threads have noticed.
        """
        with self._lock:
            known = self._peers.get(peer)
            if known is None:
                return
            known.end(volume)
            # Meanwhile it may have been let in to another volume, or forgotten by another thread.
            if known.volumes or self._peers.get(peer) is not known:
                return
            del self._peers[peer]
            del self._by_ticket[known.admission.ticket]
            threads = list(known.connections.values())
            for connection in known.connections:
                connection.shut()
        for thread in threads:
            thread.join()

    def close(self) -> None:
        """End all connections that are not authenticated yet. Blocks."""
        with self._lock:
            unknown = list(self._unknown.items())
        for _, sock in unknown:
            _shut(sock)
        for thread, _ in unknown:
            thread.join()

    def take(self, sock: socket.socket) -> None:
        """Greet and serve a new connection, in a thread. Does not block."""
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
            serve(connection, partial(peer.using, connection))
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
        """Authenticate a connection, and add it to those of its client."""
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
            return None if known is None else known.admission.secret


def _shut(sock: socket.socket) -> None:
    try:
        # Not SSLSocket.shutdown, which would take the session away from the thread that uses it.
        socket.socket.shutdown(sock, socket.SHUT_RDWR)
    except OSError:  # it has ended by itself
        log.debug("a connection ended before it was closed")
