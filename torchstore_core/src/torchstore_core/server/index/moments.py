"""The clock by which the index records when something happened.

A server that comes back repeats what has changed its state before. While it does, the clock shows
the times of then, so that the result is the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["monotonic", "then", "wall"]

#: Seconds since the epoch.
wall: Callable[[], float] = time.time
#: Seconds since this host was started.
monotonic: Callable[[], float] = time.monotonic


@contextmanager
def then() -> Iterator[Callable[[float, float], None]]:
    """Within this, the clock shows what the function that it gives was told last."""
    global wall, monotonic
    walls = monotonics = 0.0

    def show(wall_s: float, monotonic_s: float) -> None:
        nonlocal walls, monotonics
        walls, monotonics = wall_s, monotonic_s

    wall, monotonic = lambda: walls, lambda: monotonics
    try:
        yield show
    finally:
        wall, monotonic = time.time, time.monotonic
