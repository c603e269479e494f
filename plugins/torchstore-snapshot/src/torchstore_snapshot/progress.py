"""How far a take, a restore or a check is: for a function, or for a person at a terminal."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torchstore_core.clients.calls.arguments import check_bools

__all__ = ["Advance", "Progress", "check_progress", "metered"]

#: False: nothing is said. True: a bar on standard error, if that is a terminal and rich is
#: installed. Or a function, which is called with the bytes that are done and all bytes.
Progress = bool | Callable[[int, int], None]
#: Is told how many further bytes are done, by any thread.
Advance = Callable[[int], None]


class _Meter:
    def __init__(self, show: Callable[[int, int], None], total: int) -> None:
        self._show = show
        self._total = total
        self._done = 0
        self._lock = threading.Lock()

    def advance(self, nbytes: int) -> None:
        with self._lock:
            self._done += nbytes
            self._show(self._done, self._total)


def check_progress(given: Progress) -> None:
    """Raise ConfigurationError if that is no way to show progress."""
    if not callable(given):
        check_bools(progress=given)


@contextmanager
def metered(progress: Progress, text: str, total: int) -> Iterator[Advance | None]:
    """While it lasts, progress is shown; None if nobody looks.

    Args:
        text: what is being done.
        total: the bytes that will be done.

    >>> seen = []
    >>> with metered(lambda done, total: seen.append((done, total)), "reading", 3) as advance:
    ...     advance(2)
    ...     advance(1)
    >>> seen
    [(2, 3), (3, 3)]
    """
    check_progress(progress)
    if callable(progress):
        yield _Meter(progress, total).advance
        return
    if not progress or sys.stderr is None or not sys.stderr.isatty():
        yield None
        return
    try:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn
        from rich.progress import Progress as Bar
    except ImportError:
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn())
    console = Console(stderr=True)
    with Bar(
        *columns, DownloadColumn(), TransferSpeedColumn(), console=console, transient=True
    ) as bar:
        task = bar.add_task(text, total=total)
        yield _Meter(lambda done, _: bar.update(task, completed=done), total).advance
