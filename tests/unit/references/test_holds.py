"""The counts of holds against a model made of sets: whatever order messages arrive in, a version is
there exactly as long as its key has it, or somebody holds it, or it is in flight.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)
from tests.unit.server.test_controller import HERE, facts, inline, volumes

from torchstore_core.contracts.strategy import Strategy
from torchstore_core.errors import (
    KeyNotFoundError,
    ProtocolError,
    StoreFullError,
    VersionGoneError,
)
from torchstore_core.plugins.registry import Registry
from torchstore_core.server.controller import Controller
from torchstore_core.server.index.records import SessionRecord
from torchstore_core.server.index.references import holds as holding
from torchstore_core.server.index.references.holds import SHORT_GRACE_S, Holds
from torchstore_core.server.spilling.delays import Delayed
from torchstore_core.values import ObjectMeta
from torchstore_core.wire import messages as m

GRACE_S = 10.0
KEYS = ("a", "b")
OBJECT = ObjectMeta("pickle")
Ref = tuple[str, int]


@functools.cache  # to look for what is installed takes longer than most examples
def singleton() -> Strategy:
    return Registry().strategy("singleton")()


class Clock:
    """Seconds that pass when a test says so, and what is to be called then."""

    def __init__(self) -> None:
        self.now = 1000.0
        self._calls: list[tuple[float, Callable[[], None]]] = []

    def time(self) -> float:
        return self.now

    def later(self, delay: float, call: Callable[[], None]) -> None:
        self._calls.append((self.now + delay, call))

    def forget(self) -> None:
        """Call nothing of what was to be called."""
        self._calls.clear()

    def advance(self, seconds: float) -> None:
        end = self.now + seconds
        while due := [one for one in self._calls if one[0] <= end]:
            first = min(due, key=lambda one: one[0])
            self._calls.remove(first)
            self.now = max(self.now, first[0])
            first[1]()
        self.now = end


class Store:
    """A controller with small inline values, and a clock of its own."""

    def __init__(self) -> None:
        self.clock = Clock()
        self._volumes = volumes(1 << 20)
        self.controller = Controller(self._volumes.__enter__(), singleton(), prefault=False)
        controller = self.controller
        controller.holds = self.holds = Holds(
            controller.catalog, controller._free, self.clock.later, GRACE_S, self.clock.time
        )
        self._ids = itertools.count(1)

    def close(self) -> None:
        self._volumes.__exit__(None, None, None)

    def session(self) -> SessionRecord:
        return self.controller.open_session(facts(), HERE)

    def next_id(self) -> int:
        return next(self._ids)

    def put(self, session: SessionRecord, key: str, data: bytes) -> Ref:
        put = m.Put(self.next_id(), self.next_id(), [inline(key, data)])
        versions, _ = self.controller.put(session, put)
        return key, versions[0]

    def put_value(self, session: SessionRecord, key: str, data: bytes, *lent: int) -> Ref:
        """Put an object that has references in it."""
        item = m.PutItem(key, OBJECT, len(data), data)
        put = m.Put(self.next_id(), self.next_id(), [item], lent=[(0, list(lent))])
        versions, _ = self.controller.put(session, put)
        return key, versions[0]

    def put_object(self, session: SessionRecord, hold: int, data: bytes, *lent: int) -> Ref:
        item = m.PutItem("", OBJECT, len(data), data)
        put = m.PutObject(self.next_id(), self.next_id(), item, hold, lent=[(0, list(lent))])
        versions, _ = self.controller.put_object(session, put)
        return "", versions[0]

    def claim(self, session: SessionRecord, hold: int, ticket: int, ref: Ref) -> None:
        self.holds.claim(session, m.Claim(hold, ticket, *ref, timeline=0))

    def hold(self, session: SessionRecord, hold: int, key: str, version: int = 0) -> int:
        return self.holds.hold(session, m.Hold(self.next_id(), hold, key, version)).version

    def has(self, ref: Ref) -> bool:
        try:
            return self.controller.catalog.find(*ref) is not None
        except VersionGoneError:
            return False

    @property
    def used(self) -> int:
        return self.controller.volumes[0].used


class _Ticket:
    """A reference in flight, as the model sees it."""

    def __init__(self, sender: SessionRecord, held: dict[int, Ref]) -> None:
        self.sender = sender
        self.held = held
        self.claimed = False
        self.due: float | None = None
        self.inside: set[Ref] = set()  # the values that have it in them

    def receive(self, due: float) -> None:
        self.claimed = True
        if not self.inside:
            self.due = due


class HoldsMachine(RuleBasedStateMachine):
    """Requests of living and dead sessions, in any order that their connections allow."""

    sessions: Bundle[SessionRecord] = Bundle("sessions")
    sent: Bundle[tuple[int, Ref]] = Bundle("sent")  # what a decoder may find, for ever

    make_store: Callable[[], Store] = Store

    def __init__(self) -> None:
        super().__init__()
        self.store = self.make_store()
        self.sizes: dict[Ref, int] = {}
        self.current: dict[str, Ref] = {}
        self.holds: dict[bytes, dict[int, Ref]] = {}
        self.tickets: dict[int, _Ticket] = {}
        self.dying: set[bytes] = set()
        self.numbers = itertools.count(1)
        self.early: set[int] = set()  # tickets that were claimed before their sender was read
        self.containers: dict[Ref, int] = {}  # the ticket that is in a value

    def teardown(self) -> None:
        self.store.close()

    # ---- sessions -------------------------------------------------------------------------

    @initialize(target=sessions)
    def begin(self):
        return multiple(self._open(), self._open())

    @rule(target=sessions)
    def open(self):
        return self._open()

    def _open(self) -> SessionRecord:
        session = self.store.session()
        self.holds[session.token] = {}
        return session

    @rule(session=sessions)
    def die(self, session):
        """The process is seen to be dead; its connection may still be open, and unread."""
        if session.token in self.holds and session.closed is None:
            self.store.controller.end_session(session)
            self.dying.add(session.token)

    @rule(session=consumes(sessions))
    def close(self, session):
        if session.token in self.holds:
            self._ended(session.token)
            self.store.controller.close_session(session)

    def _ended(self, token: bytes) -> None:
        self.holds.pop(token)
        self.dying.discard(token)
        for ticket in self.tickets.values():
            if ticket.sender.token == token and ticket.due is None and not ticket.inside:
                ticket.due = self.store.clock.now + GRACE_S

    def _living(self, session: SessionRecord) -> bool:
        return session.token in self.holds and session.closed is None

    # ---- holds ----------------------------------------------------------------------------

    @rule(session=sessions, key=st.sampled_from(KEYS), size=st.integers(1, 100))
    def put(self, session, key, size):
        if self._living(session):
            ref = self.store.put(session, key, bytes(size))
            self.sizes[ref] = size
            self.current[key] = ref

    @rule(key=st.sampled_from(KEYS))
    def delete(self, key):
        self.store.controller.delete([key], strict=False)
        self.current.pop(key, None)

    @rule(session=sessions, size=st.integers(1, 100), given_back=st.booleans())
    def put_object(self, session, size, given_back):
        """``given_back``: its process has been cancelled, and that has come first."""
        if not self._living(session):
            return
        hold = self.store.next_id()
        if given_back:
            self.store.holds.unhold(session, [hold])
        ref = self.store.put_object(session, hold, bytes(size))
        self.sizes[ref] = size
        if not given_back:
            self.holds[session.token][hold] = ref

    @rule(session=sessions, key=st.sampled_from(KEYS))
    def hold(self, session, key):
        if not self._living(session):
            return
        hold = self.store.next_id()
        if key not in self.current:
            with pytest.raises(KeyNotFoundError):
                self.store.hold(session, hold, key)
            return
        assert self.store.hold(session, hold, key) == self.current[key][1]
        self.holds[session.token][hold] = self.current[key]

    @rule(session=sessions, data=st.data())
    def unhold(self, session, data):
        mine = self.holds.get(session.token)
        if mine:
            hold = data.draw(st.sampled_from(sorted(mine)))
            self.store.holds.unhold(session, [hold])
            del mine[hold]

    @rule(data=st.data())
    def free(self, data):
        if not self.sizes:
            return
        ref = data.draw(st.sampled_from(sorted(self.sizes)))
        held = ref in self._held()
        assert self.store.holds.free([(*ref, 0)]) == held
        for mine in self.holds.values():
            for hold in [hold for hold, there in mine.items() if there == ref]:
                del mine[hold]
        for ticket in self.tickets.values():
            ticket.held = {hold: there for hold, there in ticket.held.items() if there != ref}

    # ---- in flight ------------------------------------------------------------------------

    @rule(target=sent, session=sessions, data=st.data(), overtaken=st.booleans())
    def send(self, session, data, overtaken):
        """Encode a reference. ``overtaken``: a receiver is faster than the sender's own message."""
        mine = self.holds.get(session.token)
        if not mine:
            return multiple()
        hold = data.draw(st.sampled_from(sorted(mine)))
        ref = mine[hold]
        number = next(self.numbers)
        if overtaken:
            self._receive(data.draw(self.sessions), number, ref)
        self.store.holds.lend(session, hold, number)
        ticket = self.tickets[number] = _Ticket(session, {hold: ref})
        if overtaken and number in self.early:
            ticket.receive(self.store.clock.now + GRACE_S)
        return number, ref

    @rule(
        target=sent,
        session=sessions,
        data=st.data(),
        key=st.sampled_from(KEYS),
        order=st.sampled_from(("lent first", "put first", "gone first")),
    )
    def put_into(self, session, data, key, order):
        """A value with a reference in it. They come over two connections."""
        mine = self.holds.get(session.token)
        if not mine or not self._living(session):
            return multiple()
        hold, number = data.draw(st.sampled_from(sorted(mine))), next(self.numbers)
        if order == "lent first":
            self.store.holds.lend(session, hold, number)
        outer = self.current[key] = self.store.put_value(session, key, bytes(10), number)
        self.sizes[outer] = 10
        if order == "gone first":
            self.delete(key)
        if order != "lent first":
            self.store.holds.lend(session, hold, number)
        ticket = self.tickets[number] = _Ticket(session, {hold: mine[hold]})
        ticket.inside, self.containers[outer] = {outer}, number
        return number, mine[hold]

    @rule(session=sessions, what=sent)
    def take_back(self, session, what):
        """The put was given up: whether it has taken place, the server knows."""
        self.store.holds.take_back(session, [what[0]])
        ticket = self.tickets.get(what[0])
        if ticket is not None and not (ticket.claimed or ticket.inside):
            del self.tickets[what[0]]

    def _look_into_values(self, due: float) -> None:
        """What was in those that are gone may have been read just now."""
        alive = self._alive()
        for outer in self.containers.keys() - alive:
            ticket = self.tickets[self.containers.pop(outer)]
            ticket.inside.discard(outer)
            ticket.receive(due)

    @rule(session=sessions, what=sent)
    def receive(self, session, what):
        self._receive(session, *what)

    def _receive(self, session: SessionRecord, number: int, ref: Ref) -> None:
        hold = self.store.next_id()
        ticket = self.tickets.get(number)
        there = ref in self._alive()
        has_ended = session.token not in self.holds
        self.store.claim(session, hold, number, ref)
        if ticket is not None:  # also if its receiver has died since
            ticket.receive(self.store.clock.now + GRACE_S)
        elif there or has_ended:
            self.early.add(number)
        if there and not has_ended:
            self.holds[session.token][hold] = ref

    @rule(
        target=sessions,
        session=sessions,
        order=st.sampled_from(("parent first", "child first", "child ends first")),
    )
    def fork(self, session, order):
        """Parent and child have connections of their own: which of them is read first?"""
        if not self._living(session):
            return multiple()
        number = next(self.numbers)
        child = self._open()
        if order != "parent first":
            self.store.holds.adopt(child, number)
        if order == "child ends first":
            self._ended(child.token)
            self.store.controller.close_session(child)
        self.store.holds.lend_all(session, number)
        if order == "parent first":
            self.store.holds.adopt(child, number)
        if order != "child ends first":
            self.holds[child.token] = dict(self.holds[session.token])
        return child

    @rule(seconds=st.sampled_from((1.0, GRACE_S / 2, GRACE_S + 1)))
    def wait(self, seconds):
        end = self.store.clock.now + seconds
        for token in list(self.dying):  # a quarter of a second later, what it sent has been read
            self._ended(token)
            self._look_into_values(self.store.clock.now + GRACE_S)
        self.store.clock.advance(seconds)
        while dues := [t.due for t in self.tickets.values() if t.due and t.due < end - 0.5]:
            now = min(dues)
            self.tickets = {n: t for n, t in self.tickets.items() if t.due != now}
            self._look_into_values(now + SHORT_GRACE_S)

    # ---- what must be so ------------------------------------------------------------------

    def _held(self) -> set[Ref]:
        held = {ref for mine in self.holds.values() for ref in mine.values()}
        return held | {ref for ticket in self.tickets.values() for ref in ticket.held.values()}

    def _alive(self) -> set[Ref]:
        return self._held() | set(self.current.values())

    @invariant()
    def what_is_referred_to_is_there_and_nothing_else(self):
        self._look_into_values(self.store.clock.now + GRACE_S)
        alive = self._alive()
        assert self.store.used == sum(self.sizes[ref] for ref in alive)
        for ref in self.sizes:
            assert self.store.has(ref) == (ref in alive), ref

    @invariant()
    def the_report_agrees(self):
        sessions = self.store.controller.sessions.values()
        reports = self.store.holds.report(sessions, set())
        assert {(one.key, one.version) for one in reports} == self._held()
        assert all(one.holders for one in reports)

    @invariant()
    def each_ticket_knows_how_many_values_have_it(self):
        holds = self.store.holds
        inside = Counter(itertools.chain.from_iterable(holds.containers.values()))
        known = {number: one.inside for number, one in holds._tickets.items() if one.inside}
        assert {**known, **holds._contained_early} == inside


