"""Whether other processes of this host are alive, and how they have ended."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
from collections.abc import Callable
from typing import NamedTuple

log = logging.getLogger(__name__)

_LOOK_AGAIN_S = 0.5
# Indexes of fields, see :func:`stat_fields`.
_FLAGS, _START_TIME = 6, 19
# PF_EXITING of the kernel's include/linux/sched.h.
_EXITING = 0x4


class Process(NamedTuple):
    """The identity of a process, as a process that communicates with it knows it.

    Args:
        pid: the pid, in the pid namespace of the process that reports it; 0: unknown.
        namespace: the id of that namespace, see :func:`pid_namespace`.
    """

    pid: int
    namespace: int


def pid_namespace() -> int:
    """Return an id of this process's pid namespace, unique on the host; 0: unknown."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def stat_fields(pid: int) -> list[str]:
    """The fields of ``/proc/<pid>/stat`` that follow the command's name, which is in parentheses
    and may contain anything; none if there is no such process.
    """
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stat:
            return stat.read().rpartition(")")[2].split()
    except OSError:
        return []


def started(pid: int) -> int:
    """When a process was started, in ticks since the system was; it tells processes of one pid
    apart. 0: there is no such process, or it cannot be known.
    """
    fields = stat_fields(pid)
    return int(fields[_START_TIME]) if len(fields) > _START_TIME else 0


def is_exiting(pid: int) -> bool:
    """Return whether a process has ended, or is ending: the kernel marks it before it closes its
    descriptors, so whoever sees one of its connections close sees this, too.
    """
    fields = stat_fields(pid)
    return not fields or bool(int(fields[_FLAGS]) & _EXITING)


def how_ended(status: int) -> str:
    """Return how a process has ended, for people, given its exit status: negative for a signal.

    >>> how_ended(3), how_ended(-9), how_ended(-35)
    ('ended with status 3', 'was ended by SIGKILL', 'was ended by signal 35')
    """
    return f"ended with status {status}" if status >= 0 else f"was ended by {signal_name(-status)}"


def signal_name(number: int) -> str:
    """Return the name of a signal. Most real-time signals have none.

    >>> signal_name(9), signal_name(35)
    ('SIGKILL', 'signal 35')
    """
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class ProcessWatch:
    """Calls ``ended`` once, on the event loop that created the watch, when a process has ended,
    however it ended: the kernel reports it through a pidfd.

    Never called if this process cannot know: on an old kernel, or with ``pid`` 0 (the other process
    is in another pid namespace).

    Args:
        is_parent: whether ``pid`` is the parent of this process. The end of a parent is noticed on
            every kernel, even if it ended earlier and its pid belongs to another process now.
    """

    def __init__(self, pid: int, ended: Callable[[], None], *, is_parent: bool = False) -> None:
        self._pid = pid
        self._ended = ended
        self._is_parent = is_parent
        self._loop = asyncio.get_running_loop()
        self._pidfd = -1
        self._timer: asyncio.Handle | None = None
        if pid > 0:
            self._open()

    def close(self) -> None:
        """Stop watching. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1

    def _open(self) -> None:
        self._timer = None
        try:
            self._pidfd = os.pidfd_open(self._pid)
        except (AttributeError, OSError) as error:
            self._not_open(getattr(error, "errno", errno.ENOSYS))  # no errno: Python has no pidfds
        else:
            self._loop.add_reader(self._pidfd, self._over)
        if self._is_parent and os.getppid() != self._pid:
            self._timer = self._loop.call_soon(self._over)

    def _not_open(self, why: int) -> None:
        if why == errno.ESRCH:
            self._timer = self._loop.call_soon(self._over)
        elif self._is_parent or why in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
            self._timer = self._loop.call_later(_LOOK_AGAIN_S, self._open)
        else:  # an old kernel
            log.debug("process %d cannot be watched: %s", self._pid, os.strerror(why))

    def _over(self) -> None:
        self.close()
        self._ended()
