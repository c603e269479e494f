"""What leaves memory and comes back, recorded: which values, and where they lie on disk.

When that happens depends on disks and threads, so repeating requests is not enough. What follows
the record of a request are therefore the steps by which room was made for it, or its values were
read, and how that ended. What is written ahead is not recorded: a value of which there is a copy on
disk, but which is still in memory, counts as one that was never written. So of the parts of the
spill file only those are known again that have the only copy of a value, and what is freed there
needs no record.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import msgspec

from torchstore_core.errors import ProtocolError, StoreFullError
from torchstore_core.server.index.records import Value
from torchstore_core.server.keeping.log import SPARE_OF_STEPS
from torchstore_core.server.spilling.delays import Delayed
from torchstore_core.server.spilling.policy import State, Tracked
from torchstore_core.server.spilling.spilling import Spilling
from torchstore_core.wire.volumes.spilling import Extent

if TYPE_CHECKING:
    from torchstore_core.server.spilling.moves import Mover


# How a step of a request has ended.
_NO, _YES, _DELAYED, _REFUSED = range(4)
_AWAY = (State.ON_DISK, State.READING)


class _Dropped(msgspec.Struct, array_like=True, tag=0):
    """The memory of values was freed; where each lies on disk, and its checksums."""

    numbers: list[int]
    extents: list[Extent]
    sums: list[list[int]]


class _Evicted(msgspec.Struct, array_like=True, tag=1):
    """Versions were evicted that have these values."""

    numbers: list[int]


class _Reading(msgspec.Struct, array_like=True, tag=2):
    """Memory was sought for values, in order to read them from disk."""

    numbers: list[int]


class _Ended(msgspec.Struct, array_like=True, tag=3):
    """How making room for a request, or reading what it wanted, has ended."""

    how: int


class _Reserved(msgspec.Struct, array_like=True, tag=4):
    """A put was not free to take memory of any volume: values on disk need it to come back."""

    how: int


class _Read(msgspec.Struct, array_like=True, tag=5):
    """A value was read, or could not be. This is not part of a request.

    Args:
        content: its bytes, if they are not in a segment, whose memory is kept.
    """

    number: int
    failure: str
    is_damaged: bool
    content: bytes = b""


class _Aside(msgspec.Struct, array_like=True, tag=6):
    """What is not part of the request before it: another step."""

    step: bytes


class _Fetching(msgspec.Struct, array_like=True, tag=7):
    """Values are being read to these places, because they have to leave a volume. This is not part
    of a request.
    """

    numbers: list[int]
    places: list[tuple[int, int]]


class _Counted(msgspec.Struct, array_like=True, tag=8):
    """Values in the server's own memory count on another volume. This is not part of a request."""

    numbers: list[int]
    volume: int


_Step = _Dropped | _Evicted | _Reading | _Ended | _Reserved | _Read | _Aside | _Fetching | _Counted
_APART = _Reserved | _Read | _Aside | _Fetching | _Counted
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Step).decode
_decode_extent = msgspec.msgpack.Decoder(Extent).decode
_NOWHERE = Extent((), 0, 0)


