"""Whether other processes of this host live."""

from __future__ import annotations

import asyncio
import errno
import functools
import logging
import os
from collections.abc import Callable
from typing import NamedTuple

from torchstore_core.wire import messages as m

__all__ = ["DeathWatch", "Process", "Watcher", "pid_namespace"]

log = logging.getLogger(__name__)

_LOOK_AGAIN_S = 1.0


class Process(NamedTuple):
    """A process, as one that speaks with it knows it.

    Args:
        pid: in the pid namespace of who says it; 0: unknown.
        namespace: which one that is, see :func:`pid_namespace`.
    """

    pid: int
    namespace: int


def pid_namespace() -> int:
    """What tells the pid namespaces of a host apart; 0: unknown."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


class DeathWatch:
    """Calls ``ended`` once when a process has ended, on the event loop that made this.

    Never if that cannot be known from here: an old kernel, or ``pid`` 0 (another pid namespace).
    """

    def __init__(self, pid: int, ended: Callable[[], None]) -> None:
        self._pid = pid
        self._ended = ended
        self._loop = asyncio.get_running_loop()
        self._pidfd = -1
        self._timer: asyncio.Handle | None = None
        self._open()

    def close(self) -> None:
        """Watch no more. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1

    def _open(self) -> None:
        self._timer = None
        if self._pid <= 0:
            return
        try:
            self._pidfd = os.pidfd_open(self._pid)
        except AttributeError:  # an old Python, or system
            return
        except OSError as error:
            if error.errno == errno.ESRCH:
                self._timer = self._loop.call_soon(self._over)
            elif error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
                self._timer = self._loop.call_later(_LOOK_AGAIN_S, self._open)
            else:  # an old kernel
                log.debug("process %d cannot be watched: %s", self._pid, error)
            return
        self._loop.add_reader(self._pidfd, self._over)

    def _over(self) -> None:
        self.close()
        self._ended()


class Watcher:
    """Says when processes have ended. Everything here runs on one event loop.

    Args:
        say: takes what is known: each ``Watch`` is answered once, or never if it cannot be known
            from here (an unknown process, another pid namespace, an old kernel).
    """

    def __init__(self, say: Callable[[m.Died], None]) -> None:
        self._say = say
        self._watches: dict[bytes, DeathWatch] = {}
        self._closed = False

    def watch(self, wanted: m.Watch) -> None:
        """Answer when that process has ended: at once if there is none."""
        if self._closed or wanted.pid <= 0 or wanted.namespace != pid_namespace() != 0:
            return
        if wanted.orphan not in self._watches:
            ended = functools.partial(self._ended, wanted.orphan)
            self._watches[wanted.orphan] = DeathWatch(wanted.pid, ended)

    def _ended(self, orphan: bytes) -> None:
        del self._watches[orphan]
        self._say(m.Died(orphan))

    def close(self) -> None:
        """Stop, for good. Idempotent."""
        self._closed = True
        while self._watches:
            self._watches.popitem()[1].close()
