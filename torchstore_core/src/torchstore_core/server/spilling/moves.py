"""Moves values between memory and the spill file: starts the I/O, and notes how it ended."""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from torchstore_core import moments
from torchstore_core.errors import StoreFullError, TorchStoreError
from torchstore_core.reports.units import human_bytes
from torchstore_core.server.memory.allocator import ALIGNMENT, Allocator, rounded
from torchstore_core.server.memory.volume_record import VolumeRecord
from torchstore_core.server.spilling.mapped import MappedSegment
from torchstore_core.server.spilling.policy import Residency, State, Tracked
from torchstore_core.server.spilling.spill_file import DamagedError, SpillFile, spanned, write_all
from torchstore_core.server.spilling.workers import Workers

log = logging.getLogger(__name__)

_PAGE = 4096
_WRITERS = 2
_READERS = 4
_NICE = 10
# A thread reads at least so many pieces of a value.
_LEAST_PIECES = 2
# A job writes several values, of so many bytes in all.
_BATCH = 16 << 20
# Values of at most so many bytes share pages of the file, and are moved together.
_SMALL = 64 << 10
# A job moves at most so many of them, and about so many bytes: what follows takes the event loop a
# few milliseconds.
_MOST_TOGETHER, _TOGETHER = 512, 4 << 20
# So many values at most are prepared for writing in one step of the event loop.
_MOST_AT_ONCE = 4 * _MOST_TOGETHER
# After the disk has refused a write, none is tried for so many seconds.
_PAUSE_S = 1.0
# The same trouble is logged again after so many seconds.
_SILENCE_S = 60.0

_Written = tuple[Tracked, list[int], Exception | None]


