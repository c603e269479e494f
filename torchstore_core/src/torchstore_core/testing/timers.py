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
        self._for_processors = _waited_for_processors(self._process)

    def meanwhile(self) -> float:
        """Seconds since the last call; those for a disk are whole slices."""
        before, self._for_processors = (
            self._for_processors,
            _waited_for_processors(self._process),
        )
        try:
            stat = (self._process / "stat").read_text()
        except OSError:  # it has ended
            return 0.0
        for_disks = _SLICE_S if stat.rpartition(")")[2].split()[0] == "D" else 0.0
        return self._for_processors - before + for_disks


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
    return time.perf_counter() - _waited_for_processors(thread)


def _waited_for_processors(task: Path) -> float:
    """Seconds; 0 where the kernel does not count them, or the task has ended."""
    try:
        return int((task / "schedstat").read_text().split()[1]) / 1e9
    except OSError:
        return 0.0
