"""Keeps the garbage collector from looking for garbage where there is none. Torch-free.

What is planned for ten thousands of tensors is hundreds of thousands of objects that all stay for a
while. Whenever a quarter as many as there were before have been made, the collector looks at each
object of the process, those of torch among them: two thirds of what a take of 20,000 small tensors
cost a processor.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["no_collections"]

_lock = threading.Lock()
_depth = 0
_collects = False


@contextmanager
def no_collections() -> Iterator[None]:
    """The garbage collector pauses meanwhile, in all threads. Only around what computes and soon
    ends, and calls nobody: not around anything that waits.
    """
    global _depth, _collects
    with _lock:
        if not _depth:
            _collects = gc.isenabled()
            gc.disable()
        _depth += 1
    try:
        yield
    finally:
        with _lock:
            _depth -= 1
            if not _depth and _collects:
                gc.enable()
