"""Threads of the library's own, and what is done around a fork, which no other thread survives.

Torch-free.
"""

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


_Call = Callable[[], None]


def at_fork(
    lock: threading.RLock,
    *,
    before: _Call | None = None,
    in_parent: _Call | None = None,
    in_child: _Call | None = None,
) -> None:
    """Hold a lock across each fork, and call these meanwhile: what is registered last is called
    first before a fork, and last after it.

    What the handler of a signal raises in such a call (Ctrl-C), the interpreter prints and forgets,
    and the rest of the call with it. So each is made once more then, and must take that; and the
    lock is taken and given back by itself, by functions in C.
    """
    calls = {"before": before, "after_in_parent": in_parent, "after_in_child": in_child}
    again = {when: _again(call) for when, call in calls.items() if call is not None}
    if again:
        os.register_at_fork(**again)
    os.register_at_fork(
        before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release
    )


def _again(call: _Call) -> _Call:
    def made() -> None:
        try:
            call()
        except BaseException:
            call()
            raise

    return made
