"""Coroutines run to their end from code that is not async, on an event loop of each thread.

A loop per thread rather than one thread for all: a hand-over between threads costs more than a
small put. Torch-free.
"""

from __future__ import annotations

import asyncio
import os
import selectors
import signal
import threading
import weakref
from collections.abc import Callable, Coroutine
from types import FrameType
from typing import Any, TypeVar

from torchstore_core.errors import ConfigurationError

__all__ = ["aside", "background", "may_block", "run"]

T = TypeVar("T")
# Without the conversion to enums, which takes as long as the rest of a call.
_set_handler: Any = getattr(signal.signal, "__wrapped__", signal.signal)
_handler: Any = getattr(signal.getsignal, "__wrapped__", signal.getsignal)
_SIGINT = int(signal.SIGINT)
_DEFAULT = signal.default_int_handler


class _ThreadLoop:
    """The event loop of one thread, closed when the thread ends.

    It waits with poll(2). An epoll belongs to both sides of a fork: a child that closed its loop
    would take the parent's descriptors out.
    """

    def __init__(self) -> None:
        self.loop = _new_loop()
        weakref.finalize(self, _close, self.loop)


def _new_loop() -> asyncio.AbstractEventLoop:
    return asyncio.SelectorEventLoop(selectors.PollSelector())


def _close(loop: asyncio.AbstractEventLoop) -> None:
    if not loop.is_running():
        loop.close()


class _Here(threading.local):
    mine: _ThreadLoop | None = None


_here = _Here()
_background: asyncio.AbstractEventLoop | None = None
_lock = threading.Lock()


def may_block(name: str) -> None:
    """Refuse to block an event loop.

    Raises:
        ConfigurationError: one is running in this thread.
    """
    if asyncio._get_running_loop() is not None:
        raise ConfigurationError(
            f"torchstore_core.blocking: {name}() would block the event loop that is running in "
            f"this thread; use `await ts.{name}(...)` with `import torchstore_core as ts`"
        )


def run(call: Coroutine[Any, Any, T], name: str) -> T:
    """The result of a coroutine, run on this thread's own event loop.

    ``KeyboardInterrupt``, or whatever else a signal handler raises, cancels it first.

    Args:
        call: the coroutine.
        name: of the call, for the error.

    Raises:
        ConfigurationError: an event loop is running in this thread.
    """
    try:
        may_block(name)
    except ConfigurationError:
        call.close()
        raise
    mine = _here.mine
    if mine is None or mine.loop.is_closed():
        mine = _here.mine = _ThreadLoop()
    loop = mine.loop
    task = loop.create_task(call)
    if threading.current_thread() is threading.main_thread() and _handler(_SIGINT) is _DEFAULT:
        return _run_interruptible(loop, task)
    return _run(loop, task)


def _run(loop: asyncio.AbstractEventLoop, task: asyncio.Task[T]) -> T:
    try:
        return loop.run_until_complete(task)
    except BaseException:
        try:
            if not task.done():
                task.cancel()
                loop.run_until_complete(asyncio.wait([task]))
        finally:
            _drain(loop)
        raise


def _drain(loop: asyncio.AbstractEventLoop) -> None:
    """Run what is due. What a signal handler raised may have left a call to stop there, which
    would stop the next operation.
    """
    loop.call_soon(loop.stop)
    loop.run_forever()


def _run_interruptible(loop: asyncio.AbstractEventLoop, task: asyncio.Task[T]) -> T:
    """As asyncio.run: Ctrl-C cancels, rather than breaking off in the middle of some line; a second
    one does break off. One that comes when all is done is raised afterwards.
    """
    interrupted = False

    def cancel(signum: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        if interrupted:
            raise KeyboardInterrupt
        interrupted = True
        if not task.done():
            task.cancel()
            loop.call_soon_threadsafe(_nothing)  # wakes the loop

    _set_handler(_SIGINT, cancel)
    try:
        result = _run(loop, task)
    except asyncio.CancelledError:
        if interrupted:
            raise KeyboardInterrupt from None
        raise
    except Exception as error:
        if interrupted:
            raise KeyboardInterrupt from error
        raise
    finally:
        _set_handler(_SIGINT, _DEFAULT)
    if interrupted:
        raise KeyboardInterrupt
    return result


def _nothing() -> None:
    return None


async def aside(call: Callable[[], T]) -> T:
    """The result of a call that blocks, made in another thread; by this one when the interpreter is
    ending, which takes no more work for others. Then there is nothing else to do here, either.
    """
    try:
        made = asyncio.get_running_loop().run_in_executor(None, call)
    except RuntimeError:
        return call()
    return await made


def background() -> asyncio.AbstractEventLoop:
    """A loop that runs in a thread of this process, also when nobody waits."""
    global _background
    with _lock:
        if _background is None:
            loop = _background = _new_loop()
            threading.Thread(
                target=loop.run_forever, name="torchstore-background", daemon=True
            ).start()
        return _background


def _after_fork_in_child() -> None:
    global _background, _lock, _here
    if _background is not None:
        _inherited.append(_background)  # its thread is the parent's; a loop that runs is not closed
    _background, _lock, _here = None, threading.Lock(), _Here()


_inherited: list[asyncio.AbstractEventLoop] = []

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
