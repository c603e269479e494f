"""The clock by which the index records when something happened.

A server that comes back repeats what has changed its state before. While it does, the clock shows
the times of then, so that the result is the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

#: Seconds since the epoch.
wall: Callable[[], float] = time.time
#: Seconds since this host was started.
monotonic: Callable[[], float] = time.monotonic


@contextmanager
def then() -> Iterator[Callable[[float], None]]:
    """Within this, the clocks show the time, of the monotonic one, that the function is told."""
    global wall, monotonic
    now = wall, monotonic
    ahead = wall() - monotonic()
    shown = 0.0

    def show(at: float) -> None:
        nonlocal shown
        shown = at

    wall, monotonic = lambda: shown + ahead, lambda: shown
    try:
        yield show
    finally:
        wall, monotonic = now
