"""Memory that the engine may touch for longer than it says.

After a transfer has failed or was given up, Monarch's TCP fallback continues what it has begun, and
may read or write memory that its owner has freed or given to others. So without RDMA hardware, it
gets only buffers of our own, and those of a failed transfer are kept for a while. (With hardware,
the network card itself stops when a client's buffer is dropped.) A volume receives what is to be
written in buffers of its own in any case: only it can say for whom its memory is still written.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import time
from collections import deque
from collections.abc import Sequence

from torchstore_core.machine.copying import STREAM_MIN, Run, copy_runs

_KEEP_S = 120.0
_kept: deque[tuple[float, object]] = deque()


@functools.cache
def is_direct() -> bool:
    """Return whether this host has RDMA hardware, so that no intermediate buffers are needed."""
    from monarch.rdma import is_ibverbs_available

    return bool(is_ibverbs_available())


def keep(memory: object) -> None:
    """Keep the memory that a failed transfer used alive for a while."""
    now = time.monotonic()
    while _kept and now - _kept[0][0] > _KEEP_S:
        _kept.popleft()
    _kept.append((now, memory))


def buffer(nbytes: int) -> memoryview:
    """Return new memory, at least one byte."""
    return memoryview(mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def copy(places: Sequence[tuple[int, int]], memory: memoryview, *, into: bool) -> None:
    """Gather ``(address, nbytes)`` places in a buffer (``into``), one after the other, or spread
    the buffer to them. Blocks, without the interpreter's lock.
    """
    runs: list[Run] = []
    at = 0
    for address, nbytes in places:
        runs.append((address, at, nbytes))
        at += nbytes
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    copy_runs(runs, base, into=into, stream=at >= STREAM_MIN)
