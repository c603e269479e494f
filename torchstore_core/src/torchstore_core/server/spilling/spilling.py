"""What leaves memory when it is full, and what comes back: decides, and has threads do the I/O.

Everything here runs in the thread of the event loop and never waits. A request that has to wait
raises :class:`Delayed`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from torchstore_core import moments
from torchstore_core.errors import ConfigurationError, ObjectLostError, StoreFullError
from torchstore_core.reports.status import SpillStatus
from torchstore_core.reports.units import human_bytes
from torchstore_core.server.index.catalog import Catalog
from torchstore_core.server.index.records import Txn, Value
from torchstore_core.server.memory.volume_record import VolumeRecord
from torchstore_core.server.spilling.delays import Delayed, RoomQueue
from torchstore_core.server.spilling.policy import Residency, State, Ticket, Tracked
from torchstore_core.wire import messages as m

if TYPE_CHECKING:
    from torchstore_core.server.spilling.moves import Mover, Site


# Writing begins when less than the first part of the capacity is free or can be freed at once,
# and goes on until it is the second.
_LOW, _HIGH = 0.25, 0.40
# So many values leave memory in one step of the event loop: that takes it a few milliseconds.
_MOST_AT_ONCE = 1024
# How long a request waits for readers to release memory if nothing else happens, in seconds.
_PATIENCE_S = 5.0


class Spilling:
    """Values that may leave memory.

    Args:
        volumes: whose memory it is.
        catalog: forgets versions that are evicted.
        free: frees the memory of values that nobody holds any more.
        default: what is done with puts that do not say; see ``messages.Put.when_full``.
        mover: moves values between memory and a spill file; None: the store has no such file.
        later: calls something after so many seconds.

    Attributes:
        default: as above, for puts that keep no older versions; never 0.
        active: whether any value is tracked. Until then there is nothing to do here.
        room: requests that wait for room.
        mover: as above.
        settled: called with a value that is no longer being read or written.
        evicted: how many values have been evicted, and how many bytes they had.
    """

    def __init__(
        self,
        volumes: Sequence[VolumeRecord],
        catalog: Catalog,
        free: Callable[[Iterable[Value]], None],
        default: int = 0,
        mover: Mover | None = None,
        later: Callable[[float, Callable[[], None]], object] = lambda delay, call: None,
    ) -> None:
        self._volumes = volumes
        self._catalog = catalog
        self._free = free
        self._keeps_spillable = not default and mover is not None
        self.default = default or m.PINNED
        self._later = later
        self.mover = mover
        self.settled: Callable[[Tracked], None] = lambda tracked: None
        self.active = False
        self.values = Residency(by_volume=mover is not None and mover.by_volume)
        self.room = RoomQueue()
        self.evicted = (0, 0)
        self._last_progress = 0.0
        self._retry_is_due = self._is_timed = False
        if mover is not None:
            mover.begin(self.values, self._moved, self._read_ended, self._settled, later)

    @property
    def _capacity(self) -> int:
        """Bytes of all volumes that are in service."""
        return sum([v.info.capacity_bytes for v in self._volumes if not v.closed])

    # ---- puts -----------------------------------------------------------------------------

    def choice(self, wanted: int, *, keeps: bool = False) -> int:
        """What is done with the values of a put when memory is full.

        Args:
            wanted: what the put wants; see ``messages.Put``.
            keeps: whether the put keeps older versions.

        Raises:
            ConfigurationError: it wants to be spilled, but the store has no place for that.
        """
        if not 0 <= wanted <= m.EVICTABLE:
            raise ConfigurationError(f"this server does not know when_full={wanted}")
        if wanted == m.SPILLABLE and self.mover is None:
            raise ConfigurationError(
                'when_full="spillable" needs a store with a place to spill to: initialize it with '
                "spill= (a directory)"
            )
        if not wanted and keeps and self._keeps_spillable:
            return m.SPILLABLE
        return wanted or self.default

    def track(self, values: Iterable[Value], choice: int) -> None:
        """Values that are versions of their keys by themselves are committed."""
        for value in values:
            self._track(value, value.key, choice)
        self._write_ahead()

    def track_put(self, txn: Txn) -> None:
        """A put is committed."""
        for value in txn.plain:
            self._track(value, value.key, txn.when_full)
        for target, contribution in txn.contributions:
            for value in contribution.values:
                self._track(value, target.key, txn.when_full)
        self._write_ahead()

    def _track(self, value: Value, key: str, choice: int) -> None:
        if choice == m.EVICTABLE:
            if value.nbytes:
                self.active = True
                self.values.add(value, key, State.CACHED, inline=value.data is not None)
        elif choice == m.SPILLABLE and value.nbytes:
            self.active = True
            self.values.add(value, key, State.DIRTY, inline=value.data is not None)

    # ---- gets -----------------------------------------------------------------------------

    def use(self, values: Iterable[Value], prefix: str = "") -> None:
        """Values are about to be read: they are now the last that were used.

        Args:
            prefix: precedes the names of the values in errors.

        Raises:
            Delayed: some are not in memory; they are being read.
            ObjectLostError: some cannot be read any more.
            StoreFullError: memory has no room for those that have to be read.
        """
        tracked = self.values.tracked(values)
        for one in tracked:
            self.values.touch(one)
        if not self.values.away:
            return
        away = [t for t in tracked if t.state in (State.ON_DISK, State.READING)]
        if away and self.mover is not None:
            away = list({id(t): t for t in away}.values())
            for one in away:
                # While it is being read, the failure is for the end of that to note.
                if one.failure and one.state is State.ON_DISK:
                    raise self._failed(one, prefix)
            self._use_away(tracked, away, self.mover)

    def _use_away(self, tracked: Sequence[Tracked], away: Sequence[Tracked], mover: Mover) -> None:
        """Read those of the values that are ``away``; raises Delayed or StoreFullError, as
        :meth:`use`.
        """
        ticket = Ticket(tracked)
        try:
            self._bring_back([t for t in away if t.state is State.ON_DISK], mover)
        except BaseException:
            ticket.give_up()
            raise
        for one in away:
            ticket.await_read(one)
        nbytes = sum(t.nbytes for t in away)
        raise Delayed(f"{human_bytes(nbytes)} of it were being read from disk", ticket.then)

    def _bring_back(self, values: Sequence[Tracked], mover: Mover) -> None:
        nbytes = sum(t.nbytes for t in values)
        only = {v.index for t in values for v in mover.homes(t)}
        most = sum([self._volumes[at].info.capacity_bytes for at in only])
        anywhere = len(only) == len(self._volumes)
        while not self._begin_reading(values, mover):
            if nbytes <= most and self._make_room(nbytes, only=None if anywhere else only):
                continue
            count = f"{len(values):,} values" if len(values) > 1 else repr(values[0].value.key)
            leased = sum(v.leased for v in self._volumes)
            left = self._range_left(0, self._volumes)
            error = StoreFullError(
                f"{count} ({nbytes:,} bytes) cannot be brought back from disk, because memory of "
                f"{self._capacity:,} bytes has no room: readers hold {leased:,}, and the largest "
                f"range without values that have to stay has {left:,}. Get fewer "
                "values at once, drop tensors that zero-copy gets returned, or delete keys",
                key=values[0].key,
                details={
                    "capacity_bytes": self._capacity,
                    "requested_bytes": nbytes,
                    "leased_bytes": leased,
                    "unfinished_bytes": sum(v.unfinished for v in self._volumes),
                },
            )
            raise self.noted(error)

    def _begin_reading(self, values: Sequence[Tracked], mover: Mover) -> bool:
        return mover.read(values)

    def _read_ended(self, tracked: Tracked) -> None:
        """A value has been read, or cannot be; this is about to be noted."""

    def _failed(self, tracked: Tracked, prefix: str) -> ObjectLostError:
        """The error of a value that could not be read from disk."""
        value = tracked.value
        key = prefix + value.key if prefix or value.box is None else tracked.key
        reason = tracked.failure
        place = "" if self.mover is None else self.mover.directory
        advice = "Put it again"
        if not tracked.is_damaged:
            tracked.failure = ""  # the next get tries again
            advice = "Get it again, or put it again"
        return ObjectLostError(
            f"version {value.version} of {key!r} was spilled to {place!r}, and cannot be read from "
            f"there: {reason}. {advice}",
            key=key,
            details={"version": value.version, "spill": place, "reason": reason},
        )

    # ---- room -----------------------------------------------------------------------------

    def make_room(
        self, nbytes: int, keys: Collection[str] = (), reserved: Collection[int] = ()
    ) -> bool:
        """Free memory, for ``nbytes``. Returns whether some was freed, so that it is worth while to
        try again; False if nothing can be.

        Args:
            keys: of the put that needs it; the newest versions of these are not evicted.
            reserved: the volumes that the put leaves alone.

        Raises:
            Delayed: some will be freed soon.
        """
        others = {v.index for v in self._volumes if not v.draining} - {*reserved}
        if len(others) == len(self._volumes):
            return self._make_room(nbytes, keys)
        return self._make_room(nbytes, keys, others)

    def reserved_for_copy(self, nbytes: int) -> Collection[int] | None:
        """As :meth:`reserved`, for a copy that the store makes by itself, which is no request."""
        return Spilling.reserved(self, nbytes) if self.active else ()

    def make_room_for_copy(self, nbytes: int, reserved: Collection[int]) -> bool:
        """As :meth:`make_room`, for such a copy."""
        with self.aside():
            return Spilling.make_room(self, nbytes, (), reserved)

    def _make_room(
        self, nbytes: int, keys: Collection[str] = (), only: Collection[int] | None = None
    ) -> bool:
        """``only``: in these volumes; None: in any. Otherwise see :meth:`make_room`."""
        if self.room and not self.room.retrying:
            raise self.delayed("others were waiting for room in memory before")

        def is_there(tracked: Tracked) -> bool:
            return tracked.is_in(only)

        there = [v for v in self._volumes if only is None or v.index in only]
        free = max((v.left for v in there), default=0)
        short = nbytes - free if nbytes > free else nbytes
        mover = self.mover
        most = sys.maxsize if mover is None else _MOST_AT_ONCE
        if clean := self.values.oldest(State.CLEAN, short, is_there, most):
            self.drop(clean)
            return self._made_room(len(clean) == most)
        if found := self._evict(short, keys, most, is_there):
            return self._made_room(found == most)
        if mover is None:
            return False
        mover.write(short, at_any_price=True, only=only)
        bytes_of = self.values.bytes_of
        unfinished = sum(v.unfinished for v in self._volumes)  # which may leave memory soon
        if bytes_of[State.WRITING]:
            raise self.delayed(self._why_full(mover))
        held = sum(bytes_of[state] for state in State if state is not State.ON_DISK)
        patient = not self.room and not self.room.retrying
        patient = patient or moments.monotonic() - self._last_progress < _PATIENCE_S
        if held + unfinished >= short and patient:
            raise self.delayed(self._why_full(mover))
        return False

    def _made_room(self, is_more: bool) -> bool:
        """Values have left memory; ``is_more``: and others have to, after other requests."""
        if is_more:
            self.retry_soon()
            raise self.delayed("memory was full; many small values were leaving it")
        return True

    def _why_full(self, mover: Mover) -> str:
        """What a request waits for that needs memory."""
        where, bytes_of = repr(mover.directory), self.values.bytes_of
        waiting = bytes_of[State.WRITING] + bytes_of[State.DIRTY]
        leased = sum(v.leased for v in self._volumes)
        unfinished = sum(v.unfinished for v in self._volumes)
        why = []
        if leased:
            why.append(f"readers held {human_bytes(leased)} of it")
        if unfinished:
            why.append(f"unfinished puts held {human_bytes(unfinished)} of it")
        if waiting:
            why.append(f"{human_bytes(waiting)} were still to be written to {where} to make room")
        if mover.trouble:
            why.append(f"nothing could be written to {where}: {mover.trouble}")
        return f"memory was full; {', '.join(why)}" if why else "memory was full"

    def reserved(self, nbytes: int) -> frozenset[int] | None:
        """The volumes that a put of so many bytes has to leave alone, so that values on disk can
        still be brought back; None: all that are not lost. While the disk takes more, they can:
        others are written there instead. When it is full, a range of memory has to be left for the
        largest of them. (It can still be lost, because what stays in memory depends on what is read
        meanwhile; then the get of such a value is refused until something is deleted.)

        Raises:
            Delayed: that would be all, and it is being tried whether the disk takes more now.
        """
        mover = self.mover
        if mover is None:
            return frozenset()
        full = [
            volume.index
            for number, site in enumerate(mover.sites)
            if not (mover.by_volume and self._volumes[number].draining)
            and not self._leaves_room(number, site, self._served(mover, number), nbytes)
            for volume in self._served(mover, number)
        ]
        if not full:
            return frozenset()
        mover.write(nbytes, only=full)
        if not all(volume.closed or volume.index in full for volume in self._volumes):
            return frozenset(full)
        if self.values.bytes_of[State.WRITING]:
            raise self.delayed(self._why_full(mover))
        return None

    def _served(self, mover: Mover, number: int) -> Sequence[VolumeRecord]:
        """The volumes to which what one of the spill files has can come back."""
        return self._volumes[number : number + 1] if mover.by_volume else self._volumes

    def _leaves_room(
        self, number: int, site: Site, volumes: Sequence[VolumeRecord], nbytes: int
    ) -> bool:
        """Whether what one of the spill files has can come back after a put of so many bytes."""
        if site.lost:
            return True
        left = 0 if site.trouble else site.left
        if left >= sum([volume.info.capacity_bytes for volume in volumes]):
            return True
        largest = self.values.largest_on_disk(number)
        if left >= 4 * largest and not site.trouble:
            return True
        return self._range_left(nbytes, volumes) >= largest

    def _range_left(self, nbytes: int, volumes: Sequence[VolumeRecord]) -> int:
        """Bytes of the largest range of these volumes' memory that can be free after a put of so
        many. What the server has in its own memory takes none of it, but counts towards the
        capacity.
        """
        alive = {volume.index: volume for volume in volumes if not volume.closed}
        there = sum(volume.free for volume in alive.values()) - nbytes
        free = [
            (volume.index, offset, size)
            for volume in alive.values()
            for offset, size in volume.allocator.free_ranges()
        ]
        for tracked in self.values.disposable():
            places = [place for place in tracked.value.places if place[0] in alive]
            if places or tracked.value.volume in alive:
                there += tracked.nbytes * max(1, len(places))
                free += [(volume, at, tracked.nbytes) for volume, at in places]
        return max(0, min(there, _left_over(free, nbytes)))

    def delayed(self, why: str) -> Delayed:
        """What a request raises that is to be retried when memory is freed."""
        return Delayed(why, self._add)

    def _add(self, retry: Callable[[], None]) -> None:
        if not self.room and not self.room.retrying:
            self._last_progress = moments.monotonic()
        self.room.add(retry)
        self._retry_later()

    def _retry_later(self) -> None:
        """Retry requests that wait for room even if nothing happens, so that they are refused."""
        if not self._is_timed and self.room:
            self._is_timed = True
            self._later(_PATIENCE_S / 4, self._time_is_up)

    def _time_is_up(self) -> None:
        self._is_timed = False
        if moments.monotonic() - self._last_progress > _PATIENCE_S:
            self.room.retry()
        self._retry_later()

    def retry_soon(self) -> None:
        """Memory was freed, or readers have released some: retry requests that wait for room."""
        if not self._retry_is_due:
            self._retry_is_due = True
            self._later(0, self._progress)

    def _moved(self, is_progress: bool) -> None:
        """The mover has done something, or tried to."""
        if is_progress:
            self._progress()
        elif self.room:
            self.room.retry()

    def _progress(self) -> None:
        """Something has changed."""
        self._retry_is_due = False
        self._last_progress = moments.monotonic()
        self._write_ahead()
        if self.room:
            self.room.retry()

    def _write_ahead(self) -> None:
        """Write values before their memory is needed."""
        if self.mover is None or not self.values.count_of[State.DIRTY]:
            return
        of = self.values.bytes_of
        there = sum(v.free for v in self._volumes)
        there += of[State.CLEAN] + of[State.CACHED] + of[State.WRITING]
        if there < _LOW * self._capacity or of[State.WRITING]:
            self.mover.write(int(_HIGH * self._capacity) - there + of[State.WRITING])

    def drop(self, clean: Sequence[Tracked]) -> None:
        """Free the memory of values that are on disk, too."""
        ranges: dict[int, list[tuple[int, int]]] = {}
        for tracked in clean:
            value = tracked.value
            if tracked.is_inline:
                self._volumes[value.volume].inline -= value.nbytes
            for volume, offset in value.places:
                ranges.setdefault(volume, []).append((offset, value.nbytes))
            self.values.move(tracked, State.ON_DISK)
            value.data, value.offset, value.more = None, -1, ()
        for volume, freed in ranges.items():
            self._volumes[volume].allocator.free(freed)

    def _evict(
        self,
        nbytes: int,
        keys: Collection[str],
        most: int,
        among: Callable[[Tracked], bool],
    ) -> int:
        """Evict versions of at most so many values; returns how many values these were."""
        evictions = self._catalog.evictions
        found = self.values.oldest(
            State.CACHED,
            nbytes,
            lambda t: (
                among(t) and evictions.can_evict(t.key, t.value, newest_too=t.key not in keys)
            ),
            most,
        )
        self.evict_these(found)
        return len(found)

    def can_evict(self, tracked: Tracked) -> bool:
        """Whether the version of a cached value can be evicted now."""
        if tracked.state is not State.CACHED or not tracked.is_free_to_go:
            return False
        return self._catalog.evictions.can_evict(tracked.key, tracked.value, newest_too=True)

    def evict_these(self, found: Sequence[Tracked]) -> None:
        """Evict the versions that have these values."""
        for tracked in found:
            if tracked.gone:  # it went with another one of its version
                continue
            freed = self._catalog.evictions.evict(tracked.key, tracked.value)
            count, before = self.evicted
            self.evicted = count + len(freed), before + sum(value.nbytes for value in freed)
            self._free(freed)

    # ---- from the server's own memory into a segment ---------------------------------------

    def can_take_in(self, values: Iterable[Value]) -> bool:
        """Whether the bytes of all of these values may be moved: none is on disk, or on its way."""
        if not self.active:
            return True
        return all(t.state in (State.CACHED, State.DIRTY) for t in self.values.tracked(values))

    def take_in(self, values: Iterable[Value]) -> None:
        """The bytes of these values are no longer inline."""
        for tracked in self.values.tracked(values):
            self.values.take_in(tracked)

    # ---- volumes that are drained, see ``repairing.departures`` ----------------------------

    def aside(self) -> AbstractContextManager[None]:
        """What leaves memory within this does not do so for a request."""
        return nullcontext()

    def fetch(self, wanted: Sequence[Tracked]) -> bool:
        """Have values read that are on disk, so that they can be copied elsewhere. False if there
        is no room for all of them where they are to come.

        Raises:
            Delayed: a volume is being asked whether its host has the memory.
            StoreFullError: it cannot be recorded.
        """
        mover = self.mover
        places = None if mover is None else mover.allocate(wanted)
        if mover is None or places is None:
            return False
        try:
            self._fetching(wanted, places)
        except StoreFullError:
            mover.free_places(wanted, places)
            raise
        mover.read_to(wanted, places)
        return True

    def _fetching(self, wanted: Sequence[Tracked], places: Sequence[tuple[int, int]]) -> None:
        """Values are about to be read to these places."""

    def why_no_more(self) -> str:
        """Why not more can be spilled, as text behind why there is no room; empty if it can."""
        mover = self.mover
        return f"; nothing more can be spilled: {mover.trouble}" if mover and mover.trouble else ""

    def count_on(self, moved: Sequence[Tracked], index: int) -> None:
        """Values in the server's own memory, and nowhere else, count on another volume."""
        for tracked in moved:
            value = tracked.value
            self._volumes[value.volume].inline -= value.nbytes
            self._volumes[index].inline += value.nbytes
            value.volume = index

    def _settled(self, tracked: Tracked) -> None:
        self.settled(tracked)

    # ---- ends -----------------------------------------------------------------------------

    def lose(self, index: int) -> None:
        """A volume is lost. If it has a spill file of its own, so is what is in that; what the
        server has in its own memory stays there.
        """
        mover = self.mover
        if mover is None or not mover.by_volume:
            return
        mover.lose(index)
        for tracked in self.values.all():
            value = tracked.value
            if value.volume != index or tracked.state is State.CACHED:
                continue
            if value.data is None and not value.more:
                self.values.remove(value)
                mover.forget(tracked)
            elif tracked.state is State.CLEAN:
                mover.only_in_memory(tracked)

    def forget(self, values: Iterable[Value]) -> list[Value]:
        """Nobody holds these values any more. Returns those whose memory is to be freed now."""
        here: list[Value] = []
        for value in values:
            tracked = self.values.remove(value)
            if tracked is None or self.mover is None or self.mover.forget(tracked):
                here.append(value)
        return here

    def trim(self) -> None:
        """Return disk space that is not used to the file system."""
        if self.mover is not None:
            self.mover.trim()

    def close(self) -> None:
        """End the threads, and give the disk space back."""
        if self.mover is not None:
            self.mover.close()

    def status(self) -> SpillStatus:
        """What has left memory."""
        values, mover = self.values, self.mover
        evicted, evicted_bytes = self.evicted
        if mover is None:
            return SpillStatus(evicted=evicted, evicted_bytes=evicted_bytes)
        return SpillStatus(
            directory=mover.directory,
            capacity_bytes=mover.capacity,
            disk_bytes=mover.used,
            spilled=values.count_of[State.ON_DISK],
            spilled_bytes=values.bytes_of[State.ON_DISK],
            clean_bytes=values.bytes_of[State.CLEAN],
            waiting=len(self.room),
            written_bytes=mover.written_bytes,
            read_bytes=mover.read_bytes,
            evicted=evicted,
            evicted_bytes=evicted_bytes,
            trouble=mover.trouble,
            file_system=mover.file_system,
            left_bytes=mover.left,
        )

    def noted(self, error: StoreFullError) -> StoreFullError:
        """Add what spilling has to do with it to the error of a put that does not fit."""
        if self.mover is None:
            return error
        of, mover = self.values.bytes_of, self.mover
        text = f"{human_bytes(of[State.ON_DISK])} are spilled to {mover.directory!r}"
        trouble = mover.trouble
        if not trouble and mover.free < self._capacity:
            trouble = f"{human_bytes(mover.free)} of {human_bytes(mover.capacity)} are left"
        if trouble:
            text += f", and no more can be: {trouble}"
        else:
            text += (
                ", and what is left in memory is pinned or being used: only what is put with "
                "when_full='spillable', or into a store that is initialized with it, can be spilled"
            )
        details = {**error.details, "spilled_bytes": of[State.ON_DISK], "spill": trouble}
        return StoreFullError(f"{error.message}. {text}", key=error.key, details=details)


def _left_over(ranges: Iterable[tuple[int, int, int]], nbytes: int) -> int:
    """The length of the longest range that is left when ``nbytes`` have been put where it is worst:
    at the beginning of any of these ranges (volume, offset, length), of which some touch.

    >>> _left_over([(0, 0, 64), (0, 64, 64)], 64), _left_over([(0, 0, 64), (0, 64, 128)], 64)
    (64, 64)
    """
    gaps: list[tuple[int, list[int]]] = []  # each with where its parts begin, and its end
    for volume, offset, size in sorted(ranges):
        if gaps and gaps[-1][0] == volume and gaps[-1][1][-1] == offset:
            gaps[-1][1].append(offset + size)
        else:
            gaps.append((volume, [offset, offset + size]))
    lengths = sorted([at[-1] - at[0] for _, at in gaps], reverse=True)
    if not lengths:
        return 0
    longest = next(at for _, at in gaps if at[-1] - at[0] == lengths[0])
    start, end = longest[0], longest[-1]
    split = [max(at - start, end - at - nbytes) for at in longest[:-1] if at + nbytes <= end]
    return max([min(split, default=end - start), *lengths[1:2]])
