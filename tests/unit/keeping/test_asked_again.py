"""What a server that has come back is told, and tells, about requests of its earlier lives."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.support import turn
from tests.unit.references.test_holds import singleton
from tests.unit.server.test_controller import HERE, META, facts, volumes

from torchstore_core.errors import StoreFullError
from torchstore_core.server.index.records import SessionRecord
from torchstore_core.server.keeping.log import Log
from torchstore_core.server.keeping.recorded import RecordedController
from torchstore_core.server.keeping.returning import Returning
from torchstore_core.server.memory.volume_record import VolumeRecord
from torchstore_core.wire import messages as m

LIFE = 2


@pytest.fixture
def log() -> Iterator[Log]:
    made = Log()
    yield made
    made.close()


@pytest.fixture
def records() -> Iterator[list[VolumeRecord]]:
    with volumes(1 << 16) as there:
        yield there


def life(log: Log, records: list[VolumeRecord]) -> RecordedController:
    there = [VolumeRecord(v.info, v.memory, v.halves) for v in records]
    controller = RecordedController(log, there, singleton(), prefault=False)
    controller.restore()
    return controller


def put(number: int) -> m.Put:
    return m.Put(number, number, [m.PutItem("k", META, 16, b"x" * 16)])


async def come_back(
    log: Log, records: list[VolumeRecord], token: bytes
) -> tuple[RecordedController, Returning, SessionRecord]:
    """The next life, in which the connection of the only session is there."""
    controller = life(log, records)
    returning = Returning(controller, LIFE, lambda session: None, lambda session, then: then())
    session = controller.sessions[token]
    returning.begin({session.serial})
    return controller, returning, session


async def test_what_a_client_may_ask_again_is_known_as_long_as_it_lives(log, records) -> None:
    """Its loop may be busy with something else for minutes. Of the rest nothing is kept."""
    before = life(log, records)
    session = before.open_session(facts(), HERE)
    for number in (5, 6, 7):
        before.put(session, put(number))
    controller, returning, session = await come_back(log, records, session.token)
    returning.resume(session, m.Resume(LIFE, [], [], [6], last=True))
    await turn()  # nothing is left to be called later that forgets it
    assert returning.again(session, put(6)) == m.Committed(6, [2])
    assert returning.again(session, put(6)) == m.Committed(6, [2])
    assert returning.again(session, put(5)) is None
    assert controller.results[session.token].keys() == {("Put", 6)}


async def test_a_put_that_was_refused_is_tried_when_it_is_asked_for_again(log, records) -> None:
    """Its client may have given back memory since, and have sent it once more."""
    before = life(log, records)
    session = before.open_session(facts(), HERE)
    before.put(session, m.Put(5, 5, [m.PutItem("large", META, 1 << 16)]))
    refused = put(6)
    with pytest.raises(StoreFullError):
        before.put(session, refused)
    controller, returning, session = await come_back(log, records, session.token)
    returning.resume(session, m.Resume(LIFE, [], [], [6], last=True))
    assert returning.again(session, refused) is None
    assert controller.put(session, refused) == ([1], None)


async def test_what_an_earlier_life_was_told_gives_up_nothing(log, records) -> None:
    """The client has begun more since it has answered that one."""
    before = life(log, records)
    session = before.open_session(facts(), HERE)
    item = m.PutItem("k", META, 4096)
    before.put(session, m.Put(5, 5, [item]))
    _, returning, session = await come_back(log, records, session.token)
    returning.resume(session, m.Resume(LIFE - 1, [], [], [], last=True))
    assert session.txns.keys() == {5}
    let_in: list[bool] = []
    assert returning.hold_back(session.token, lambda: let_in.append(True))
    returning.resume(session, m.Resume(LIFE, [5], [], [], last=True))
    assert session.txns.keys() == {5}
    assert let_in == [True]
    returning.resume(session, m.Resume(LIFE, [], [], [], last=True))  # it has answered already
    assert session.txns.keys() == {5}


async def test_a_client_with_much_tells_it_in_parts(log, records) -> None:
    """Nothing is given up before the last one, nor because of what a lost connection has told."""
    before = life(log, records)
    session = before.open_session(facts(), HERE)
    items = [m.PutItem(f"k{n}", META, 64) for n in range(3)]
    before.put(session, m.Put(5, 5, items))
    before.put(session, m.Put(6, 6, items))
    _, returning, session = await come_back(log, records, session.token)
    returning.resume(session, m.Resume(LIFE, [5], [], []))
    assert session.txns.keys() == {5, 6}
    returning.take(session.token)
    returning.resume(session, m.Resume(LIFE, [], [], [6]))
    returning.resume(session, m.Resume(LIFE, [6], [], []))
    assert session.txns.keys() == {5, 6}
    returning.resume(session, m.Resume(LIFE, [], [], [], last=True))
    assert session.txns.keys() == {6}
    assert returning.again(session, put(6)) is not None


async def test_what_is_given_up_waits_until_nobody_can_write_it(log, records) -> None:
    """Halves in other processes have outlived the server. Channels wait as long, and a connection
    that is lost meanwhile has told nothing.
    """
    before = life(log, records)
    session = before.open_session(facts(), HERE)
    before.put(session, m.Put(5, 5, [m.PutItem("k", META, 64)]))
    controller, settled, let_in = life(log, records), [], []
    session = controller.sessions[session.token]
    settle = lambda session, then: settled.append(then)  # noqa: E731
    returning = Returning(controller, LIFE, lambda session: None, settle)
    returning.begin({session.serial})
    assert returning.hold_back(session.token, lambda: let_in.append(True))
    returning.resume(session, m.Resume(LIFE, [], [], [], last=True))
    returning.take(session.token)
    returning.resume(session, m.Resume(LIFE, [], [], [], last=True))
    first, second = settled
    first()
    assert session.txns.keys() == {5}
    assert not let_in
    second()
    assert not session.txns
    assert let_in == [True]


async def test_what_was_recorded_last_is_not_done_again(log, records) -> None:
    """Also in the life after the next, and if the log was written anew meanwhile."""
    before = life(log, records)
    session = before.open_session(facts(), HERE)
    other = before.open_session(facts(), HERE)
    before.holds.lend_all(session, 99)
    before.holds.lend_all(other, 98)
    [*_, lent, _] = [record.body for record in log]
    between = life(log, records)
    anew = Log()
    between.write_state(anew)
    _, returning, session = await come_back(anew, records, session.token)
    assert returning.was_recorded(session, lent)
    assert not returning.was_recorded(session, lent)  # only the first one may be
    anew.close()
