"""An event loop without time and without I/O: the simulation decides when its callbacks run."""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import itertools
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

__all__ = ["SimulatedLoop"]


class SimulatedLoop(asyncio.AbstractEventLoop):
    """What the server's asyncio code needs of a loop. Nothing here looks at a clock.

    Attributes:
        now: simulated time in seconds; only :meth:`advance` moves it.
        ready: the callbacks that wait to be run.
        timers: what is due some time, as a heap.
        failed: what callbacks and tasks have raised that nobody has caught.
    """

    def __init__(self) -> None:
        self.now = 1000.0  # a moment that is 0 is none at all
        self.failed: list[dict[str, Any]] = []
        self._tasks: list[asyncio.Task[Any]] = []
        self.ready: deque[asyncio.Handle] = deque()
        self.timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._order = itertools.count()

    def run_one(self) -> None:
        """Run the callback that has waited longest."""
        handle = self.ready.popleft()
        if not handle.cancelled():
            handle._run()

    def advance(self, seconds: float) -> None:
        """Let time pass; timers that are due become ready, in order."""
        self.now += seconds
        while self.timers and self.timers[0][0] <= self.now:
            self.ready.append(heapq.heappop(self.timers)[2])

    @property
    def next_timer(self) -> float | None:
        """When something is due; None: never."""
        return self.timers[0][0] if self.timers else None

    def forget_timers(self) -> None:
        """Nothing is due any more."""
        self.timers.clear()

    def forget_timer(self, callback: Callable[..., object]) -> None:
        """That is never due."""
        self.timers = [one for one in self.timers if one[2]._callback != callback]
        heapq.heapify(self.timers)

    def end(self) -> None:
        """Cancel all tasks, so that nothing is left of them."""
        while any(not task.done() for task in self._tasks):
            for task in self._tasks:
                task.cancel()
            while self.ready:
                self.run_one()
        self.ready.clear()
        self.forget_timers()  # also those that what was ready has set
        for task in self._tasks:
            if not task.cancelled():
                task.exception()  # retrieve it, or asyncio complains that nobody did
        self._tasks.clear()

    # ---- asyncio --------------------------------------------------------------------------

    def time(self) -> float:
        return self.now

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def call_soon(  # type: ignore[override]
        self,
        callback: Callable[..., object],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self.ready.append(handle)
        return handle

    def call_soon_threadsafe(  # type: ignore[override]
        self,
        callback: Callable[..., object],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.Handle:
        return self.call_soon(callback, *args, context=context)

    def call_later(  # type: ignore[override]
        self,
        delay: float,
        callback: Callable[..., object],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        return self.call_at(self.now + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self.timers, (when, next(self._order), handle))
        return handle

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(  # type: ignore[override]
        self,
        coro: Coroutine[Any, Any, Any],
        *,
        name: str | None = None,
        context: contextvars.Context | None = None,
    ) -> asyncio.Task[Any]:
        task = asyncio.Task(coro, loop=self, name=name, context=context)
        self._tasks.append(task)
        return task

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        self.failed.append(context)

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Cancelled timers stay in the heap and do nothing when they are due."""