TestHolds = HoldsMachine.TestCase


@pytest.fixture
def store():
    made = Store()
    yield made
    made.close()


def test_a_ticket_of_a_dead_sender_lasts_for_the_grace(store: Store):
    sender, receiver = store.session(), store.session()
    ref = store.put_object(sender, 1, b"value")
    store.holds.lend(sender, 1, 77)
    store.controller.close_session(sender)
    store.clock.advance(GRACE_S - 1)
    assert store.has(ref)
    store.claim(receiver, 5, 77, ref)
    store.clock.advance(10 * GRACE_S)
    assert store.has(ref)
    store.holds.unhold(receiver, [5])
    assert not store.has(ref)
    assert store.used == 0


def test_a_ticket_that_nobody_claims_ends_after_the_grace(store: Store):
    sender = store.session()
    ref = store.put_object(sender, 1, b"value")
    store.holds.lend(sender, 1, 77)
    store.holds.unhold(sender, [1])
    store.clock.advance(100 * GRACE_S)  # its sender lives: it may be anywhere
    assert store.has(ref)
    store.controller.close_session(sender)
    store.clock.advance(GRACE_S - 1)
    assert store.has(ref)
    store.clock.advance(2)
    assert not store.has(ref)


def test_what_is_in_a_value_lasts_as_long_as_that(store: Store):
    sender, receiver = store.session(), store.session()
    inner = store.put_object(sender, 1, b"inner")
    store.holds.lend(sender, 1, 77)
    outer = store.put_object(sender, 2, b"outer", 77, 78)
    store.put_value(sender, "key", b"outer, too", 77)
    store.holds.hold(receiver, m.Hold(store.next_id(), 9, "", outer[1]))
    store.controller.close_session(sender)
    store.clock.advance(10 * GRACE_S)
    assert store.has(inner)
    store.claim(receiver, 5, 77, inner)  # it may be received at any time, and again
    store.holds.unhold(receiver, [5])
    store.clock.advance(10 * GRACE_S)
    assert store.has(inner)
    store.holds.unhold(receiver, [9])
    assert not store.has(outer)
    store.clock.advance(10 * GRACE_S)
    assert store.has(inner)  # the key has it
    store.controller.delete(["key"], True)
    store.clock.advance(GRACE_S - 1)
    assert store.has(inner)  # somebody may just have read it
    store.clock.advance(2)
    assert not store.has(inner)
    assert store.used == 0
    assert not store.holds.containers


