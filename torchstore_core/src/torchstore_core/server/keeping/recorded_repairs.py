"""What a store copies by itself, recorded: which copies it makes and drops, and what is drained.

When that happens depends on time and on copiers, so repeating requests is not enough. The log has
the steps that change what others see: a batch of copies was begun, copies were dropped, a volume is
drained. That a batch was committed, or is given up, is a request of its copier like any other. The
search for what is to be copied is not in the log; it begins anew when a server comes back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from torchstore_core.errors import ProtocolError, StoreFullError
from torchstore_core.server.index.records import SessionRecord, Txn, Value
from torchstore_core.server.index.stored import stored_values
from torchstore_core.server.keeping.log import SPARE, SPARE_OF_STEPS
from torchstore_core.server.memory.volume_record import VolumeRecord
from torchstore_core.server.repairing.backlog import Backlog, Entry
from torchstore_core.server.repairing.copiers import Copier
from torchstore_core.server.repairing.repairs import Repairs

_AGAIN_S = 1.0


class _Begun(msgspec.Struct, array_like=True, tag=0):
    """Copies to a volume were begun: of which values, by where they lie, and to where."""

    session: int
    txn: int
    lease: int
    volume: int
    values: list[tuple[int, int]]
    offsets: list[int]


class _Dropped(msgspec.Struct, array_like=True, tag=1):
    """The copies of values at these offsets of a volume were dropped."""

    volume: int
    offsets: list[int]


class _Drained(msgspec.Struct, array_like=True, tag=2):
    """A volume is drained, or is back in service."""

    volume: int
    draining: bool


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Begun | _Dropped | _Drained).decode


class RecordedRepairs(Repairs):
    """:class:`Repairs`, of which everything is recorded that memory depends on.

    Args:
        record: appends to the log, see ``RecordedController._step``.
        args: of the class above.
    """

    def __init__(self, record: Callable[[bytes, int], None], *args: Any) -> None:
        super().__init__(*args)
        self._record = record
        self._repeats = False
        self._at: dict[tuple[int, int], Value] = {}  # while records are repeated: by place

    # ---- what is recorded -----------------------------------------------------------------

    def drain(self, volume: VolumeRecord, *, draining: bool) -> None:
        if not self._repeats:
            self._record(_encode(_Drained(volume.index, draining)), SPARE)
        super().drain(volume, draining=draining)

    def _begin(self, copier: Copier, at: int, found: Sequence[tuple[Entry, int]]) -> None:
        request = copier.request
        places = [entry.value.places[0] for entry, _ in found]
        offsets = [offset for _, offset in found]
        serial = copier.session.serial
        begun = _Begun(serial, request.txn, request.lease, at, places, offsets)
        try:
            self._record(_encode(begun), SPARE_OF_STEPS)
        except StoreFullError as full:  # the log cannot grow: it is tried again
            self._trouble = full.message
            freed = [(offset, entry.value.nbytes) for entry, offset in found]
            self._volumes[at].allocator.free(freed)
            for entry, _ in reversed(found):
                self.backlog.add(self.targets.entry(entry.key, entry.value), first=True)
            self._back_off()
            return
        super()._begin(copier, at, found)

    def _drop(self, leaving: Mapping[int, list[Value]]) -> None:
        if self._repeats:
            return
        recorded: dict[int, list[Value]] = {}
        for at, values in leaving.items():
            places = [dict(value.places) for value in values]
            offsets = {there[at]: None for there in places if at in there and len(there) > 1}
            try:
                if offsets:
                    self._record(_encode(_Dropped(at, list(offsets))), SPARE_OF_STEPS)
            except StoreFullError:  # the log cannot grow: they are looked for again
                self._later(_AGAIN_S, self.look)
            else:
                recorded[at] = values
        super()._drop(recorded)

    # ---- coming back ----------------------------------------------------------------------

    def look(self) -> None:
        if self._repeats:
            self.active = True
            self.targets.look_again()
        else:
            super().look()

    def committed(self, txn: Txn) -> None:
        if not self._repeats:
            super().committed(txn)

    def aborted(self, txn: Txn) -> None:
        if not self._repeats:
            super().aborted(txn)
        elif self._batch is not None and self._batch.txn is txn:
            self._batch = None

    def _pump(self) -> None:
        if not self._repeats:
            super()._pump()

    def step_again(self, body: bytes, sessions: Mapping[int, SessionRecord]) -> None:
        """Take a step again; ``sessions``: by serial number."""
        step = _decode(body)
        match step:
            case _Drained():
                self.drain(self._volumes[step.volume], draining=step.draining)
            case _Dropped():
                values = [self._value((step.volume, at), sessions) for at in step.offsets]
                self.leavings.drop(values, step.volume)
            case _Begun():
                values = [self._value(place, sessions) for place in step.values]
                allocator = self._volumes[step.volume].allocator
                for value, offset in zip(values, step.offsets, strict=True):
                    allocator.take(offset, value.nbytes)
                entries = [Entry(value, value.key, 0) for value in values]
                session, found = sessions[step.session], zip(entries, step.offsets, strict=True)
                self._enter(session, step.txn, step.lease, step.volume, list(found))

    def _value(self, place: tuple[int, int], sessions: Mapping[int, SessionRecord]) -> Value:
        """What lies there. All values are looked at once, and again when some have come since.

        Raises:
            ProtocolError: nothing does, so that the log was not repeated as it was written.
        """
        for _ in range(2):
            found = self._at.get(place)
            if found is not None and place in found.places and (found.uses or found.pins):
                return found
            self._at = {there: value for value in self._values(sessions) for there in value.places}
        raise ProtocolError(f"the log has a copy of what is not at {place}")

    def _values(self, sessions: Mapping[int, SessionRecord]) -> Iterator[Value]:
        for session in sessions.values():
            for held in session.leases.values():
                yield from filter(None, held)
        for pairs in stored_values(self._catalog):
            for _, value in pairs:
                if value.data is None and value.uses:
                    yield value

    @contextmanager
    def repeating(self) -> Iterator[None]:
        """Within this, steps are taken again; then what is to be copied is sought anew."""
        self._repeats = True
        try:
            yield
        finally:
            self._repeats = False
            self._at.clear()
            self.backlog = Backlog()
        if self._batch is not None:
            self._watch(self._batch)
        if self.active:
            self.look()

    def state(self) -> dict[str, Any]:
        """All that a log needs at its beginning, besides what volumes are drained."""
        return {
            "active": self.active,
            "batch": self._batch,
            "left": self.leavings.all,
            "copied": self.copied,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Set it, of one that has none yet."""
        self.active = state["active"]
        self._batch = state["batch"]
        self.leavings.all = state["left"]
        self.copied = state["copied"]
        self.targets.look_again()
