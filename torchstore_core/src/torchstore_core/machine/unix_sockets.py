"""Connecting to Unix sockets of this host, which waits while whoever listens is too busy to accept;
and who is at the other end of one.

A connect that finds the queue of the listener full ends at once with EAGAIN when it does not block,
which ``loop.sock_connect`` takes for success. That is a store that is busy, not one that is gone.
Torch-free.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["connect", "connect_blocking", "opening", "peer"]

_FIRST_PAUSE_S = 0.001
_LONGEST_PAUSE_S = 0.05


@contextmanager
def opening() -> Iterator[socket.socket]:
    """A non-blocking Unix socket. It is closed if the block, in a coroutine, does not come to its
    end; also if that never runs again, and the collector finds it with its event loop.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.setblocking(False)
    # Not only below: the collector may call the socket's own finalizer first, which warns.
    guard = weakref.finalize(asyncio.current_task() or asyncio.get_running_loop(), _close, sock)
    guard.atexit = False
    try:
        yield sock
    except BaseException:
        _close(sock)
        raise
    finally:
        guard.detach()


def _close(sock: socket.socket) -> None:
    """At once, though uvloop may count on it."""
    if sock.fileno() >= 0:
        os.close(sock.detach())


async def connect(sock: socket.socket, path: str) -> None:
    """Connect a non-blocking socket, however long the listener takes: callers bound it.

    Raises:
        OSError: nobody listens there.
    """
    pause = _FIRST_PAUSE_S
    while True:
        try:
            sock.connect(path)
        except BlockingIOError:
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)
        else:
            return


def connect_blocking(path: str, timeout: float) -> socket.socket:
    """A connected socket, whose every step takes at most ``timeout`` seconds. Not for event loops.

    Raises:
        BlockingIOError: the listener did not accept within that time.
        OSError: nobody listens there.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # Python's own time-out makes the socket non-blocking: then the kernel does not wait.
        limit = struct.pack("ll", int(timeout), int(timeout % 1 * 1e6))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        sock.connect(path)
    except BaseException:
        sock.close()
        raise
    return sock


def peer(sock: socket.socket) -> tuple[int, int | None]:
    """Pid and uid at the other end; (0, None) where the platform cannot tell (the directory's mode
    guards).
    """
    if not hasattr(socket, "SO_PEERCRED"):
        return 0, None
    size = struct.calcsize("3i")
    pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return int(pid), int(uid)
