"""Connect to Unix sockets of this host, and find out who is at the other end of one.

``connect`` waits while the listener is too busy to accept: if the listener's queue is full, a
non-blocking connect fails at once with EAGAIN, which ``loop.sock_connect`` takes for success. The
store is then busy, not gone. Torch-free.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import resource
import socket
import struct
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from torchstore_core.errors import TransportNotReadyError

#: What the system says when this process may open no more, or no process may.
OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)

# The largest descriptor of a standard stream: standard error's.
_LAST_STANDARD = 2
_FIRST_PAUSE_S = 0.001
_LONGEST_PAUSE_S = 0.05


@contextmanager
def unix_socket() -> Iterator[socket.socket]:
    """Yield a non-blocking Unix socket, which is closed if the ``with`` block fails.

    It is also closed if the coroutine that contains the block never runs again and is collected
    together with its event loop.

    Raises:
        TransportNotReadyError: this process has no file descriptor left for it.
    """
    with descriptors("a connection to a store"), ExitStack() as opened:
        sock = opened.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        if sock.fileno() <= _LAST_STANDARD:
            (fd,) = above_standard([sock.detach()])
            sock = socket.socket(fileno=fd)
        opened.pop_all()
    sock.setblocking(False)
    # The except clause is not enough: the collector may finalize the socket first, which warns.
    guard = weakref.finalize(asyncio.current_task() or asyncio.get_running_loop(), _close, sock)
    guard.atexit = False
    try:
        yield sock
    except BaseException:
        _close(sock)
        raise
    finally:
        guard.detach()


def above_standard(fds: Sequence[int]) -> list[int]:
    """Return descriptors, with duplicates in place of 0, 1 and 2. A process that has closed its
    standard streams without opening others, as some daemons do, gets these numbers next, and what a
    library prints to standard error there would be written to a connection, or over tensors.

    Raises:
        OSError: this process has no descriptor left; all that were given are closed then.
    """
    made: list[int] = []
    with ExitStack() as opened:
        for fd in fds:
            opened.callback(os.close, fd)
        for fd in fds:
            made.append(fd)
            if fd <= _LAST_STANDARD:
                made[-1] = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _LAST_STANDARD + 1)
                opened.callback(os.close, made[-1])
        opened.pop_all()
    for fd in set(fds) - set(made):
        os.close(fd)
    return made


def open_standard() -> None:
    """Open ``/dev/null`` in place of standard descriptors that are closed, in a process that is the
    store's own.
    """
    while True:
        fd = os.open(os.devnull, os.O_RDWR)
        if fd > _LAST_STANDARD:
            os.close(fd)
            return
        os.set_inheritable(fd, True)


def check_descriptors(purpose: str, count: int = 1) -> None:
    """Fail if this process cannot open so many: much of Python takes that for an absent file.

    Raises:
        TransportNotReadyError: this process has no file descriptor left for ``purpose``.
    """
    with descriptors(purpose), ExitStack() as opened:
        for _ in range(count):
            opened.callback(os.close, os.open("/", os.O_RDONLY | os.O_CLOEXEC))


@contextmanager
def descriptors(purpose: str) -> Iterator[None]:
    """Say it if the block fails because there are no file descriptors left.

    Raises:
        TransportNotReadyError: this process has none left for ``purpose``.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in OUT_OF_DESCRIPTORS:
            raise
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        of_whom = f"process {os.getpid()}", f"its limit is {limit}; see ulimit -n"
        if error.errno == errno.ENFILE:
            of_whom = "this system", "see the sysctl fs.file-max"
        raise TransportNotReadyError(
            f"{of_whom[0]} has no file descriptor left for {purpose} ({of_whom[1]})",
            details={"descriptor_limit": limit},
        ) from error


def _close(sock: socket.socket) -> None:
    """Close the descriptor at once; with uvloop ``sock.close`` may be deferred."""
    if sock.fileno() >= 0:
        os.close(sock.detach())


async def connect(sock: socket.socket, path: str) -> None:
    """Connect a non-blocking socket. Waits without limit for the listener; callers set one.

    Raises:
        OSError: nothing listens at ``path``.
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


def peer(sock: socket.socket) -> tuple[int, int]:
    """Return the pid and uid at the other end."""
    size = struct.calcsize("3i")
    pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return int(pid), int(uid)
