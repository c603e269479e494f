"""How a call that blocks in one thread is ended by another one, as when an async call is cancelled.

A call that may be stopped runs with a :class:`Stop`. What it does in loops, in its own thread or in
others that work for it, asks :func:`check` from time to time. Torch-free.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from torchstore_core.clients.calls import thread_loops

__all__ = ["Stop", "Stopped", "check", "current", "in_thread", "run_in_background", "until"]

T = TypeVar("T")
_TEXT = "the call was cancelled"


class Stopped(BaseException):
    """A call was stopped. Like KeyboardInterrupt, it is not an error of what was interrupted."""


class Stop:
    """Says whether calls are to end.

    Args:
        outer: another one, which stops this one, too.

    >>> outer = Stop()
    >>> inner = Stop(outer)
    >>> outer.set()
    >>> inner.is_set()
    True
    """

    def __init__(self, outer: Stop | None = None) -> None:
        self._outer = outer
        self._set = False
        self._lock = threading.Lock()
        self._calls: list[Callable[[], None]] = []

    def set(self) -> None:
        """Stop the calls. Returns at once; they end a little later."""
        with self._lock:
            self._set = True
            calls = [*self._calls]
        for call in calls:
            call()

    def is_set(self) -> bool:
        """Whether :meth:`set` was called, of this one or of an outer one."""
        return self._set or (self._outer is not None and self._outer.is_set())

    def run(self, call: Callable[[], T]) -> T:
        """Make a call that may be stopped, in this thread."""

        def made() -> T:
            _current.set(self)
            return call()

        # In a context of its own: whenever a signal raises, nothing later is stopped with it.
        return contextvars.copy_context().run(made)

    @contextmanager
    def calling(self, call: Callable[[], None]) -> Iterator[None]:
        """While it lasts, :meth:`set` also makes a call, in any thread; at once if it is set."""
        if self._outer is not None:
            with self._outer.calling(call), self._calling(call):
                yield
        else:
            with self._calling(call):
                yield

    @contextmanager
    def _calling(self, call: Callable[[], None]) -> Iterator[None]:
        with self._lock:
            self._calls.append(call)
            already = self._set
        try:
            if already:
                call()
            yield
        finally:
            with self._lock:
                self._calls.remove(call)


_current: contextvars.ContextVar[Stop | None] = contextvars.ContextVar("stop", default=None)


def current() -> Stop | None:
    """Return what may stop the call that this thread is in; None if nothing may."""
    return _current.get()


def check() -> None:
    """Raise Stopped if the call that this thread is in is to end."""
    stop = _current.get()
    if stop is not None and stop.is_set():
        raise Stopped(_TEXT)


async def in_thread(call: Callable[[], T]) -> T:
    """Make a call that blocks in another thread. If the awaiting task is cancelled, the call is
    stopped, and CancelledError is raised when it has ended.
    """
    stop = Stop()
    work = partial(stop.run, call)
    try:
        made = asyncio.get_running_loop().run_in_executor(None, work)
    except RuntimeError:  # the interpreter is shutting down: this thread has nothing else to do
        return work()
    try:
        return await asyncio.shield(made)
    except asyncio.CancelledError:
        stop.set()
        while not made.done():
            try:
                await asyncio.wait([made])
            except asyncio.CancelledError:
                continue  # again; it is known
        made.cancelled() or made.exception()  # nobody else asks for it
        raise


def run_in_background(call: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in this process's background loop and return its result. If the call that
    this thread is in is stopped, or interrupted by a signal, the coroutine is cancelled, and has
    ended when this raises.

    Raises:
        Stopped: the call was stopped.
    """
    loop = thread_loops.background()
    ended = threading.Event()
    tasks: list[asyncio.Task[T]] = []

    def start() -> None:
        tasks.append(loop.create_task(call))
        tasks[0].add_done_callback(lambda _: ended.set())

    def cancel() -> None:
        if tasks:
            tasks[0].cancel()
        else:  # it was interrupted before the loop knew of it
            call.close()
            ended.set()

    def from_any_thread() -> None:
        loop.call_soon_threadsafe(cancel)

    stop = current() or Stop()
    try:
        loop.call_soon_threadsafe(start)
        with stop.calling(from_any_thread):
            ended.wait()
    except BaseException:
        from_any_thread()
        until(ended.wait)
        if tasks and not tasks[0].cancelled():
            tasks[0].exception()  # nobody else asks for it
        raise
    if tasks[0].cancelled():
        raise Stopped(_TEXT)
    return tasks[0].result()


def until(wait: Callable[[], object]) -> None:
    """Wait for something that ends soon, also if the user presses Ctrl-C (again) meanwhile; that is
    raised afterwards.
    """
    interrupted: KeyboardInterrupt | None = None
    while True:
        try:
            wait()
        except KeyboardInterrupt as error:
            interrupted = error
            continue
        if interrupted is not None:
            raise interrupted
        return
