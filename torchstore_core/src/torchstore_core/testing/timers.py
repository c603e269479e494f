"""Deadlines of tests, which must hold on a busy machine, too."""

from __future__ import annotations

import asyncio
from typing import Any

__all__ = ["ends_within"]

_SLICES = 20


async def ends_within(work: asyncio.Future[Any], seconds: float) -> bool:
    """Return whether ``work`` ends before a timer that begins now: where the machine is too busy
    for either, both are late. The timer is one of many short ones, one after the other, so that it
    does not count for how long this process has stood still.
    """
    for _ in range(_SLICES):
        await asyncio.wait([work], timeout=seconds / _SLICES)
        if work.done():
            return True
    return False
