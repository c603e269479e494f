"""Deadlines of tests, which must hold on a busy machine, too."""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

__all__ = ["clock", "ends_within", "within"]

_SLICE_S = 0.02


async def ends_within(work: asyncio.Future[Any], seconds: float) -> bool:
    """Return whether ``work`` ends before a timer that begins now: where the machine is too busy
    for either, both are late. The timer is one of many short ones, one after the other: each waits
    for a processor as ``work`` does, and for how long this process stands still does not count.
    """
    for _ in range(math.ceil(seconds / _SLICE_S)):
        await asyncio.wait([work], timeout=_SLICE_S)
        if work.done():
            return True
    return work.done()


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
    try:
        counts = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat").read_text().split()
    except OSError:  # nobody counts
        return time.perf_counter()
    return time.perf_counter() - int(counts[1]) / 1e9
