"""Listening sockets that pause, instead of spinning, when file descriptors run out.

A listening socket stays readable while accepting fails. An event loop that keeps watching it spins,
and one that closes new connections turns away clients that could have waited. So nothing is
accepted while there are no free descriptors: clients wait in the backlog as long as they like, and
accepting resumes by itself once other connections have closed.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import resource
import socket
import stat
from collections.abc import Callable

from torchstore_core.errors import ConfigurationError
from torchstore_core.machine.directories import make_again
from torchstore_core.machine.processes import is_exiting
from torchstore_core.machine.sockets.unix import peer
from torchstore_core.machine.tasks import begin
from torchstore_core.server.serving.journal import journal

log = logging.getLogger(__name__)

#: Takes an accepted connection and the id of the process at its other end (0: unknown).
Take = Callable[[socket.socket, int], None]

_BACKLOG = 512
_ACCEPTED_AT_ONCE = 64
# Descriptors kept free of connections, for pidfds, passing descriptors, the interpreter's files.
_RESERVE = 32
_LOOK_AGAIN_S = 0.25
_CALM_S = 2.0
# How often to see whether the socket can still be found.
_NAME_S = 2.0


class Listener:
    """A Unix socket that accepts connections of this user's processes.

    Args:
        take: called with each accepted connection.
        keeps: whether connections stay open. If so, accepting stops while some descriptors are
            still left for other uses. False if each connection ends before the next is accepted.

    Attributes:
        renewed: called with the new descriptor when the socket was made again, because somebody
            has removed its file.
        owner: the pid of the process whose directory it is in, and which is not this one; 0: none.
            When that process has ended, the file is not made again.
    """

    def __init__(self, take: Take, *, keeps: bool = True) -> None:
        self._take = take
        self._keeps = keeps
        self._path = ""
        self._socket: socket.socket | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.renewed: Callable[[int], None] = _do_nothing
        self.owner = 0
        self._name_timer: asyncio.TimerHandle | None = None
        self._paused = False
        self._told = False  # whether the pause was logged; reset after a while without a pause

    def open(self, path: str, fd: int | None = None) -> None:
        """Start listening at ``path``, on the running event loop. A socket that a killed server
        left there is replaced, unless it is given: ``fd`` is one that listens there already.

        Raises:
            OSError: the socket could not be bound.
        """
        self._path = path
        self._loop = asyncio.get_running_loop()
        if fd is not None:
            listener = socket.socket(fileno=fd)
            listener.setblocking(False)
        else:
            _remove_stale(path)
            listener = _listening(path)
        self._socket = listener
        self._loop.add_reader(listener.fileno(), self._readable)
        self._look_for_file()

    def fileno(self) -> int:
        """The descriptor of the listening socket; -1 if it is closed."""
        return -1 if self._socket is None else self._socket.fileno()

    def close(self) -> None:
        """Stop accepting connections; open ones stay open. Idempotent."""
        listener, self._socket = self._socket, None
        if listener is None:
            return
        self._again(None)
        if self._name_timer is not None:
            self._name_timer.cancel()
        if not self._paused:
            self._loop.remove_reader(listener.fileno())
        listener.close()

    def freed(self) -> None:
        """Note that a connection is closing; its descriptor is free in the loop's next turn, which
        ends a pause if there are enough descriptors then.
        """
        if self._paused:
            self._loop.call_soon(self._look)

    # ---- inside ---------------------------------------------------------------------------

    def _look_for_file(self) -> None:
        """See that clients find the socket, now and from time to time."""
        if self._socket is None:
            return
        if not (self._paused or os.path.lexists(self._path) or self._is_left()):
            try:
                make_again(os.path.dirname(self._path))
                self._renew(self._socket, _listening(self._path))
            except (OSError, ConfigurationError) as error:
                log.debug("%s is gone, and cannot be made again yet: %s", self._path, error)
        self._name_timer = self._loop.call_later(_NAME_S, self._look_for_file)

    def _is_left(self) -> bool:
        """Whether the owner has ended; then this process is about to."""
        return self.owner > 0 and is_exiting(self.owner)

    def _renew(self, before: socket.socket, listener: socket.socket) -> None:
        self._readable()  # who has connected already
        if not self._paused:
            self._loop.remove_reader(before.fileno())
            self._loop.add_reader(listener.fileno(), self._readable)
        self._socket = listener
        before.close()
        self.renewed(listener.fileno())
        journal.warning("somebody has removed %s; made again", self._path)

    def _readable(self) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            if self._socket is None:
                return
            try:
                accepted, _ = self._socket.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _EXHAUSTED:
                    self._pause(error.errno)
                    return
                log.debug("accept: %s", error)  # the client has disconnected already
                continue
            number = accepted.fileno()
            self._let_in(accepted)
            if self._is_last(number):
                self._pause(errno.EMFILE)
                return

    def _let_in(self, accepted: socket.socket) -> None:
        pid, uid = peer(accepted)
        if uid != os.getuid():
            log.warning("refused a connection of uid %d", uid)
            accepted.close()
            return
        self._take(accepted, pid)

    def _is_last(self, number: int) -> bool:
        """Return whether only reserved descriptors are left after ``number`` was assigned: a new
        descriptor always gets the lowest free number.
        """
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if not self._keeps or limit == resource.RLIM_INFINITY:
            return False
        return number >= limit - min(_RESERVE, limit // 8)

    def _pause(self, why: int) -> None:
        if self._socket is None:
            return
        self._paused = True
        self._loop.remove_reader(self._socket.fileno())
        self._again(self._look, _LOOK_AGAIN_S)
        if not self._told:
            self._told = True
            journal.warning(
                "paused: %s; who connects to %s waits until there are. %s",
                *(_EXHAUSTED[why][0], self._path, _EXHAUSTED[why][1]),
            )

    def _look(self) -> None:
        """Resume accepting if descriptors are available again; otherwise check again later."""
        if self._socket is None or not self._paused:
            return
        try:
            number = os.dup(self._socket.fileno())
        except OSError:
            short = True
        else:
            os.close(number)
            short = self._is_last(number)
        if short:
            self._again(self._look, _LOOK_AGAIN_S)
            return
        self._paused = False
        self._again(self._calm, _CALM_S)
        self._loop.add_reader(self._socket.fileno(), self._readable)

    def _calm(self) -> None:
        self._timer = None
        self._told = False
        journal.info("resumed: there are file descriptors again for who connects to %s", self._path)

    def _again(self, call: Callable[[], None] | None, after_s: float = 0.0) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if call is None else self._loop.call_later(after_s, call)


_EXHAUSTED: dict[int, tuple[str, str]] = {
    errno.EMFILE: (
        "all file descriptors that this process may have are in use",
        "For more, raise its limit: LimitNOFILE= of a systemd unit, or `ulimit -n`",
    ),
    errno.ENFILE: (
        "all file descriptors of this system are in use",
        "For more, raise the sysctl fs.file-max, or find out who has them all",
    ),
    errno.ENOBUFS: ("the system has no memory for sockets", "Free some memory"),
    errno.ENOMEM: ("the system has no memory for sockets", "Free some memory"),
}


def speaking(make: Callable[[int], asyncio.BaseProtocol]) -> Take:
    """Return a ``Take`` that gives each connection its own protocol, created by ``make(pid)``."""
    connecting: set[asyncio.Task[None]] = set()

    def take(accepted: socket.socket, pid: int) -> None:
        begin(_connect(accepted, lambda: make(pid)), connecting)

    return take


async def _connect(accepted: socket.socket, make: Callable[[], asyncio.BaseProtocol]) -> None:
    accepted.setblocking(False)
    try:
        await asyncio.get_running_loop().connect_accepted_socket(make, accepted)
    except OSError as error:
        log.debug("a connection was lost as it began: %s", error)
        accepted.close()


def raise_descriptor_limit() -> None:
    """Raise this process's soft limit of descriptors to the hard limit. Each client uses at least
    three descriptors of a server; the usual limit of 1,024 exists for programs that use select(2).
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError) as error:  # some systems do not allow their own hard limit
            log.debug("the limit of file descriptors stays %d: %s", soft, error)


def _listening(path: str) -> socket.socket:
    """A socket whose file is there when it listens: who finds it before that is refused, and takes
    the store for gone.
    """
    made = os.path.join(os.path.dirname(path), f".{os.getpid():x}")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        _remove_stale(made)
        try:
            listener.bind(made)
        except OSError as error:
            raise OSError(error.errno, os.strerror(error.errno or 0), made) from error
        os.chmod(made, 0o600)
        listener.listen(_BACKLOG)
        listener.setblocking(False)
        os.rename(made, path)
    except BaseException:
        listener.close()
        raise
    return listener


def _do_nothing(fd: int) -> None:
    """There is no keeper to leave it with."""


def _remove_stale(path: str) -> None:
    try:
        if stat.S_ISSOCK(os.stat(path).st_mode):
            os.unlink(path)
    except FileNotFoundError:
        return
