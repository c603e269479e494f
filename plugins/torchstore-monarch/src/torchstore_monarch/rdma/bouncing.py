"""Memory that the engine may touch for longer than it says.

After a transfer has failed or was given up, Monarch's TCP fallback continues what it has begun, and
may read or write memory that its owner has freed or given to others. So without RDMA hardware, it
gets only buffers of our own, and those of a failed transfer are kept for a while. (With hardware,
the network card itself stops when a buffer is dropped.)
"""

from __future__ import annotations

import functools
import time
from collections import deque

__all__ = ["is_direct", "keep"]

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