class RecordedSpilling(Spilling):
    """:class:`Spilling`, of which everything is recorded that its values' memory depends on. A
    store without a spill file records nothing: what it evicts depends only on its requests.

    Args:
        record: appends to the log, see ``RecordedController._step``. What raises because it cannot
            be recorded is refused.
        next_step: the next record of that kind while the log is repeated, if it is one; it is taken
            if the argument says so.
        args: of the class above.
    """

    def __init__(
        self,
        record: Callable[[bytes, int], None],
        next_step: Callable[[bool], bytes | None],
        *args: Any,
    ) -> None:
        self._record = record
        self._next_step = next_step
        self._repeats = self._is_aside = False
        self._numbered: dict[int, Tracked] = {}  # while records are repeated
        super().__init__(*args)

    # ---- requests -------------------------------------------------------------------------

    def make_room(
        self, nbytes: int, keys: Collection[str] = (), reserved: Collection[int] = ()
    ) -> bool:
        if self.mover is None:
            return super().make_room(nbytes, keys, reserved)
        if self._repeats:
            return self._steps_again(self.mover)
        how = _REFUSED
        try:
            how = int(super().make_room(nbytes, keys, reserved))
        except Delayed:
            how = _DELAYED
            raise
        finally:
            self._record(_encode(_Ended(how)), 0)
        return bool(how)

    def reserved(self, nbytes: int) -> frozenset[int] | None:
        if self.mover is None:
            return super().reserved(nbytes)
        if self._repeats:
            body = self._next_step(False)
            step = None if body is None else _decode(body)
            if not isinstance(step, _Reserved):
                return frozenset()
            self._next_step(True)
            if step.how == _DELAYED:
                raise _delayed()
            return None
        try:
            found = super().reserved(nbytes)
        except Delayed:
            self._record(_encode(_Reserved(_DELAYED)), 0)
            raise
        if found is None:
            self._record(_encode(_Reserved(_NO)), 0)
        return found

    def _use_away(self, tracked: Sequence[Tracked], away: Sequence[Tracked], mover: Mover) -> None:
        if self._repeats:
            self._steps_again(mover)
            return
        how = _REFUSED
        try:
            super()._use_away(tracked, away, mover)
        except Delayed:
            how = _DELAYED
            raise
        finally:
            self._record(_encode(_Ended(how)), 0)

    def _steps_again(self, mover: Mover) -> bool:
        """Do what was done for the request that is repeated.

        Raises:
            Delayed: it was delayed; or the log does not say, because the server died meanwhile.
            StoreFullError: it was refused.
        """
        of = self._numbered.__getitem__
        while (body := self._next_step(False)) is not None:
            step = _decode(body)
            if isinstance(step, _APART):
                break
            self._next_step(True)
            match step:
                case _Dropped():
                    self._drop_again(step)
                case _Evicted():
                    self.evict_these(list(map(of, step.numbers)))
                case _Reading():
                    with suppress(Delayed):  # as the end of these steps says, too
                        mover.read(list(map(of, step.numbers)))
                case _Ended():
                    if step.how == _DELAYED:
                        raise _delayed()
                    if step.how == _REFUSED:
                        raise StoreFullError("this was refused before")
                    return bool(step.how)
        raise _delayed()

    @contextmanager
    def aside(self) -> Iterator[None]:
        self._is_aside = True
        try:
            yield
        finally:
            self._is_aside = False

    def _record_step(self, step: _Dropped | _Evicted) -> None:
        body = _encode(step)
        self._record(_encode(_Aside(body)) if self._is_aside else body, SPARE_OF_STEPS)

    def drop(self, clean: Sequence[Tracked]) -> None:
        if not self._repeats:
            where = [one.extent for one in clean if one.extent is not None]
            numbers = [one.number for one in clean]
            self._record_step(_Dropped(numbers, where, [one.sums for one in clean]))
        super().drop(clean)

    def _drop_again(self, step: _Dropped) -> None:
        dropped = [self._numbered[number] for number in step.numbers]
        for one, extent, sums in zip(dropped, step.extents, step.sums, strict=True):
            one.extent, one.sums = extent, sums
        self.drop(dropped)

    def evict_these(self, found: Sequence[Tracked]) -> None:
        # Without a spill file what is evicted for requests depends on these alone.
        if found and not self._repeats and (self.mover is not None or self._is_aside):
            self._record_step(_Evicted([one.number for one in found]))
        super().evict_these(found)

    def _fetching(self, wanted: Sequence[Tracked], places: Sequence[tuple[int, int]]) -> None:
        step = _Fetching([one.number for one in wanted], list(places))
        self._record(_encode(step), SPARE_OF_STEPS)

    def count_on(self, moved: Sequence[Tracked], index: int) -> None:
        if not self._repeats:
            step = _Counted([one.number for one in moved], index)
            self._record(_encode(step), SPARE_OF_STEPS)
        super().count_on(moved, index)

    def _begin_reading(self, values: Sequence[Tracked], mover: Mover) -> bool:
        if values:
            self._record(_encode(_Reading([one.number for one in values])), SPARE_OF_STEPS)
        return super()._begin_reading(values, mover)

    def _read_ended(self, tracked: Tracked) -> None:
        outcome = tracked.failure, tracked.is_damaged, tracked.content
        self._record(_encode(_Read(tracked.number, *outcome)), 0)

    def _track(self, value: Value, key: str, choice: int) -> None:
        super()._track(value, key, choice)
        if self._repeats and (tracked := self.values.find(value)) is not None:
            self._numbered[tracked.number] = tracked

    def _write_ahead(self) -> None:
        if not self._repeats:
            super()._write_ahead()

    # ---- coming back ----------------------------------------------------------------------

    def read_again(self, body: bytes) -> None:
        """Note again what a record says that is not part of a request.

        Raises:
            ProtocolError: it says something else, so that the log was not repeated as it was
                written.
        """
        of, step = self._numbered.__getitem__, _decode(body)
        if isinstance(step, _Aside):
            inner = _decode(step.step)
            if isinstance(inner, _Dropped):
                self._drop_again(inner)
            elif isinstance(inner, _Evicted):
                self.evict_these(list(map(of, inner.numbers)))
        elif isinstance(step, _Fetching) and self.mover is not None:
            wanted = list(map(of, step.numbers))
            self.mover.take_places(wanted, step.places)
            self.mover.read_to(wanted, step.places)
        elif isinstance(step, _Counted):
            self.count_on(list(map(of, step.numbers)), step.volume)
        elif isinstance(step, _Read) and self.mover is not None:
            self._note_read_again(of(step.number), step, self.mover)
        else:
            raise ProtocolError(f"the log has a {type(step).__name__} out of place")

    def _note_read_again(self, tracked: Tracked, step: _Read, mover: Mover) -> None:
        tracked.failure, tracked.is_damaged = step.failure, step.is_damaged
        tracked.content = step.content
        mover.note_read(tracked)
        if tracked.state is State.CLEAN:
            self._only_in_memory(tracked)

    def _only_in_memory(self, tracked: Tracked) -> None:
        """Whether its copy on disk was given up later is not known."""
        self.values.move(tracked, State.DIRTY)
        tracked.extent, tracked.sums = None, []

    @contextmanager
    def repeating(self) -> Iterator[None]:
        """Within this, requests are repeated; then what was interrupted goes on."""
        self._repeats = True
        if self.mover is not None:
            self.mover.repeat()
        try:
            yield
        finally:
            self._repeats = False
            self._numbered.clear()
        if self.mover is not None:
            self.mover.go_on()
            self._write_ahead()

    def state(self) -> dict[str, Any]:
        """All that a log needs at its beginning."""
        there = self.values.all()
        reading = [] if self.mover is None else self.mover.reading
        known = [*there, *[one for one in reading if one.gone]]
        away = {at: _away(one) for at, one in enumerate(known) if one.state in _AWAY}
        return {
            "values": [one.value for one in known],
            "keys": [one.key for one in known],
            "numbers": [one.number for one in known],
            "cached": [one.state is State.CACHED for one in known],
            "inline": [one.is_inline for one in known],
            "gone": len(known) - len(there),
            "away": away,
            "next": self.values.next_number,
            "active": self.active,
            "evicted": self.evicted,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Set it, of one that has none yet."""
        names = "values", "keys", "numbers", "cached", "inline"
        held = len(state["values"]) - state["gone"]
        columns = zip(*map(state.__getitem__, names), strict=True)
        self.active = state["active"]  # as it was, although it may track nothing now
        for at, (value, key, number, cached, inline) in enumerate(columns):
            self.values.next_number = number
            kind = State.CACHED if cached else State.DIRTY
            tracked = self.values.add(value, key, kind, inline=inline)
            self._numbered[number] = tracked
            if found := state["away"].get(at):
                self._set_away(tracked, *found)
            if at >= held:
                self.values.remove(value)
        self.values.next_number = state["next"]
        self.evicted = state["evicted"]

    def _set_away(
        self,
        tracked: Tracked,
        extent: bytes,
        sums: list[int],
        place: tuple[int, int] | None,
        failure: str,
        is_damaged: bool,
    ) -> None:
        tracked.extent, tracked.sums = _decode_extent(extent), sums
        tracked.failure, tracked.is_damaged = failure, is_damaged
        self.values.move(tracked, State.ON_DISK)
        if place is not None and self.mover is not None:
            self.mover.note_reading(tracked, place)


def _away(one: Tracked) -> tuple[Any, ...]:
    where = _encode(one.extent or _NOWHERE)
    place = one.place if one.state is State.READING else None
    return where, one.sums, place, one.failure, one.is_damaged


def _delayed() -> Delayed:
    return Delayed("this was delayed before", lambda retry: None)
