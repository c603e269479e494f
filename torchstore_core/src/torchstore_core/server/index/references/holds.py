"""Holds: what keeps versions alive for the processes that refer to them. Pure bookkeeping.

A version is held by sessions, and by *tickets*: references that have been sent and may not have
arrived. As long as there is one of either, the version can be read, whatever happens to its key.
An object without a key exists only as long as that; its key is empty, and its version its number.
"""

from __future__ import annotations

import heapq
import math
import secrets
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from torchstore_core import moments
from torchstore_core.errors import (
    ConfigurationError,
    KeyNotFoundError,
    ProtocolError,
    StoreClosedError,
    VersionGoneError,
)
from torchstore_core.reports.refs import HolderReport, RefReport
from torchstore_core.server.index.catalog import Catalog
from torchstore_core.server.index.records import (
    HeldVersion,
    Hold,
    Manifest,
    SessionRecord,
    Value,
    release_version,
    retain_version,
)
from torchstore_core.values import ObjectMeta
from torchstore_core.wire import messages as m

#: How long a reference in flight is kept after its sender has ended, and after it was received.
DEFAULT_GRACE_S = 10.0
#: The environment variable that sets it, in seconds.
GRACE = "TORCHSTORE_REF_GRACE"
#: How long it is kept after it was received when memory is full, and after a value with it inside
#: that nobody has held for the usual time.
SHORT_GRACE_S = 1.0
#: A process that died may have sent tickets that have not been read yet: its holds end after this.
READ_REST_S = 0.25
# Claims that are remembered because they came before their tickets, which other sockets carry.
_MAX_EARLY = 100_000


def grace_s(environment: Mapping[str, str]) -> float:
    """How long a reference in flight is kept when it may have been forgotten, in seconds.

    Raises:
        ConfigurationError: the environment gives no number that is at least 0.
    """
    text = environment.get(GRACE, "")
    if not text:
        return DEFAULT_GRACE_S
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise ConfigurationError(f"{GRACE} is a number of seconds, at least 0, not {text!r}")
    return seconds


class Ticket(msgspec.Struct, eq=False):
    """A reference in flight; or all that a forked child inherits, until it is adopted
    (``is_fork``).

    Args:
        holds: what it holds; of a fork by the ids of the parent's session, otherwise one.
        due: when it ends, as the clock has it; None: not before it is claimed, or its sender ends.
        is_hurried: whether it ends earlier than otherwise, because memory is full, or because the
            value that it was inside of was out of use before.
        inside: how many values there are that were put with the reference in them. It does not end
            before they do.
    """

    holds: dict[int, Hold]
    sender: SessionRecord
    is_fork: bool = False
    claimed: bool = False
    due: float | None = None
    is_hurried: bool = False
    inside: int = 0


