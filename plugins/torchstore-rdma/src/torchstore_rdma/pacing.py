"""How often to ask a library that cannot say when there is something to do."""

from __future__ import annotations

import threading
import time

__all__ = ["Pace"]

# A call of the library that found nothing to do takes about a microsecond.
_WORKED_S = 4e-6
_SPIN_S = 100e-6
_YIELD_S = 2e-3
_GROWTH = 1.2
_FIRST_SLEEP_S = 50e-6


class Pace:
    """Waits between two rounds: not at all while they find work, a moment after that, then longer
    and longer.

    Args:
        longest: the longest pause, in seconds.
    """

    def __init__(self, longest: float) -> None:
        self._longest = longest
        self._worked = time.perf_counter()
        self._used = time.thread_time()
        self._pause = _FIRST_SLEEP_S
        self._woken = threading.Event()

    def hurry(self) -> None:
        """There is something to do now. May be called by any thread."""
        self._worked = time.perf_counter()
        self._woken.set()

    def wait(self, calls: int = 1) -> None:
        """After a round of that many calls: sleep as long as is adequate."""
        used = time.thread_time()
        now = time.perf_counter()
        if used - self._used > _WORKED_S * calls:
            self._worked = now
        idle = now - self._worked
        if idle < _SPIN_S:
            self._pause = _FIRST_SLEEP_S
        elif idle < _YIELD_S:
            time.sleep(0)
        else:
            if self._woken.wait(self._pause):
                self._woken.clear()
            self._pause = min(self._pause * _GROWTH, self._longest)
        self._used = time.thread_time()
