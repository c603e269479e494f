"""How often to ask a library that cannot say when there is something to do."""

from __future__ import annotations

import math
import threading
import time

__all__ = ["Pace"]

# A call of the library that found nothing to do takes 1 to 5 µs, as the processor and UCX's ways
# want it: the cheapest one is the measure. One that has moved bytes takes tens of microseconds.
_WORKED_S = 4e-6
_WORKED = 3.0
# On some machines the first two calls after a pause take longer, work or not.
_IN_A_ROW = 3
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
        self._used = math.nan  # of the thread that waits, which need not be this one
        self._cheapest = float("inf")
        self._suspected = 0  # calls in a row
        self._pause = _FIRST_SLEEP_S
        self._woken = threading.Event()

    def hurry(self) -> None:
        """There is something to do now. May be called by any thread."""
        self._worked = time.perf_counter()
        self._woken.set()

    def wait(self, calls: int = 1) -> None:
        """After a round of that many calls: sleep as long as is adequate."""
        took = (time.thread_time() - self._used) / calls
        now = time.perf_counter()
        self._cheapest = min(self._cheapest, took)
        self._suspected = self._suspected + 1 if took > self._least_work() else 0
        if self._suspected >= _IN_A_ROW:
            self._worked = now
        idle = now - self._worked
        if idle < _SPIN_S:
            self._pause = _FIRST_SLEEP_S
        elif idle < _YIELD_S:
            time.sleep(0)
        elif not self._suspected:
            if self._woken.wait(self._pause):
                self._woken.clear()
            self._pause = min(self._pause * _GROWTH, self._longest)
        self._used = time.thread_time()

    def _least_work(self) -> float:
        """How long a call takes that has done something, in seconds of this thread. A few calls
        alone say nothing: the first after a pause take longer, and any may be interrupted.
        """
        return max(_WORKED_S, _WORKED * self._cheapest)
