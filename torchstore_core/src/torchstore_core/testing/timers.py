"""Deadlines of tests, which must hold on a busy machine, too."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

__all__ = ["clock", "ends_within", "within"]

_SLICE_S = 0.02


async def ends_within(
    work: asyncio.Future[Any], seconds: float, *, done_by: int | None = None
) -> bool:
    """Return whether ``work`` ends before a timer that begins now: where the machine is too busy
    for either, both are late. The timer is one of many short ones, one after the other: each waits
    for a processor as ``work`` does, and for how long this process stands still does not count.

    Nor does for how long the main thread of ``done_by``, the process that is at work, waits for a
    processor or for a disk: one that has much to do waits longer than a timer that sleeps most of
    the time.
    """
    waited = _Waits(f"/proc/{done_by}") if done_by is not None else None
    left = seconds
    while left > 0:
        await asyncio.wait([work], timeout=_SLICE_S)
        if work.done():
            return True
        left -= _SLICE_S - (waited.meanwhile() if waited is not None else 0.0)
    return False


class _Waits:
    """For how long the main thread of a process could not run, slice by slice."""

    def __init__(self, process: str) -> None:
        self._process = Path(process)
        self._counts = _counts(self._process)
        self._ahead = 0.0  # of a wait that is under way, which the kernel counts when it ends

    def meanwhile(self) -> float:
        """Seconds since the last call; those for a disk are whole slices."""
        try:
            state = (self._process / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:  # it has ended
            return 0.0
        if state == "D":
            return _SLICE_S
        before, self._counts = self._counts, _counts(self._process)
        if state == "R" and before == self._counts != (0.0, 0.0):
            self._ahead += _SLICE_S
            return _SLICE_S
        ahead, self._ahead = self._ahead, 0.0
        return max(0.0, self._counts[1] - before[1] - ahead)


@contextlib.asynccontextmanager
async def within(seconds: float) -> AsyncIterator[None]:
    """Fail the test if what it does in this context does not end before such a timer. It is not
    for what blocks the event loop: the timer waits for that.
    """
    ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    timing = asyncio.ensure_future(ends_within(ended, seconds))
    try:
        yield
    finally:
        if not timing.done():
            ended.set_result(None)
        in_time = await timing
    if not in_time:
        pytest.fail(f"it did not end within {seconds:g} s")


def clock() -> float:
    """Seconds, which stop while this thread waits for a processor: that is the machine's fault."""
    thread = Path(f"/proc/self/task/{threading.get_native_id()}")
    return time.perf_counter() - _counts(thread)[1]


def _counts(task: Path) -> tuple[float, float]:
    """For how many seconds a task has run, and has waited for a processor; (0, 0) where the kernel
    does not count them, or it has ended.
    """
    try:
        ran, waited = (task / "schedstat").read_text().split()[:2]
    except OSError:
        return 0.0, 0.0
    return int(ran) / 1e9, int(waited) / 1e9
