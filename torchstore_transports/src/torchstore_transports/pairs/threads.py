"""Blocking calls in threads, and a lock that works across event loops. Torch-free."""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from torchstore_core.machine.tasks import call_from_thread, retrieve

if TYPE_CHECKING:
    from torchstore_transports.pairs.connection import PairConnection

__all__ = ["Turns", "before_exit", "in_library", "in_thread", "kill_made", "overdue"]

T = TypeVar("T")

# At the end of the process: how long threads may take to end once nothing is left to wait for, and
# how long the interpreter may take to end, during which none may return from a library.
_EXIT_S, _ENDING_S = 1.0, 4.0
# The threads that run, each with the time at which its wait inside of a library is over, if it is
# in one; and what ends such waits.
_running: dict[threading.Thread, float] = {}
_enders: weakref.WeakKeyDictionary[Any, Callable[[Any], None]] = weakref.WeakKeyDictionary()


def in_thread(call: Callable[[], T]) -> asyncio.Future[T]:
    """Run a blocking call in a thread of its own, and return the future of its result.

    The threads of an executor would not do: a call may wait long for a peer that was stopped, and
    neither other work nor the end of this process should wait for it.
    """
    result: Future[T] = Future()
    result.set_running_or_notify_cancel()
    waiting = asyncio.wrap_future(result)
    waiting.add_done_callback(retrieve)  # because nobody may wait for it any more
    run = threading.Thread(target=_run, args=(call, result), daemon=True, name="torchstore-pair")
    run.start()
    return waiting


def before_exit(owner: T, end: Callable[[T], None]) -> None:
    """Have ``end(owner)`` called at the end of the process, if ``owner`` lives and any thread of
    :func:`in_thread` still runs. It must end what such threads wait for.
    """
    _enders[owner] = end


@contextmanager
def in_library(most_s: float) -> Iterator[None]:
    """Mark that a thread is in a library, which returns after ``most_s`` seconds at the latest."""
    thread = threading.current_thread()
    if thread not in _running:
        yield
        return
    _running[thread] = time.monotonic() + most_s
    try:
        yield
    finally:
        _running[thread] = 0.0


def overdue() -> list[Hashable]:
    """Name the waits inside of libraries that should be over: see ``TransportServer.stuck``."""
    now = time.monotonic()
    return [(thread, over) for thread, over in _running.copy().items() if 0 < over < now]


def _end_all() -> None:
    """Let threads end while the interpreter still lives.

    One that returns from a library when the interpreter is ending can take no lock of it any more,
    and is ended in the middle of C++ code, which ends the process with SIGABRT. A library may not
    wake a thread whose message has arrived in part; that one is waited for only if it would return
    at the wrong moment.
    """
    if not _running:
        return
    for owner, end in _enders.copy().items():
        end(owner)
    soon = time.monotonic() + _EXIT_S
    for thread in list(_running):
        thread.join(max(0.0, soon - time.monotonic()))
    for thread, over in _running.copy().items():
        left = over - time.monotonic()
        if left < _ENDING_S:
            thread.join(max(0.0, left) + _EXIT_S)


def _in_child() -> None:
    """In a forked child there are neither the threads nor what they wait for."""
    _running.clear()
    _enders.clear()


atexit.register(_end_all)
os.register_at_fork(after_in_child=_in_child)


def _run(call: Callable[[], T], result: Future[T]) -> None:
    _running[threading.current_thread()] = 0.0
    try:
        result.set_result(call())
    except BaseException as error:  # noqa: BLE001 - whoever awaits the future gets it
        _forget_locals(error)
        result.set_exception(error)
    finally:
        del call, result  # otherwise the error would keep them alive, and they the error
        _running.pop(threading.current_thread(), None)


def _forget_locals(error: BaseException) -> None:
    """Free what the failed calls used, because errors are kept for long, sometimes in cycles."""
    at: BaseException | None = error
    while at is not None:
        traceback.clear_frames(at.__traceback__)
        at = at.__cause__ or at.__context__


def kill_made(made: asyncio.Future[PairConnection]) -> None:
    """A callback of futures whose connection, if it is made after all, nobody wants any more."""
    if not made.cancelled() and made.exception() is None:
        in_thread(made.result().kill)


class Turns:
    """A lock for coroutines of several event loops, which acquire it in the order of arrival.

    Use it as an async context manager.
    """

    def __init__(self) -> None:
        # Reentrant: the collector may end a coroutine that has the lock in a thread that is here.
        self._lock = threading.RLock()
        self._taken = False
        self._turn: asyncio.Future[None] | None = None  # whose it is, if that one had to wait
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def __aenter__(self) -> None:
        with self._lock:
            if not self._taken:
                self._taken = True
                return
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
        try:
            await turn
        except BaseException:
            self._leave(turn)
            raise

    async def __aexit__(self, *_: object) -> None:
        self._release()

    def _leave(self, turn: asyncio.Future[None]) -> None:
        """It does not wait any more. Said here, as its loop may not run again."""
        with self._lock:
            if turn in self._waiting:
                self._waiting.remove(turn)
            elif turn is self._turn:  # since that moment
                self._release()

    def _release(self) -> None:
        with self._lock:
            while self._waiting:
                self._turn = turn = self._waiting.popleft()
                if call_from_thread(turn.get_loop(), _grant, turn):
                    return
            self._taken, self._turn = False, None


def _grant(turn: asyncio.Future[None]) -> None:
    if not turn.done():
        turn.set_result(None)
