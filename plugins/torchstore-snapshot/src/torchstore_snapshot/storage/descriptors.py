"""Which files are open for reading. Torch-free.

A snapshot may have more files than a process may have open, so a file is open while it is read, and
afterwards only as long as there is room.
"""

from __future__ import annotations

import errno
import os
import resource
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["NO_FILE", "OpenForReading"]

#: Errors of opening what is there instead of a file: a symbolic link to itself, a socket.
NO_FILE = {errno.ELOOP, errno.ENXIO}

# Files that nobody is reading and that stay open, so that the next read need not open them again;
# fewer if the process may not have many open.
_IDLE_MAX = 64
_SHARE = 16


class OpenForReading:
    """A file that is opened when it is read, and may be closed between two reads.

    Args:
        path: its path. It is opened once at least, here, so that a missing file is known early.

    Raises:
        FileNotFoundError: there is none, or something else in its place that cannot be opened.
        OSError: it cannot be opened.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._file = -1
        self._users = 0
        self._closed = False
        with self.opened() as file:
            self.nbytes = os.fstat(file).st_size

    @contextmanager
    def opened(self) -> Iterator[int]:
        """A context with the open file, which any number of threads may be in at a time.

        Raises:
            OSError: it cannot be opened (again): FileNotFoundError if it was removed.
        """
        with _lock:
            if self._file < 0:
                # If it is a pipe, this must not wait for a writer; pipes have no bytes of a file.
                flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
                try:
                    self._file = os.open(self._path, flags)
                except OSError as error:
                    if error.errno not in NO_FILE:
                        raise
                    raise FileNotFoundError(error.errno, error.strerror, self._path) from error
            self._users += 1
            _idle.pop(self, None)
        try:
            yield self._file
        finally:
            with _lock:
                self._users -= 1
                if not self._users:
                    _idle[self] = None
                    if self._closed:
                        self._release()
                _close_some()

    def close(self) -> None:
        """Close the file when nobody reads it any more. Idempotent."""
        with _lock:
            self._closed = True
            if not self._users:
                self._release()

    def _release(self) -> None:
        _idle.pop(self, None)
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)


_lock = threading.Lock()
# Those that nobody is reading, the one that was read last at the end.
_idle: OrderedDict[OpenForReading, None] = OrderedDict()


def _close_some() -> None:
    if len(_idle) <= 1:
        return
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _IDLE_MAX if soft == resource.RLIM_INFINITY else min(_IDLE_MAX, soft // _SHARE)
    while len(_idle) > max(most, 1):
        next(iter(_idle))._release()


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()  # another thread may have held it


os.register_at_fork(after_in_child=_after_fork)