class Holds:
    """All holds of one store.

    Args:
        catalog: whose versions are held. Its ``held`` is kept by this class alone.
        free: takes values that nobody holds any more.
        later: has a function called after so many seconds; only :meth:`sweep` is.
        grace_s: see :data:`DEFAULT_GRACE_S`.
        clock: seconds that only grow.
    """

    def __init__(
        self,
        catalog: Catalog,
        free: Callable[[Iterable[Value]], None],
        later: Callable[[float, Callable[[], None]], object] = lambda delay, call: None,
        grace_s: float = DEFAULT_GRACE_S,
        clock: Callable[[], float] = lambda: moments.monotonic(),
    ) -> None:
        self._catalog = catalog
        self._held = catalog.held
        self._free = free
        self._later = later
        self._grace_s = self._nested_s = grace_s
        self._clock = clock
        self._tickets: dict[int, Ticket] = {}
        #: The tickets of the references that were put as part of values.
        self.containers: dict[Value, list[int]] = {}
        # How many of these there are with a ticket of which the sender's socket was not read yet.
        self._contained_early: dict[int, int] = {}
        self._early: dict[int, SessionRecord | None] = {}
        #: What children have sent that wait for what their parents lend to them.
        self._adopting: dict[SessionRecord, list[tuple[str, Any]]] = {}
        self._dying: set[SessionRecord] = set()  # what they have sent may not be read yet
        self._deadlines: list[tuple[float, int, int | SessionRecord]] = []
        self._counter = 0
        self._armed_for = math.inf  # when :meth:`sweep` is called next
        # Starts anywhere, so that a number never means an object of another store, or of this one
        # before it was started again.
        self._number = secrets.randbits(61)

    # ---- beginning ------------------------------------------------------------------------

    def next_number(self) -> int:
        """The number of a new object without a key."""
        self._number += 1
        return self._number

    def publish(self, session: SessionRecord, ident: int, value: Value, where: str) -> None:
        """An object without a key is complete: from now on its holds keep it, and this one is the
        first. The put that made it gives up its own.
        """
        value.created = moments.wall()
        held = HeldVersion("", value.version, value)
        self._held["", value.version, 0] = held
        held.count += 1  # while it has none, it must not end
        self._begin(session, ident, held, where)
        self._end(held)

    def hold(self, session: SessionRecord, request: m.Hold) -> HeldVersion:
        """Hold a version of a key, or of an entry of a state dict; 0: the newest. Returns it.

        Raises:
            KeyNotFoundError, PartialPutError, VersionGoneError: it cannot be read.
            ProtocolError: the id is in use.
        """
        if session.closed is not None:
            raise StoreClosedError("the process of this session has ended")
        if request.hold in session.holds:
            raise ProtocolError(f"hold id {request.hold} is in use")
        held = self._find(request.key, request.version, request.timeline)
        self._begin(session, request.hold, held, request.where)
        self._end(held)
        return held

    def _find(self, key: str, version: int, timeline: int) -> HeldVersion:
        """A version as one that is held, once more than it is: the caller gives that up."""
        catalog = self._catalog
        of = None if timeline < 0 else timeline
        held = catalog.held_version(key, version, of) if version else None
        if held is None:
            if version and of is not None:
                catalog.check_timeline(key, version, of)
            found = catalog.find(key, version)
            if found is None:
                raise catalog.missing_error([key])
            stored, version = found
            held = catalog.held_version(key, version)
            if held is None:
                of = catalog.timeline(key, version)
                held = HeldVersion(key, version, stored, of)
                self._held[key, version, of] = held
                retain_version(stored)
        held.count += 1
        return held

    def _begin(self, session: SessionRecord, ident: int, held: HeldVersion, where: str) -> None:
        if session.was_ended_early(ident):  # its process does not want it any more
            return
        held.count += 1
        session.holds[ident] = Hold(held, moments.wall(), where)

    # ---- ending ---------------------------------------------------------------------------

    def unhold(self, session: SessionRecord, idents: Iterable[int]) -> None:
        """End holds of a session; ids that are unknown are refused when they are to begin."""
        idents = list(idents)
        if self._waits(session, "unhold", idents):
            return
        for ident in idents:
            hold = session.holds.pop(ident, None)
            if hold is not None:
                self._end(hold.version)
            else:
                session.end_early(ident)

    def session_ended(self, session: SessionRecord) -> None:
        """A session has ended, and all that it has sent is read. Idempotent."""
        self._dying.discard(session)
        holds = list(session.holds.values())
        session.holds.clear()
        now = self._clock()
        for number in session.tickets:
            ticket = self._tickets[number]
            if ticket.due is None and not ticket.inside:
                self._set_due(number, ticket, now + self._grace_s)
        for hold in holds:
            self._end(hold.version)

    def process_died(self, session: SessionRecord) -> None:
        """The process of a session has died. Its holds end when what it had sent has been read."""
        self._dying.add(session)
        self._push(self._clock() + READ_REST_S, session)

    def free(
        self, refs: Iterable[tuple[str, int, int]], by: tuple[SessionRecord, int] | None = None
    ) -> int:
        """End all holds of these versions, also those in flight; returns how many were held.
        ``by``: see ``Controller.delete``.
        """
        freed = 0
        for key, version, timeline in refs:
            of = None if timeline < 0 else timeline
            held = self._catalog.held_version(key, version, of)
            if held is not None:
                freed += 1
                held.freed = True
                self._forget(held)
        return freed

    def _forget(self, held: HeldVersion) -> None:
        del self._held[held.key, held.version, held.timeline]
        self._free(release_version(held.stored))

    def _end(self, held: HeldVersion) -> None:
        held.count -= 1
        if not held.count and not held.freed:
            self._forget(held)

    # ---- in flight ------------------------------------------------------------------------

    def lend(self, session: SessionRecord, ident: int, number: int) -> None:
        """A session sends a reference."""
        if self._waits(session, "lend", (ident, number)):
            return
        hold = session.holds.get(ident)
        if hold is None or number in self._tickets:
            return  # it was freed, or its session has ended
        inside = self._contained_early.pop(number, 0)
        ticket = Ticket({0: Hold(hold.version, moments.wall(), hold.where)}, session, inside=inside)
        self._add(number, ticket)
        if number in self._early:
            del self._early[number]
            self._received(number, ticket)

    def lend_all(self, session: SessionRecord, number: int) -> None:
        """The process of a session forks."""
        if self._waits(session, "lend_all", number):
            return
        if number not in self._tickets:
            self._add(number, Ticket(dict(session.holds), session, is_fork=True))
            child = self._early.pop(number, None)
            if child is not None:
                self._adopt(child, number)

    def _add(self, number: int, ticket: Ticket) -> None:
        self._tickets[number] = ticket
        ticket.sender.tickets.add(number)
        for hold in ticket.holds.values():
            hold.version.count += 1

    def claim(self, session: SessionRecord, request: m.Claim) -> None:
        """A reference has arrived. If it comes too late, its session does not hold it, and is told
        so when it reads it. If its process has died since, it is not in flight any more, either.
        """
        if request.hold in session.holds:
            return
        if self._waits(session, "claim", request):
            return
        ticket = self._tickets.get(request.ticket)
        if session.closed is not None and session not in self._dying:
            if ticket is None:
                self._remember_early(request.ticket, None)
            elif not ticket.is_fork:
                self._received(request.ticket, ticket)
            return
        sent = None if ticket is None or ticket.is_fork else ticket.holds[0].version
        if ticket is not None and sent is not None and not sent.freed:
            held = sent
            held.count += 1
            self._received(request.ticket, ticket)
        else:
            try:
                held = self._find(request.key, request.version, request.timeline)
            except (KeyNotFoundError, VersionGoneError):
                return
            if sent is None:
                self._remember_early(request.ticket, None)
        self._begin(session, request.hold, held, request.where)
        self._end(held)

    def _received(self, number: int, ticket: Ticket) -> None:
        """It may be received again, but nobody knows how often: from now on only for a while."""
        ticket.claimed, ticket.is_hurried = True, self._nested_s < self._grace_s
        if not ticket.inside:
            self._set_due(number, ticket, self._clock() + self._nested_s)

    def take_back(self, session: SessionRecord, numbers: list[int]) -> None:
        """What was sent with these tickets has reached nobody, but for values that are there."""
        if not self._waits(session, "take_back", numbers):
            self.end_unsent(numbers)

    def end_unsent(self, numbers: Iterable[int]) -> None:
        """The same, of what no session says."""
        for number in numbers:
            ticket = self._tickets.get(number)
            if ticket is not None:
                if not (ticket.inside or ticket.claimed or ticket.is_fork):
                    self._end_ticket(number)
            elif number not in self._contained_early:
                self._remember_early(number, None)

    def contain(self, value: Value, numbers: list[int]) -> None:
        """References in flight are part of a value, which keeps them as long as it is there."""
        self.containers.setdefault(value, []).extend(numbers)
        for number in numbers:
            ticket = self._tickets.get(number)
            if ticket is None:
                self._contained_early[number] = self._contained_early.get(number, 0) + 1
            else:
                ticket.inside += 1
                ticket.due = None

    def containers_gone(self, values: Iterable[Value]) -> None:
        """Values are freed. Whoever has read one just now may still claim what was in it."""
        for value in values:
            for number in self.containers.pop(value, ()):
                ticket = self._tickets.get(number)
                if ticket is not None:
                    ticket.inside -= 1
                    if not ticket.inside:
                        self._received(number, ticket)
                elif left := self._contained_early.pop(number, 0) - 1:
                    self._contained_early[number] = left
                else:
                    self._remember_early(number, None)

    def adopt(self, session: SessionRecord, number: int, pid: int = 0) -> None:
        """A forked child takes over what its parent has lent to it (0: nothing), or says that it is
        ``pid`` that has the session from now on (0: it does not say so). If its connection is read
        before that of its parent, all that it sends waits; it may have ended by then.
        """
        if pid:
            session.facts = msgspec.structs.replace(session.facts, pid=pid)
        if number:
            self._adopt(session, number)

    def _adopt(self, session: SessionRecord, number: int) -> None:
        ticket = self._tickets.get(number)
        if ticket is None:
            self._adopting.setdefault(session, [])
            self._remember_early(number, session)
            return
        if not ticket.is_fork:
            return
        for ident, hold in ticket.holds.items():
            if ident not in session.holds:
                hold.version.count += 1
                session.holds[ident] = Hold(hold.version, hold.since, hold.where)
        self._end_ticket(number)
        for name, sent in self._adopting.pop(session, ()):
            match name:  # what a subclass does with it, it has done when it came
                case "unhold":
                    Holds.unhold(self, session, sent)
                case "lend":
                    Holds.lend(self, session, *sent)
                case "lend_all":
                    Holds.lend_all(self, session, sent)
                case "claim":
                    Holds.claim(self, session, sent)
                case "take_back":
                    Holds.take_back(self, session, sent)
        if session.closed is not None:
            self.session_ended(session)

    def _waits(self, session: SessionRecord, name: str, sent: Any) -> bool:
        """Whether what a session has sent has to wait, because it inherits first."""
        if session not in self._adopting:
            return False
        self._adopting[session].append((name, sent))
        return True

    def _remember_early(self, number: int, child: SessionRecord | None) -> None:
        """A ticket was claimed, or adopted by a child, before its sender's socket was read. 0: it
        was no ticket.
        """
        if number:
            self._early[number] = child
        while len(self._early) > _MAX_EARLY:
            forgotten = self._early.pop(next(iter(self._early)))
            if forgotten is not None:
                self._adopting.pop(forgotten, None)

    def _end_ticket(self, number: int) -> None:
        """Nothing is in flight by that ticket any more."""
        ticket = self._tickets.pop(number, None)
        if ticket is not None:
            ticket.sender.tickets.discard(number)
            for hold in ticket.holds.values():
                self._end(hold.version)

    def hurry(self) -> int:
        """Memory is full: what only references keep that were received ends earlier than otherwise.
        Returns the bytes of memory that this will free; what frees none stays.
        """
        numbers: dict[int, list[int]] = {}
        versions: dict[int, HeldVersion] = {}
        for number, ticket in self._tickets.items():
            if ticket.claimed and not ticket.inside:
                held = ticket.holds[0].version
                versions[id(held)] = held
                numbers.setdefault(id(held), []).append(number)
        nbytes = 0
        for which, held in versions.items():
            if held.count > len(numbers[which]) or held.freed:
                continue
            if self._catalog.is_kept(held.key, held.version, held.timeline):
                continue
            nbytes += held.stored.nbytes
            for number in numbers[which]:
                ticket = self._tickets[number]
                if ticket.due is not None and not ticket.is_hurried:
                    ticket.is_hurried = True
                    due = ticket.due - max(0.0, self._grace_s - SHORT_GRACE_S)
                    self._set_due(number, ticket, due)
        return nbytes

    # ---- time -----------------------------------------------------------------------------

    def _set_due(self, number: int, ticket: Ticket, due: float) -> None:
        ticket.due = due
        self._push(due, number)

    def _push(self, due: float, what: int | SessionRecord) -> None:
        self._counter += 1
        heapq.heappush(self._deadlines, (due, self._counter, what))
        self._arm()

    def _arm(self) -> None:
        if self._deadlines and self._deadlines[0][0] < self._armed_for:
            self._armed_for = self._deadlines[0][0]
            self._later(max(0.0, self._armed_for - self._clock()) + 0.01, self.sweep)

    def sweep(self) -> None:
        """End what is due."""
        self._armed_for = math.inf
        now = self._clock()
        sessions: list[SessionRecord] = []
        tickets: list[int] = []
        while self._deadlines and self._deadlines[0][0] <= now:
            due, _, what = heapq.heappop(self._deadlines)
            if isinstance(what, SessionRecord):
                sessions.append(what)
                continue
            ticket = self._tickets.get(what)
            if ticket is not None and ticket.due == due:
                tickets.append(what)
        if sessions or tickets:
            self.end_due(sessions, tickets)
        self._arm()

    def end_due(self, sessions: Iterable[SessionRecord], tickets: Iterable[int]) -> None:
        """The time of these is over. Others end only with a request.

        What was inside of a value that only these tickets kept has been out of use for as long as
        the value, so it ends soon: a chain of values would take the whole time for each otherwise.
        """
        for session in sessions:
            self.session_ended(session)
        self._nested_s = min(SHORT_GRACE_S, self._grace_s)
        try:
            for number in tickets:
                self._end_ticket(number)
        finally:
            self._nested_s = self._grace_s

    # ---- for people -----------------------------------------------------------------------

    def report(self, sessions: Iterable[SessionRecord], detached: set[bytes]) -> list[RefReport]:
        """Every version that is held, and by whom."""
        holders: dict[int, list[HolderReport]] = {}
        for session in sessions:
            state = "orphan" if session.token in detached else "held"
            for hold in session.holds.values():
                holders.setdefault(id(hold.version), []).append(_holder(session, hold, state))
        for ticket in self._tickets.values():
            state = "received" if ticket.claimed else "in flight"
            if ticket.inside:
                state = "in a value"
            for hold in ticket.holds.values():
                there = holders.setdefault(id(hold.version), [])
                there.append(_holder(ticket.sender, hold, state))
        reports: list[RefReport] = []
        for held in self._held.values():
            stored = held.stored
            kind = "tensor"
            if type(stored) is Manifest:
                kind = "state dict"
            elif isinstance(stored.meta, ObjectMeta):
                kind = "object"
            there = sorted(holders.get(id(held), ()), key=lambda one: one.since)
            current = self._catalog.is_kept(held.key, held.version, held.timeline)
            reports.append(
                RefReport(
                    held.key, held.version, stored.nbytes, kind, current, there, held.timeline
                )
            )
        return reports

    @property
    def nbytes(self) -> int:
        """Bytes of the versions that are there only because they are held."""
        kept = self._catalog.is_kept
        every = self._held.values()
        return sum(h.stored.nbytes for h in every if not kept(h.key, h.version, h.timeline))


def _holder(session: SessionRecord, hold: Hold, state: str) -> HolderReport:
    facts = session.facts
    return HolderReport(facts.pid, facts.hostname, facts.rank, hold.since, hold.where, state)
