"""Runs coroutines to completion for callers that are not async, on one event loop per thread.

There is a loop per thread, rather than one thread that serves all, because passing a call between
threads takes longer than a small put. Torch-free.
"""

from __future__ import annotations

# ``signal`` without its conversions to enums, which take longer than what is asked for.
import _signal  # type: ignore[import-not-found]
import asyncio
import os
import selectors
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Coroutine
from types import FrameType
from typing import Any, TypeVar

from torchstore_core.errors import ConfigurationError
from torchstore_core.machine.threads import start_thread

T = TypeVar("T")
# By these a program is told to end, or that its time is up: their handlers often raise.
_SIGNALS = tuple(
    int(getattr(signal, f"SIG{name}"))
    for name in ("HUP", "INT", "QUIT", "USR1", "USR2", "ALRM", "TERM", "VTALRM", "PROF", "XCPU")
)


class _ThreadLoop:
    """The event loop of one thread. It is closed when the thread ends.

    The loop uses poll(2), because a fork shares an epoll instance: a child that closed its loop
    would unregister the parent's descriptors.
    """

    def __init__(self) -> None:
        self.loop = _new_loop()
        _loops.add(self.loop)
        weakref.finalize(self, _close, self.loop)


def _new_loop() -> asyncio.AbstractEventLoop:
    return asyncio.SelectorEventLoop(selectors.PollSelector())


def _close(loop: asyncio.AbstractEventLoop) -> None:
    if not loop.is_running():
        loop.close()


class _Local(threading.local):
    loop: _ThreadLoop | None = None


_local = _Local()
# The loops of all threads. One that runs in a thread whose own it is not belongs to a greenlet.
_loops: weakref.WeakSet[asyncio.AbstractEventLoop] = weakref.WeakSet()
_background: asyncio.AbstractEventLoop | None = None
_lock = threading.Lock()


def may_block(name: str) -> None:
    """Check that this thread may block.

    Raises:
        ConfigurationError: an event loop is running in this thread: the program's, or, within
            another call or in another greenlet, one of this module.
    """
    running = asyncio._get_running_loop()
    if running is not None and _local.loop is not None and running is _local.loop.loop:
        raise ConfigurationError(
            f"torchstore_core.blocking: {name}() was called within another call of this thread "
            "(by a signal handler, __del__, a callback of weakref or gc, or the pickling of a "
            "value), which it would keep waiting; make it after that call, or in another thread"
        )
    if running is not None and running in _loops:
        raise ConfigurationError(
            f"torchstore_core.blocking: {name}() was called while another greenlet of this thread "
            "waits for a call, and a thread runs one event loop at a time: make calls in other "
            f"threads (with gevent: get_hub().threadpool.apply(ts.blocking.{name}, ...))"
        )
    if running is not None:
        raise ConfigurationError(
            f"torchstore_core.blocking: {name}() would block the event loop that is running in "
            f"this thread; use `await ts.{name}(...)` with `import torchstore_core as ts`"
        )


def run(call: Coroutine[Any, Any, T], name: str) -> T:
    """Run a coroutine on this thread's own event loop and return its result.

    If a signal handler raises, as for ``KeyboardInterrupt``, the coroutine is cancelled first.

    Args:
        call: the coroutine.
        name: the name of the call, for the error.

    Raises:
        ConfigurationError: an event loop is running in this thread.
    """
    try:
        may_block(name)
    except ConfigurationError:
        call.close()
        raise
    thread_loop = _local.loop
    if thread_loop is None or thread_loop.loop.is_closed():
        thread_loop = _local.loop = _ThreadLoop()
    loop = thread_loop.loop
    if threading.current_thread() is threading.main_thread():  # others handle no signals
        return _run_interruptible(loop, call)
    return _run(loop, loop.create_task(call))


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
    """Run all callbacks that are due. After a signal handler has raised, a call to ``stop`` may be
    among them, which would stop the next operation.
    """
    loop.call_soon(loop.stop)
    loop.run_forever()


