"""The controller of a store: index, versions, leases, placement and memory accounts.

It is a synchronous state machine without I/O: every method runs to completion without waiting, so
that every request sees and changes one consistent state. Conversations call it and send what it
returns; errors are raised.
"""

from __future__ import annotations

import secrets
import time
from bisect import bisect_left
from collections import ChainMap, defaultdict
from collections.abc import Callable, Iterable, Sequence
from operator import add
from typing import TYPE_CHECKING, Any

import msgspec

from torchstore_core.boxes import Box
from torchstore_core.contracts.strategy import ClientFacts, Strategy
from torchstore_core.errors import (
    ObjectLostError,
    ProtocolError,
    StoreClosedError,
)
from torchstore_core.machine.topology import Topology
from torchstore_core.reports.bandwidths import DEFAULT_BANDWIDTH
from torchstore_core.reports.units import human_bytes
from torchstore_core.server.index.catalog import Catalog
from torchstore_core.server.index.collective.puts import CollectivePut
from torchstore_core.server.index.collective.unfinished import UnfinishedVersions
from torchstore_core.server.index.items import (
    PutItems,
    check_lent,
    grants_of,
    packed_grant,
)
from torchstore_core.server.index.key_history import PutTarget
from torchstore_core.server.index.records import (
    Change,
    SessionRecord,
    Txn,
    Value,
    Versions,
    release,
)
from torchstore_core.server.index.references.holds import DEFAULT_GRACE_S, Holds
from torchstore_core.server.index.waiting import Waiting
from torchstore_core.server.memory.detached_sessions import DetachedSessions
from torchstore_core.server.memory.leases import Leases
from torchstore_core.server.memory.lost_volumes import LostVolumes
from torchstore_core.server.memory.placement import (
    Assigned,
    checked_items,
    find_place,
    placed_values,
    sizes_of,
)
from torchstore_core.server.memory.shortage import full_error, most_bytes
from torchstore_core.server.memory.volume_record import VolumeRecord
from torchstore_core.server.reads import Reads
from torchstore_core.server.repairing.copiers import StartsCopier
from torchstore_core.server.repairing.drains import Drains
from torchstore_core.server.repairing.repairs import Repairs
from torchstore_core.server.spilling.spilling import Spilling
from torchstore_core.wire import messages as m
from torchstore_core.wire.columns import rounded_sum

if TYPE_CHECKING:
    from torchstore_core.server.spilling.moves import Mover


