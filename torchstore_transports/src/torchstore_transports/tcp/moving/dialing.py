"""Making connections to a volume that may have several addresses."""

from __future__ import annotations

import errno
import os
import selectors
import socket
import ssl
import time

from torchstore_transports.tcp.wire.authentication import GREETING_S, RefusedError, introduce
from torchstore_transports.tcp.wire.connection import Connection, tune
from torchstore_transports.tcp.wire.protocol import Endpoint, Welcome

__all__ = ["Dialer"]

_DIAL_S = 10.0
# How long one address is tried alone before the next one is tried, too.
_STAGGER_S = 0.2
_NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)


class Dialer:
    """Connects to the first endpoint of a volume that answers and proves that it has the secret.

    Args:
        welcome: the volume's answer to the handshake.
        secure: the TLS context; None: no TLS.
    """

    def __init__(self, welcome: Welcome, secure: ssl.SSLContext | None) -> None:
        self._welcome = welcome
        self._secure = secure
        self._best: Endpoint | None = None

    def dial(self) -> Connection:
        """Return a new, authenticated connection. Blocks for at most ten seconds; thread-safe.

        Raises:
            OSError: none of the endpoints can be used now.
        """
        # The endpoint that answered last time is tried first.
        endpoints = sorted(self._welcome.endpoints, key=lambda one: one != self._best)
        deadline = time.monotonic() + _DIAL_S
        failures: list[str] = []
        with selectors.DefaultSelector() as selector:
            try:
                return self._race(selector, endpoints, failures, deadline)
            finally:
                for key in list(selector.get_map().values()):
                    _socket(key).close()

    def _race(
        self,
        selector: selectors.BaseSelector,
        endpoints: list[Endpoint],
        failures: list[str],
        deadline: float,
    ) -> Connection:
        """Try one endpoint after the other; return the connection that is ready first."""
        coming = endpoints[::-1]
        start = 0.0
        while (now := time.monotonic()) < deadline:
            if coming and (now >= start or not selector.get_map()):
                endpoint = coming.pop()
                try:
                    selector.register(_begin(endpoint), selectors.EVENT_WRITE, endpoint)
                except OSError as error:
                    if error.errno in _NO_DESCRIPTORS:
                        raise
                    failures.append(_failure(endpoint, error))
                start = now + _STAGGER_S
            if not coming and not selector.get_map():
                raise ConnectionError("; ".join(failures) or "it listens nowhere")
            wait = min(start, deadline) if coming else deadline
            for key, _ in selector.select(max(0.0, wait - now)):
                selector.unregister(key.fileobj)
                try:
                    made = self._greeted(_socket(key))
                except OSError as error:
                    failures.append(_failure(key.data, error))
                    continue
                self._best = key.data
                return made
        silent = [_failure(key.data, "no answer") for key in selector.get_map().values()]
        raise TimeoutError("; ".join([*failures, *silent]))

    def _greeted(self, sock: socket.socket) -> Connection:
        """Authenticate an established connection; close it if that fails."""
        try:
            code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                raise OSError(code, os.strerror(code))
            tune(sock)
            if self._secure is not None:
                sock.settimeout(GREETING_S)
                sock = self._secure.wrap_socket(sock)
            introduce(sock, self._welcome.ticket, self._welcome.secret, GREETING_S)
            return Connection(sock)
        except BaseException:
            sock.close()
            raise


def _begin(endpoint: Endpoint) -> socket.socket:
    """Return a socket that has begun to connect."""
    sock = socket.socket(socket.AF_INET6 if ":" in endpoint[0] else socket.AF_INET)
    try:
        sock.setblocking(False)
        code = sock.connect_ex(endpoint)
        if code not in (0, errno.EINPROGRESS):
            raise OSError(code, os.strerror(code))
    except BaseException:
        sock.close()
        raise
    return sock


def _socket(key: selectors.SelectorKey) -> socket.socket:
    if not isinstance(key.fileobj, socket.socket):
        raise TypeError("only sockets are registered")
    return key.fileobj


def _failure(endpoint: Endpoint, error: object) -> str:
    refused = "refused the greeting: " if isinstance(error, RefusedError) else ""
    return f"{endpoint[0]} port {endpoint[1]}: {refused}{error}"