def _run_interruptible(loop: asyncio.AbstractEventLoop, call: Coroutine[Any, Any, T]) -> T:
    """Like asyncio.run with Ctrl-C, for every signal: what a handler raises first cancels the task,
    instead of interrupting it in the middle of a line; the second time it does interrupt it. What
    is raised when the task is done is raised afterwards.

    asyncio would log what is raised within a callback, and go on without it. Raised while a reply
    is handed over, it would leave the task waiting for ever, even for its cancellation. Raised
    before the task has begun, it would leave the task to the next call of this thread.
    """
    task: asyncio.Task[T] | None = None
    raised: BaseException | None = None
    over = False

    def held_back(handler: Callable[..., object]) -> Callable[[int, FrameType | None], None]:
        def handle(signum: int, frame: FrameType | None) -> None:
            nonlocal raised
            try:
                handler(signum, frame)
            except BaseException as error:
                if over or raised is not None:
                    raise
                raised = error
                # Later, as a callback may be about to end what the task waits for.
                if task is not None and not task.done():
                    loop.call_soon_threadsafe(task.cancel)

        return handle

    handlers: _Handlers = {}
    try:
        for signum in _SIGNALS:
            if callable(handler := _signal.getsignal(signum)):
                handlers[signum] = handler, held_back(handler)
                _signal.signal(signum, handlers[signum][1])
        # Only now: what raises before leaves no task in the loop, where the next call would run it.
        task = loop.create_task(call)
        if raised is not None:
            task.cancel()
        result = _run(loop, task)
    except asyncio.CancelledError:
        if raised is None:
            raise
    except Exception as error:
        if raised is None:
            raise
        raised.__cause__ = error
    finally:
        if task is None:
            call.close()
        try:
            over = True
            _set_back(handlers)
        except BaseException:  # of a handler that was there again
            _set_back(handlers)
            raise
    if raised is None:
        return result
    _drain(loop)  # the cancellation may have come too late, and would keep the task
    try:
        raise raised
    finally:
        raised = None  # its traceback has this frame: the cycle would keep what the call has got


# By the number of a signal: its handler, and what stands in for that during a call.
_Handlers = dict[int, tuple[Callable[..., object], Callable[[int, FrameType | None], None]]]


def _set_back(handlers: _Handlers) -> None:
    for signum, (handler, ours) in handlers.items():
        if _signal.getsignal(signum) is ours:  # a handler may have set another one
            _signal.signal(signum, handler)


def is_patched() -> bool:
    """Whether gevent has patched the program and this is not its main thread: here no process can
    be started, and threads are greenlets, which nobody runs once this thread has left the call.
    """
    monkey: Any = sys.modules.get("gevent.monkey")
    if monkey is None or not monkey.is_module_patched("threading"):
        return False
    return not sys.modules["gevent"].get_hub().loop.default


async def in_thread(call: Callable[[], T]) -> T:
    """Run a call that blocks in another thread and return its result.

    When the interpreter is shutting down and no longer accepts work for threads, the call runs in
    this thread, which has nothing else left to do then. So it does if there can be no more threads;
    it stays in the executor's queue then, but runs only once. Nor has it anything else to do if its
    threads are greenlets: they would keep the program from ending.
    """
    if is_patched():
        return call()
    waiting = [call]

    def run() -> T:
        return waiting.pop()()

    try:
        made = asyncio.get_running_loop().run_in_executor(None, run)
    except RuntimeError:
        return run()
    return await made


def background() -> asyncio.AbstractEventLoop:
    """Return an event loop that runs in a thread of this process all the time.

    Raises:
        TransportNotReadyError: this process can have no more threads.
    """
    global _background
    with _lock:
        if _background is None:
            loop = _new_loop()
            try:
                start_thread(loop.run_forever, "torchstore-background")
            except BaseException:
                loop.close()
                raise
            _background = loop
        return _background


def _after_fork_in_child() -> None:
    global _background, _lock, _local
    if _background is not None:
        # Keep it: its thread exists only in the parent, and a running loop cannot be closed.
        _inherited.append(_background)
    _background, _lock, _local = None, threading.Lock(), _Local()


_inherited: list[asyncio.AbstractEventLoop] = []

os.register_at_fork(after_in_child=_after_fork_in_child)
