"""Watching processes of this host for the server, which may be on another one."""

from __future__ import annotations

import functools
from collections.abc import Callable

from torchstore_core.machine.processes import ProcessWatch, pid_namespace
from torchstore_core.wire import messages as m

__all__ = ["ProcessWatches"]


class ProcessWatches:
    """Says when processes have ended. Everything here runs on one event loop.

    Args:
        say: takes what is known: each ``Watch`` is answered once, or never if it cannot be known
            from here (an unknown process, another pid namespace, an old kernel).
    """

    def __init__(self, say: Callable[[m.ProcessDied], None]) -> None:
        self._say = say
        self._watches: dict[bytes, ProcessWatch] = {}
        self._closed = False

    def watch(self, wanted: m.WatchProcess) -> None:
        """Answer when that process has ended: at once if there is none."""
        if self._closed or wanted.pid <= 0 or wanted.namespace != pid_namespace() != 0:
            return
        if wanted.session not in self._watches:
            ended = functools.partial(self._ended, wanted.session)
            self._watches[wanted.session] = ProcessWatch(wanted.pid, ended)

    def _ended(self, session: bytes) -> None:
        del self._watches[session]
        self._say(m.ProcessDied(session))

    def close(self) -> None:
        """Stop, for good. Idempotent."""
        self._closed = True
        while self._watches:
            self._watches.popitem()[1].close()
