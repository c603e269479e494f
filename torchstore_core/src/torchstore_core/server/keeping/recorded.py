"""A controller of which another process can make a copy: it records what changes its state.

The controller is a state machine, so its requests are enough: a server that comes back repeats them
and has the same state, whatever that consists of. A request is recorded before it is executed. What
others may have seen of its effects is therefore always in the log, and one that was recorded but
not answered has been executed as far as anybody can tell; its client asks again
(``messages.Again``), and is told what the repetition gave.

When the log cannot grow, what can be refused is refused before it changes anything. What cannot
(leases that are given back, the end of a process, time) goes on in what the log keeps for it, and
waits in its order when that is used up, too: neither recorded nor done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar, NamedTuple, TypeVar

import msgspec

from torchstore_core import moments
from torchstore_core.contracts.strategy import ClientFacts
from torchstore_core.errors import StoreFullError, TorchStoreError, from_wire
from torchstore_core.machine.processes import Process, started
from torchstore_core.machine.topology import Topology
from torchstore_core.server.controller import Controller
from torchstore_core.server.index.records import SessionRecord
from torchstore_core.server.keeping.log import SPARE, Log, Record, Records
from torchstore_core.server.keeping.recorded_holds import RecordedHolds, asked_by
from torchstore_core.server.keeping.recorded_repairs import RecordedRepairs
from torchstore_core.server.keeping.recorded_spilling import RecordedSpilling
from torchstore_core.server.keeping.state import StateReader, written
from torchstore_core.server.memory.detached_sessions import DetachedSessions
from torchstore_core.server.memory.placement import Assigned
from torchstore_core.server.memory.volume_record import VolumeRecord
from torchstore_core.server.serving.answers import ANSWERS
from torchstore_core.server.spilling.delays import Delayed
from torchstore_core.wire import messages as m
from torchstore_core.wire.framing import decode_request, portable
from torchstore_core.wire.repeating import number_of

# Kinds of records. Their numbers must stay what they are only as long as a store lives.
_OPEN, _CLOSE, _END, _REQUEST, _ABORT, _ABORT_EARLY, _RELEASE, _RELEASE_EARLY = range(8)
_VALUES, _STATE, _DUE, _BEGIN, _GREW, _TRIMMED, _SPILLING, _REPAIRING = range(8, 16)
_DETACH, _DETACHED_ENDED, _LOST, _RESERVED, _RETURNED, _TAKEN_IN, _USABLE, _PLACED = range(16, 24)
_encode = msgspec.msgpack.Encoder().encode
_WITHOUT_REPLY = frozenset((m.Unhold, m.Lend, m.LendAll, m.Claim, m.Adopt, m.TakeBack))
_PUTS = frozenset((m.Put, m.Rewind, m.PutObject))
_decode_ids = msgspec.msgpack.Decoder(list[int]).decode
_decode_due = msgspec.msgpack.Decoder(tuple[list[int], list[int]]).decode
_decode_placed = msgspec.msgpack.Decoder(Assigned | m.Failure).decode
_decode_number = msgspec.msgpack.Decoder(int).decode
_decode_detached = msgspec.msgpack.Decoder(tuple[Process | None, bool]).decode
_decode_release = msgspec.msgpack.Decoder(tuple[list[int], list[tuple[int, list[int]]]]).decode


class Opened(msgspec.Struct, array_like=True):
    """A session that was opened.

    Args:
        pid, started: of its process, see ``machine.processes``; 0: unknown.
        via: the relay through which it has come, if there is one.
    """

    token: bytes
    peer: bytes
    facts: ClientFacts
    topology: Topology
    opened: float
    pid: int
    started: int
    via: m.Via | None = None


_decode_opened = msgspec.msgpack.Decoder(Opened).decode
T = TypeVar("T")
_Unsent = tuple[bytes, Mapping[tuple[str, int], m.Reply]]


class _Late(NamedTuple):
    """What waits until the log has room for its record, if it has one, and is done then."""

    record: tuple[int, int, bytes] | None
    do: Callable[[], None]


class RecordedController(Controller):
    """A :class:`Controller` that writes a log.

    Args:
        log: new, or that of an earlier life, which :meth:`restore` then repeats.
        args, options: of the controller.

    Attributes:
        log: the one that it writes.
        state_nbytes: how much of the log that was repeated is the state that it begins with.
        opened: the sessions that are open, by token, with their processes.
        last_sent: what sessions have sent last of what has no reply, as it was recorded, by their
            serial numbers; until it is known whether they have to be read once more.
        results: the answers to requests that were repeated, by token, and by the class of the
            request and its number, see ``wire.repeating``. Of those alone that have one.
        unsent: gives, for each connection, the answers that a client may ask for again although
            they are not in the results, see ``Conversation.unsent``.
    """

    spilling: RecordedSpilling
    holds: RecordedHolds
    repairs: RecordedRepairs

    def __init__(self, log: Log, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.log = log
        for at, volume in enumerate(self.volumes):
            allocator = volume.allocator
            if allocator.grow is not None:
                allocator.ask(partial(self._grow, at, allocator.grow), allocator.assured)
        self._records: Records | None = None  # while they are repeated
        self._late: deque[_Late] = deque()
        self._is_catching_up = False
        if not log.nbytes:
            self.log.append(_BEGIN, 0, _encode(self.holds._number))
        self._next_serial = 1
        self.state_nbytes = 0
        # What happens now is part of something that is recorded: it needs no record of its own.
        self._silent = False
        # A get that is under way, and is recorded only if it changes something.
        self._reading: tuple[SessionRecord, m.Locate | m.Fetch] | None = None
        self.opened: dict[bytes, Opened] = {}
        self.last_sent: dict[int, bytes] = {}
        self.results: dict[bytes, dict[tuple[str, int], m.Reply]] = {}
        self.unsent: Callable[[], Iterable[_Unsent]] = tuple

    def _new_spilling(self, *args: Any) -> RecordedSpilling:
        return RecordedSpilling(
            partial(self._step, _SPILLING), partial(self._next_body, _SPILLING), *args
        )

    def _new_holds(self, *args: Any) -> RecordedHolds:
        return RecordedHolds(self._record, self._record_sooner_or_later, self._record_due, *args)

    def _new_repairs(self, *args: Any) -> RecordedRepairs:
        return RecordedRepairs(partial(self._step, _REPAIRING), *args)

    def _new_detached(self, *args: Any) -> DetachedSessions:
        return _RecordedDetached(self, *args)

    # ---- room in the log ------------------------------------------------------------------

    def _append(self, kind: int, serial: int, body: bytes) -> None:
        """Record what can be refused.

        Raises:
            StoreFullError: the log cannot grow, and has no more than what is kept for the rest.
        """
        if self._silent:
            return
        if self._late:
            self._catch_up()
        self.log.append(kind, serial, body, SPARE)

    def _sooner_or_later(self, kind: int, serial: int, body: bytes, do: Callable[[], None]) -> None:
        """Record what cannot be refused, and do it: now, or when the log has room, in order."""
        if self._silent:
            do()
            return
        if not self.catch_up():
            self._late.append(_Late((kind, serial, body), do))
            return
        try:
            self.log.append(kind, serial, body)
        except StoreFullError:
            self._late.append(_Late((kind, serial, body), do))
        else:
            do()

    def catch_up(self) -> bool:
        """Do what waits for room in the log, as far as there is some; whether nothing waits."""
        if self._late:
            try:
                self._catch_up()
            except StoreFullError:
                return False
        return True

    def _catch_up(self) -> None:
        if self._is_catching_up:  # what one of them needs as well comes behind the others
            raise StoreFullError("the server's log is full")
        self._is_catching_up = True
        try:
            while self._late:
                record, do = self._late[0]
                if record is not None:
                    self.log.append(*record)
                self._late.popleft()
                do()
        finally:
            self._is_catching_up = False

    def when_recorded(self, call: Callable[[], None]) -> bool:
        if not self._late:
            return False
        self._late.append(_Late(None, call))
        return True

    # ---- what is recorded -----------------------------------------------------------------

    def _record(self, serial: int, request: m.Message) -> None:
        self._append(_REQUEST, serial, _encode(request))

    def _record_sooner_or_later(
        self, serial: int, request: m.Message, do: Callable[[], None]
    ) -> None:
        self._sooner_or_later(_REQUEST, serial, _encode(request), do)

    def _step(self, kind: int, body: bytes, spare: int = 0) -> None:
        """Record a step of what is recorded, or something that is tried again if it cannot be;
        ``spare``: as for ``Log.append``.

        Raises:
            StoreFullError: it cannot be, and must not be done.
        """
        if self._late and not self._is_catching_up:
            self._catch_up()
        self.log.append(kind, 0, body, spare)

    def _next_body(self, kind: int, take: bool) -> bytes | None:
        """The next record that is repeated, if it is of that kind; ``take``: go on behind it."""
        found = None if self._records is None else self._records.peek()
        if found is None or found.kind != kind:
            return None
        if take and self._records is not None:
            next(self._records)
        return found.body

    def _grow(self, at: int, grow: Callable[[int], int], end: int) -> int:
        """How far a volume may be used depends on what else uses memory: record the answer. That of
        a volume in another process comes later, see :meth:`grown`; until then, requests are
        delayed, and if it was not enough, that is recorded behind the request that is refused.
        """
        is_here = self.volumes[at].memory.is_here
        if self._records is not None and self._records.peek() is not None:
            # It is what follows the request that needed it.
            body = self._next_body(_GREW, take=True)
            if body is not None:
                return _decode_number(body)
            if is_here:
                return self.volumes[at].allocator.assured
            raise Delayed("this was delayed before", lambda retry: None)
        limit = grow(end)
        try:
            self.log.append(_GREW, at, _encode(limit))
        except StoreFullError:
            if not is_here:  # the next life would delay it
                raise
            return self.volumes[at].allocator.assured  # the next life will not know that it may
        return limit

    def _assigned(self, assign: Callable[[], Assigned]) -> Assigned:
        """Record where a put goes, or why nowhere: in another life a strategy may answer otherwise,
        being of another version of its package, or not as pure as it should be, and values would
        be looked for where they are not.
        """
        if self._records is not None:
            body = self._next_body(_PLACED, take=True)
            if body is None:  # it was refused; or the life before has ended just here
                raise StoreFullError("the server's log had no room for where this put goes")
            answer: Assigned | m.Failure = _decode_placed(body)
            if isinstance(answer, m.Failure):
                raise from_wire(answer.code, answer.message, answer.key, answer.details)
            return answer
        try:
            assigned = assign()
        except TorchStoreError as error:
            failure = m.Failure(0, error.code, error.message, error.key, portable(error)[1])
            self._step(_PLACED, _encode(failure), SPARE)
            raise
        self._step(_PLACED, _encode(assigned), SPARE)
        return assigned

    def grown(self, index: int, usable: int) -> None:
        grown = partial(super().grown, index, usable)
        self._sooner_or_later(_USABLE, index, _encode(usable), grown)

    def trim(self, idle_s: float, keep: int) -> int:
        try:
            self.log.make_room()
        except StoreFullError:
            return 0
        before = [volume for volume in self.volumes if volume.reserved is None]
        given = super().trim(idle_s, keep)
        for volume in before:
            if volume.reserved is not None:
                self.log.append(_RESERVED, volume.index, b"")
        if given:
            self.log.append(_TRIMMED, 0, b"")
            self._ask_again()
        return given

    def trimmed(self, index: int) -> None:
        if self.volumes[index].reserved is not None:
            self._sooner_or_later(_RETURNED, index, b"", partial(super().trimmed, index))

    def lose_volume(self, index: int, why: str) -> None:
        if not self.volumes[index].lost:
            lose = partial(self._silently, super().lose_volume, index, why)
            self._sooner_or_later(_LOST, index, why.encode(), lose)

    def _ask_again(self) -> None:
        for volume in self.volumes:
            volume.allocator.ask_again()

    def _record_due(self, sessions: list[int], tickets: list[int], end: Callable[[], None]) -> None:
        self._sooner_or_later(_DUE, 0, _encode((sessions, tickets)), end)

    def open_session(
        self, facts: ClientFacts, topology: Topology, pid: int = 0, via: m.Via | None = None
    ) -> SessionRecord:
        session = super().open_session(facts, topology, pid, via)
        opened = Opened(
            session.token, session.peer, facts, topology, session.opened, pid, started(pid), via
        )
        try:
            self._append(_OPEN, self._next_serial, _encode(opened))
        except StoreFullError:
            del self.sessions[session.token]
            raise
        self._enter(session, opened)
        return session

    def _enter(self, session: SessionRecord, opened: Opened) -> None:
        self.opened[opened.token] = opened
        session.serial = self._next_serial
        self._next_serial += 1

    def close_session(self, session: SessionRecord) -> None:
        if session.token in self.sessions:
            self._sooner_or_later(_CLOSE, session.serial, b"", partial(self._close, session))

    def _close(self, session: SessionRecord) -> None:
        if session.token in self.sessions:  # it may have been closed twice, and both have waited
            self._silently(super().close_session, session)
            self._forget(session)

    def _forget(self, session: SessionRecord) -> None:
        del self.opened[session.token]
        self.results.pop(session.token, None)
        self.last_sent.pop(session.serial, None)

    def end_session(self, session: SessionRecord) -> None:
        end = partial(self._silently, super().end_session, session)
        self._sooner_or_later(_END, session.serial, b"", end)

    def _silently(self, change: Callable[..., T], *args: Any) -> T:
        before, self._silent = self._silent, True
        try:
            return change(*args)
        finally:
            self._silent = before

    def put(
        self, session: SessionRecord, request: m.Put, body: bytes = b""
    ) -> tuple[list[int], list[m.Grant | None] | None]:
        self._append(_REQUEST, session.serial, body or _encode(request))
        return super().put(session, request)

    def put_object(
        self, session: SessionRecord, request: m.PutObject, body: bytes = b""
    ) -> tuple[list[int], list[m.Grant | None] | None]:
        self._append(_REQUEST, session.serial, body or _encode(request))
        return super().put_object(session, request)

    def commit(self, session: SessionRecord, txn_id: int, body: bytes = b"") -> list[int]:
        self._append(_REQUEST, session.serial, body or _encode(m.Commit(0, txn_id)))
        return self._silently(super().commit, session, txn_id)  # it may abort

    def seal(self, session: SessionRecord, request: m.Seal, body: bytes = b"") -> list[int]:
        self._append(_REQUEST, session.serial, body or _encode(request))
        return self._silently(super().seal, session, request)  # it may abort

    def abort(
        self, session: SessionRecord, txn_ids: Iterable[int], *, remember: bool = False
    ) -> None:
        txn_ids = list(txn_ids)
        abort = partial(super().abort, session, txn_ids, remember=remember)
        kind = _ABORT_EARLY if remember else _ABORT
        self._sooner_or_later(kind, session.serial, _encode(txn_ids), abort)

    def locate(
        self, session: SessionRecord, request: m.Locate
    ) -> tuple[list[m.Entry] | m.EntryColumns, bool]:
        if self.spilling.active:  # it changes what is evicted next
            self._record(session.serial, request)
            return self._reads.locate(session, request)
        self._reading = session, request
        try:
            entries, leased = self._reads.locate(session, request)
            if leased:
                self._record_lease()
        finally:
            self._reading = None
        return entries, leased

    def fetch(self, session: SessionRecord, request: m.Fetch) -> m.Fetched:
        if self.spilling.active:
            self._record(session.serial, request)
            return self._reads.fetch(session, request)
        self._reading = session, request
        try:
            fetched = self._reads.fetch(session, request)
            if fetched.leased:
                self._record_lease()
        finally:
            self._reading = None
        return fetched

    def _record_reading(self) -> None:
        """Record the get that is under way, unless it has been recorded."""
        if self._reading is not None:
            session, request = self._reading
            self._record(session.serial, request)
            self._reading = None

    def _record_lease(self) -> None:
        """Record it only now: nobody knows of the lease before it is answered."""
        reading = self._reading
        try:
            self._record_reading()
        except StoreFullError:
            if reading is not None:
                super().release(reading[0], [reading[1].lease], [])
            raise

    def _begins_to_take_in(self) -> bool:
        try:
            self._record_reading()
        except StoreFullError:  # the reply has the bytes itself, then
            return False
        return True

    def _takes_in(self, offsets: Sequence[int], contents: Sequence[bytes]) -> bool:
        if self._records is not None:  # they were written then, and may have gone since
            return self._next_body(_TAKEN_IN, take=True) is not None
        if not super()._takes_in(offsets, contents):
            return False
        try:
            self._step(_TAKEN_IN, b"", SPARE)
        except StoreFullError:
            return False
        return True

    def release(
        self,
        session: SessionRecord,
        leases: Iterable[int],
        parts: Iterable[tuple[int, list[int]]],
        *,
        remember: bool = False,
    ) -> None:
        leases, parts = list(leases), list(parts)
        release = partial(super().release, session, leases, parts, remember=remember)
        kind = _RELEASE_EARLY if remember else _RELEASE
        self._sooner_or_later(kind, session.serial, _encode((leases, parts)), release)

    def delete(
        self, keys: Sequence[str], strict: bool, by: tuple[SessionRecord, int] | None = None
    ) -> int:
        serial, number = asked_by(by)
        self._record(serial, m.Delete(0, list(keys), strict, number))
        return super().delete(keys, strict)

    # ---- coming back ----------------------------------------------------------------------

    def write_state(self, log: Log) -> None:
        """Write the present state into a log that is empty."""
        results = {token: dict(known) for token, known in self.results.items()}
        for token, answers in self.unsent():
            if answers:
                results.setdefault(token, {}).update(answers)
        more = {
            "opened": list(self.opened.values()),
            "results": results,
            "last_sent": self.last_sent,
            "spilling": self.spilling.state(),
            "repairs": self.repairs.state(),
            "detached": self.detached.sessions,
            "processes": self.detached.processes,
        }
        for is_rest, body in written(self, more):
            kind = _STATE if is_rest else _VALUES
            log.append(kind, self._next_serial, body)

    def restore(self) -> None:
        """Repeat what an earlier life has recorded, from the state that the log begins with."""
        self._restoring = StateReader(self)
        self._known: dict[int, SessionRecord] = {}
        prefault, self._prefault = self._prefault, False
        self._silent = True
        try:
            with self._repeating(), moments.then() as show:
                self._records = Records(iter(self.log))
                for record in self._records:
                    show(record.at)
                    self._repeat[record.kind](self, record)
        finally:
            self._silent = False
            self._records = None
            self._prefault = prefault
            del self._restoring, self._known
        for session in self.sessions.values():
            session.channels = 0
        self.drains.go_on()

    @contextmanager
    def _repeating(self) -> Iterator[None]:
        with self.holds.repeating(), self.spilling.repeating(), self.repairs.repeating():
            yield

    def _grew_again(self, record: Record) -> None:
        """For a copy, whose place is recorded when it is begun; or a volume has answered."""
        allocator = self.volumes[record.session].allocator
        allocator.ask(allocator.grow, _decode_number(record.body))

    def _due_again(self, record: Record) -> None:
        serials, tickets = _decode_due(record.body)
        sessions = [self._known[serial] for serial in serials if serial in self._known]
        self.holds.end_due(sessions, tickets)

    def _values_again(self, record: Record) -> None:
        self.state_nbytes += len(record.body)
        self._restoring.add_values(record.body)

    def _state_again(self, record: Record) -> None:
        self.state_nbytes += len(record.body)
        sessions, more = self._restoring.finish(record.body)
        self._next_serial = record.session
        self.results = more["results"]
        self.last_sent = more["last_sent"]
        self.spilling.set_state(more["spilling"])
        self.repairs.set_state(more["repairs"])
        self.opened = {opened.token: opened for opened in more["opened"]}
        self.detached.sessions.update(more["detached"])
        self.detached.processes.update(more["processes"])
        for session in sessions:
            self._known[session.serial] = session

    def _open_again(self, record: Record) -> None:
        opened = _decode_opened(record.body)
        session = SessionRecord(
            opened.token, opened.facts, opened.topology, peer=opened.peer, opened=opened.opened
        )
        self._known[record.session] = self.sessions[opened.token] = session
        self._next_serial = record.session
        self._enter(session, opened)

    def _close_again(self, record: Record) -> None:
        session = self._known.pop(record.session, None)
        if session is not None:
            self.close_session(session)

    def _end_again(self, record: Record) -> None:
        if (session := self._known.get(record.session)) is not None:
            self.end_session(session)

    def _request_again(self, record: Record) -> None:
        request = decode_request(record.body)
        kind = type(request)
        if kind in _WITHOUT_REPLY:
            self.last_sent[record.session] = record.body
        session = self._known.get(record.session)
        if session is None and kind is not m.Delete and kind is not m.Free:
            return
        try:
            done = self._tried(session, request, record.body)
        except Delayed:  # it was handled later, with a record of its own, or its client asks again
            return
        if session is not None and done is not None and (number := number_of(request)):
            mine = self.results.setdefault(session.token, {})
            mine[kind.__name__, number] = msgspec.structs.replace(done, id=0)

    def _tried(self, session: Any, request: m.Request, body: bytes) -> m.Reply | None:
        """The answer to a request, also if that is an error."""
        try:
            return ANSWERS[type(request)](self, session, request, body)
        except TorchStoreError as error:
            if type(request) in _PUTS and isinstance(error, StoreFullError):
                # It has changed nothing, and is no last word: the server tries again what waits for
                # memory to be returned, and a client with tensors that have just ended, too.
                return None
            return m.Failure(0, error.code, error.message, error.key, portable(error)[1])

    def _detach_again(self, record: Record) -> None:
        if (session := self._known.pop(record.session, None)) is not None:
            process, session.keeps_memory = _decode_detached(record.body)
            self.detached.detach(session, process)

    def _abort_again(self, record: Record) -> None:
        if (session := self._known.get(record.session)) is not None:
            early = record.kind == _ABORT_EARLY
            self.abort(session, _decode_ids(record.body), remember=early)

    def _release_again(self, record: Record) -> None:
        if (session := self._known.get(record.session)) is not None:
            leases, parts = _decode_release(record.body)
            early = record.kind == _RELEASE_EARLY
            self.release(session, leases, parts, remember=early)

    _repeat: ClassVar[dict[int, Callable[[RecordedController, Record], None]]] = {
        _OPEN: _open_again,
        _CLOSE: _close_again,
        _END: _end_again,
        _REQUEST: _request_again,
        _ABORT: _abort_again,
        _ABORT_EARLY: _abort_again,
        _RELEASE: _release_again,
        _RELEASE_EARLY: _release_again,
        _VALUES: _values_again,
        _STATE: _state_again,
        _DUE: _due_again,
        _BEGIN: lambda self, record: self.holds.begin_at(_decode_number(record.body)),
        _TRIMMED: lambda self, record: self._ask_again(),
        _SPILLING: lambda self, record: self.spilling.read_again(record.body),
        _GREW: _grew_again,
        _REPAIRING: lambda self, record: self.repairs.step_again(record.body, self._known),
        _DETACH: _detach_again,
        _DETACHED_ENDED: lambda self, record: self.detached.process_ended(record.body),
        _LOST: lambda self, record: self.lose_volume(record.session, record.body.decode()),
        _RESERVED: lambda self, record: self.volumes[record.session].reserve(),
        _RETURNED: lambda self, record: self.trimmed(record.session),
        _TAKEN_IN: lambda self, record: None,  # part of the get before it, which has taken it
        _USABLE: _grew_again,
        _PLACED: lambda self, record: None,  # part of the put before it, whose session is gone
    }


class _RecordedDetached(DetachedSessions):
    """The detached sessions of a :class:`RecordedController`."""

    def __init__(
        self,
        controller: RecordedController,
        watch: Callable[[VolumeRecord, m.WatchProcess], None],
    ) -> None:
        super().__init__(controller, watch)
        self._recorded = controller

    def detach(self, session: SessionRecord, process: Process | None) -> None:
        if session.token in self._recorded.sessions:
            detach = partial(self._recorded._silently, super().detach, session, process)
            # That it keeps memory is no request: its client has told it, and cannot any more.
            body = _encode((process, session.keeps_memory))
            self._recorded._sooner_or_later(_DETACH, session.serial, body, detach)

    def process_ended(self, token: bytes) -> None:
        if token in self.sessions:
            end = partial(self._recorded._silently, super().process_ended, token)
            self._recorded._sooner_or_later(_DETACHED_ENDED, 0, token, end)