def test_a_chain_of_values_takes_the_whole_time_only_once(store: Store):
    sender = store.session()
    length = 20
    chain = [store.put_object(sender, 1, b"first")]
    for at in range(1, length):
        store.holds.lend(sender, at, 70 + at)
        chain.append(store.put_object(sender, at + 1, b"next", 70 + at))
        store.holds.unhold(sender, [at])
    store.clock.advance(10 * GRACE_S)
    assert all(map(store.has, chain))
    store.holds.unhold(sender, [length])
    assert not store.has(chain[-1])
    store.clock.advance(GRACE_S - 0.1)
    assert all(map(store.has, chain[:-1]))  # somebody may just have read the last one
    store.clock.advance(0.2)
    assert not store.has(chain[-2])
    store.holds.hurry()  # a second is the least, however full memory is
    store.clock.advance(SHORT_GRACE_S - 0.2)
    assert all(map(store.has, chain[:-2]))  # or this one, by its number
    store.clock.advance(length * (SHORT_GRACE_S + 0.05))
    assert not any(map(store.has, chain))
    assert store.used == 0


def test_a_value_may_be_there_before_its_references_are_known_to_be_lent(store: Store):
    """They come over another connection."""
    sender = store.session()
    inner = store.put_object(sender, 1, b"inner")
    store.put_value(sender, "key", b"outer", 77, 78)
    store.put_value(sender, "other", b"outer, too", 77)
    store.controller.delete(["other"], True)
    store.holds.lend(sender, 1, 77)
    store.controller.close_session(sender)
    store.clock.advance(10 * GRACE_S)
    assert store.has(inner)
    store.controller.delete(["key"], True)
    store.clock.advance(GRACE_S + 1)
    assert not store.has(inner)
    assert store.used == 0
    assert not store.holds._contained_early


