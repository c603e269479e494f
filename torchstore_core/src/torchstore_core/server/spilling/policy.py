"""Which values leave memory first: pure bookkeeping, without memory, files or time.

A value is *tracked* from its commit on if it may leave memory. It is in one of these states:

| state | in memory | on disk | what may happen to it |
|---|---|---|---|
| ``CACHED`` | yes | no | it is evicted |
| ``DIRTY`` | yes | no | it is written |
| ``WRITING`` | yes | not yet | it becomes clean |
| ``CLEAN`` | yes | yes | its memory is freed, at no cost |
| ``ON_DISK`` | no | yes | it is read when somebody wants it |
| ``READING`` | not yet | yes | it becomes clean |
"""

from __future__ import annotations

import enum
import heapq
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from torchstore_core.server.index.records import Value
from torchstore_core.server.memory.allocator import rounded

if TYPE_CHECKING:
    from torchstore_core.wire.volumes.spilling import Extent, SpillTrouble


class State(enum.IntEnum):
    """Where a tracked value is; see the table above."""

    CACHED = 0
    DIRTY = 1
    WRITING = 2
    CLEAN = 3
    ON_DISK = 4
    READING = 5


_STATES = tuple(State)  # to look through the class itself takes five times as long
_RANKED = (State.CACHED, State.DIRTY, State.CLEAN)
_WITH_COPY = (State.CLEAN, State.ON_DISK, State.READING)


class Tracked(msgspec.Struct, eq=False):
    """A value that may leave memory.

    Args:
        key: of the version that it is, or that it is part of.
        number: which of all values that were ever tracked it is.
        wanted: how many delayed requests are to find it in memory when they are retried.
        extent, sums: where it lies in the spill file, and the checksums of its pieces; they do not
            change while it is clean.
        gone: nobody holds the value any more; what is under way only has to be cleaned up.
        failure: why it could not be read.
        is_damaged: whether it never can be.
        place: volume and offset that it is being read to.
        reads, trouble: how many orders to read pieces of it are under way, and why one could not be
            carried out.
        waiting: requests that are retried when it has been read.
        is_inline: whether its bytes are in the server's own memory when they are in memory, and not
            in a segment.
        content: these bytes, when they have just been read.
    """

    value: Value
    key: str
    state: State
    number: int = 0
    wanted: int = 0
    extent: Extent | None = None
    sums: list[int] = []
    gone: bool = False
    failure: str = ""
    is_damaged: bool = False
    place: tuple[int, int] = (-1, -1)
    reads: int = 0
    trouble: SpillTrouble | None = None
    waiting: list[Ticket] = []
    is_inline: bool = False
    content: bytes = b""

    @property
    def nbytes(self) -> int:
        """Bytes of memory that one copy of it takes."""
        value = self.value
        return value.nbytes if self.is_inline else rounded(value.nbytes)

    @property
    def is_free_to_go(self) -> bool:
        """Whether nobody reads it, or is about to."""
        return not (self.value.pins or self.wanted)

    def is_in(self, only: Collection[int] | None) -> bool:
        """Whether it has a copy in one of these volumes; None: in any."""
        if only is None or self.value.volume in only:
            return True
        return any(at in only for at, _ in self.value.more)


class Ticket:
    """A request that waits until values have been read. Meanwhile all values that it wants stay in
    memory, also those that were there already.

    Args:
        wanted: all values that it wants.
    """

    def __init__(self, wanted: Sequence[Tracked]) -> None:
        self._wanted = wanted
        self._left = 0
        self._retry: Callable[[], None] | None = None
        for tracked in wanted:
            tracked.wanted += 1

    def await_read(self, tracked: Tracked) -> None:
        """Wait for this one of them."""
        self._left += 1
        tracked.waiting.append(self)

    def then(self, retry: Callable[[], None]) -> None:
        """What to call when all have been read."""
        self._retry = retry

    def one_read(self) -> None:
        """One has been read, or cannot be."""
        self._left -= 1
        if not self._left:
            self.give_up()
            if self._retry is not None:
                self._retry()

    def give_up(self) -> None:
        """From now on, the values may leave memory again."""
        for tracked in self._wanted:
            tracked.wanted -= 1
        self._wanted = ()


