"""Freezing one thread of another process, as a library that never returns would."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["frozen", "newest_thread"]

_SEIZE, _INTERRUPT, _DETACH = 0x4206, 0x4207, 17
_ALL = 0x40000000  # __WALL: threads are waited for, too
_PAUSE_S = 0.02


def newest_thread(pid: int) -> int:
    """The thread of a process that began last, of those that Python has started."""
    found: list[int] = []
    name = Path(f"/proc/{pid}/comm").read_bytes()
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it ends at this moment
            if (task / "comm").read_bytes() == name:
                found.append(int(task.name))
    return max(found)


@contextmanager
def frozen(thread: int) -> Iterator[None]:
    """Stop one thread of another process; the others go on. Its process may be killed meanwhile.

    Raises:
        OSError: this process may not trace that one, or the thread has ended.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = [ctypes.c_long] * 4
    stopped, end = threading.Event(), threading.Event()
    errors: list[OSError] = []

    def trace() -> None:  # only the thread that has begun to trace may go on with it
        try:
            for request in (_SEIZE, _INTERRUPT):
                if libc.ptrace(request, thread, 0, 0):
                    error = ctypes.get_errno()
                    raise OSError(error, os.strerror(error))
            os.waitpid(thread, _ALL)
        except OSError as error:
            errors.append(error)
            return
        finally:
            stopped.set()
        while not end.wait(_PAUSE_S):
            found, status = os.waitpid(thread, _ALL | os.WNOHANG)
            if found and not os.WIFSTOPPED(status):
                return  # it has ended with its process
        libc.ptrace(_DETACH, thread, 0, 0)

    tracer = threading.Thread(target=trace)
    tracer.start()
    stopped.wait()
    try:
        if errors:
            raise errors[0]
        yield
    finally:
        end.set()
        tracer.join()
