"""Keeps the garbage collector from looking for garbage where there is none. Torch-free.

What is planned for ten thousands of tensors is hundreds of thousands of objects that all stay for a
while. Whenever a quarter as many as there were before have been made, the collector looks at each
object of the process, those of torch among them: two thirds of what a take of 20,000 small tensors
cost a processor.
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["no_collections"]

# A collection may begin while it is held, and run what pauses collections, too.
_lock = threading.RLock()
_depth = 0
_collects = False


@contextmanager
def no_collections() -> Iterator[None]:
    """The garbage collector pauses meanwhile, in all threads. Only around what computes and soon
    ends, and calls nobody: not around anything that waits.
    """
    global _depth, _collects
    with _lock:
        _depth += 1
        if _depth == 1:
            _collects = gc.isenabled()
            gc.disable()
    try:
        yield
    finally:
        with _lock:
            if _depth == 1 and _collects:
                gc.enable()
            _depth -= 1


def _after_fork_in_child() -> None:
    """The threads that have paused the collector are not there."""
    global _lock, _depth
    if _depth and _collects:
        gc.enable()
    _lock, _depth = threading.RLock(), 0


os.register_at_fork(after_in_child=_after_fork_in_child)