class Residency:
    """The tracked values, in the order of their last use.

    Args:
        by_volume: whether each volume has a spill file of its own, which has its number; otherwise
            there is one, of number 0.

    Attributes:
        away: how many are not in memory.
        bytes_of: bytes of the values in each state.
        copied: bytes of each spill file that hold copies of clean values.
        next_number: of the next value that is tracked.
    """

    def __init__(self, *, by_volume: bool = False) -> None:
        self._by_volume = by_volume
        self._tracked: dict[int, Tracked] = {}
        self._by_use: dict[State, OrderedDict[int, Tracked]] = {s: OrderedDict() for s in _RANKED}
        self.bytes_of = dict.fromkeys(_STATES, 0)
        self.copied: dict[int, int] = defaultdict(int)
        self.count_of = dict.fromkeys(_STATES, 0)
        self.next_number = 0
        # How many of each size there are that have a copy in each spill file, and these sizes as a
        # heap, the largest first; sizes stay in both until they are the largest, of none.
        self._sizes: dict[int, dict[int, int]] = defaultdict(dict)
        self._largest: dict[int, list[int]] = defaultdict(list)

    def __len__(self) -> int:
        return len(self._tracked)

    @property
    def away(self) -> int:
        """How many values are not in memory."""
        return self.count_of[State.ON_DISK] + self.count_of[State.READING]

    def find(self, value: Value) -> Tracked | None:
        """What is known of a value; None if it is not tracked."""
        return self._tracked.get(id(value))

    def add(self, value: Value, key: str, state: State, *, inline: bool = False) -> Tracked:
        """Track a value, as the one that was used last; ``inline``: see :class:`Tracked`."""
        tracked = Tracked(value, key, state, self.next_number, is_inline=inline)
        self._tracked[id(value)] = tracked
        self.next_number += 1
        self._enter(tracked)
        return tracked

    def remove(self, value: Value) -> Tracked | None:
        """Stop tracking a value, because nobody holds it any more."""
        tracked = self._tracked.pop(id(value), None)
        if tracked is not None:
            self._leave(tracked)
            tracked.gone = True
        return tracked

    def move(self, tracked: Tracked, state: State, *, first: bool = False) -> None:
        """Change the state of a value; ``first``: it is then the first to go on from there."""
        if not tracked.gone:
            self._leave(tracked)
        tracked.state = state
        if not tracked.gone:
            self._enter(tracked)
            if first and state in self._by_use:
                self._by_use[state].move_to_end(id(tracked.value), last=False)

    def touch(self, tracked: Tracked) -> None:
        """It is used now."""
        order = self._by_use.get(tracked.state)
        if order is not None:
            order.move_to_end(id(tracked.value))

    def take_in(self, tracked: Tracked) -> None:
        """Its bytes are in a segment now. It is used for that, so it is the last in order."""
        self._leave(tracked)
        tracked.is_inline = False
        self._enter(tracked)

    def oldest(
        self,
        state: State,
        nbytes: int,
        among: Callable[[Tracked], bool] = lambda tracked: True,
        most: int = sys.maxsize,
    ) -> list[Tracked]:
        """The least recently used values in this state that are free to go, ``among`` those that
        this says: as few as have ``nbytes`` together, or all if they have less; ``most``: no more
        than so many.
        """
        found: list[Tracked] = []
        for tracked in self._by_use[state].values():
            if nbytes <= 0 or len(found) == most:
                break
            if tracked.is_free_to_go and among(tracked):
                found.append(tracked)
                nbytes -= tracked.nbytes
        return found

    def all(self) -> list[Tracked]:
        """All of them: those of which there is an order by use in that order."""
        ranked = [one for order in self._by_use.values() for one in order.values()]
        return ranked + [one for one in self._tracked.values() if one.state not in _RANKED]

    def largest_on_disk(self, file: int = 0) -> int:
        """Bytes of memory that the largest value takes that is only in this file, or can be at
        once.
        """
        largest, sizes = self._largest[file], self._sizes[file]
        while largest and not sizes[-largest[0]]:
            del sizes[-heapq.heappop(largest)]
        return -largest[0] if largest else 0

    def disposable(self) -> Iterator[Tracked]:
        """The values whose memory can be freed at once, when nobody reads them any more."""
        for state in (State.CLEAN, State.CACHED):
            yield from self._by_use[state].values()

    def newest(self, state: State, file: int = 0) -> Tracked | None:
        """The most recently used value in this state, of those of this file."""
        there = reversed(self._by_use[state].values())
        return next((tracked for tracked in there if self._file(tracked) == file), None)

    def _file(self, tracked: Tracked) -> int:
        return tracked.value.volume if self._by_volume else 0

    def tracked(self, values: Iterable[Value]) -> list[Tracked]:
        """Those of the values that are tracked."""
        get = self._tracked.get
        return [found for value in values if (found := get(id(value))) is not None]

    def _enter(self, tracked: Tracked) -> None:
        size = tracked.nbytes
        if tracked.state in _WITH_COPY:
            file = self._file(tracked)
            sizes = self._sizes[file]
            if size not in sizes:
                sizes[size] = 0
                heapq.heappush(self._largest[file], -size)
            sizes[size] += 1
        if tracked.state is State.CLEAN and tracked.extent is not None:
            self.copied[self._file(tracked)] += tracked.extent.span
        self.bytes_of[tracked.state] += size
        self.count_of[tracked.state] += 1
        order = self._by_use.get(tracked.state)
        if order is not None:
            order[id(tracked.value)] = tracked

    def _leave(self, tracked: Tracked) -> None:
        size = tracked.nbytes
        if tracked.state in _WITH_COPY:
            self._sizes[self._file(tracked)][size] -= 1
        if tracked.state is State.CLEAN and tracked.extent is not None:
            self.copied[self._file(tracked)] -= tracked.extent.span
        self.bytes_of[tracked.state] -= size
        self.count_of[tracked.state] -= 1
        order = self._by_use.get(tracked.state)
        if order is not None:
            del order[id(tracked.value)]