@pytest.mark.parametrize("early", [False, True])
def test_what_is_in_a_value_that_was_gone_early_does_not_stay_in_flight(store: Store, early: bool):
    sender = store.session()
    inner = store.put_object(sender, 1, b"inner")
    if not early:
        store.holds.lend(sender, 1, 77)
    store.put_value(sender, "key", b"outer", 77)
    store.controller.delete(["key"], True)
    if early:
        store.holds.lend(sender, 1, 77)
    store.holds.unhold(sender, [1])
    store.clock.advance(GRACE_S - 1)
    assert store.has(inner)  # somebody may just have read it
    store.clock.advance(2)
    assert not store.has(inner)


def test_what_is_taken_back_stays_only_in_values_that_are_there(store: Store):
    sender = store.session()
    unsent, sent = store.put_object(sender, 1, b"unsent"), store.put_object(sender, 2, b"sent")
    for ident in (1, 2):
        store.holds.lend(sender, ident, 70 + ident)
        store.holds.unhold(sender, [ident])
    store.put_value(sender, "key", b"outer", 72)
    store.holds.take_back(sender, [71, 72, 79])
    assert not store.has(unsent)
    store.clock.advance(10 * GRACE_S)
    assert store.has(sent)
    store.controller.delete(["key"], True)
    store.clock.advance(GRACE_S + 1)
    assert store.used == 0


