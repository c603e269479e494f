"""What tests of every folder share."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import Any

__all__ = ["until"]

_POLL_S = 0.005


async def until(predicate: Callable[[], Awaitable[Any] | Any], timeout: float = 5.0) -> Any:
    """Poll until ``predicate()`` (sync or async) is true, and return what it gave.

    Raises:
        AssertionError: not within ``timeout`` seconds.
    """
    deadline = time.monotonic() + timeout
    while True:
        value = predicate()
        if inspect.isawaitable(value):
            value = await value
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"not true within {timeout} s: {predicate!r} gave {value!r}")
        await asyncio.sleep(_POLL_S)
