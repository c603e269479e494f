"""Connecting again to a server that has come back, from a thread that may block. Torch-free."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable

from torchstore_core.clients.session.handshake import welcome_in
from torchstore_core.errors import StoreClosedError
from torchstore_core.wire import messages as m
from torchstore_core.wire.framing import FrameReader, encode

# How long one attempt waits before it looks whether anybody still wants it; the server may need
# longer, and the connection stays in its queue.
_LOOK_S = 0.25
_PAUSE_S = 0.02
_RECEIVE = 1 << 18


def rejoin(
    path: str,
    hello: m.Hello,
    wanted: Callable[[], bool],
    *,
    once: bool = False,
) -> tuple[socket.socket, m.Welcome, FrameReader] | None:
    """Connect, say hello, and wait for the answer. As often as the connection is lost, this begins
    anew.

    Args:
        path: of the server's socket.
        wanted: whether to go on.
        once: do not begin anew; but a socket that is not there, while this is wanted, will be.

    Returns:
        The socket, which blocks; the answer to the Hello; and what has come in part. None if it is
        not wanted any more, or was lost ``once``.

    Raises:
        StoreClosedError: nobody listens there any more, or the session has ended.
        ProtocolError: the server answers what this does not understand.
    """
    while wanted():
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            found = _attempt(sock, path, hello, wanted, once)
        except BaseException:
            sock.close()
            raise
        if found is not None:
            return found
        sock.close()
        if once:
            return None
        time.sleep(_PAUSE_S)  # between two lives of a server: a thread that nobody waits for
    return None


def has_ended(sock: socket.socket) -> bool:
    """Whether the other end of a connection has closed it."""
    try:
        return not sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True


def _attempt(
    sock: socket.socket, path: str, hello: m.Hello, wanted: Callable[[], bool], patient: bool
) -> tuple[socket.socket, m.Welcome, FrameReader] | None:
    """One attempt; None if the connection was lost, or is not wanted any more."""
    sock.settimeout(_LOOK_S)
    try:
        while patient and not os.path.exists(path) and wanted():
            time.sleep(_PAUSE_S)
        sock.connect(path)
    except (TimeoutError, BlockingIOError):  # more wait than its queue holds
        return None
    except OSError as error:
        raise StoreClosedError(f"no store at {path}: {error}") from error
    reader = FrameReader(m.MAX_FRAME)
    bodies: list[bytes] = []
    try:
        sock.sendall(encode(hello), socket.MSG_NOSIGNAL)
        while not bodies:
            try:
                data = sock.recv(_RECEIVE)
            except TimeoutError:
                if wanted():
                    continue
                return None
            if not data:
                return None
            bodies = reader.feed(data)
    except OSError:
        return None
    welcome = welcome_in(bodies, path)
    sock.settimeout(None)
    return sock, welcome, reader