@pytest.mark.parametrize("commits", [False, True])
def test_what_is_in_a_value_of_several_participants_is_in_what_is_stored(
    store: Store, commits: bool
):
    """Both participants put the same entry; the bytes of one of them are stored."""
    first, second = store.session(), store.session()
    refs: list[Ref] = []
    for at, session in enumerate((first, second)):
        refs.append(store.put_object(session, 1, b"inner"))
        store.holds.lend(session, 1, 70 + at)
        store.holds.unhold(session, [1])
        of = m.Publication("state", str(at), 2, False, 1)
        item = m.PutItem("entry", OBJECT, 5, b"outer")
        if at == 0 or commits:
            put = m.Put(store.next_id(), store.next_id(), [item], 0, of, lent=[(0, [70 + at])])
            store.controller.put(session, put)
    store.clock.advance(10 * GRACE_S)
    assert [store.has(ref) for ref in refs] == [True, not commits]
    store.controller.close_session(first)
    store.controller.close_session(second)
    store.clock.advance(10 * GRACE_S)
    assert [store.has(ref) for ref in refs] == [True, False]  # although it may not be visible yet
    store.controller.delete(["state"], False)
    store.clock.advance(GRACE_S + 1)
    assert store.used == 0


def test_references_in_what_is_not_put_are_a_protocol_error(store: Store):
    session = store.session()
    put = m.Put(store.next_id(), store.next_id(), [inline("key", b"value")], lent=[(1, [7])])
    with pytest.raises(ProtocolError, match="items that the put does not have"):
        store.controller.put(session, put)