class Mover:
    """Moves values between the segments of this process and one spill file.

    Args:
        file: where they are spilled to.
        volumes: whose memory it is.
        memories: the descriptors of their segments.
        soon: calls something in the thread of the event loop; it may be called in any thread.

    Attributes:
        trouble: why nothing could be written the last time; empty if it could.
        written_bytes, read_bytes: how much has been moved so far.
    """

    def __init__(
        self,
        file: SpillFile,
        volumes: Sequence[VolumeRecord],
        memories: Sequence[int],
        soon: Callable[[Callable[[], None]], None],
    ) -> None:
        self.file = file
        self._volumes = volumes
        self._memories = [MappedSegment(fd) for fd in memories]
        self._writers = Workers("torchstore-spill", _WRITERS, _NICE, soon)
        self._readers = Workers("torchstore-unspill", _READERS, 0, soon)
        self._reading: dict[int, Tracked] = {}  # by their numbers
        self._repeating = False
        self._trimming = False
        self._paused_until = 0.0
        self._is_full = False  # which is why it pauses
        self.trouble = ""
        self._troubles = 0
        self._logged: dict[str, float] = {}  # when each trouble was, the last time
        self.written_bytes = self.read_bytes = 0

    def begin(
        self,
        values: Residency,
        moved: Callable[[bool], None],
        read: Callable[[Tracked], None],
        later: Callable[[float, Callable[[], None]], object] = lambda delay, call: None,
    ) -> None:
        """The values that it moves, what to call when it has tried to move some, with whether that
        has changed anything, and what to call with one that was read, or could not be, just before
        its state changes; that raises StoreFullError if it may not change yet. ``later`` calls
        something after so many seconds.
        """
        self._values = values
        self._moved = moved
        self._ended = read
        self._later = later

    def repeat(self) -> None:
        """Until :meth:`go_on`, nothing is read or written: what is noted has happened before."""
        self._repeating = True

    def go_on(self) -> None:
        """From now on, the file has what the values say; those that were being read are read."""
        self._repeating = False
        there = [*self._values.all(), *[one for one in self._reading.values() if one.gone]]
        self.file.occupy([one.extent for one in there if one.extent is not None])
        self._submit_reads(self.reading)

    @property
    def reading(self) -> list[Tracked]:
        """The values that are being read, with those that nobody holds any more."""
        return list(self._reading.values())

    # ---- to disk --------------------------------------------------------------------------

    def write(self, nbytes: int, *, at_any_price: bool = False) -> None:
        """Have values written, the least recently used first, until ``nbytes`` are under way.

        Args:
            at_any_price: somebody waits for it. If the spill file is full, also give up the copies
                in it of values that are in memory.
        """
        self._write(nbytes, at_any_price)
        if at_any_price:
            self._writers.hurry()

    def _write(self, nbytes: int, at_any_price: bool) -> None:
        values = self._values
        # A copy that a get has left in the full file can be given up at once for another value.
        at_once = at_any_price and self._is_full and values.copied
        if moments.monotonic() < self._paused_until and not at_once:
            return
        wanted = nbytes - values.bytes_of[State.WRITING]
        if wanted <= 0:  # what is under way is enough
            return
        found: list[Tracked] = []
        if self.file.free:
            found = values.oldest(State.DIRTY, wanted, self._fits, _MOST_AT_ONCE)
        if not found and at_any_price:
            found = self._give_up_copies()
        batch: list[Tracked] = []
        size = 0
        for tracked in found:
            if _is_small(tracked):
                continue
            extent = self.file.reserve(tracked.value.offset % _PAGE, tracked.value.nbytes)
            if extent is None:  # those before it took the room
                continue
            tracked.extent = extent
            batch.append(tracked)
            size += tracked.nbytes
            if size >= _BATCH:
                self._submit(batch)
                batch, size = [], 0
        if batch:
            self._submit(batch)
        for some in _portions([tracked for tracked in found if _is_small(tracked)]):
            self._submit_together(some)
        if not found and values.oldest(State.DIRTY, wanted, most=1):
            full = human_bytes(self.file.capacity)
            self._pause(f"its capacity of {full} is used up (see spill_capacity=)")
            self._is_full = True

    def _fits(self, tracked: Tracked, more: int = 0) -> bool:
        """Whether the file has room for a value, if ``more`` bytes are freed there."""
        value = tracked.value
        head = 0 if _is_small(tracked) else value.offset % _PAGE
        return spanned(head, value.nbytes) <= self.file.free + more

    def _give_up_copies(self) -> list[Tracked]:
        """Make room in the file for the least recently used value for which that is possible, by
        giving up copies of values that are in memory; the most recently used first.
        """
        values = self._values
        found = values.oldest(State.DIRTY, 1, lambda tracked: self._fits(tracked, values.copied))
        while found and not self._fits(found[0]) and (clean := values.newest(State.CLEAN)):
            values.move(clean, State.DIRTY)
            self._discard(clean)
        return found

    def _submit_together(self, batch: Sequence[Tracked]) -> None:
        """Write small values one after the other, as far as there is room."""
        room = self.file.reserve_together([tracked.value.nbytes for tracked in batch])
        if room is None:
            if len(batch) > 1:
                self._submit_together(batch[: len(batch) // 2])
                self._submit_together(batch[len(batch) // 2 :])
            return
        whole, extents = room
        places: list[bytes | tuple[int, int, int]] = []
        for tracked, extent in zip(batch, extents, strict=True):
            value = tracked.value
            here = value.volume, value.nbytes, value.offset
            places.append(here if value.data is None else value.data)
            tracked.extent = extent

        def job() -> list[_Written]:
            contents = [
                one if isinstance(one, bytes) else os.pread(self._memories[one[0]].fd, *one[1:])
                for one in places
            ]
            sums = self.file.write_together(contents, whole)
            return [(*one, None) for one in zip(batch, sums, strict=True)]

        self._begin_writing(batch, job)

    def _submit(self, batch: Sequence[Tracked]) -> None:
        places = [(t, *t.value.places[0], t.extent) for t in batch]

        def job() -> list[_Written]:
            done: list[_Written] = []
            for tracked, volume, offset, extent in places:
                if extent is None or tracked.gone:
                    done.append((tracked, [], None))
                    continue
                try:
                    sums = self.file.write(self._memories[volume], offset, extent)
                except OSError as error:
                    done.append((tracked, [], error))
                else:
                    done.append((tracked, sums, None))
            return done

        self._begin_writing(batch, job)

    def _begin_writing(self, batch: Sequence[Tracked], job: Callable[[], list[_Written]]) -> None:
        """Have values written by a job; if it fails, none of them was."""
        for tracked in batch:
            self._values.move(tracked, State.WRITING)
        troubles = self._troubles

        def failed(error: Exception) -> None:
            self._written([(tracked, [], error) for tracked in batch], troubles)

        self._writers.submit(lambda: functools.partial(self._written, job(), troubles), failed)

    def _written(self, done: list[_Written], troubles: int) -> None:
        """``troubles``: how often nothing could be written before these writes were begun."""
        for tracked, sums, error in done:
            if tracked.gone:
                self._discard(tracked)
            elif error is not None:
                self._discard(tracked)
                self._values.move(tracked, State.DIRTY, first=True)
                self._pause(_why(error))
            else:
                if troubles == self._troubles:  # what failed meanwhile says more: this found a gap
                    self.trouble = ""
                tracked.sums = sums
                self.written_bytes += tracked.value.nbytes
                self._values.move(tracked, State.CLEAN)
        self._moved(any(tracked.gone or error is None for tracked, _, error in done))

    def _pause(self, why: str) -> None:
        now = moments.monotonic()
        if why != self.trouble and now - self._logged.get(why, -_SILENCE_S) >= _SILENCE_S:
            self._logged[why] = now
            log.warning("cannot spill to %s: %s", self.file.directory, why)
        self.trouble, self._is_full = why, False
        self._troubles += 1
        self._paused_until = now + _PAUSE_S

    # ---- from disk ------------------------------------------------------------------------

    def read(self, wanted: Sequence[Tracked]) -> bool:
        """Have values read into memory. Returns False, and does nothing, if there is no room for
        all of them.
        """
        places: list[tuple[int, int]] = []
        for tracked in wanted:
            place = self._place(tracked)
            if place is None:
                for taken, other in zip(places, wanted, strict=False):
                    self._free_place(other, taken)
                return False
            places.append(place)
        for tracked, place in zip(wanted, places, strict=True):
            self.note_reading(tracked, place)
        if not self._repeating:
            self._submit_reads(wanted)
        return True

    def note_reading(self, tracked: Tracked, place: tuple[int, int]) -> None:
        """A value is being read to a place, which is allocated. Whether it could be before says
        nothing about this time.
        """
        tracked.place, tracked.failure = place, ""
        self._values.move(tracked, State.READING)
        self._reading[tracked.number] = tracked

    def _submit_reads(self, wanted: Iterable[Tracked]) -> None:
        small: list[Tracked] = []
        for tracked in wanted:
            if _is_small(tracked):
                small.append(tracked)
            else:
                self._submit_read(tracked)
        small.sort(key=_position)
        for some in _portions(small):
            job = functools.partial(self._read_together_in_thread, some)
            self._readers.submit(job, functools.partial(self._none_read, some))

    def _submit_read(self, tracked: Tracked) -> None:
        """Have all readers read pieces of a large value."""
        count = len(tracked.sums)
        step = max(-(-count // _READERS), _LEAST_PIECES)
        shares = [slice(start, start + step) for start in range(0, count, step)]
        tracked.reads, tracked.error = len(shares), None
        for share in shares:
            job = functools.partial(self._read_in_thread, tracked, share)
            self._readers.submit(job, functools.partial(self._share_read, tracked))

    def _place(self, tracked: Tracked) -> tuple[int, int] | None:
        """Memory for a value, in the volume where it was if there is room. What is in the server's
        own memory only counts there; the offset is then -1.
        """
        value, extent = tracked.value, tracked.extent
        head = 0 if extent is None else extent.head
        order = sorted(self._volumes, key=lambda v: v.index != value.volume)
        for volume in order:
            if volume.lost or volume.free < tracked.nbytes:
                continue
            if tracked.is_inline:
                volume.inline += tracked.nbytes
                return volume.index, -1
            if _is_small(tracked):
                offset = volume.allocator.allocate(value.nbytes)
            else:
                offset = _allocate_at(volume.allocator, head, value.nbytes)
            if offset is not None:
                return volume.index, offset
        return None

    def _read_in_thread(self, tracked: Tracked, share: slice) -> Callable[[], None]:
        volume, offset = tracked.place
        extent, memory = tracked.extent, self._memories[volume]
        if extent is not None and not tracked.gone:
            self.file.read(memory, offset, extent, tracked.sums, share)
        return functools.partial(self._share_read, tracked, None)

    def _free_place(self, tracked: Tracked, place: tuple[int, int]) -> None:
        """Free memory for a value; see :meth:`_place`."""
        at, offset = place
        if tracked.is_inline:
            self._volumes[at].inline -= tracked.nbytes
        else:
            self._volumes[at].allocator.free([(offset, tracked.value.nbytes)])

    def _read_together_in_thread(self, wanted: Sequence[Tracked]) -> Callable[[], None]:
        there = [
            (tracked, tracked.extent, tracked.sums)
            for tracked in wanted
            if tracked.extent is not None and not tracked.gone
        ]
        found = self.file.read_together([(extent, sums) for _, extent, sums in there])
        contents: dict[int, bytes | Exception] = {}
        for (tracked, _, _), content in zip(there, found, strict=True):
            contents[tracked.number] = content
            if isinstance(content, bytes) and not tracked.is_inline:
                volume, offset = tracked.place
                try:
                    write_all(self._memories[volume].fd, memoryview(content), offset)
                    contents[tracked.number] = b""
                except OSError as error:
                    contents[tracked.number] = error
        return functools.partial(self._read_together, wanted, contents)

    def _read_together(
        self, wanted: Sequence[Tracked], contents: Mapping[int, bytes | Exception]
    ) -> None:
        for tracked in wanted:
            content = contents.get(tracked.number, b"")
            if isinstance(content, bytes):
                tracked.content = content
                self._read(tracked, None)
            else:
                self._read(tracked, content)
        self._moved(True)

    def _none_read(self, wanted: Sequence[Tracked], error: Exception) -> None:
        self._read_together(wanted, {tracked.number: error for tracked in wanted})

    def _share_read(self, tracked: Tracked, error: Exception | None) -> None:
        tracked.error = tracked.error or error
        tracked.reads -= 1
        if not tracked.reads:
            self._read(tracked, tracked.error)
            self._moved(True)

    def _read(self, tracked: Tracked, error: Exception | None) -> None:
        if error is not None and not tracked.gone:
            tracked.is_damaged = isinstance(error, DamagedError)
            tracked.failure = _why(error)
            log.error("%r cannot be read from %s: %s", tracked.key, self.file.directory, error)
        self._end_read(tracked)

    def _end_read(self, tracked: Tracked) -> None:
        try:
            self._ended(tracked)
        except StoreFullError as failed:  # what comes next would not know of it
            log.warning("%r was read, but that cannot be noted yet: %s", tracked.key, failed)
            self._later(_PAUSE_S, functools.partial(self._end_read_again, tracked))
            return
        self.note_read(tracked)
        waiting, tracked.waiting = tracked.waiting, []
        for ticket in waiting:
            ticket.one_read()

    def _end_read_again(self, tracked: Tracked) -> None:
        self._end_read(tracked)
        self._moved(True)

    def note_read(self, tracked: Tracked) -> None:
        """A value has been read, unless it has a ``failure``."""
        del self._reading[tracked.number]
        at, offset = tracked.place
        volume, value = self._volumes[at], tracked.value
        if tracked.gone or tracked.failure:
            self._free_place(tracked, tracked.place)
        if tracked.gone:
            self._discard(tracked)
        elif tracked.failure:
            self._values.move(tracked, State.ON_DISK)
        else:
            value.volume, value.offset = at, offset
            if tracked.is_inline:
                value.data, tracked.content = tracked.content, b""
            else:
                volume.memory.touched(offset + value.nbytes)
            self.read_bytes += value.nbytes
            self._values.move(tracked, State.CLEAN)

    # ---- ends -----------------------------------------------------------------------------

    def forget(self, tracked: Tracked) -> bool:
        """Nobody holds a value any more. Returns whether it has memory that can be freed now."""
        if tracked.state is State.READING:
            return False  # freed as soon as nothing is read into it any more
        if tracked.state is not State.WRITING:
            self._discard(tracked)
        return tracked.state is not State.ON_DISK

    def _discard(self, tracked: Tracked) -> None:
        if tracked.extent is not None:
            if not self._repeating:
                self.file.release(tracked.extent)
                if self._is_full:  # there is room again
                    self._is_full, self._paused_until = False, 0.0
            tracked.extent = None

    def trim(self) -> None:
        """Return the unused end of the file to the file system, and let the segments leave the page
        tables of this process. The former takes long on some file systems, so the space is not
        returned whenever a value goes, but used for the next one.
        """
        if self._trimming:
            return
        tail = self.file.take_tail()
        filled = [memory for memory in self._memories if memory.is_filled]
        if tail is None and not filled:
            return
        self._trimming = True

        def job() -> Callable[[], None]:
            for memory in filled:
                memory.rest()
            if tail is not None:
                with contextlib.suppress(OSError):  # then it stays on disk, and is used again
                    self.file.cut(tail)
            return functools.partial(self._trimmed, tail)

        self._writers.submit(job, functools.partial(self._trimmed, tail))

    def _trimmed(self, tail: tuple[int, int] | None, error: Exception | None = None) -> None:
        self._trimming = False
        if tail is not None:
            self.file.return_tail(tail)
            self._moved(True)

    def close(self) -> None:
        """End the threads and close the file."""
        self.file.stop()
        self._writers.close()
        self._readers.close()
        for memory in self._memories:
            memory.close()
        self.file.close()


def _why(error: Exception) -> str:
    """Why something could not be read or written, for people.

    >>> _why(OSError(errno.ENOSPC, "said by the system")), _why(MemoryError())
    ('said by the system', 'MemoryError')
    """
    if isinstance(error, OSError):
        return error.strerror or str(error) or os.strerror(error.errno or errno.EIO)
    if isinstance(error, TorchStoreError):
        return error.message
    return f"{type(error).__name__}: {error}".removesuffix(": ")


def _is_small(tracked: Tracked) -> bool:
    return tracked.is_inline or tracked.value.nbytes <= _SMALL


def _portions(small: Iterable[Tracked]) -> Iterator[list[Tracked]]:
    """Small values, as many at a time as are moved together."""
    portion: list[Tracked] = []
    size = 0
    for tracked in small:
        portion.append(tracked)
        size += tracked.nbytes
        if len(portion) == _MOST_TOGETHER or size >= _TOGETHER:
            yield portion
            portion, size = [], 0
    if portion:
        yield portion


def _position(tracked: Tracked) -> int:
    return -1 if tracked.extent is None else tracked.extent.runs[0][0]


def _allocate_at(allocator: Allocator, head: int, nbytes: int) -> int | None:
    """Allocate memory at the same position within a page, because it is then read without a copy;
    if there is none, anywhere.

    >>> _allocate_at(Allocator(1 << 20), 128, 100), _allocate_at(Allocator(4096), 128, 4096)
    (128, 0)
    """
    size = max(rounded(nbytes), ALIGNMENT)
    start = allocator.allocate(size + _PAGE)
    if start is None:
        return allocator.allocate(nbytes)
    offset = start + (head - start) % _PAGE
    spare = [(start, offset - start), (offset + size, start + _PAGE - offset)]
    allocator.free([(at, length) for at, length in spare if length])
    return offset
