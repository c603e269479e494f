"""What a measured process sees of itself and of the store, and waiting for it to come to rest."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable
from pathlib import Path
from typing import TypeVar

import torchstore_core as ts
from torchstore_core.contracts.hooks import hookimpl
from torchstore_core.contracts.observer import Operation

T = TypeVar("T")
_POLL_S = 0.005
_SETTLE_S = 2.0


def process_size(pid: int) -> dict[str, int]:
    """Open descriptors, mappings, resident bytes, and those of them that are shared memory."""
    base = Path(f"/proc/{pid}")
    fields = dict(line.split(":", 1) for line in (base / "status").read_text().splitlines())
    rss, shared = (int(fields[name].split()[0]) * 1024 for name in ("VmRSS", "RssShmem"))
    return {
        "fds": len(os.listdir(base / "fd")),
        "maps": (base / "maps").read_text().count("\n"),
        "rss": rss,
        "rss_shared": shared,
    }


def reset_peak() -> None:
    """Let :func:`peak_rss` begin anew."""
    Path("/proc/self/clear_refs").write_text("5")


def peak_rss() -> int:
    """The highest number of bytes that this process had resident."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(dict(line.split(":", 1) for line in lines)["VmHWM"].split()[0]) * 1024


async def timed(what: Awaitable[T]) -> tuple[float, T]:
    """Seconds that an operation took, and its result."""
    start = time.perf_counter()
    result = await what
    return time.perf_counter() - start, result


async def warm_bytes() -> int:
    """Pool memory that is backed by pages, over all volumes."""
    return sum(volume.warm_bytes for volume in (await ts.status()).volumes)


async def until_warm(nbytes: int, deadline: float = 60.0) -> float:
    """Wait until the pool has this much warm memory, then (up to 2 s) until this process's page
    tables have it too; the seconds it took.
    """
    start = time.perf_counter()
    while await warm_bytes() < nbytes:
        if time.perf_counter() - start > deadline:
            raise TimeoutError(f"{nbytes} bytes were not warm within {deadline} s")
        await asyncio.sleep(_POLL_S)
    settled = time.perf_counter() + _SETTLE_S
    while time.perf_counter() < settled and process_size(os.getpid())["rss_shared"] < nbytes:
        await asyncio.sleep(_POLL_S)
    return time.perf_counter() - start


async def until_quiet(still: float = 0.25, deadline: float = 60.0) -> None:
    """Wait until no background warming has made progress for ``still`` seconds."""
    end = time.perf_counter() + deadline
    before, since = -1, time.perf_counter()
    while time.perf_counter() - since < still and time.perf_counter() < end:
        now = await warm_bytes()
        if now != before:
            before, since = now, time.perf_counter()
        await asyncio.sleep(_POLL_S)


async def until_unleased(deadline: float = 10.0) -> None:
    """Wait until the server has back what dropped tensors held."""
    gc.collect()
    end = time.perf_counter() + deadline
    while any(volume.leased_bytes for volume in (await ts.status()).volumes):
        if time.perf_counter() > end:
            raise TimeoutError(f"leases were not given back within {deadline} s")
        await asyncio.sleep(_POLL_S)


#: Kinds of requests that nobody waits for, as they are called on the wire.
NO_REPLY = {"abort", "release", "cancel", "keep"}


async def operations() -> dict[str, int]:
    """How many requests of each kind the server has had, this one included."""
    return (await ts.status()).operations


async def messages_since(before: dict[str, int]) -> int:
    """Control messages since then, replies included, without the counting itself."""
    asked = Counter(await operations())
    asked.subtract(before)
    asked.subtract(["Status"])
    return sum(n if kind.lower() in NO_REPLY else 2 * n for kind, n in asked.items())


class Observer:
    """Notes what this process's clients tell their observers; the clients are made afterwards.

    It comes in by the door of every observer plug-in: an entry point, here of a distribution that
    is only a folder with a few lines of metadata.
    """

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="torchstore-bench-")
        info = Path(self._folder.name) / "torchstore_bench_observer-1.dist-info"
        info.mkdir()
        about = "Metadata-Version: 2.1\nName: torchstore-bench-observer\nVersion: 1\n"
        (info / "METADATA").write_text(about)
        (info / "entry_points.txt").write_text("[torchstore.plugins]\nbench = watching\n")
        sys.path.append(self._folder.name)

    def close(self) -> None:
        """Clients that are made from now on are not watched."""
        sys.path.remove(self._folder.name)
        self._folder.cleanup()

    def moved(self, name: str) -> int:
        """Bytes that operations of this name moved since the last call."""
        seen, _seen[:] = list(_seen), []
        return sum(operation.nbytes for operation in seen if operation.name == name)


_seen: list[Operation] = []


@hookimpl
def torchstore_operation(operation: Operation) -> None:
    """Called after every operation."""
    _seen.append(operation)
