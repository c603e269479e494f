"""Moves values between memory and spill files: orders the I/O, and notes how it ended."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Protocol

from torchstore_core import moments
from torchstore_core.errors import StoreFullError
from torchstore_core.reports.units import human_bytes
from torchstore_core.server.memory.allocator import ALIGNMENT, Allocator, rounded
from torchstore_core.server.memory.volume_record import VolumeRecord
from torchstore_core.server.spilling.policy import Residency, State, Tracked
from torchstore_core.server.spilling.space import SpillSpace
from torchstore_core.server.spilling.threads import READERS, SpillDevice, SpillThreads
from torchstore_core.wire.volumes import spilling as orders
from torchstore_core.wire.volumes.spilling import Place, SpillDone, SpillTrouble, spanned

log = logging.getLogger(__name__)

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
# Of what has no extent any more, and is not wanted.
_NOWHERE = orders.Extent((), 0, 0)


class HasFile(Protocol):
    """Whoever has a spill file, and carries out orders for it: ``threads.SpillThreads``, or a
    volume in another process.
    """

    @property
    def file_system(self) -> str:
        """The type of the file system; empty if it is not known."""

    @property
    def most(self) -> int:
        """The bytes that the file may have in the end, as far as is known."""

    @property
    def size(self) -> int:
        """Where what was ever written ends."""

    @property
    def frees(self) -> bool:
        """Whether it is to be told what is not in use any more."""

    @property
    def is_filled(self) -> bool:
        """Whether it is worth while to let its segments leave the page tables."""

    def submit(
        self,
        order: orders.SpillOrder,
        done: Callable[[SpillDone], None],
        wanted: Callable[[int], bool],
    ) -> None:
        """Have an order carried out, see ``SpillThreads.submit``."""

    def hurry(self) -> None:
        """Somebody waits for what is being written."""

    def close(self) -> None:
        """No orders are carried out any more."""


class Site:
    """One spill file, as the event loop sees it.

    Args:
        capacity: the most bytes that the file may have.
        file: whoever has it.

    Attributes:
        space: which parts of it are in use.
        trouble: why nothing could be written the last time; empty if it could.
        troubles: how often nothing could be.
        paused_until: until when nothing is written.
        is_full: whether that is because its capacity is used up.
        is_trimming: whether its end is being cut off.
        lost: whether it is gone for good.
        freed: parts of it that are not in use any more, and it has not been told yet.
    """

    def __init__(self, capacity: int, file: HasFile) -> None:
        self.space = SpillSpace(capacity)
        self.file = file
        self.trouble = ""
        self.troubles = 0
        self.paused_until = 0.0
        self.is_full = False
        self.is_trimming = False
        self.lost = False
        self.freed: list[tuple[int, int]] = []

    @property
    def left(self) -> int:
        """Bytes that can still be written, as far as is known: others may fill the disk, too."""
        return 0 if self.lost else min(self.space.free, max(0, self.file.most - self.space.used))


class Mover:
    """Moves values between segments and spill files.

    Args:
        directory: where the files are.
        sites: the files.
        volumes: whose memory it is.
        by_volume: whether each volume has a file of its own. Then what is written to that can only
            come back to this volume. Otherwise there is one file for all.

    Attributes:
        written_bytes, read_bytes: how much has been moved so far.
    """

    def __init__(
        self,
        directory: str,
        sites: Sequence[Site],
        volumes: Sequence[VolumeRecord],
        *,
        by_volume: bool,
    ) -> None:
        self.directory = directory
        self.sites = sites
        self.by_volume = by_volume
        self._volumes = volumes
        self._reading: dict[int, Tracked] = {}  # by their numbers
        self._repeating = self._closed = False
        self._logged: dict[str, float] = {}  # when each trouble was, the last time
        self.written_bytes = self.read_bytes = 0

    @classmethod
    def here(
        cls,
        file: SpillDevice,
        volumes: Sequence[VolumeRecord],
        memories: Sequence[int],
        soon: Callable[[Callable[[], None]], object],
    ) -> Mover:
        """One for volumes of this process, with the descriptors of their segments; it closes the
        file. ``soon``: see :class:`SpillThreads`.
        """
        site = Site(file.capacity, SpillThreads(file, memories, soon))
        return cls(file.directory, [site], volumes, by_volume=False)

    def begin(
        self,
        values: Residency,
        moved: Callable[[bool], None],
        read: Callable[[Tracked], None],
        settled: Callable[[Tracked], None] = lambda tracked: None,
        later: Callable[[float, Callable[[], None]], object] = lambda delay, call: None,
    ) -> None:
        """The values that it moves, what to call when it has tried to move some, with whether that
        has changed anything, and what to call with one that was read, or could not be, just before
        its state changes; that raises StoreFullError if it may not change yet. ``settled`` is
        called with a value that is no longer being read or written; ``later`` calls something after
        so many seconds.
        """
        self._values = values
        self._moved = moved
        self._ended = read
        self._settled = settled
        self._later = later

    def repeat(self) -> None:
        """Until :meth:`go_on`, nothing is read or written: what is noted has happened before."""
        self._repeating = True

    def lose(self, index: int) -> None:
        """A volume is lost, and its spill file with it, if it has one of its own."""
        if self.by_volume:
            self.sites[index].lost = True

    def only_in_memory(self, tracked: Tracked) -> None:
        """Give up the copy on disk of a value that is in memory, too."""
        self._values.move(tracked, State.DIRTY)
        self._discard(tracked, self._site(tracked))

    def go_on(self) -> None:
        """From now on, the files have what the values say; those that were being read are read."""
        self._repeating = False
        there = [*self._values.all(), *[one for one in self._reading.values() if one.gone]]
        extents: list[list[orders.Extent]] = [[] for _ in self.sites]
        for one in there:
            if one.extent is not None:
                extents[self._number(one)].append(one.extent)
        for site, occupied in zip(self.sites, extents, strict=True):
            site.space.occupy(occupied, site.file.size)
            if site.file.frees:
                runs = _merged(run for extent in occupied for run in extent.runs)
                site.file.submit(orders.KeepSpill(0, runs), _ignore, _always)
        for volume in self._volumes:
            if volume.lost:
                self.lose(volume.index)
        self._submit_reads(self.reading)

    @property
    def reading(self) -> list[Tracked]:
        """The values that are being read, with those that nobody holds any more."""
        return list(self._reading.values())

    def _number(self, tracked: Tracked) -> int:
        """Which of the sites a value is written to, or was."""
        return tracked.value.volume if self.by_volume else 0

    def _site(self, tracked: Tracked) -> Site:
        return self.sites[self._number(tracked)]

    def _where(self, tracked: Tracked, place: tuple[int, int]) -> Place:
        volume, offset = place
        return Place(0 if self.by_volume else volume, offset, tracked.value.nbytes)

    # ---- what is known of the files ---------------------------------------------------------

    @property
    def trouble(self) -> str:
        """Why nothing could be written to a file the last time; empty if it could."""
        return next((site.trouble for site in self.sites if site.trouble and not site.lost), "")

    @property
    def capacity(self) -> int:
        """The most bytes that all files may have."""
        return sum([site.space.capacity for site in self.sites if not site.lost])

    @property
    def used(self) -> int:
        """Bytes of the files that are in use."""
        return sum([site.space.used for site in self.sites if not site.lost])

    @property
    def free(self) -> int:
        """Bytes that are left."""
        return sum([site.space.free for site in self.sites if not site.lost])

    @property
    def left(self) -> int:
        """Bytes that can still be written, as far as is known."""
        return sum([site.left for site in self.sites])

    @property
    def file_system(self) -> str:
        """The type of their file systems, if all have the same."""
        kinds = {site.file.file_system for site in self.sites}
        return kinds.pop() if len(kinds) == 1 else ""

    # ---- to disk --------------------------------------------------------------------------

    def write(
        self, nbytes: int, *, at_any_price: bool = False, only: Collection[int] | None = None
    ) -> None:
        """Have values written, the least recently used first, until ``nbytes`` are under way.

        Args:
            only: only values of these volumes; None: any, except for the files of volumes that are
                drained.
            at_any_price: somebody waits for it. If a spill file is full, also give up the copies
                in it of values that are in memory.
        """
        self._write(nbytes, at_any_price, only)
        if at_any_price:
            for site in self.sites:
                site.file.hurry()

    def _write(self, nbytes: int, at_any_price: bool, only: Collection[int] | None) -> None:
        values = self._values
        now = moments.monotonic()
        # A copy that a get has left in the full file can be given up at once for another value.
        ready = [
            site
            for number, site in enumerate(self.sites)
            if not site.lost
            and (not self.by_volume or self._takes_more(number, only))
            and (
                now >= site.paused_until
                or (at_any_price and site.is_full and values.copied[number])
            )
        ]
        wanted = nbytes - values.bytes_of[State.WRITING]
        if not ready or wanted <= 0:  # what is under way is enough
            return

        def is_ready(tracked: Tracked) -> bool:
            if not tracked.is_in(only):
                return False
            return len(ready) == len(self.sites) or self._site(tracked) in ready

        found: list[Tracked] = []
        if any(site.space.free for site in ready):
            found = values.oldest(
                State.DIRTY,
                wanted,
                lambda tracked: is_ready(tracked) and self._fits(tracked),
                _MOST_AT_ONCE,
            )
        if not found and at_any_price:
            found = self._give_up_copies(is_ready)
        for site in ready:
            self._write_to(site, [tracked for tracked in found if self._site(tracked) is site])
        if not found:
            for site in ready:
                if values.oldest(
                    State.DIRTY, wanted, functools.partial(self._is_at, site, only), 1
                ):
                    full = human_bytes(site.space.capacity)
                    self._pause(site, f"its capacity of {full} is used up (see spill_capacity=)")
                    site.is_full = True

    def _takes_more(self, number: int, only: Collection[int] | None) -> bool:
        """Whether values of the volume with this file are written to it."""
        return not self._volumes[number].draining if only is None else number in only

    def write_these(self, wanted: Sequence[Tracked]) -> None:
        """Have these values written, as far as there is room and the disk takes something. There is
        one file for all volumes.
        """
        [site] = self.sites
        if not site.lost and moments.monotonic() >= site.paused_until:
            self._write_to(site, [tracked for tracked in wanted if self._fits(tracked)])

    def _is_at(self, site: Site, only: Collection[int] | None, tracked: Tracked) -> bool:
        return tracked.is_in(only) and self._site(tracked) is site

    def _write_to(self, site: Site, found: Sequence[Tracked]) -> None:
        batch: list[Tracked] = []
        size = 0
        for tracked in found:
            if _is_small(tracked):
                continue
            extent = site.space.reserve(tracked.value.offset % orders.PAGE, tracked.value.nbytes)
            if extent is None:  # those before it took the room
                continue
            tracked.extent = extent
            batch.append(tracked)
            size += tracked.nbytes
            if size >= _BATCH:
                self._submit(site, batch)
                batch, size = [], 0
        if batch:
            self._submit(site, batch)
        for some in _portions([tracked for tracked in found if _is_small(tracked)]):
            self._submit_together(site, some)

    def _fits(self, tracked: Tracked, more: int = 0) -> bool:
        """Whether its file has room for a value, if ``more`` bytes are freed there."""
        value = tracked.value
        head = 0 if _is_small(tracked) else value.offset % orders.PAGE
        return spanned(head, value.nbytes) <= self._site(tracked).space.free + more

    def _give_up_copies(self, is_ready: Callable[[Tracked], bool]) -> list[Tracked]:
        """Make room in a file for the least recently used value for which that is possible, by
        giving up copies of values that are in memory; the most recently used first.
        """
        values = self._values

        def may_fit(tracked: Tracked) -> bool:
            return is_ready(tracked) and self._fits(tracked, values.copied[self._number(tracked)])

        found = values.oldest(State.DIRTY, 1, may_fit)
        while found and not self._fits(found[0]):
            clean = values.newest(State.CLEAN, self._number(found[0]))
            if clean is None:
                break
            self.only_in_memory(clean)
        return found

    def _submit_together(self, site: Site, batch: Sequence[Tracked]) -> None:
        """Write small values one after the other, as far as there is room."""
        room = site.space.reserve_together([tracked.value.nbytes for tracked in batch])
        if room is None:
            if len(batch) > 1:
                self._submit_together(site, batch[: len(batch) // 2])
                self._submit_together(site, batch[len(batch) // 2 :])
            return
        whole, extents = room
        contents: list[bytes | Place] = []
        for tracked, extent in zip(batch, extents, strict=True):
            value = tracked.value
            here = self._where(tracked, (value.volume, value.offset))
            contents.append(here if value.data is None else value.data)
            tracked.extent = extent
        self._begin_writing(site, batch, orders.WriteTogether(0, contents, whole))

    def _submit(self, site: Site, batch: Sequence[Tracked]) -> None:
        places = [self._where(tracked, tracked.value.places[0]) for tracked in batch]
        extents = [tracked.extent for tracked in batch if tracked.extent is not None]
        self._begin_writing(site, batch, orders.WriteValues(0, places, extents))

    def _begin_writing(
        self, site: Site, batch: Sequence[Tracked], order: orders.SpillOrder
    ) -> None:
        """Have values written by one order."""
        for tracked in batch:
            self._values.move(tracked, State.WRITING)
        if site.freed:  # perhaps what is written now takes its place
            self._tell_freed(site)
        done = functools.partial(self._written, site, batch, site.troubles)
        site.file.submit(order, done, lambda at: not batch[at].gone)

    def _written(
        self, site: Site, batch: Sequence[Tracked], troubles: int, done: SpillDone
    ) -> None:
        """``troubles``: how often nothing could be written before these writes were begun."""
        is_progress = False
        for at, tracked in enumerate(batch):
            trouble = done.trouble(at)
            is_progress = is_progress or tracked.gone or trouble is None
            if tracked.gone:
                self._discard(tracked, site)
            elif trouble is not None:
                self._discard(tracked, site)
                self._values.move(tracked, State.DIRTY, first=True)
                self._pause(site, trouble.why)
            else:
                if troubles == site.troubles:  # what failed meanwhile says more: this found a gap
                    site.trouble = ""
                tracked.sums = done.sums[at]
                self.written_bytes += tracked.value.nbytes
                self._values.move(tracked, State.CLEAN)
        for tracked in batch:
            self._settled(tracked)
        self._moved(is_progress)

    def _pause(self, site: Site, why: str) -> None:
        if self._closed:  # so it was stopped
            return
        now = moments.monotonic()
        if why != site.trouble and now - self._logged.get(why, -_SILENCE_S) >= _SILENCE_S:
            self._logged[why] = now
            log.warning("cannot spill to %s: %s", self.directory, why)
        site.trouble, site.is_full = why, False
        site.troubles += 1
        site.paused_until = now + _PAUSE_S

    # ---- from disk ------------------------------------------------------------------------

    def read(self, wanted: Sequence[Tracked]) -> bool:
        """Have values read into memory. Returns False, and does nothing, if there is no room for
        all of them.

        Raises:
            Delayed: a volume is being asked whether its host has the memory; nothing is done.
        """
        places = self.allocate(wanted)
        if places is None:
            return False
        self.read_to(wanted, places)
        return True

    def allocate(self, wanted: Sequence[Tracked]) -> list[tuple[int, int]] | None:
        """Allocate memory to read values into: all of it, or none, which is None.

        Raises:
            Delayed: as for :meth:`read`.
        """
        places: list[tuple[int, int]] = []
        try:
            for tracked in wanted:
                place = self._place(tracked)
                if place is None:
                    break
                places.append(place)
        finally:
            if len(places) < len(wanted):
                self.free_places(wanted, places)
        return places if len(places) == len(wanted) else None

    def free_places(self, wanted: Sequence[Tracked], places: Sequence[tuple[int, int]]) -> None:
        """Free what was allocated for the first of these values."""
        for tracked, place in zip(wanted, places, strict=False):
            self._free_place(tracked, place)

    def read_to(self, wanted: Sequence[Tracked], places: Sequence[tuple[int, int]]) -> None:
        """Have values read to places that are allocated."""
        for tracked, place in zip(wanted, places, strict=True):
            self.note_reading(tracked, place)
        if not self._repeating:
            self._submit_reads(wanted)

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
        for number, site in enumerate(self.sites):
            for some in _portions([one for one in small if self._number(one) == number]):
                self._read_small(site, some)

    def _read_small(self, site: Site, some: Sequence[Tracked]) -> None:
        order = orders.ReadTogether(
            0,
            [None if one.is_inline else self._where(one, one.place) for one in some],
            [one.extent or _NOWHERE for one in some],
            [one.sums for one in some],
        )

        def is_wanted(at: int) -> bool:
            return some[at].extent is not None and not some[at].gone

        site.file.submit(order, functools.partial(self._read_together, some), is_wanted)

    def _submit_read(self, tracked: Tracked) -> None:
        """Have all readers read pieces of a large value."""
        count = len(tracked.sums)
        step = max(-(-count // READERS), _LEAST_PIECES)
        shares = range(0, count, step)
        tracked.reads, tracked.trouble = len(shares), None
        place, extent = self._where(tracked, tracked.place), tracked.extent or _NOWHERE
        for first in shares:
            sums = tracked.sums[first : first + step]
            self._site(tracked).file.submit(
                orders.ReadPieces(0, place, extent, sums, first),
                functools.partial(self._share_read, tracked),
                lambda at: tracked.extent is not None and not tracked.gone,
            )

    def _place(self, tracked: Tracked) -> tuple[int, int] | None:
        """Memory for a value, in one of its :meth:`homes`. What is in the server's own memory only
        counts there; the offset is then -1.
        """
        value, extent = tracked.value, tracked.extent
        head = 0 if extent is None else extent.head
        for volume in self.homes(tracked):
            if volume.left < tracked.nbytes:
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

    def homes(self, tracked: Tracked) -> Sequence[VolumeRecord]:
        """The volumes that a value may come back to, best first. What the file of a volume has can
        only come to the memory of this volume, also while it is drained.
        """
        own = tracked.value.volume
        if self.by_volume:
            return [self._volumes[own]]
        order = sorted(self._volumes, key=lambda v: v.index != own)
        return [volume for volume in order if not volume.closed]

    def take_places(self, wanted: Sequence[Tracked], places: Sequence[tuple[int, int]]) -> None:
        """Allocate just these places for values again."""
        for tracked, (at, offset) in zip(wanted, places, strict=True):
            if tracked.is_inline:
                self._volumes[at].inline += tracked.nbytes
            else:
                self._volumes[at].allocator.take(offset, tracked.value.nbytes)

    def _free_place(self, tracked: Tracked, place: tuple[int, int]) -> None:
        """Free memory for a value; see :meth:`_place`."""
        at, offset = place
        if tracked.is_inline:
            self._volumes[at].inline -= tracked.nbytes
        else:
            self._volumes[at].allocator.free([(offset, tracked.value.nbytes)])

    def _read_together(self, wanted: Sequence[Tracked], done: SpillDone) -> None:
        for at, tracked in enumerate(wanted):
            trouble = done.trouble(at)
            if trouble is None:
                tracked.content = done.contents[at]
            self._read(tracked, trouble)
        self._moved(True)

    def _share_read(self, tracked: Tracked, done: SpillDone) -> None:
        tracked.trouble = tracked.trouble or done.trouble()
        tracked.reads -= 1
        if not tracked.reads:
            self._read(tracked, tracked.trouble)
            self._moved(True)

    def _read(self, tracked: Tracked, trouble: SpillTrouble | None) -> None:
        if trouble is not None and not tracked.gone:
            tracked.is_damaged, tracked.failure = trouble.is_damaged, trouble.why
            log.error("%r cannot be read from %s: %s", tracked.key, self.directory, trouble.why)
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
        self._settled(tracked)

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
            self._discard(tracked, self._site(tracked))
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
            self._discard(tracked, self._site(tracked))
        return tracked.state is not State.ON_DISK

    def _discard(self, tracked: Tracked, site: Site) -> None:
        """Free what a value has of a file."""
        if tracked.extent is not None:
            if not self._repeating:
                freed = site.space.release(tracked.extent)
                if site.file.frees:
                    self._free(site, freed)
                if site.is_full:  # there is room again
                    site.is_full, site.paused_until, site.trouble = False, 0.0, ""
            tracked.extent = None

    def _free(self, site: Site, freed: Sequence[tuple[int, int]]) -> None:
        """Tell of it soon, together with more."""
        if not site.freed:
            self._later(0, functools.partial(self._tell_freed, site))
        site.freed += freed

    def _tell_freed(self, site: Site) -> None:
        if site.freed and not site.lost:
            site.file.submit(orders.FreeSpill(0, _merged(site.freed)), _ignore, _always)
        site.freed = []

    def trim(self) -> None:
        """Return the unused ends of the files to the file system, and let the segments leave the
        page tables. The former takes long on some file systems, so the space is not returned
        whenever a value goes, but used for the next one.
        """
        for site in self.sites:
            if site.is_trimming or site.lost:
                continue
            tail = None if site.file.frees else site.space.take_tail()
            if tail is None and not site.file.is_filled:
                continue
            site.is_trimming = True
            order = orders.CutSpill(0, -1 if tail is None else tail[0])
            done = functools.partial(self._trimmed, site, tail)
            site.file.submit(order, done, _always)

    def _trimmed(self, site: Site, tail: tuple[int, int] | None, done: SpillDone) -> None:
        site.is_trimming = False
        if tail is not None:
            site.space.return_tail(tail)
            self._moved(True)

    def close(self) -> None:
        """Carry out nothing more."""
        self._closed = True
        for site in self.sites:
            site.file.close()


def _merged(runs: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Parts of a file, as (offset, bytes), with those in one that touch or overlap.

    >>> _merged([(8192, 4096), (0, 4096), (4096, 4096), (0, 4096), (40960, 4096)])
    [(0, 12288), (40960, 4096)]
    """
    merged: list[tuple[int, int]] = []
    for start, nbytes in sorted(runs):
        if merged and start <= sum(merged[-1]):
            first = merged[-1][0]
            merged[-1] = first, max(sum(merged[-1]), start + nbytes) - first
        else:
            merged.append((start, nbytes))
    return merged


def _ignore(done: SpillDone) -> None:
    """Whoever has the file tries again by itself."""


def _always(at: int) -> bool:
    return True


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
    start = allocator.allocate(size + orders.PAGE)
    if start is None:
        return allocator.allocate(nbytes)
    offset = start + (head - start) % orders.PAGE
    spare = [(start, offset - start), (offset + size, start + orders.PAGE - offset)]
    allocator.free([(at, length) for at, length in spare if length])
    return offset
