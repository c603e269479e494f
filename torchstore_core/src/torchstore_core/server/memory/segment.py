"""A volume's memory: one sparse memfd as large as its capacity, warmed in the background.

It has no name in any file system, so nothing can be left behind, and no other process can open it
by guessing its name.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import logging
import mmap
import os
import tempfile
import threading
from collections.abc import Callable, Sequence
from typing import Any

from torchstore_core.errors import (
    ConfigurationError,
    StoreFullError,
    TransportNotReadyError,
)
from torchstore_core.machine.threads import start_thread
from torchstore_core.machine.topology import memory_left_bytes, memory_limit_bytes
from torchstore_core.machine.virtual_memory import (
    map_shared,
    populate_write,
    punch_hole,
    unmap,
)

log = logging.getLogger(__name__)

# Small, because a chunk counts as the server's own memory while it is being warmed.
_CHUNK = 4 << 20
# How far the memory may grow before the system is asked again what it has left: at most so far, and
# at most by one part in so many of what is left.
_MOST_AT_ONCE, _PART_AT_ONCE = 64 << 20, 4
# Of the memory that a process may use, one part in so many is left to other uses, at most so much.
_RESERVED_PART, _MOST_RESERVED = 16, 512 << 20


def open_memory(name: str, nbytes: int) -> int:
    """Return a descriptor of ``nbytes`` of shareable, unnamed, sparse memory.

    Where there is no memfd, an unlinked temporary file serves instead.

    Raises:
        StoreFullError: the system has no files so large, or no process can map it.
        ConfigurationError: a filter of system calls forbids it.
    """
    if hasattr(os, "memfd_create"):
        try:
            label: Any = f"torchstore:{name}".encode(errors="surrogateescape")  # in any locale
            fd = os.memfd_create(label, os.MFD_CLOEXEC)
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.EPERM, errno.EACCES):
                raise
            raise ConfigurationError(
                f"memfd_create, which makes the memory of a store, is refused: {error}. Permit it "
                "in the filter of system calls (seccomp) of this container or unit"
            ) from error
    else:
        handle, path = tempfile.mkstemp(prefix="torchstore-")
        os.unlink(path)
        fd = handle
    try:
        os.ftruncate(fd, nbytes)
        # Every transport maps the whole of it, so more than can be mapped is of no use.
        unmap(map_shared(fd, nbytes), nbytes)
    except (OSError, OverflowError) as error:
        os.close(fd)
        why = str(error) if isinstance(error, OSError) else "more than this system can address"
        if isinstance(error, OSError) and error.errno == errno.EFBIG:
            why += " (see ulimit -f)"
        raise StoreFullError(f"cannot make {nbytes} bytes of shared memory: {why}") from error
    return fd


class SegmentMemory:
    """One segment: its descriptor, its size, and how much of its beginning is known to be warm.

    Writing to a fresh page takes several times as long as writing to a warm one. :meth:`prefault`
    spends that time in a low-priority thread, through mappings that are dropped at once, so that
    the server's own memory use stays small.
    """

    def __init__(self, name: str, nbytes: int, fd: int | None = None) -> None:
        self.nbytes = nbytes
        #: Returns the end of the range that transports have registered; :meth:`trim` keeps it.
        self.registered: Callable[[], int] = lambda: 0
        self.fd = open_memory(name, nbytes) if fd is None else fd
        self._lock = threading.Lock()
        self._reserve = min(memory_limit_bytes() // _RESERVED_PART, _MOST_RESERVED)
        self._assured = 0
        self._warm = 0
        self._target = 0
        self._thread: threading.Thread | None = None
        self._closed = False

    @property
    def warm(self) -> int:
        """The number of bytes, from the start, that have been touched."""
        return self._warm

    def touched(self, end: int) -> None:
        """Record that the memory up to ``end`` has been written to."""
        if end > self._warm:
            with self._lock:
                self._warm = max(self._warm, min(end, self.nbytes))

    def may_grow(self, end: int) -> int:
        """Return how far the segment may be written to, now that this is wanted up to ``end``.

        It is less than ``end`` if the system, or a cgroup, does not have the memory for the pages
        that are still missing: whoever writes to such a page is killed. It is more if there is
        plenty.
        """
        left = memory_left_bytes()
        if left is None:
            return self.nbytes
        has = os.fstat(self.fd).st_blocks * 512
        room = has + max(0, left - self._reserve)
        start = end if end <= room else has
        return start + min((room - start) // _PART_AT_ONCE, _MOST_AT_ONCE)

    def prefault(self, target: int, done: Callable[[], None]) -> None:
        """Warm the first ``target`` bytes, or as many as the system has memory for, in a background
        thread, which then calls ``done``.

        A prefault that is already running is only extended.
        """
        if target > self._assured:
            self._assured = self.may_grow(target)
            target = min(target, self._assured)
        with self._lock:
            self._target = max(self._target, min(target, self.nbytes))
            if self._closed or self._target <= self._warm or self._thread is not None:
                return
            try:
                run = functools.partial(self._run, done)
                self._thread = start_thread(run, "torchstore-prefault")
            except TransportNotReadyError as error:  # whoever puts touches the pages first, then
                log.debug("no memory is warmed: %s", error)

    def trim(self, start: int) -> int:
        """Return the pages from ``start`` on to the system; returns the number of bytes.

        No range there may be allocated. Mappings of the pages read as zeros afterwards. Pages that
        nobody has told of are returned, too: registering memory makes some.
        """
        start = -(-max(start, self.registered()) // mmap.PAGESIZE) * mmap.PAGESIZE
        with self._lock:
            if self._closed or self._thread is not None or start >= self.nbytes:
                return 0
            had = os.fstat(self.fd).st_blocks
            if not punch_hole(self.fd, start, self.nbytes - start):
                return 0
            if start < self._warm:
                self._warm = self._target = start
                self._assured = 0
            return (had - os.fstat(self.fd).st_blocks) * 512

    def close(self) -> None:
        """Close the descriptor, after a running prefault has ended (within one step)."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            thread = self._thread
        if thread is not None:
            thread.join()
        os.close(self.fd)

    def _run(self, done: Callable[[], None]) -> None:
        try:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
        except OSError:  # not permitted here: the thread runs at normal priority
            log.debug("prefault thread keeps its priority")
        while True:
            with self._lock:
                start = self._warm & -mmap.PAGESIZE
                size = min(_CHUNK, self._target - start)
                if self._closed or self._warm >= self._target:
                    self._thread = None
                    break
            if not self._populate(start, size):
                with self._lock:
                    self._target = self._warm
                    self._thread = None
                break
            self.touched(start + size)
        if not self._closed:
            done()

    def _populate(self, start: int, size: int) -> bool:
        try:
            address = map_shared(self.fd, size, start)
        except OSError as error:
            log.warning("prefault stopped: %s", error)
            return False
        try:
            code = populate_write(address, size)
            if code == errno.EINVAL:  # an older kernel: touch page by page
                for at in range(0, size, mmap.PAGESIZE):
                    # A read allocates the page without disturbing what a client may be writing.
                    ctypes.string_at(address + at, 1)
            elif code:  # out of memory, most likely: clients will notice when they write
                log.warning("prefault stopped: %s", os.strerror(code))
                return False
            return True
        finally:
            unmap(address, size)

    @property
    def left(self) -> int | None:
        """How many bytes of memory this host, or a cgroup, has left; None: that is not known."""
        return memory_left_bytes()

    @property
    def is_here(self) -> bool:
        return True

    def read(self, offset: int, nbytes: int) -> bytes:
        """Read ``nbytes`` bytes at ``offset``, without mapping them."""
        return os.pread(self.fd, nbytes, offset)

    def write(self, offsets: Sequence[int], contents: Sequence[bytes]) -> bool:
        """Write each of the contents at its offset, without mapping them; whether all could be."""
        try:
            for offset, content in zip(offsets, contents, strict=True):
                if os.pwrite(self.fd, content, offset) < len(content):
                    return False
        except OSError as error:  # the system has no memory for a page, most likely
            log.warning("small values stay in the server's own memory: %s", error)
            return False
        return True
