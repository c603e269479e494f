"""The listening sockets of a server half, and the thread that accepts on all of them."""

from __future__ import annotations

import errno
import logging
import resource
import selectors
import socket
import threading
from collections.abc import Callable, Sequence

__all__ = ["Listeners"]

log = logging.getLogger(__name__)

_BACKLOG = 128
# While accepting fails, the sockets stay readable, so trying again at once would be a busy loop.
_PAUSE_S = 0.25
# Descriptors that are not used for new connections: the store needs some to serve others.
_RESERVE = 64
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Listeners:
    """Listens at some addresses of this host, each with a port chosen by the system.

    Args:
        take: called with each accepted connection, in the accepting thread.
    """

    def __init__(self, take: Callable[[socket.socket], None]) -> None:
        self._take = take
        self._sockets: dict[str, socket.socket] = {}
        self._lock = threading.RLock()
        self._thread: threading.Thread | None = None
        self._wake: socket.socket | None = None

    def open(self, addresses: Sequence[str]) -> list[tuple[str, int]]:
        """Listen at these addresses, too. Return the endpoints, in the order of the addresses,
        without addresses that cannot be listened at.
        """
        with self._lock:
            added = False
            for address in addresses:
                if address not in self._sockets:
                    try:
                        self._sockets[address] = _listener(address)
                    except OSError as error:
                        log.warning("cannot listen at %s: %s", address, error)
                        continue
                    added = True
            if added:
                self._restart()
            known = [address for address in addresses if address in self._sockets]
            return [(address, self._sockets[address].getsockname()[1]) for address in known]

    def close(self) -> None:
        """Stop listening. Waits for the thread, which ends at once."""
        with self._lock:
            self._end()
            while self._sockets:
                self._sockets.popitem()[1].close()

    def _restart(self) -> None:
        self._end()
        reader, self._wake = socket.socketpair()
        sockets = list(self._sockets.values())
        self._thread = threading.Thread(
            target=self._accept, args=(sockets, reader), name="torchstore-tcp-accept", daemon=True
        )
        self._thread.start()

    def _end(self) -> None:
        thread, self._thread = self._thread, None
        wake, self._wake = self._wake, None
        if wake is not None:
            wake.close()
        if thread is not None:
            thread.join()

    def _accept(self, sockets: list[socket.socket], wake: socket.socket) -> None:
        """Accept connections, in the thread, until the other end of ``wake`` is closed."""
        with wake, selectors.DefaultSelector() as all_of_them, selectors.DefaultSelector() as end:
            all_of_them.register(wake, selectors.EVENT_READ)
            end.register(wake, selectors.EVENT_READ)
            for listener in sockets:
                all_of_them.register(listener, selectors.EVENT_READ)
            while True:
                for key, _ in all_of_them.select():
                    if key.fileobj is wake:
                        return
                    if isinstance(key.fileobj, socket.socket) and not self._accept_one(key.fileobj):
                        end.select(_PAUSE_S)

    def _accept_one(self, listener: socket.socket) -> bool:
        """Accept a connection. Return False if no more can be accepted for now."""
        try:
            accepted, _ = listener.accept()
        except OSError as error:
            if error.errno in _EXHAUSTED:
                return False
            log.debug("accept: %s", error)  # the client has gone again
            return True
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if limit != resource.RLIM_INFINITY and accepted.fileno() >= limit - min(
            _RESERVE, limit // 8
        ):
            accepted.close()
            return False
        self._take(accepted)
        return True


def _listener(address: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    sock = socket.socket(family)
    try:
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind((address, 0))
        sock.listen(_BACKLOG)
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    return sock
