"""The log of a server: records in shared memory, which survive the process that writes them.

Writing one is a copy into memory and nothing else: no system call, no message, no wait. The pages
belong to a memfd of which the keeper has a descriptor, so they stay when the server is killed at
whatever instruction. A record counts from the moment when the word at the head of the log says
that the log reaches beyond it, which is one store to an aligned address.

Memory is only written to when the system has given it: whoever writes to a page that there is none
for is killed. So a log that cannot grow says so, and has :data:`SPARE` bytes left then.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import struct
import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple

from torchstore_core import moments
from torchstore_core.errors import StoreClosedError, StoreFullError
from torchstore_core.machine.copying import compiled
from torchstore_core.machine.virtual_memory import MADV_POPULATE_WRITE, punch_hole
from torchstore_core.server.memory.segment import open_memory

#: So many bytes of a log are kept for what cannot be refused.
SPARE = 4096
#: And of these so many for the short records by which the steps of a request end, when the steps
#: may be as long as anything.
SPARE_OF_STEPS = 512

_MAGIC = 0x31676F4C65726F54  # "ToreLog1"
_HEAD = mmap.PAGESIZE
# Of a record: bytes of its body, its kind, the session, and when it was written.
_RECORD = struct.Struct("<IHId")
_AT = _RECORD.size
# What a record takes besides its body: its head, and up to 8 bytes to where the next one begins.
_MORE = _AT + 8
_FIRST = 1 << 20
_LARGEST_STEP = 256 << 20
# How many bytes get pages at a time, and when: so long before they are needed. The pages of a step
# take some 20 µs on a virtual machine, for 60 puts of 1 KB.
_STEP = 64 << 10
_EARLY = 32 << 10
_MAGIC_WORD, _END_WORD = 0, 1


def _append_record(
    memory: mmap.mmap, kind: int, session: int, at: float, body: bytes | bytearray
) -> int:
    """Append a record to a log. Returns where the log ends then; -1, and does nothing, if there is
    no room.
    """
    with memoryview(memory)[:_HEAD].cast("Q") as words:
        start = words[_END_WORD]
        end = start + _AT + len(body)
        if end + 8 > len(memory):
            return -1
        _RECORD.pack_into(memory, start, len(body), kind, session, at)
        memory[start + _AT : end] = body
        words[_END_WORD] = end = (end + 7) & -8
        return end


_append: Callable[[mmap.mmap, int, int, float, bytes | bytearray], int]
_append = compiled("append_record") or _append_record


def _do_nothing() -> None:
    pass


class Record(NamedTuple):
    """One record.

    Args:
        kind: what it is, see ``keeping.recorded``.
        session: the serial number of the session that it is about.
        at: when it was written, by the monotonic clock of this host, in seconds.
        body: what its kind says.
    """

    kind: int
    session: int
    at: float
    body: bytes


class Records:
    """Records one after the other, of which the next can be looked at before it is taken."""

    def __init__(self, records: Iterator[Record]) -> None:
        self._records = records
        self._next: Record | None = None

    def __iter__(self) -> Iterator[Record]:
        return self

    def __next__(self) -> Record:
        found = self.peek()
        if found is None:
            raise StopIteration
        self._next = None
        return found

    def peek(self) -> Record | None:
        """The next one; None: there is none, and will be none."""
        if self._next is None:
            self._next = next(self._records, None)
        return self._next


class Log:
    """A log, new or of an earlier life.

    Args:
        fd: of an earlier life's; None: begin a new one.

    Attributes:
        fd: of its memory.
        when_used: called when few bytes of the memory that has pages are left, after which
            :meth:`make_ready` is due. Not called again before that.
        is_full: whether the system has not given it the memory that it was last asked for.

    Raises:
        StoreClosedError: ``fd`` is no log of this version.
        StoreFullError: the system has no memory for it.
        OSError: this process has no descriptor left for it.
    """

    def __init__(self, fd: int | None = None) -> None:
        self.fd = open_memory("log", _FIRST) if fd is None else fd
        self.when_used: Callable[[], None] = _do_nothing
        self.is_full = False
        self._when_long: Callable[[], None] = _do_nothing
        self._limit = sys.maxsize
        try:
            self._map(os.fstat(self.fd).st_size)
            if fd is None:
                self._populate(0, mmap.PAGESIZE)
        except OSError as error:
            if fd is None:
                os.close(self.fd)
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise
            raise StoreFullError(f"there is no memory for the server's log: {error}") from error
        if fd is None:
            self._words[_MAGIC_WORD] = _MAGIC
            self._words[_END_WORD] = _HEAD
        elif self._words[_MAGIC_WORD] != _MAGIC:
            raise StoreClosedError("what the server before has left is no log of this version")
        self._end = self._words[_END_WORD]
        # Memory up to here has pages; a record whose body would end beyond the second position
        # needs more; behind a record that ends beyond the third, somebody is told.
        self._ready = self._room = self._notice = 0

    def _map(self, size: int) -> None:
        memory = mmap.mmap(self.fd, size)
        self._memory, self._size = memory, size
        self._words = memoryview(memory)[:_HEAD].cast("Q")

    @property
    def nbytes(self) -> int:
        """How long it is."""
        return self._end - _HEAD

    @property
    def end(self) -> int:
        """Where the next record begins."""
        return self._end

    def refresh(self) -> None:
        """Another process, which has ended, has written to it.

        Raises:
            StoreFullError: it has become longer than what this process can map.
        """
        size = os.fstat(self.fd).st_size
        if size != self._size:
            try:
                self._map_anew(size)
            except OSError as error:
                raise self._full(error) from error
        self._end = self._words[_END_WORD]

    def _map_anew(self, size: int) -> None:
        words, memory = self._words, self._memory
        self._map(size)
        words.release()
        memory.close()

    @property
    def memory_nbytes(self) -> int:
        """How much memory it has, as far as that has been written to."""
        return os.fstat(self.fd).st_blocks * 512

    def clear(self, spare: int = 0) -> None:
        """Forget all records. So many bytes of the memory stay: it costs less to write to them
        again.
        """
        self._words[_END_WORD] = self._end = _HEAD
        self.when_used = _do_nothing
        self.expect(sys.maxsize, _do_nothing)
        self.give_back(spare)

    def give_back(self, spare: int = 0) -> None:
        """Give the system the memory that has no records, except for so many bytes, and those that
        are for what cannot be refused.
        """
        begin = (self._end + _MORE + max(spare, SPARE) + mmap.PAGESIZE - 1) & -mmap.PAGESIZE
        if begin < self._size:
            punch_hole(self.fd, begin, self._size - begin)
            self._is_ready_to(min(self._ready, begin))

    def expect(self, limit: int, when_long: Callable[[], None]) -> None:
        """Call a function once when a record has gone beyond a position.

        That is only a notice: what is appended then is recorded like anything else.
        """
        self._limit, self._when_long = limit, when_long
        self._notice = min(limit, self._ready - _EARLY)

    def make_ready(self) -> None:
        """Give memory to what is appended next, so that it costs that no page fault.

        On a virtual machine a fault on new memory takes longer than recording a put.
        """
        self._notice = self._limit
        with contextlib.suppress(OSError):  # then whatever needs it asks again
            self._provide(max(self._ready, self._end) + _STEP)

    def make_room(self, nbytes: int = 0, spare: int = SPARE) -> None:
        """Have memory for a record with a body of so many bytes, and so many bytes behind it.

        Raises:
            StoreFullError: the system does not give it.
        """
        least = self._end + _MORE + nbytes + spare
        if least <= self._ready:
            return
        try:
            try:
                self._provide(least + _STEP)
            except OSError:
                self._provide(least)
        except OSError as error:
            self.is_full = True
            raise self._full(error) from error
        self.is_full = False

    def _full(self, error: OSError) -> StoreFullError:
        why = error.strerror or str(error)
        return StoreFullError(
            f"the server's log, which has {self.nbytes:,} bytes, cannot grow: {why}. What is not "
            "recorded there would be lost with the server, so nothing was changed. Values can be "
            "read, and the server goes on by itself as soon as it gets memory: free some on its "
            "host, or raise the limit that it has reached (of its cgroup, of its address space, "
            "of its mappings in vm.max_map_count, or of the file system that has its memory)",
            details={"log_bytes": self.nbytes, "reason": why},
        )

    def _provide(self, end: int) -> None:
        """Have pages up to a position.

        Raises:
            OSError: the system does not give them.
        """
        end = (end + mmap.PAGESIZE - 1) & -mmap.PAGESIZE
        if end > self._size:
            self._grow(end)
        begin = max(self._ready, self._end) & -mmap.PAGESIZE
        if begin < end:
            self._populate(begin, end - begin)
            self._is_ready_to(end)

    def _is_ready_to(self, end: int) -> None:
        self._ready = end
        self._room = end - SPARE - _MORE
        self._notice = min(self._limit, end - _EARLY)

    def _populate(self, begin: int, nbytes: int) -> None:
        try:
            self._memory.madvise(MADV_POPULATE_WRITE, begin, nbytes)
        except OSError as error:
            if error.errno == errno.EFAULT:  # as the kernel says it of a full file system
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error
            if error.errno != errno.EINVAL:
                raise
            os.posix_fallocate(self.fd, begin, nbytes)  # an older kernel

    def append_from(self, other: Log, start: int) -> None:
        """Append the records of another log from a position on.

        Raises:
            StoreFullError: the system does not give the log more memory. Nothing was appended.
        """
        nbytes = other.end - start
        self.make_room(nbytes)
        end = self._end + nbytes
        self._memory[self._end : end] = other._memory[start : other.end]
        self._words[_END_WORD] = self._end = end

    def append(self, kind: int, session: int, body: bytes | bytearray, spare: int = 0) -> None:
        """Append a record. When this returns, it is there for the next life.

        Args:
            spare: how many bytes have to be left behind it.

        Raises:
            StoreFullError: the system does not give the log more memory. Nothing was appended.
        """
        if self._end + len(body) > self._room:
            self.make_room(len(body), spare)
        self._end = end = _append(self._memory, kind, session, moments.monotonic(), body)
        if end > self._notice:
            self._look()

    def _look(self) -> None:
        """Records have come to a position of which somebody is to be told."""
        if self._end > self._limit:
            self._limit = sys.maxsize
            self._when_long()
        if self._end > self._ready - _EARLY:
            self.when_used()
        self._notice = self._limit

    def __iter__(self) -> Iterator[Record]:
        """All records, from the first."""
        return self.records(_HEAD)

    def records(self, start: int) -> Iterator[Record]:
        """The records from a position on."""
        memory = self._memory
        while start < self._end:
            nbytes, kind, session, at = _RECORD.unpack_from(memory, start)
            begin = start + _AT
            end = begin + nbytes
            yield Record(kind, session, at, memory[begin:end])
            start = (end + 7) & -8

    def _grow(self, end: int) -> None:
        size = self._size
        while size < end:
            size += min(size, _LARGEST_STEP)
        try:
            self._resize(size)
        except OSError:
            if end == size:
                raise
            self._resize(end)

    def _resize(self, size: int) -> None:
        os.ftruncate(self.fd, size)
        try:
            self._map_anew(size)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self.fd, self._size)
            raise

    def close(self) -> None:
        """Unmap it, and close its descriptor."""
        self._words.release()
        self._memory.close()
        os.close(self.fd)
