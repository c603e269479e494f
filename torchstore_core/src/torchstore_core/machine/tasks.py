"""Work on event loops: begun, and waited for where it must not be left running. Torch-free."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


def begin(work: Coroutine[Any, Any, T], kept: set[asyncio.Task[T]]) -> asyncio.Task[T]:
    """Begin work on the running event loop. The task is ``kept`` until it ends, because the loop
    alone would not keep it.
    """
    task = asyncio.get_running_loop().create_task(work)
    kept.add(task)
    task.add_done_callback(kept.discard)
    return task


def call_from_thread(
    loop: asyncio.AbstractEventLoop, call: Callable[..., object], *args: Any
) -> bool:
    """Have an event loop call something, in any thread. Returns whether it will: not if it is
    closed.
    """
    try:
        loop.call_soon_threadsafe(call, *args)
    except RuntimeError:
        return False
    return True


def is_cancelled() -> bool:
    """Return whether the running task has been cancelled. If it has not, a CancelledError that it
    receives comes from another task that it awaits. False outside of a task.
    """
    try:
        task = asyncio.current_task()
    except RuntimeError:  # there is no event loop in this thread
        return False
    return task is not None and task.cancelling() > 0


def retrieve(done: asyncio.Future[T]) -> None:
    """A callback of futures whose error nobody may be interested in: asyncio would log it."""
    if not done.cancelled():
        done.exception()


async def wait_ended(work: asyncio.Future[Any], timeout: float | None = None) -> bool:
    """Wait until ``work`` has ended, at most ``timeout`` seconds, even if the caller is cancelled
    meanwhile: memory must not be handed to others while ``work`` may still write to it.

    Returns:
        Whether the caller was cancelled. If so, it must raise ``CancelledError``.

    >>> async def main() -> bool:
    ...     work = asyncio.ensure_future(asyncio.sleep(0.01))
    ...     waiting = asyncio.ensure_future(wait_ended(work))
    ...     await asyncio.sleep(0)
    ...     waiting.cancel()
    ...     return await waiting and work.done()
    >>> asyncio.run(main())
    True
    """
    loop = asyncio.get_running_loop()
    end = None if timeout is None else loop.time() + timeout
    cancelled = False
    while not work.done():
        left = None if end is None else end - loop.time()
        if left is not None and left <= 0:
            break
        try:
            await asyncio.wait([work], timeout=left)
        except asyncio.CancelledError:
            cancelled = True
    return cancelled


async def together(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run coroutines concurrently. If one fails, or the caller is cancelled, all have stopped when
    this raises. (The TaskGroup of Python 3.11 loses the caller's cancellation if a task fails while
    the others are stopping.)
    """
    tasks = [asyncio.ensure_future(one) for one in work]
    cancelled = False
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        for task in tasks:
            task.cancel()
        for task in tasks:
            cancelled |= await wait_ended(task)
        errors = [task.exception() for task in tasks if not task.cancelled()]
    if cancelled:
        raise asyncio.CancelledError
    for error in errors:
        if error is not None:
            raise error
    return [task.result() for task in tasks]
