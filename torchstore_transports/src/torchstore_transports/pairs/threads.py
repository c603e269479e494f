"""Blocking calls in threads, and a lock that works across event loops. Torch-free."""

from __future__ import annotations

import asyncio
import threading
import traceback
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

__all__ = ["Turns", "in_thread"]

T = TypeVar("T")


def in_thread(call: Callable[[], T]) -> asyncio.Future[T]:
    """Run a blocking call in a thread of its own, and return the future of its result.

    The threads of an executor would not do: a call may wait long for a peer that was stopped, and
    neither other work nor the end of this process should wait for it.
    """
    result: Future[T] = Future()
    result.set_running_or_notify_cancel()
    waiting = asyncio.wrap_future(result)
    waiting.add_done_callback(_retrieve)  # because nobody may wait for it any more
    run = threading.Thread(target=_run, args=(call, result), daemon=True, name="torchstore-pair")
    run.start()
    return waiting


def _run(call: Callable[[], T], result: Future[T]) -> None:
    try:
        result.set_result(call())
    except BaseException as error:  # noqa: BLE001 - whoever awaits the future gets it
        _forget_locals(error)
        result.set_exception(error)
    finally:
        del call, result  # otherwise the error would keep them alive, and they the error


def _forget_locals(error: BaseException) -> None:
    """Free what the failed calls used, because errors are kept for long, sometimes in cycles."""
    at: BaseException | None = error
    while at is not None:
        traceback.clear_frames(at.__traceback__)
        at = at.__cause__ or at.__context__


def _retrieve(done: asyncio.Future[T]) -> None:
    if not done.cancelled():
        done.exception()


class Turns:
    """A lock for coroutines of several event loops, which acquire it in the order of arrival.

    Use it as an async context manager.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken = False
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
        except asyncio.CancelledError:
            if not turn.cancelled():  # the lock was granted at the same moment
                self._release()
            raise

    async def __aexit__(self, *_: object) -> None:
        self._release()

    def _release(self) -> None:
        with self._lock:
            while self._waiting:
                turn = self._waiting.popleft()
                try:
                    turn.get_loop().call_soon_threadsafe(self._grant, turn)
                except RuntimeError:  # the loop of that turn is closed
                    continue
                return
            self._taken = False

    def _grant(self, turn: asyncio.Future[None]) -> None:
        if turn.cancelled():
            self._release()
        else:
            turn.set_result(None)
