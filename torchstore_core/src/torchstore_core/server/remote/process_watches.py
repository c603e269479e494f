"""Watches processes on this host for the server, which may be on another one."""

from __future__ import annotations

import functools
from collections.abc import Callable

from torchstore_core.machine.processes import ProcessWatch, pid_namespace
from torchstore_core.wire import messages as m


class ProcessWatches:
    """Reports when processes have ended. Everything here runs on one event loop.

    Args:
        report: called once for each ``WatchProcess``, when the process has ended; never if that
            cannot be observed here (an unknown process, another pid namespace, an old kernel).
    """

    def __init__(self, report: Callable[[m.ProcessDied], None]) -> None:
        self._report = report
        self._watches: dict[bytes, ProcessWatch] = {}
        self._closed = False

    def watch(self, wanted: m.WatchProcess) -> None:
        """Report when the process has ended, or right away if it does not exist."""
        if self._closed or wanted.pid <= 0 or wanted.namespace != pid_namespace() != 0:
            return
        if wanted.session not in self._watches:
            ended = functools.partial(self._ended, wanted.session)
            self._watches[wanted.session] = ProcessWatch(wanted.pid, ended)

    def _ended(self, session: bytes) -> None:
        del self._watches[session]
        self._report(m.ProcessDied(session))

    def close(self) -> None:
        """Stop all watches, and accept no more. Idempotent."""
        self._closed = True
        while self._watches:
            self._watches.popitem()[1].close()
