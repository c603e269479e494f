"""How values that may leave memory leave a volume that is drained.

Where all volumes share a spill file, what is there may stay there; only memory has to become free.
Where each volume has a file of its own, what is on disk goes to the memory of its volume first, as
for a get, and from there to another volume like everything else: only the process of a volume can
read its file. It is fetched as far ahead as the next batch of copies needs it.

Where other volumes have no room, some is made as for a put.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence

from torchstore_core.errors import StoreFullError
from torchstore_core.server.index.records import Value
from torchstore_core.server.memory.volume_record import VolumeRecord
from torchstore_core.server.repairing.backlog import Entry
from torchstore_core.server.spilling.delays import Delayed
from torchstore_core.server.spilling.policy import State, Tracked
from torchstore_core.server.spilling.spilling import Spilling

# So many values at most are fetched together, or written.
_MOST_TOGETHER = 512
_MOST_BYTES = 16 << 20


class Departures:
    """What is on the disks of volumes that are drained, and what becomes of values that find no
    room elsewhere.

    Attributes:
        nbytes: of the values that are still to be fetched.
        coming: bytes of those that are being fetched.
    """

    def __init__(self, volumes: Sequence[VolumeRecord], spilling: Spilling) -> None:
        self._volumes = volumes
        self._spilling = spilling
        self._queue: deque[Entry] = deque()
        self._queued: set[int] = set()  # the id() of the values
        self._coming: dict[int, Tracked] = {}  # by the id()
        self.nbytes = self.coming = 0

    def __len__(self) -> int:
        """How many values are still to be fetched, or are being fetched."""
        return len(self._queue) + len(self._coming)

    @property
    def _has_files(self) -> bool:
        """Whether each volume has a spill file of its own."""
        mover = self._spilling.mover
        return mover is not None and mover.by_volume

    def disk_bytes(self, index: int) -> int:
        """How much of the spill file of a volume is in use; 0 if it has none of its own."""
        mover = self._spilling.mover
        return 0 if mover is None or not mover.by_volume else mover.sites[index].space.used

    # ---- which of them are copied ---------------------------------------------------------

    def is_ready(self, entry: Entry) -> bool:
        """Whether a value may be copied, or a copy of it dropped, as if it could not leave memory.
        If not, it is seen to here, or it will settle: see ``Spilling.settled``.
        """
        tracked = self._spilling.values.find(entry.value)
        if tracked is None:
            return True
        if tracked.state in (State.WRITING, State.READING):
            return False
        value = entry.value
        if not (self._has_files and self._volumes[value.volume].draining):
            return True
        if tracked.state is State.ON_DISK:
            self._add(entry)
            return False
        if value.data is not None:
            self._count_elsewhere(tracked)
            return False
        return True

    def _add(self, entry: Entry, *, first: bool = False) -> None:
        """Add a value to those to be fetched, unless it is one. ``first``: it is the next one."""
        if id(entry.value) not in self._queued:
            self._queued.add(id(entry.value))
            (self._queue.appendleft if first else self._queue.append)(entry)
            self.nbytes += entry.value.nbytes

    def _count_elsewhere(self, tracked: Tracked) -> None:
        """A value in the server's own memory needs nothing of the volume but its account."""
        mover = self._spilling.mover
        if tracked.state is State.CLEAN and mover is not None:
            mover.only_in_memory(tracked)
        best = max(self._volumes, key=lambda volume: volume.free)
        if best.free >= tracked.nbytes:
            with contextlib.suppress(StoreFullError):  # it is as safe where it is
                self._spilling.count_on([tracked], best.index)

    # ---- from disk ------------------------------------------------------------------------

    def fetch(
        self,
        nbytes: int,
        most: int,
        place: Callable[[Entry], tuple[int, int] | None],
        park: Callable[[Entry, str], None],
    ) -> bool:
        """Begin to read values into memory: about so many bytes, and so many values at most. Those
        for which the memory of their own volume has no room come next. Returns whether there is
        nothing but those.

        Args:
            place: allocates memory for a further copy of a value, so that what is read can leave
                again; None if the value has been seen to in another way.
            park: called with a value that cannot be read, and why.

        Raises:
            Delayed, StoreFullError: as ``place``, and ``Spilling.fetch``.
        """
        found: list[tuple[Entry, Tracked]] = []
        places: list[tuple[tuple[int, int], int]] = []  # that there is room where they are to go
        count = 0
        try:
            while nbytes > 0 and len(found) < most and (one := self._take()):
                found.append(one)
                entry, tracked = one
                if tracked.failure and tracked.is_damaged:
                    found.pop()
                    park(entry, unreadable(entry.key, tracked))
                    continue
                if not tracked.is_inline:
                    try:
                        there = place(entry)
                    except Delayed:
                        if len(found) == 1:
                            raise
                        self._add(found.pop()[0], first=True)  # it waits for those before it
                        break
                    if there is None:
                        found.pop()
                        continue
                    places.append((there, entry.value.nbytes))
                nbytes -= entry.value.nbytes
            self._free(places)
            count = self._begin([tracked for _, tracked in found])
        finally:
            self._free(places)
            for entry, _ in reversed(found[count:]):
                self._add(entry, first=True)
        return bool(found) and not count

    def _take(self) -> tuple[Entry, Tracked] | None:
        """Remove and return the next value to fetch; None if there is none."""
        while self._queue:
            entry = self._queue.popleft()
            value = entry.value
            self._queued.discard(id(value))
            self.nbytes -= value.nbytes
            tracked = self._spilling.values.find(value)
            if tracked is None or tracked.state is not State.ON_DISK:
                continue
            if self._volumes[value.volume].draining and not self._volumes[value.volume].lost:
                return entry, tracked
        return None

    def _free(self, places: list[tuple[tuple[int, int], int]]) -> None:
        """Free these places, with their sizes, and forget them."""
        for (at, offset), nbytes in places:
            self._volumes[at].allocator.free([(offset, nbytes)])
        places.clear()

    def _begin(self, found: Sequence[Tracked]) -> int:
        """Begin to fetch the first of these; returns how many."""
        count = len(found)
        while count and not self._spilling.fetch(found[:count]):
            count //= 2
        for tracked in found[:count]:
            self._coming[id(tracked)] = tracked
            self.coming += tracked.value.nbytes
        return count

    def give_up(self, park: Callable[[Entry, str], None]) -> None:
        """Park all that is still to be fetched: nothing is under way that would free memory of a
        volume for what it has on its disk.
        """
        while (one := self._take()) is not None:
            entry, _ = one
            volume = self._volumes[entry.value.volume]
            entry.waits = True
            park(
                entry,
                f"no room: {entry.key!r} has {entry.value.nbytes:,} bytes on the disk of volume "
                f"{volume.info.id}, whose memory has {volume.left:,} left to read it back",
            )

    def came(self, tracked: Tracked) -> bool:
        """A value is no longer being read or written; returns whether it was fetched."""
        if self._coming.pop(id(tracked), None) is None:
            return False
        self.coming -= tracked.value.nbytes
        return True

    # ---- room -----------------------------------------------------------------------------

    def reserved(self, nbytes: int) -> Collection[int] | None:
        """The volumes that a copy leaves alone; see ``Spilling.reserved``, which also says what is
        raised.
        """
        return self._spilling.reserved_for_copy(nbytes)

    def has_room_for_more(self, index: int, nbytes: int) -> bool:
        """Whether so many bytes may go to a volume without looking at each value."""
        try:
            reserved = self.reserved(nbytes)
        except Delayed:
            return False
        return reserved is not None and index not in reserved

    def let_go(self, entry: Entry) -> bool:
        """Let a value leave memory for which other volumes have no room at once: where all volumes
        share a spill file, it need not go to another one. Returns whether it does.
        """
        mover, value = self._spilling.mover, entry.value
        tracked = self._spilling.values.find(value)
        if tracked is None or mover is None or mover.by_volume or not tracked.is_free_to_go:
            return False
        if tracked.state is State.CLEAN:
            with self._spilling.aside():
                self._spilling.drop([tracked])
            return True
        if tracked.state is State.DIRTY:
            more = self._spilling.values.oldest(
                State.DIRTY,
                _MOST_BYTES - value.nbytes,
                lambda one: one is not tracked and self._volumes[one.value.volume].draining,
                _MOST_TOGETHER,
            )
            mover.write_these([tracked, *more])
        return tracked.state is State.WRITING

    def make_room(self, entry: Entry, reserved: Collection[int]) -> bool:
        """Make room for a copy as for a put; returns whether it is worth while to try again.

        Raises:
            Delayed: there will be some.
            StoreFullError: what leaves memory cannot be recorded.
        """
        spilling = self._spilling
        if not spilling.active:
            return False
        fits = any(
            entry.value.nbytes <= volume.info.capacity_bytes
            for volume in self._volumes
            if not volume.closed and volume.index not in reserved
        )
        return fits and spilling.make_room_for_copy(entry.value.nbytes, reserved)

    def evict(self, entry: Entry) -> bool:
        """Evict a value that is cached and finds no room; returns whether it was."""
        tracked = self._spilling.values.find(entry.value)
        if tracked is None or not self._spilling.can_evict(tracked):
            return False
        with self._spilling.aside():
            self._spilling.evict_these([tracked])
        return True

    def leave(self, values: Iterable[Value], index: int) -> None:
        """The copies of values on a volume are no longer needed, and are about to be dropped: nor
        is what they have on its disk.
        """
        if not self._has_files:
            return
        mover = self._spilling.mover
        for tracked in self._spilling.values.tracked(values):
            value = tracked.value
            is_there = value.volume == index and value.more and tracked.state is State.CLEAN
            if is_there and mover is not None:
                mover.only_in_memory(tracked)


def unreadable(key: str, tracked: Tracked) -> str:
    """Why a value that could not be read from disk has no further copy."""
    return f"{key!r} cannot be read from disk: {tracked.failure}"
