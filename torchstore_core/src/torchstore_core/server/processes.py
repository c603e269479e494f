"""Whether other processes of this host live."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
from collections.abc import Callable
from typing import NamedTuple

from torchstore_core.wire import messages as m

__all__ = ["Process", "Watcher", "pid_namespace"]

log = logging.getLogger(__name__)


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


class Watcher:
    """Says when processes have ended. Everything here runs on one event loop.

    Args:
        say: takes what is known: each ``Watch`` is answered once, or never if it cannot be known
            from here (an unknown process, another pid namespace, an old kernel).
    """

    def __init__(self, say: Callable[[m.Died], None]) -> None:
        self._say = say
        self._pidfds: set[int] = set()
        self._closed = False

    def watch(self, wanted: m.Watch) -> None:
        """Answer when that process has ended: at once if there is none."""
        if self._closed or wanted.pid <= 0 or wanted.namespace != pid_namespace() != 0:
            return
        try:
            pidfd = os.pidfd_open(wanted.pid)
        except (OSError, AttributeError) as error:
            if isinstance(error, OSError) and error.errno == errno.ESRCH:
                self._say(m.Died(wanted.orphan))
            else:
                log.warning("process %d cannot be watched: %s", wanted.pid, error)
            return
        self._pidfds.add(pidfd)
        asyncio.get_running_loop().add_reader(pidfd, self._ended, pidfd, wanted.orphan)

    def _ended(self, pidfd: int, orphan: bytes) -> None:
        self._forget(pidfd)
        self._say(m.Died(orphan))

    def close(self) -> None:
        """Stop, for good. Idempotent."""
        self._closed = True
        for pidfd in list(self._pidfds):
            self._forget(pidfd)

    def _forget(self, pidfd: int) -> None:
        self._pidfds.discard(pidfd)
        asyncio.get_running_loop().remove_reader(pidfd)
        os.close(pidfd)
