"""A thread with an event loop of its own, for the parts of the store that an actor hosts.

The endpoints of all actors in a process share one event loop, and the store's clients must not wait
behind them.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from torchstore_core.machine.tasks import call_from_thread

T = TypeVar("T")
_END_S = 1.0
_TURNS = 3


class CoreThread:
    """Runs coroutines on its own event loop (uvloop if that is installed).

    These coroutines keep the context of the endpoint that started them, and can call actors.
    """

    def __init__(self, name: str) -> None:
        self.loop = new_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
        left = asyncio.all_tasks(self.loop)
        for task in left:
            task.cancel()
        if left:
            self.loop.run_until_complete(asyncio.wait(left, timeout=_END_S))
        for _ in range(_TURNS):  # transports that were closed last finish in the next iterations
            self.loop.run_until_complete(asyncio.sleep(0))
        self.loop.close()

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work`` on the thread's loop, and wait for it on another loop."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self.loop))

    async def call(self, function: Callable[..., T], *args: Any) -> T:
        """Call a plain function on the thread's loop, and return its result."""

        async def work() -> T:
            return function(*args)

        return await self.run(work())

    def close(self) -> None:
        """Cancel what still runs on the loop, and end the thread. Idempotent."""
        call_from_thread(self.loop, self.loop.stop)


def new_loop() -> asyncio.AbstractEventLoop:
    """The fastest event loop that is installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()
