"""A segment as the threads that spill see it: mapped once, not anew for each piece.

To map and unmap a piece takes longer than everything else that is done with it besides the I/O. The
other processors have to be interrupted for it, and threads that map wait for each other: with two
writers, that took half of the time that the same writes took from memory that stays mapped.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import threading
from collections.abc import Iterator

from torchstore_core.machine.virtual_memory import (
    forget_pages,
    map_shared,
    populate_read,
    unmap,
)

log = logging.getLogger(__name__)

#: Of a segment of at most this many bytes, what was mapped stays in the page tables until the
#: segment is idle. Pages of a larger one leave them at once, so that the server never looks much
#: larger than it is to whoever watches its memory, or kills a process when there is none left.
KEPT = 1 << 30


class MappedSegment:
    """The mapping of one segment; any thread may use it.

    Args:
        fd: of the segment, which has its final size.
        kept: the most bytes that a segment may have for its pages to stay in the page tables.

    Attributes:
        is_filled: whether pages have stayed there since the last :meth:`rest`.
    """

    def __init__(self, fd: int, kept: int = KEPT) -> None:
        self.fd = fd
        self._nbytes = os.fstat(fd).st_size
        self._stays = self._nbytes <= kept
        self._lock = threading.Lock()
        self._address: int | None = None
        self._tried = False
        self.is_filled = False

    @contextlib.contextmanager
    def piece(self, start: int, nbytes: int) -> Iterator[memoryview]:
        """A view of whole pages of the segment, which all have memory; it is writable.

        Raises:
            OSError: the kernel has no memory for them.
        """
        whole = self._map()
        if whole is None:
            address = map_shared(self.fd, nbytes, start)
        else:
            address = whole + start
            self.is_filled = self._stays
        try:
            # Reading is enough: a page of a shared mapping is then writable, too, and the kernel
            # enters sixteen at a time, which it does not do for writing.
            code = populate_read(address, nbytes)
            if code and code != errno.EINVAL:  # EINVAL: the kernel is too old; pages are touched
                raise OSError(code, f"{nbytes:,} bytes of a segment: {os.strerror(code)}")
            with memoryview((ctypes.c_char * nbytes).from_address(address)) as chars:
                view = chars.cast("B")
                try:
                    yield view
                finally:
                    view.release()
        finally:
            if whole is None:
                unmap(address, nbytes)
            elif not self._stays:
                forget_pages(address, nbytes)

    def rest(self) -> None:
        """Nothing is moved for the time being: let all pages leave the page tables. This may take
        10 ms for each gigabyte.
        """
        self.is_filled = False
        with self._lock:
            if self._address is not None:
                forget_pages(self._address, self._nbytes)

    def close(self) -> None:
        """Remove the mapping. No piece may be in use."""
        with self._lock:
            address, self._address, self._tried = self._address, None, True
        if address is not None:
            unmap(address, self._nbytes)

    def _map(self) -> int | None:
        """Where the segment is mapped; None if there is not enough address space for all of it."""
        with self._lock:
            if not self._tried:
                self._tried = True
                try:
                    self._address = map_shared(self.fd, self._nbytes)
                except OSError as error:
                    log.info("a segment is mapped piece by piece: %s", error)
            return self._address
