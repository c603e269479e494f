"""Gives values further copies: after the loss of a volume, and to empty one that is drained.

The bytes are moved by *copiers*, processes beside the volumes, which are clients: they lease what
they read, and what they write is an unfinished put until they commit it. Here is decided what they
copy, and when. One batch is under way at a time, and the next one is not begun before the bandwidth
allows it.

Everything here runs in the thread of the event loop and never waits; a store of which no volume was
ever lost or drained pays one look at ``active`` for each commit.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import msgspec

from torchstore_core.contracts.strategy import Strategy
from torchstore_core.errors import StoreFullError
from torchstore_core.reports.bandwidths import DEFAULT_BANDWIDTH
from torchstore_core.reports.repairs import RepairStatus
from torchstore_core.server.index.catalog import Catalog
from torchstore_core.server.index.records import SessionRecord, Txn, Value
from torchstore_core.server.index.stored import named_values, stored_values
from torchstore_core.server.memory.allocator import rounded
from torchstore_core.server.memory.leases import Leases
from torchstore_core.server.memory.volume_record import VolumeRecord
from torchstore_core.server.repairing.backlog import Backlog, Entry, Parked
from torchstore_core.server.repairing.copiers import Copier, Copiers, StartsCopier
from torchstore_core.server.repairing.departures import Departures, unreadable
from torchstore_core.server.repairing.leavings import Leavings
from torchstore_core.server.repairing.rates import Rate
from torchstore_core.server.repairing.targets import Targets
from torchstore_core.server.spilling.delays import Delayed
from torchstore_core.server.spilling.policy import Tracked
from torchstore_core.server.spilling.spilling import Spilling
from torchstore_core.wire import messages as m

# A batch has at most so many bytes, unless it is one value, and so many values.
_BATCH_BYTES = 64 << 20
_BATCH_VALUES = 128
# The least time for each value, in seconds: the server has others to serve than copiers.
_VALUE_S = 1e-4
# How many values may be passed over to fill a batch.
_PASSED_OVER = 64
# The store looks at so many values at once when it looks for those that lack copies.
_SLICE = 1000
# The pause after a failure, which doubles; and before memory that was freed is tried.
_BACKOFF_S, _LONGEST_BACKOFF_S = 0.25, 30.0
_RETRY_S, _PARKED_S = 0.1, 10.0
# A copier that takes longer for a batch than all this together, in seconds, is started anew.
_LEAST_S = 120.0
_SLOWEST_BYTES_PER_S = 500_000


class _Batch(msgspec.Struct, eq=False):
    """Copies that are being made."""

    session: SessionRecord
    lease: int
    txn: Txn
    entries: list[Entry]
    nbytes: int


class Repairs:
    """The copies that a store makes by itself.

    Args:
        sessions: the open sessions, by token.
        holders: the sessions that may have leases, by token.
        free: frees the memory of values that nobody holds any more.
        release: releases leases; see ``Controller.release``.
        spilling: the values that may leave memory.
        later: calls something after so many seconds.
        start: starts a copier beside a volume, unless there is one; see
            ``messages.StartCopier``.
        bandwidth: the most bytes to copy per second; 0: no limit.

    Attributes:
        active: whether a volume was ever lost or drained.
        waits_for: what the next copies wait for, for people, if it is room in memory.
        leavings: copies that were dropped, and are still read.
        departures: values that may leave memory, on volumes that are drained.
        copiers: who makes the copies.
    """

    def __init__(
        self,
        volumes: Sequence[VolumeRecord],
        strategy: Strategy,
        catalog: Catalog,
        leases: Leases,
        sessions: Mapping[bytes, SessionRecord],
        holders: Mapping[bytes, SessionRecord],
        free: Callable[[Iterable[Value]], None],
        release: Callable[[SessionRecord, list[int], list[tuple[int, list[int]]]], None],
        spilling: Spilling,
        later: Callable[[float, Callable[[], None]], object],
        start: StartsCopier,
        bandwidth: int = DEFAULT_BANDWIDTH,
    ) -> None:
        self._volumes = volumes
        self._catalog = catalog
        self._leases = leases
        self._free = free
        self._release = release
        self._spilling = spilling
        self._later = later
        self.bandwidth = bandwidth
        self.active = False
        self.leavings = Leavings(volumes, holders)
        self.targets = Targets(volumes, strategy)
        self.copiers = Copiers(volumes, sessions, later, start, self._no_copier)
        self.departures = Departures(volumes, spilling)
        self.backlog = Backlog()
        self.parked = Parked()
        spilling.settled = self._settled
        self.waits_for: str | None = None
        self._refused = 0  # no room can be made for so many bytes, for the time being
        self._batch: _Batch | None = None
        self._search: Iterator[list[tuple[str, Value]]] | None = None
        self._search_again = False
        self._pauses = 0  # what has to end before the next batch may begin
        self._retry_is_due = self._is_timed = False
        self._failures = 0
        self._trouble = ""
        self._rate = Rate()
        self.copied = (0, 0)  # values and bytes

    @property
    def idle(self) -> bool:
        """Whether all is done that can be done."""
        waiting = len(self.backlog) + len(self.departures)
        waiting += self.waits_for is not None
        return not (waiting or self._batch or self._search or self._retry_is_due)

    # ---- what lacks copies ----------------------------------------------------------------

    def drain(self, volume: VolumeRecord, *, draining: bool) -> None:
        """Drain a volume, or put it back in service."""
        volume.draining = draining
        self.look()

    def look(self) -> None:
        """A volume was lost, is drained, or is back in service: look for values that lack copies,
        or have too many.
        """
        self.active = True
        self.targets.look_again()
        self.retry_soon()
        if self._search is not None:
            self._search_again = True
        else:
            self._search = stored_values(self._catalog)
            self._later(0, self._look_on)

    def volume_lost(self, index: int) -> None:
        """A volume is lost, and its copies are forgotten."""
        self.leavings.volume_lost(index)
        if self.targets.copies > 1 or any(v.draining for v in self._volumes):
            self.look()
        else:
            self.active = True
            self.targets.look_again()
            self._pump()

    def _look_on(self) -> None:
        """Look at some more keys, and let others have their turn."""
        search = self._search
        if search is None:
            return
        leaving: dict[int, list[Value]] = {}
        count = 0
        for found in search:
            for key, value in found:
                self._consider(key, value, leaving)
            count += 1 + len(found)
            if count >= _SLICE:
                break
        else:
            self._search = None
        self._drop(leaving)
        if self._search is not None:
            self._later(0, self._look_on)
        elif self._search_again:
            self._search_again = False
            self.look()
        else:
            self._pump()

    def _consider(self, key: str, value: Value, leaving: dict[int, list[Value]]) -> None:
        """Note a value that lacks copies, or has some that are not needed any more."""
        if self._spilling.active and not self.departures.is_ready(self.targets.entry(key, value)):
            return
        if self.targets.lacks(value):
            self.backlog.add(self.targets.entry(key, value))
        elif value.data is None and (value.uses or value.pins):
            for at in self.targets.leaves(value):
                leaving.setdefault(at, []).append(value)

    def _drop(self, leaving: Mapping[int, list[Value]]) -> None:
        for at, values in leaving.items():
            dropped = {id(v): v for v in values}.values()
            self.departures.leave(dropped, at)
            self.leavings.drop(dropped, at)
        if leaving and self._spilling.room:
            self._spilling.retry_soon()

    def _settled(self, tracked: Tracked) -> None:
        """A value is no longer being written to disk, or read from there."""
        was_fetched = self.departures.came(tracked)
        if not self.active:
            return
        leaving: dict[int, list[Value]] = {}
        for key, value in named_values(tracked.key, [] if tracked.gone else [tracked.value]):
            if was_fetched and tracked.failure:
                self._park(self.targets.entry(key, value), unreadable(key, tracked))
            else:
                self._consider(key, value, leaving)
        self._drop(leaving)
        self.retry_soon(_RETRY_S)
        self._pump()

    def released(
        self,
        session: SessionRecord,
        leases: Sequence[int],
        parts: Sequence[tuple[int, list[int]]],
    ) -> None:
        """Leases of a session are about to be released; see ``Controller.release``."""
        if len(self.leavings):
            self.leavings.released(session, leases, parts)
            self.retry_soon(_RETRY_S)

    def committed(self, txn: Txn) -> None:
        """A put was committed that may have begun before a volume was lost or drained."""
        leaving: dict[int, list[Value]] = {}
        if txn.contributions:
            for target, contribution in txn.contributions:
                for key, value in named_values(target.key, contribution.values):
                    self._consider(key, value, leaving)
        for value in txn.plain:
            self._consider(value.key, value, leaving)
        self._drop(leaving)
        self._pump()

    def freed(self, values: Iterable[Value]) -> None:
        """Nobody holds these values any more, and what they have is about to be freed."""
        for value in values:
            self.backlog.forget(value)
            self.parked.forget(value)
        if len(self.parked):
            self.retry_soon(_RETRY_S)

    def retry_soon(self, delay: float = 0.0) -> None:
        """Something has changed for values that could not be copied."""
        if not self._retry_is_due and len(self.parked):
            self._retry_is_due = True
            self._later(delay, self._retry)

    def _retry(self) -> None:
        self._retry_is_due = False
        for entry in self.parked.take_all():
            self.backlog.add(self.targets.entry(entry.key, entry.value))
        self._pump()

    # ---- copiers --------------------------------------------------------------------------

    def take(
        self, session: SessionRecord, request: m.TakeCopies, send: Callable[[m.Message], None]
    ) -> None:
        """A copier asks for something to do; it is answered when there is some.

        Raises:
            ProtocolError: see ``Copiers.add``.
        """
        self.copiers.add(session, request, send)
        if request.trouble:
            self._trouble = request.trouble
        self._pump()

    def _no_copier(self, why: str) -> None:
        """A copier has not started. It is started again, after a pause."""
        self._trouble = why
        self._back_off()

    # ---- batches --------------------------------------------------------------------------

    def _pump(self) -> None:
        """Begin the next batch, if that is possible now, and fetch what comes behind it."""
        if self._search is not None or self.waits_for is not None:
            return
        self._refused = 0
        try:
            if self._batch is None and not self._pauses:
                self._begin_next()
            if len(self.departures):
                self._fetch()
        except Delayed as delayed:
            self.waits_for = delayed.why
            delayed.then(self._wait_no_more)
        except StoreFullError as full:  # the log cannot grow: it is tried again
            self._trouble = full.message
            self._back_off()

    def _wait_no_more(self) -> None:
        self.waits_for = None
        self._pump()

    def _begin_next(self) -> None:
        """Begin the next batch.

        Raises:
            Delayed: there is no room for it, but there will be.
            StoreFullError: what makes room for it cannot be recorded.
        """
        order = self.targets.order()
        while (entry := self._next()) is not None:
            try:
                place = self._place(entry, order)
            except (Delayed, StoreFullError):
                self.backlog.add(self.targets.entry(entry.key, entry.value), first=True)
                raise
            if place is None:
                continue
            copier = self.copiers.find(place[0])
            if copier is None:
                self._volumes[place[0]].allocator.free([(place[1], entry.value.nbytes)])
                self.backlog.add(self.targets.entry(entry.key, entry.value), first=True)
                return
            self._begin(copier, place[0], self._gathered(entry, place, order))
            return
        if not len(self.departures):
            self.copiers.dismiss(lambda: self.idle)

    def _place(
        self, entry: Entry, order: Callable[[Entry], Sequence[int]]
    ) -> tuple[int, int] | None:
        """Memory for a further copy of a value. If the volumes have no room, some is made. If that
        cannot be, either, None: the value has left memory, or is parked.

        Raises:
            Delayed, StoreFullError: as :meth:`_begin_next`.
        """
        departures, nbytes = self.departures, entry.value.nbytes
        while True:
            reserved = departures.reserved(nbytes)
            if reserved is not None:
                place = self.targets.reserve(entry, order, reserved=reserved)
                if place is not None:
                    return place
            if departures.let_go(entry):
                return None
            may_try = reserved is not None and not 0 < self._refused <= nbytes
            if may_try and departures.make_room(entry, reserved or ()):
                continue
            self._refused = min(self._refused or nbytes, nbytes)
            if departures.evict(entry):
                return None
            self._park(entry, self.targets.why_not(entry) + self._spilling.why_no_more())
            return None

    def _fetch(self) -> None:
        """Have values read that have to leave a disk, as many as the next batch may have.

        Raises:
            Delayed, StoreFullError: as :meth:`_begin_next`.
        """
        departures, order = self.departures, self.targets.order()
        room = _BATCH_BYTES - departures.coming - self.backlog.nbytes
        place = functools.partial(self._place, order=order)
        is_stuck = departures.fetch(room, _BATCH_VALUES, place, self._park)
        if is_stuck and not (departures.coming or len(self.backlog) or self._batch):
            departures.give_up(self._park)

    def _park(self, entry: Entry, why: str) -> None:
        """There is no place for a copy now. It is tried again when memory was freed, and now and
        then: the host may have more memory, without telling.
        """
        self.parked.add(entry, why)
        if not self._is_timed:
            self._is_timed = True

            def time_is_up() -> None:
                self._is_timed = False
                self.retry_soon()

            self._later(_PARKED_S, time_is_up)

    def _next(self) -> Entry | None:
        """The next value that still lacks a copy."""
        leaving: dict[int, list[Value]] = {}
        try:
            while (entry := self.backlog.take()) is not None:
                if self.targets.lacks(entry.value):
                    return entry
                self._consider(entry.key, entry.value, leaving)
            return None
        finally:
            self._drop(leaving)

    def _gathered(
        self, first: Entry, place: tuple[int, int], order: Callable[[Entry], Sequence[int]]
    ) -> list[tuple[Entry, int]]:
        """Values to copy to the same volume together, with the offsets of their new copies."""
        at, offset = place
        found = [(first, offset)]
        nbytes = first.value.nbytes
        others: list[Entry] = []
        if not self.departures.has_room_for_more(at, _BATCH_BYTES):
            return found
        while nbytes < _BATCH_BYTES and len(found) < _BATCH_VALUES and len(others) < _PASSED_OVER:
            entry = self._next()
            if entry is None:
                break
            there = None
            if nbytes + entry.value.nbytes <= _BATCH_BYTES:
                with contextlib.suppress(Delayed):
                    there = self.targets.reserve(entry, order, at)
            if there is None:
                others.append(entry)
            else:
                found.append((entry, there[1]))
                nbytes += entry.value.nbytes
        for entry in reversed(others):
            self.backlog.add(self.targets.entry(entry.key, entry.value), first=True)
        return found

    def _begin(self, copier: Copier, at: int, found: Sequence[tuple[Entry, int]]) -> None:
        """Have a copier copy values to a volume, with the offsets of their new copies."""
        self.copiers.remove(copier)
        session, request = copier.session, copier.request
        batch = self._enter(session, request.txn, request.lease, at, found)
        host = self._volumes[at].info.topology.host_id

        def distance(place: tuple[int, int]) -> bool:
            return self._volumes[place[0]].info.topology.host_id != host

        pieces = [
            m.Piece(entry.value.nbytes, sorted(entry.value.places, key=distance), (at, offset))
            for entry, offset in found
        ]
        copier.send(m.Copies(request.id, pieces, self.bandwidth))
        self._pause(max(self._seconds(batch), len(found) * _VALUE_S))
        self._watch(batch)

    def _enter(
        self,
        session: SessionRecord,
        txn_id: int,
        lease: int,
        at: int,
        found: Sequence[tuple[Entry, int]],
    ) -> _Batch:
        """Note that copies are being made: as an unfinished put of a copier, which leases what it
        reads.
        """
        volume = self._volumes[at]
        values = [entry.value for entry, _ in found]
        copies = [
            Value(v.key, v.meta, v.nbytes, at, None, offset, v.creator, uses=1)
            for v, (_, offset) in zip(values, found, strict=True)
        ]
        granted = sum(rounded(v.nbytes) for v in values)
        txn = Txn(copies, {at: granted}, copies, [], copies, copy_of=values)
        self._leases.lease(session, lease, values)
        session.txns[txn_id] = txn
        volume.unfinished += granted
        nbytes = sum(v.nbytes for v in values)
        entries = [entry for entry, _ in found]
        self._batch = _Batch(session, lease, txn, entries, nbytes)
        self._rate.begin()
        return self._batch

    def _seconds(self, batch: _Batch) -> float:
        """How long a batch takes at the bandwidth."""
        return batch.nbytes / self.bandwidth if self.bandwidth else 0.0

    def _watch(self, batch: _Batch) -> None:
        """Start a copier anew that takes too long: it is stopped, maybe, or a volume is."""
        volume = self._volumes[batch.txn.values[0].volume]

        def time_is_up() -> None:
            if self._batch is batch:
                self._trouble = f"the copier beside volume {volume.info.id} has taken too long"
                self.copiers.start(volume, again=True)

        slowest = batch.nbytes / _SLOWEST_BYTES_PER_S
        self._later(_LEAST_S + 2 * self._seconds(batch) + slowest, time_is_up)

    def _pause(self, seconds: float) -> None:
        """Begin nothing for so long."""

        def over() -> None:
            self._pauses -= 1
            self._pump()

        self._pauses += 1
        self._later(seconds, over)

    def written(self, txn: Txn) -> None:
        """A copier has written copies: they become visible, where they are still lacking."""
        batch, self._batch = self._batch, None
        entries = [] if batch is None or batch.txn is not txn else batch.entries
        unused: list[Value] = []
        values, nbytes = self.copied
        for value, copy in zip(txn.copy_of, txn.values, strict=True):
            if not self.targets.lacks(value) or self._volumes[copy.volume].closed:
                copy.uses = 0
                unused.append(copy)
                continue
            self._leases.add_copy(value, (copy.volume, copy.offset))
            self.departures.leave([value], value.volume)
            values, nbytes = values + 1, nbytes + value.nbytes
            self._rate.add(value.nbytes)
        self.copied = values, nbytes
        self._free(unused)
        if batch is not None and entries:  # before copies are dropped, or these would be in use
            self._release(batch.session, [batch.lease], [])
        self._failures, self._trouble = 0, ""
        leaving: dict[int, list[Value]] = {}
        for entry in entries:
            self._consider(entry.key, entry.value, leaving)
        self._drop(leaving)
        self._pump()

    def aborted(self, txn: Txn) -> None:
        """Copies could not be made. They are tried again after a pause."""
        batch = self._batch
        if batch is None or batch.txn is not txn:
            return
        self._batch = None
        for entry in reversed(batch.entries):
            self.backlog.add(self.targets.entry(entry.key, entry.value), first=True)
        self._back_off()

    def _back_off(self) -> None:
        """Something has failed: begin nothing for a while."""
        self._pause(min(_BACKOFF_S * 2**self._failures, _LONGEST_BACKOFF_S))
        self._failures = min(self._failures + 1, 10)

    def status(self) -> RepairStatus:
        """How far it is."""
        batch = self._batch
        under_way = (0, 0) if batch is None else (len(batch.entries), batch.nbytes)
        return RepairStatus(
            values=len(self.backlog) + len(self.parked) + len(self.departures) + under_way[0],
            nbytes=self.backlog.nbytes
            + self.parked.nbytes
            + (self.departures.nbytes + self.departures.coming)
            + under_way[1],
            stuck_values=len(self.parked),
            stuck_bytes=self.parked.nbytes,
            why=next((entry.why for entry in self.parked), ""),
            scanning=self._search is not None,
            copied_values=self.copied[0],
            copied_bytes=self.copied[1],
            bytes_per_s=self._rate.per_second() if batch is not None or len(self.backlog) else 0.0,
            bandwidth=self.bandwidth,
            trouble=self._trouble,
        )