class Controller:
    """The state of one store.

    Args:
        volumes: the volumes that can hold bytes.
        strategy: decides which volume a put goes to.
        incarnation: of the memory; 0: the memory begins now, and is given a random one.
        prefault: whether to warm n free bytes, for the next put, after a put of n bytes.
        warmed: called (from a thread) when a background prefault has ended.
        watch: asks a live volume to report when a process on its host has ended.
        when_full: what is done with puts that do not say, when memory is full; see
            ``messages.Put``.
        mover: moves values to disk and back; None: the store does not spill.
        later: calls something after so many seconds.
        grace_s: see ``index.references.holds.Holds``.
        start_copier: starts a copier beside a volume, unless there is one.
        repair_bandwidth: the most bytes per second that are copied to replace copies that are
            lost, or to empty a volume; 0: no limit.
    """

    def __init__(
        self,
        volumes: Sequence[VolumeRecord],
        strategy: Strategy,
        *,
        incarnation: int = 0,
        prefault: bool = True,
        warmed: Callable[[], None] = lambda: None,
        watch: Callable[[VolumeRecord, m.WatchProcess], None] = lambda volume, wanted: None,
        when_full: int = 0,
        mover: Mover | None = None,
        later: Callable[[float, Callable[[], None]], object] = lambda delay, call: None,
        grace_s: float = DEFAULT_GRACE_S,
        start_copier: StartsCopier = lambda volume, *, again=False: None,
        repair_bandwidth: int = DEFAULT_BANDWIDTH,
    ) -> None:
        # 53 bits: JSON's numbers carry no more everywhere.
        self.incarnation = incarnation or secrets.randbits(53) | 1
        self.volumes = list(volumes)
        self.strategy = strategy
        self.sessions: dict[bytes, SessionRecord] = {}
        self.detached = self._new_detached(watch)
        self._holders = ChainMap(self.sessions, self.detached.sessions)
        self.catalog = Catalog()
        self.unfinished = UnfinishedVersions(self.catalog, self.sessions)
        #: The number of requests so far, by message class; shown in the status.
        self.operations: dict[type[m.Message], int] = defaultdict(int)
        self._prefault = prefault
        self._warmed = warmed
        self._last_put = time.monotonic()
        self.lost_volumes = LostVolumes(self.volumes)
        self.waiting = Waiting(self.catalog, self.lost_volumes.is_lost)
        self._leases = Leases(self.volumes, strategy, self._take_in)
        self.spilling = self._new_spilling(
            self.volumes, self.catalog, self._free, when_full, mover, later
        )
        self._reads = Reads(self.catalog, self._leases, self.lost_volumes, self.spilling)
        self.holds = self._new_holds(self.catalog, self._free, later, grace_s)
        self.repairs = self._new_repairs(
            self.volumes,
            strategy,
            self.catalog,
            self._leases,
            self.sessions,
            self._holders,
            self._free,
            self.release,
            self.spilling,
            later,
            start_copier,
            repair_bandwidth,
        )
        self.drains = Drains(self.volumes, self.repairs, later)

    def when_recorded(self, call: Callable[[], None]) -> bool:
        """Call something when all that was asked for has been done. False, and it is not called,
        if it has; here it always has, but see ``RecordedController``.
        """
        return False

    # Parts of which a subclass has kinds of its own; called once, with the arguments of the class.

    def _new_spilling(self, *args: Any) -> Spilling:
        return Spilling(*args)

    def _new_holds(self, *args: Any) -> Holds:
        return Holds(*args)

    def _new_repairs(self, *args: Any) -> Repairs:
        return Repairs(*args)

    def _new_detached(self, *args: Any) -> DetachedSessions:
        return DetachedSessions(self, *args)

    # ---- sessions -------------------------------------------------------------------------

    def open_session(
        self, facts: ClientFacts, topology: Topology, pid: int = 0, via: m.Via | None = None
    ) -> SessionRecord:
        """Open a new session with a fresh secret token.

        Args:
            pid: of the process that it is of, as the kernel tells it to this process; 0: unknown.
            via: the relay through which it comes, if there is one.
        """
        session = SessionRecord(secrets.token_bytes(16), facts, topology)
        if via is not None:
            session.peer = via.uplink + session.peer
        self.sessions[session.token] = session
        return session

    def join_session(self, token: bytes) -> SessionRecord:
        """Return the session with this token, for a channel that joins it.

        Raises:
            StoreClosedError: the session has ended.
        """
        session = self.sessions.get(token)
        if session is None:
            raise StoreClosedError("this session has ended; connect again")
        return session

    def close_session(self, session: SessionRecord) -> None:
        """End a session, and undo everything that it has open: unfinished puts and leases."""
        if self.sessions.pop(session.token, None) is None:
            return
        self.holds.session_ended(session)
        self.end_session(session)
        self.release(session, list(session.leases), [])

    def end_session(self, session: SessionRecord) -> None:
        """Handle the end of a session's process, by aborting its unfinished puts. Its leases stay,
        because a forked child may still read memory that it has mapped.
        """
        session.end()
        if session.token in self.sessions:
            self.holds.process_died(session)
        self.abort(session, list(session.txns))
        self._apply(*self.unfinished.settle(all_keys=True))

    # ---- put ------------------------------------------------------------------------------

    def put(
        self, session: SessionRecord, request: m.Put, body: bytes = b""
    ) -> tuple[list[int], list[m.Grant | None] | None]:
        """Begin a put. If all its data is inline, the put is committed at once, and its versions
        are returned; otherwise, the grants are returned.

        Args:
            body: the request as it has arrived, if it is at hand: for whoever records it.

        Raises:
            StoreFullError: the volumes that the strategy names have no room; nothing was changed.
            ProtocolError: the txn id is in use, or sizes or shards are invalid.
            StoreClosedError: the session's process has ended.
            VersionGoneError, ConfigurationError, LayoutMismatchError, KeyNotFoundError: the put
                does not match the present state of its generation, see
                ``UnfinishedVersions.target``.
            ObjectLostError: parts of that version that others have put are lost.
            Delayed: memory is full, and there will be room soon.
        """
        if session.closed is not None:  # no process is left that could write or abort the put
            raise StoreClosedError("the process of this session has ended")
        if request.txn in session.txns:
            raise ProtocolError(f"put id {request.txn} is in use")
        if session.ended_early and session.was_ended_early(request.txn):
            raise ProtocolError(f"put id {request.txn} was aborted before it began")
        items: Sequence[m.PutItem] = request.items
        if request.columns is not None:
            if items:
                raise ProtocolError("the items of a put come in columns or one by one")
            items = PutItems(request.columns)
        if not items and request.group is None:
            raise ProtocolError("a put needs at least one item")
        if request.lent:
            check_lent(request.lent, len(request.items))
        if request.version or request.group is not None or type(request) is m.Rewind:
            return self._put_joined(session, request, items)
        for item in request.items:
            if item.part is not None:
                return self._put_joined(session, request, items)
        when_full = request.when_full
        when_full = self.spilling.choice(when_full) if when_full else self.spilling.default
        placed, inline, sizes = checked_items(items)
        values, granted = self._make(session, items, None, placed, inline, sizes)
        if request.lent:
            self._contain(request.lent, items, items, values)
        if not sizes:
            if freed := self.catalog.flip(values):
                self._free(freed)
            if self.waiting.by_key:
                self.waiting.wake([value.key for value in values], ())
            if when_full != m.PINNED:
                self.spilling.track(values, when_full)
            if self.catalog.timelines.last:
                return self._versions(values), None
            return [value.version for value in values], None
        txn = Txn(values, granted, values, [], values, when_full)
        self._begin(session, request.txn, txn)
        if len(granted) == 1:
            if type(items) is PutItems and (packed := packed_grant(values, placed)) is not None:
                return [], packed
            return [], [m.Grant(v.volume, 0, v.offset) for v in values if v.data is None]
        return [], grants_of([v for v in values if v.data is None])

    def put_object(
        self, session: SessionRecord, request: m.PutObject, body: bytes = b""
    ) -> tuple[list[int], list[m.Grant | None] | None]:
        """Begin to put an object without a key; returns and raises as :meth:`put`."""
        if session.closed is not None:
            raise StoreClosedError("the process of this session has ended")
        if request.txn in session.txns or request.hold in session.holds:
            raise ProtocolError(f"put id {request.txn} or hold id {request.hold} is in use")
        if session.ended_early and session.was_ended_early(request.txn):
            raise ProtocolError(f"put id {request.txn} was aborted before it began")
        if request.item.part is not None:
            raise ProtocolError("an object without a key has no parts")
        if request.lent:
            check_lent(request.lent, 1)
        when_full = request.when_full
        when_full = self.spilling.choice(when_full) if when_full else self.spilling.default
        if when_full == m.EVICTABLE:  # it is there only as long as it is held
            when_full = m.PINNED
        number = self.holds.next_number()
        items = [msgspec.structs.replace(request.item, key=f"object {number:x}")]
        placed, inline, sizes = checked_items(items)
        values, granted = self._make(session, items, None, placed, inline, sizes)
        values[0].version = number
        if request.lent:
            self._contain(request.lent, items, items, values)
        held_as = request.hold, request.where
        if not sizes:
            self._publish_object(session, values, held_as, when_full)
            return [number], None
        txn = Txn(values, granted, values, [], values, when_full, held_as=held_as)
        self._begin(session, request.txn, txn)
        return [], grants_of(values)

    def _publish_object(
        self,
        session: SessionRecord,
        values: list[Value],
        held_as: tuple[int, str],
        when_full: int,
    ) -> None:
        """An object without a key is complete."""
        ident, where = held_as
        self.holds.publish(session, ident, values[0], where)
        if when_full != m.PINNED and values[0].uses:  # its session may not want it any more
            self.spilling.track(values, when_full)

    def _put_joined(
        self, session: SessionRecord, request: m.Put, items: Sequence[m.PutItem]
    ) -> tuple[list[int], list[m.Grant | None] | None]:
        """Begin a put that contributes to generations: shards, a state dict, a named version."""
        put = CollectivePut(self.unfinished, session, request, items)
        when_full = self.spilling.choice(request.when_full, keeps=put.keeps_older)
        self._free(put.clear())
        try:
            put.compare()
            placed, inline, sizes = sizes_of(put.items)
            values, granted = self._make(session, put.items, put, placed, inline, sizes)
            if request.lent:
                self._contain(request.lent, items, put.items, values)
            txn = put.enter(values, granted)
            txn.when_full = when_full
        finally:  # the put may have dropped a generation that later ones were waiting for
            if self.catalog.keys_to_settle:
                self._apply(*self.unfinished.settle())
        grants = put.grants(values, placed if len(granted) == 1 else -1)
        if grants is None:
            return self._finish(txn), None
        self._begin(session, request.txn, txn)
        return [], grants

    def _make(
        self,
        session: SessionRecord,
        items: Sequence[m.PutItem],
        collective: CollectivePut | None,
        placed: int,
        inline: int,
        sizes: list[int],
    ) -> tuple[list[Value], dict[int, int]]:
        """Create and place the values of a put, which becomes their holder. Returns the values, and
        the bytes granted for them on each volume.

        If there is no room, values that may leave memory do (see ``Spilling.make_room``), and
        stalled generations are dropped (see ``UnfinishedVersions.reclaim``).

        Raises:
            StoreFullError: there is no room.
            Delayed: there will be.
        """
        prefix = "" if collective is None else collective.prefix
        spilling = self.spilling
        reserved: frozenset[int] | None = frozenset()
        while True:
            if spilling.active:
                reserved = spilling.reserved(placed + inline)
            if reserved is None:
                break
            volumes, facts = self.volumes, session.facts
            sought = facts, items, prefix, placed, inline, sizes, reserved, self._assigned
            placements = find_place(self.strategy, volumes, *sought)
            if placements is not None:
                boxes: Sequence[Box | None] = ()
                if collective is not None and collective.in_boxes:
                    boxes = collective.boxes
                return placed_values(items, session.facts, placements, boxes)
            keys = () if collective is None else collective.keys
            kept = () if collective is None else collective.generations
            fits = placed + inline <= most_bytes(self.strategy, self.volumes)
            if fits and spilling.active:
                taken = keys if collective is not None else [item.key for item in items]
                if spilling.make_room(placed + inline, taken, reserved):
                    continue
            freed = self.unfinished.reclaim(keys, kept) if fits else None
            if freed is None:
                break
            self._free(freed)
        if placed + inline <= most_bytes(self.strategy, self.volumes):
            received = self.holds.hurry()
            if received:
                raise spilling.delayed(
                    f"memory was full, and {human_bytes(received)} of it were kept for a moment, "
                    "because references to them had just arrived in other processes"
                )
        there = self.catalog.newest.values(), self.unfinished.waiting_bytes(), self.strategy, items
        asked, sessions = placed + inline, self._holders.values()
        error = full_error(asked, self.volumes, sessions, *there, held=self.holds.nbytes)
        raise spilling.noted(error)

    def _contain(
        self,
        lent: m.Lent,
        given: Sequence[m.PutItem],
        stored: Sequence[m.PutItem],
        values: Sequence[Value],
    ) -> None:
        """The references in some of the given items are in those of the values that are stored."""
        made = {id(item): value for item, value in zip(stored, values, strict=True)}
        for at, tickets in lent:
            value = made.get(id(given[at]))
            if value is None:  # another participant has stored it
                self.holds.end_unsent(tickets)
            else:
                self.holds.contain(value, tickets)

    def _begin(self, session: SessionRecord, txn_id: int, txn: Txn) -> None:
        self._last_put = time.monotonic()
        session.txns[txn_id] = txn
        for index, nbytes in txn.granted.items():
            self.volumes[index].unfinished += nbytes

    def _assigned(self, assign: Callable[[], Assigned]) -> Assigned:
        """Ask the strategy where a put goes, see ``find_place``."""
        return assign()

    def commit(self, session: SessionRecord, txn_id: int, body: bytes = b"") -> list[int]:
        """Make all keys of a put visible in one step; returns their new versions, see
        ``messages.Committed``. ``body``: as for :meth:`put`.

        Raises:
            ProtocolError: there is no such put.
            ObjectLostError: bytes that the put wrote, or that others wrote for the same version,
                are lost; the put is undone.
        """
        return self._commit(session, txn_id, self._writing(session, txn_id))

    def seal(self, session: SessionRecord, request: m.Seal, body: bytes = b"") -> list[int]:
        """Commit a put of one value under a name that it is given now, and lease that value; see
        ``messages.Seal``. Returns its version. ``body``: as for :meth:`put`.

        Raises:
            ProtocolError: there is no such put, or it is not of one whole value; an id is in use.
            ConfigurationError: the store has no place to spill to.
            ObjectLostError: as :meth:`commit`.
        """
        txn = self._writing(session, request.txn, request.key or "an object")
        if len(txn.values) != 1 or txn.plain != txn.values or txn.copy_of or txn.held_as:
            raise ProtocolError(f"put {request.txn} is not one of a single value")
        if len(request.key) > m.MAX_KEY or request.hold in session.holds:
            raise ProtocolError(f"the key is too long, or hold id {request.hold} is in use")
        if session.ended_early and session.was_ended_early(request.lease):
            raise ProtocolError(f"lease id {request.lease} was given back before it began")
        when_full = self.spilling.choice(request.when_full)
        value = txn.values[0]
        self._leases.lease(session, request.lease, [value])
        value.key, txn.when_full = request.key, when_full
        if not request.key:
            number = self.holds.next_number()
            value.key, value.version = f"object {number:x}", number
            txn.held_as = request.hold, request.where
            txn.when_full = m.PINNED if when_full == m.EVICTABLE else when_full
        return self._commit(session, request.txn, txn)

    def _writing(self, session: SessionRecord, txn_id: int, name: str = "") -> Txn:
        """A put that is to be committed, after checks that it can be. ``name``: what is put, in
        errors, if it has another key than it had so far.
        """
        txn = session.txns.get(txn_id)
        if txn is None:
            raise ProtocolError(f"there is no unfinished put {txn_id} to commit")
        if self.lost_volumes.any:
            try:
                self.lost_volumes.check_put(txn, name)
            except ObjectLostError:
                self.abort(session, [txn_id])
                raise
        return txn

    def _commit(self, session: SessionRecord, txn_id: int, txn: Txn) -> list[int]:
        del session.txns[txn_id]
        self._written(txn)
        if txn.copy_of:
            self.repairs.written(txn)
            return []
        if txn.held_as is None:
            versions = self._finish(txn)
        else:
            self._publish_object(session, txn.values, txn.held_as, txn.when_full)
            versions = [txn.values[0].version]
        if self.repairs.active:
            self.repairs.committed(txn)
        if self._prefault:
            for index, nbytes in txn.granted.items():
                self.volumes[index].look_ahead(nbytes, self._warmed)
        return versions

    def _finish(self, txn: Txn) -> list[int]:
        """Publish the values of a put in one step; returns the versions for the reply."""
        freed: Sequence[Value] = self.catalog.flip(txn.plain)
        visible: Sequence[str] = ()
        rewound: Sequence[tuple[str, bool]] = ()
        if txn.contributions:
            changes = [self.unfinished.commit(*one) for one in txn.contributions]
            freed, visible, rewound = Change.of([Change(freed), *changes])
        if txn.when_full != m.PINNED:
            self.spilling.track_put(txn)
        self._apply(freed, visible, rewound, plain=txn.plain)
        return self._versions(txn.results)

    def _versions(self, results: Sequence[Value | PutTarget]) -> list[int]:
        """The versions of the results, with their timelines if any key was ever rewound."""
        versions = [result.version for result in results]
        if not self.catalog.timelines.last:
            return versions
        of = self.catalog.timelines.of
        return Versions(
            versions, [of(r.key, r.version) if type(r) is Value else r.timeline for r in results]
        )

    def _apply(
        self,
        freed: Sequence[Value],
        visible: Sequence[str] = (),
        rewound: Sequence[tuple[str, bool]] = (),
        *,
        plain: Sequence[Value] = (),
    ) -> None:
        """Free values that nothing holds any more, and answer the Waits for keys that have become
        visible, or that wait in vain because keys went back; see ``Change``.

        ``plain``: values that are, by themselves, the newest versions of their keys.
        """
        if freed:
            self._free(freed)
        if self.waiting.by_key and (plain or visible):
            self.waiting.wake([value.key for value in plain], visible)
            if rewound:
                self.waiting.end(rewound)

    def abort(
        self, session: SessionRecord, txn_ids: Iterable[int], *, remember: bool = False
    ) -> None:
        """Undo unfinished puts.

        ``remember``: remember ids that are unknown, so that puts with these ids are rejected when
        they arrive later, over another connection.
        """
        # The latest first, so that its participant returns to the state before all of them.
        for txn_id in sorted(txn_ids, reverse=True):
            txn = session.txns.pop(txn_id, None)
            if txn is None:
                if remember:
                    session.end_early(txn_id)
                continue
            self._written(txn)
            changes = [self.unfinished.abort(target, one) for target, one in txn.contributions]
            self._apply(*Change.of([Change(release(txn.plain)), *changes]))
            if txn.copy_of:
                self.repairs.aborted(txn)

    def _written(self, txn: Txn) -> None:
        """Account for a put that has ended, committed or not, and note that its memory is warm."""
        alone = len(self.volumes) == 1
        for index, nbytes in txn.granted.items():
            volume = self.volumes[index]
            volume.unfinished -= nbytes
            if volume.memory.warm >= volume.allocator.high_water:  # the usual case
                continue
            if alone:
                ends = [v.offset + v.nbytes for v in txn.values if v.data is None]
            else:
                places = ((at, v) for v in txn.values for at in v.places)
                ends = [offset + v.nbytes for (at, offset), v in places if at == index]
            volume.memory.touched(max(ends, default=0))

    def trim(self, idle_s: float, keep: int) -> int:
        """Return free memory, and what is unused of the spill file, to the system if there has
        been no put for ``idle_s`` seconds.

        Args:
            keep: how many bytes at the start of each volume always stay warm.

        Returns:
            The number of bytes returned to the system.
        """
        if time.monotonic() - self._last_put < idle_s:
            return 0
        self.spilling.trim()
        if any(session.keeps_memory for session in self._holders.values()):
            return 0
        return sum([volume.trim(keep) for volume in self.volumes if not volume.lost])

    def trimmed(self, index: int) -> None:
        """A volume in another process has returned the end of its memory to the system."""
        self.volumes[index].trimmed()

    def grown(self, index: int, usable: int) -> None:
        """A volume in another process has said how far it may be written to."""
        allocator = self.volumes[index].allocator
        allocator.ask(allocator.grow, usable)
        self.spilling.room.retry()
        self.repairs.retry_soon()

    # ---- get ------------------------------------------------------------------------------

    def locate(
        self, session: SessionRecord, request: m.Locate
    ) -> tuple[list[m.Entry] | m.EntryColumns, bool]:
        """Return entries for all wanted values, and whether they are leased; see ``Reads``."""
        return self._reads.locate(session, request)

    def fetch(self, session: SessionRecord, request: m.Fetch) -> m.Fetched:
        """Return entries of one version of a state dict; see ``Reads``."""
        return self._reads.fetch(session, request)

    def release(
        self,
        session: SessionRecord,
        leases: Iterable[int],
        parts: Iterable[tuple[int, list[int]]],
        *,
        remember: bool = False,
    ) -> None:
        """Release leases, or some of the values that they hold, and free the values that nothing
        holds any more.

        Args:
            parts: leases of which only some values are released, with these values' positions.
            remember: see :meth:`abort`.
        """
        if self.repairs.active and len(self.repairs.leavings):
            leases, parts = list(leases), list(parts)
            self.repairs.released(session, leases, parts)
        returned: list[Value | None] = []
        for lease in leases:
            held = session.leases.pop(lease, None)
            if held is not None:
                returned += held
            elif remember:
                session.end_early(lease)
        for lease, positions in parts:
            held = session.leases.get(lease)
            if held is None:
                continue
            for at in positions:
                if 0 <= at < len(held):
                    returned.append(held[at])
                    held[at] = None
            if not any(v is not None for v in held):
                del session.leases[lease]
        if freed := self._leases.unpin(returned):
            self._free(freed)
        if self.spilling.room:
            self.spilling.retry_soon()

    # ---- keys -----------------------------------------------------------------------------

    def delete(
        self, keys: Sequence[str], strict: bool, by: tuple[SessionRecord, int] | None = None
    ) -> int:
        """Delete keys; returns how many existed. ``strict``: delete none unless all exist. ``by``:
        who asks for it, and the number that this has among all that the session has asked for.
        """
        catalog = self.catalog
        if strict:
            missing = [k for k in keys if k not in catalog.newest and not catalog.is_pending(k)]
            if missing:
                raise catalog.missing_error(missing)
        deleted = [freed for key in keys if (freed := catalog.delete(key)) is not None]
        self._free([value for freed in deleted for value in freed])
        return len(deleted)

    def keys(self, prefix: str) -> list[str]:
        """Return the keys and state dict entries that start with ``prefix``, sorted, including lost
        ones. Hidden ones are left out, unless the prefix is a hidden one.
        """
        names = self.catalog.names.page(prefix)
        if not prefix.startswith(m.HIDDEN):
            begin = end = bisect_left(names, m.HIDDEN)
            while end < len(names) and names[end].startswith(m.HIDDEN):
                end += 1
            del names[begin:end]
        return names

    def exists(self, keys: Sequence[str]) -> list[bool]:
        """Return, for each key or entry, whether it has a complete version with no part lost."""
        found = map(self.catalog.find, keys)
        return [one is not None and not self.lost_volumes.is_lost(one[0]) for one in found]

    # ---- memory ---------------------------------------------------------------------------

    def _take_in(self, values: Sequence[Value]) -> None:
        """Move those of the values that were put inline from the server's own memory into the
        segment, because so many are read together that a message should not carry them. All of
        them are moved, or none: if there is no room, or where only clients write to memory.
        """
        volume = self.volumes[0]
        if len(self.volumes) > 1 or not volume.memory.is_here:
            return
        moved = {id(value): value for value in values if value.data}
        if not self.spilling.can_take_in(moved.values()):
            return
        sizes = [value.nbytes for value in moved.values()]
        nbytes, placed = sum(sizes), rounded_sum(sizes)
        if not nbytes or volume.used + placed - nbytes > volume.info.capacity_bytes:
            return
        if not self._begins_to_take_in():
            return
        offsets = volume.allocator.allocate_all(placed, sizes)
        if offsets is None:
            return
        if not self._takes_in(offsets, [value.data or b"" for value in moved.values()]):
            volume.allocator.free_all(offsets, sizes)
            return
        self.spilling.take_in(moved.values())
        for value, offset in zip(moved.values(), offsets, strict=True):
            value.data, value.offset = None, offset
        volume.inline -= nbytes
        volume.memory.touched(max(map(add, offsets, sizes)))

    def _begins_to_take_in(self) -> bool:
        """Whether :meth:`_take_in` may go on, now that it is about to change something."""
        return True

    def _takes_in(self, offsets: Sequence[int], contents: Sequence[bytes]) -> bool:
        """Write the contents of values to the segment, and settle that they are there; False if
        they are not.
        """
        return self.volumes[0].memory.write(offsets, contents)

    def _free(self, values: Iterable[Value]) -> None:
        values = list(values)
        if not values:  # nothing has changed, which whoever waits for memory need not know
            return
        if self.holds.containers:
            self.holds.containers_gone(values)
        if self.repairs.active:
            self.repairs.freed(values)
        if self.spilling.active:
            values = self.spilling.forget(values)
        if self.spilling.room:
            self.spilling.retry_soon()
        ranges: dict[int, tuple[list[int], list[int]]] = {}  # offsets and sizes, by volume
        last = -1
        for value in values:
            if value.data is not None:
                self.volumes[value.volume].inline -= value.nbytes
                continue
            if value.volume != last:
                last = value.volume
                offsets, sizes = ranges.setdefault(last, ([], []))
            offsets.append(value.offset)
            sizes.append(value.nbytes)
            if value.more:
                for index, offset in value.more:
                    more = ranges.setdefault(index, ([], []))
                    more[0].append(offset)
                    more[1].append(value.nbytes)
        for index, freed in ranges.items():
            if not self.volumes[index].lost:
                self.volumes[index].allocator.free_all(*freed)

    def lose_volume(self, index: int, why: str) -> None:
        """Handle the permanent loss of a volume's memory. Values without a copy on another volume
        are lost: their readers get an error, and may put them again. Unfinished puts that have
        bytes only on this volume fail when they commit.
        """
        if self.volumes[index].lost:
            return
        self.spilling.lose(index)  # which still knows whose file has what
        self.lost_volumes.lose(index, why, self.catalog, self._holders.values())
        self._apply(*self.unfinished.lose(self.lost_volumes.reason))
        self.detached.volume_lost()
        self.repairs.volume_lost(index)