def test_what_was_freed_is_held_anew_by_who_claims_it_late(store: Store):
    """A key still has the version; it does not matter whether a ticket is left of it."""
    sender, receiver = store.session(), store.session()
    ref = store.put(sender, "key", b"value")
    store.hold(sender, 1, "key")
    store.holds.lend(sender, 1, 77)
    store.claim(receiver, 5, 77, ref)
    store.holds.free([(*ref, 0)])
    store.claim(receiver, 6, 77, ref)
    store.controller.delete(["key"], True)
    assert store.has(ref)
    store.holds.unhold(receiver, [5, 6])
    assert not store.has(ref)


def test_what_has_arrived_is_kept_for_less_time_when_memory_is_full(store: Store):
    """What is in flight, or that others hold, or that has a key, is not what ends earlier."""
    sender, receiver = store.session(), store.session()
    size = 300 << 10  # of a mebibyte

    def send(hold: int, ref: Ref, *, received: bool) -> None:
        store.holds.lend(sender, hold, 70 + hold)
        store.holds.unhold(sender, [hold])
        if received:
            store.claim(receiver, hold, 70 + hold, ref)

    arrived = store.put_object(sender, 1, bytes(size))
    in_flight = store.put_object(sender, 2, bytes(size))
    held = store.put_object(sender, 3, bytes(size))
    send(1, arrived, received=True)
    send(2, in_flight, received=False)
    send(3, held, received=True)
    retried: list[Ref] = []
    with pytest.raises(StoreFullError):
        store.put_object(sender, 4, bytes(size))  # nothing ends soon
    store.holds.unhold(receiver, [1])
    with pytest.raises(Delayed) as delayed:
        store.put_object(sender, 4, bytes(size))
    delayed.value.then(lambda: retried.append(store.put_object(sender, 4, bytes(size))))
    store.clock.advance(SHORT_GRACE_S - 0.1)
    assert store.has(arrived)
    store.clock.advance(0.2)
    assert not store.has(arrived)
    store.controller.spilling.room.retry()
    assert [store.has(ref) for ref in (in_flight, held, *retried)] == [True, True, True]
    with pytest.raises(StoreFullError):
        store.put_object(sender, 5, bytes(size))
    store.clock.advance(10 * GRACE_S)
    assert store.has(in_flight)


def test_what_a_dead_process_sent_last_counts(store: Store):
    """A process that was killed may have sent messages that the server has not read yet."""
    sender, receiver = store.session(), store.session()
    ref = store.put_object(sender, 1, b"value")
    store.controller.end_session(sender)  # seen by its process id
    store.holds.lend(sender, 1, 77)  # and now its connection is read
    store.controller.close_session(sender)
    store.clock.advance(1)
    store.claim(receiver, 5, 77, ref)
    assert store.has(ref)


@pytest.mark.parametrize("end", ["died", "closed"])
def test_what_a_process_has_received_that_died_is_not_in_flight(store: Store, end: str):
    """Its sender lives on, so nothing else would ever end the ticket."""
    sender, receiver = store.session(), store.session()
    ref = store.put_object(sender, 1, b"value")
    store.holds.lend(sender, 1, number=7)
    store.holds.unhold(sender, [1])
    if end == "died":  # its death is seen before its socket is read
        store.controller.end_session(receiver)
    else:
        store.controller.close_session(receiver)
    store.claim(receiver, 1, 7, ref)
    store.clock.advance(GRACE_S / 2)
    assert store.has(ref)
    store.clock.advance(GRACE_S)
    assert not store.has(ref)
    assert store.used == 0


