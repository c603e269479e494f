"""Memory that the engine may touch for longer than it says.

Monarch's TCP fallback goes on with what it has begun when a transfer has failed or was given up,
and reads or writes memory that its owner has freed, or given to others. So without RDMA hardware
it only gets buffers of our own, and those of a failed transfer are kept for a while. (With hardware
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
    """Whether there is RDMA hardware here, which needs no buffers between."""
    from monarch.rdma import is_ibverbs_available

    return bool(is_ibverbs_available())


def keep(memory: object) -> None:
    """Keep what a failed transfer used."""
    now = time.monotonic()
    while _kept and now - _kept[0][0] > _KEEP_S:
        _kept.popleft()
    _kept.append((now, memory))
