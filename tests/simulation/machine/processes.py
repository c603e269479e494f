"""The processes of a run, as the server sees them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.simulation.world import World

__all__ = ["Processes"]


class Processes:
    """Which of them have ended, and who is told of it some time."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._dead: set[int] = set()
        self._watches: list[_Watch] = []

    def started(self, pid: int) -> int:
        """See ``machine.processes.started``."""
        return 0 if pid in self._dead else pid

    def watch(self, pid: int, ended: Callable[[], None]) -> _Watch:
        """See ``machine.processes.ProcessWatch``."""
        watch = _Watch(pid, ended)
        self._watches.append(watch)
        if pid in self._dead:
            self._tell_soon(watch)
        return watch

    def ended(self, pid: int) -> None:
        """A process is no more."""
        self._dead.add(pid)
        for watch in self._watches:
            if watch.pid == pid:
                self._tell_soon(watch)

    def nobody_watches(self) -> None:
        """Who has watched them is dead."""
        for watch in self._watches:
            watch.close()
        self._watches.clear()

    def _tell_soon(self, watch: _Watch) -> None:
        self._world.once(("noticed", watch.pid), watch.notice)


class _Watch:
    def __init__(self, pid: int, ended: Callable[[], None]) -> None:
        self.pid = pid
        self._ended: Callable[[], None] | None = ended

    def close(self) -> None:
        """It is watched no more."""
        self._ended = None

    def notice(self) -> None:
        """The process has ended."""
        ended, self._ended = self._ended, None
        if ended is not None:
            ended()