@pytest.mark.parametrize("ends", [False, True])
def test_what_a_child_sends_waits_for_what_it_inherits(store: Store, ends: bool):
    """The connections of the child and of its own child are read before that of its parent."""
    parent, child, grandchild, receiver = (store.session() for _ in range(4))
    first, second = (store.put_object(parent, hold, b"value") for hold in (1, 2))
    store.holds.adopt(grandchild, 8)
    store.holds.adopt(child, 7)
    store.holds.unhold(child, [1])
    store.holds.lend(child, 2, 77)
    store.holds.lend_all(child, 8)
    if ends:
        store.controller.close_session(child)
    store.holds.lend_all(parent, 7)
    store.holds.unhold(parent, [1, 2])
    assert not store.has(first)
    assert grandchild.holds.keys() == {2}
    store.controller.close_session(grandchild)
    store.claim(receiver, 5, 77, second)
    store.controller.close_session(child)
    store.clock.advance(2 * GRACE_S)
    assert store.has(second)
    store.holds.unhold(receiver, [5])
    assert not store.has(second)
    assert store.used == 0


def test_a_claim_that_comes_too_late_holds_nothing(store: Store):
    sender, receiver = store.session(), store.session()
    ref = store.put_object(sender, 1, b"value")
    store.holds.lend(sender, 1, 77)
    store.controller.close_session(sender)
    store.clock.advance(GRACE_S + 1)
    store.claim(receiver, 5, 77, ref)
    assert not receiver.holds
    with pytest.raises(VersionGoneError, match="had ended before this one arrived"):
        store.controller.catalog.find(*ref)


def test_ids_that_are_in_use_are_refused(store: Store):
    session = store.session()
    ref = store.put_object(session, 1, b"value")
    with pytest.raises(ProtocolError, match="in use"):
        store.put_object(session, 1, b"another")
    with pytest.raises(ProtocolError, match="in use"):
        store.hold(session, 1, *ref)
    assert store.used == 5


def test_claims_that_are_remembered_are_bounded(store: Store, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(holding, "_MAX_EARLY", 10)
    session = store.session()
    store.put(session, "a", b"value")
    for number in range(1, 100):
        store.claim(session, 1000 + number, number, ("a", 1))
    assert len(store.holds._early) == 10


def test_a_claim_that_overtakes_its_ticket_counts(store: Store):
    """They come over different connections."""
    sender, receiver = store.session(), store.session()
    ref = store.put_object(sender, 1, b"value")
    store.claim(receiver, 5, 77, ref)
    store.holds.lend(sender, 1, 77)
    store.holds.unhold(sender, [1])
    store.clock.advance(GRACE_S + 1)
    assert store.has(ref)
    store.holds.unhold(receiver, [5])
    assert not store.has(ref)  # although the sender lives: it is known that it has arrived


def test_holds_outlast_the_relay_of_their_session(store: Store):
    """Its process may live, and a volume of its host says when it has ended."""
    controller, session = store.controller, store.session()
    ref = store.put_object(session, 1, b"value")
    controller.detached.detach(session, None)
    store.clock.advance(100 * GRACE_S)
    assert store.has(ref)
    (report,) = store.holds.report(controller.detached.sessions.values(), {session.token})
    assert [holder.state for holder in report.holders] == ["orphan"]
    controller.detached.process_ended(session.token)
    assert not store.has(ref)


def test_what_is_due_soon_does_not_wait_for_what_is_due_later(store: Store) -> None:
    sender, receiver = store.session(), store.session()
    ref = store.put_object(sender, 1, b"value")
    other = store.put_object(sender, 2, b"other")
    store.holds.lend(sender, 1, 77)
    store.claim(receiver, 3, 77, ref)  # the ticket ends in ten seconds
    store.controller.end_session(sender)
    store.clock.advance(1.0)
    assert store.has(ref)
    assert not store.has(other)
