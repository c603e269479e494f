"""The rate of something over the last seconds."""

from __future__ import annotations

import time
from collections import deque

_WINDOW_S = 10.0


class Rate:
    """How much was done per second lately."""

    def __init__(self) -> None:
        self._begun = 0.0
        self._done: deque[tuple[float, int]] = deque()

    def begin(self) -> None:
        """Something begins to be done. If nothing was for a while, time counts from now on."""
        now = time.monotonic()
        self._forget(now)
        if not self._done:
            self._begun = now

    def add(self, amount: int) -> None:
        """So much was done just now."""
        self._done.append((time.monotonic(), amount))

    def per_second(self) -> float:
        """The rate over the last ten seconds; 0 if nothing was done."""
        now = time.monotonic()
        self._forget(now)
        since = max(self._begun, now - _WINDOW_S)
        return sum(amount for _, amount in self._done) / max(now - since, 1e-3)

    def _forget(self, now: float) -> None:
        while self._done and self._done[0][0] < now - _WINDOW_S:
            self._done.popleft()
