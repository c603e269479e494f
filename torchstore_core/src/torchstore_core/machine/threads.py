"""Threads of the library's own. Torch-free."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from torchstore_core.errors import TransportNotReadyError


def start_thread(target: Callable[[], object], name: str) -> threading.Thread:
    """Start a daemon thread.

    Raises:
        TransportNotReadyError: this process can have no more threads.
    """
    thread = threading.Thread(target=target, name=name, daemon=True)
    try:
        thread.start()
    except (RuntimeError, MemoryError) as error:
        raise TransportNotReadyError(
            f"process {os.getpid()} can start no more threads ({error}), and {name} needs one. See "
            "ulimit -u, the pids limit of its container or unit, and its address space (ulimit -v)"
        ) from error
    return thread
