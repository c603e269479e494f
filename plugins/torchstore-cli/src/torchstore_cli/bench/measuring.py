"""Clocks and percentiles, the sizes of processes, and waiting for a store to settle."""

from __future__ import annotations

import asyncio
import gc
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeVar

import torchstore_core as ts

__all__ = [
    "percentile",
    "process_size",
    "timed",
    "timed_call",
    "until_quiet",
    "until_unleased",
    "until_warm",
]

T = TypeVar("T")
_POLL_S = 0.005
_SETTLE_S = 2.0


async def timed(operation: Awaitable[T]) -> tuple[float, T]:
    """Return the seconds that an operation took, and its result."""
    start = time.perf_counter()
    result = await operation
    return time.perf_counter() - start, result


def timed_call(call: Callable[[], object]) -> float:
    """Return the seconds that a call took."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value that ``share`` of all values do not exceed.

    >>> percentile([4, 1, 3, 2], 0.5), percentile(range(1, 101), 0.99)
    (2, 99)
    """
    ordered = sorted(values)
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)]


def process_size(pid: int) -> dict[str, int]:
    """Return a process's open descriptors, mappings, resident bytes, and shared resident bytes."""
    base = Path(f"/proc/{pid}")
    fields = dict(line.split(":", 1) for line in (base / "status").read_text().splitlines())
    rss, shared = (int(fields[name].split()[0]) * 1024 for name in ("VmRSS", "RssShmem"))
    return {
        "fds": len(os.listdir(base / "fd")),
        "maps": (base / "maps").read_text().count("\n"),
        "rss": rss,
        "rss_shared": shared,
    }


async def _warm_bytes() -> int:
    """Return the bytes of pool memory that are backed by pages, over all volumes."""
    return sum(volume.warm_bytes for volume in (await ts.status()).volumes)


async def _until(done: Callable[[], Awaitable[bool]], seconds: float) -> bool:
    """Poll until ``done`` returns True; return False if that takes more than ``seconds``."""
    end = time.perf_counter() + seconds
    while not await done():
        if time.perf_counter() > end:
            return False
        await asyncio.sleep(_POLL_S)
    return True


async def until_warm(nbytes: int, deadline: float = 60.0) -> float:
    """Wait until the pool has this much warm memory, then (up to 2 s) until the page tables of this
    process contain it, too; return the seconds this took. After ``deadline`` seconds, stop waiting:
    the next put will show it.
    """

    async def pool() -> bool:
        return await _warm_bytes() >= nbytes

    async def page_tables() -> bool:
        return process_size(os.getpid())["rss_shared"] >= nbytes

    start = time.perf_counter()
    if await _until(pool, deadline):
        await _until(page_tables, _SETTLE_S)
    return time.perf_counter() - start


async def until_quiet(still: float = 0.25, deadline: float = 60.0) -> None:
    """Wait until background warming has made no progress for ``still`` seconds."""
    before, since = -1, time.perf_counter()

    async def quiet() -> bool:
        nonlocal before, since
        now = await _warm_bytes()
        if now != before:
            before, since = now, time.perf_counter()
        return time.perf_counter() - since >= still

    await _until(quiet, deadline)


async def until_unleased(deadline: float = 10.0) -> None:
    """Wait until the server has taken back the leases of this process's dropped tensors.

    Raises:
        TimeoutError: it has not done so within ``deadline`` seconds.
    """
    gc.collect()

    async def unleased() -> bool:
        sessions = (await ts.status()).sessions
        return not any(s.leased_bytes for s in sessions if s.pid == os.getpid())

    if not await _until(unleased, deadline):
        raise TimeoutError(f"leases were not given back within {deadline} s")
