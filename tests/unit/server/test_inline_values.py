"""Values that were put inline, and are read together: more than a message should carry."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from tests.simulation.promises.states import state_of
from tests.unit.server.test_controller import HERE, facts, volumes

from torchstore_core.contracts.strategy import Strategy
from torchstore_core.server.controller import Controller
from torchstore_core.server.index.records import SessionRecord
from torchstore_core.server.keeping.log import Log
from torchstore_core.server.keeping.recorded import RecordedController
from torchstore_core.server.memory.segment import SegmentMemory
from torchstore_core.server.memory.volume_record import VolumeRecord
from torchstore_core.values import TensorMeta
from torchstore_core.wire import messages as m
from torchstore_core.wire.columns import FEWEST, EntryColumns

COUNT, NBYTES = FEWEST + 8, 1000
KEYS = [f"k{at}" for at in range(COUNT)]
WANTS = [m.Want(key) for key in KEYS]
PLACED = COUNT * 1024
TOGETHER = m.LocateKeys(1, 7, [], NBYTES, [], KEYS)
ONE_BY_ONE = m.Locate(1, 7, WANTS, NBYTES)


def content(key: str) -> bytes:
    return (key.encode() * NBYTES)[:NBYTES]


def put(
    controller: Controller, session: SessionRecord, when_full: int = 0, keys: list[str] = KEYS
) -> None:
    """Put each key by itself."""
    for key in keys:
        item = m.PutItem(key, TensorMeta("uint8", (NBYTES,)), NBYTES, content(key))
        controller.put(session, m.Put(1, 1, [item], when_full=when_full))


def contents(
    records: list[VolumeRecord], entries: list[m.Entry] | EntryColumns
) -> list[bytes | None]:
    """What the entries of a reply say where to read."""
    if isinstance(entries, EntryColumns):
        return [records[0].memory.read(at, NBYTES) for at in entries.places()]
    return [
        None if one.grant is None else records[0].memory.read(one.grant.offset, one.nbytes)
        for one in entries
    ]


def ride(entries: list[m.Entry] | EntryColumns) -> bool:
    """Whether the reply has all of the bytes itself."""
    return not isinstance(entries, EntryColumns) and [e.data for e in entries] == [
        content(key) for key in KEYS
    ]


@pytest.fixture
def records() -> Iterator[list[VolumeRecord]]:
    with volumes(1 << 20) as made:
        yield made


@pytest.mark.parametrize("request_", [TOGETHER, ONE_BY_ONE], ids=["together", "one by one"])
@pytest.mark.parametrize("when_full", [m.PINNED, m.EVICTABLE], ids=["pinned", "evictable"])
def test_they_move_into_the_segment(records, request_, when_full):
    """And they are read there from then on, by all readers, until nobody holds them."""
    controller, volume = Controller(records, Strategy(), prefault=False), records[0]
    session = controller.open_session(facts(), HERE)
    put(controller, session, when_full)
    assert (volume.inline, volume.allocator.used) == (COUNT * NBYTES, 0)
    entries, leased = controller.locate(session, request_)
    assert isinstance(entries, EntryColumns) == (request_ is TOGETHER)
    assert leased
    assert contents(records, entries) == [content(key) for key in KEYS]
    accounts = (volume.inline, volume.allocator.used, volume.leased)
    assert accounts == (0, PLACED, PLACED)
    other = controller.open_session(facts(2), HERE)
    again, _ = controller.locate(other, request_)
    assert contents(records, again) == contents(records, entries)
    put(controller, session, when_full)  # the leases hold what was there before
    assert (volume.inline, volume.allocator.used) == (COUNT * NBYTES, PLACED)
    assert contents(records, entries) == [content(key) for key in KEYS]
    controller.release(session, [7], [])
    controller.release(other, [7], [])
    controller.delete(KEYS, strict=True)
    assert (volume.used, volume.leased) == (0, 0)
    if when_full == m.EVICTABLE:
        assert not len(controller.spilling.values)


def test_what_is_asked_for_twice_moves_once(records):
    controller, volume = Controller(records, Strategy(), prefault=False), records[0]
    session = controller.open_session(facts(), HERE)
    put(controller, session)
    entries, _ = controller.locate(session, m.Locate(1, 7, WANTS * 2, NBYTES))
    assert contents(records, entries) == [content(key) for key in KEYS * 2]
    assert (volume.inline, volume.allocator.used, volume.leased) == (0, PLACED, PLACED)


def test_what_a_message_can_carry_stays(records):
    controller, volume = Controller(records, Strategy(), prefault=False), records[0]
    session = controller.open_session(facts(), HERE)
    put(controller, session)
    total = COUNT * NBYTES
    for request in (
        m.LocateKeys(1, 7, [], total, [], KEYS),
        m.Locate(1, 7, WANTS, total),
        m.LocateKeys(1, 7, [], 0, [0], KEYS),  # by a client that cannot read in the segment
        m.Locate(1, 7, WANTS, 0, [0]),
    ):
        entries, leased = controller.locate(session, request)
        assert ride(entries)
        assert not leased
    # A small value beside a large one is carried, too.
    controller.put(session, m.Put(1, 1, [m.PutItem("large", TensorMeta("uint8", (1,)), 5000)]))
    controller.commit(session, 1)
    wants = [m.Want("large"), WANTS[0]]
    found, _ = controller.locate(session, m.Locate(1, 7, wants, NBYTES))
    assert not isinstance(found, EntryColumns)
    assert found[1].data == content("k0")
    assert volume.inline == total


@pytest.mark.parametrize("request_", [TOGETHER, ONE_BY_ONE], ids=["together", "one by one"])
def test_they_stay_where_there_is_no_room(request_):
    with volumes(COUNT * NBYTES) as records:  # what they take in a segment is rounded up
        controller, volume = Controller(records, Strategy(), prefault=False), records[0]
        session = controller.open_session(facts(), HERE)
        put(controller, session)
        entries, leased = controller.locate(session, request_)
        assert ride(entries)
        assert not leased
        assert (volume.inline, volume.allocator.used) == (COUNT * NBYTES, 0)


@pytest.mark.parametrize("kept", [False, True], ids=["not kept", "kept"])
def test_they_stay_where_memory_cannot_be_written(records, kept):
    """The system has no page for them, for example. What comes back after a restart is the same."""
    memory = records[0].memory
    assert isinstance(memory, SegmentMemory)
    fd = os.open(f"/proc/self/fd/{memory.fd}", os.O_RDONLY)
    blind = SegmentMemory("blind", memory.nbytes, fd)
    try:
        record = VolumeRecord(records[0].info, blind, records[0].halves)
        log = Log()
        controller = (
            RecordedController(log, [record], Strategy(), prefault=False)
            if kept
            else Controller([record], Strategy(), prefault=False)
        )
        session = controller.open_session(facts(), HERE)
        put(controller, session)
        entries, leased = controller.locate(session, TOGETHER)
        assert ride(entries)
        assert not leased
        assert (record.inline, record.allocator.used) == (COUNT * NBYTES, 0)
        if kept:
            assert state_of(restored(log, [record])) == state_of(controller)
    finally:
        blind.close()


def restored(log: Log, records: list[VolumeRecord]) -> RecordedController:
    """What a next life makes of a log."""
    again = [VolumeRecord(one.info, one.memory, one.halves) for one in records]
    made = RecordedController(log, again, Strategy(), prefault=False)
    made.restore()
    return made


@pytest.mark.parametrize("when_full", [m.PINNED, m.EVICTABLE], ids=["pinned", "evictable"])
def test_a_server_that_comes_back_knows_where_they_are(records, when_full):
    """It does not write them again, because others may have been given their memory since."""
    log = Log()
    controller, volume = RecordedController(log, records, Strategy(), prefault=False), records[0]
    session = controller.open_session(facts(), HERE)
    put(controller, session, when_full)
    controller.locate(session, TOGETHER)
    before = [volume.memory.read(at, NBYTES) for at in range(0, PLACED, 1024)]
    controller.release(session, [7], [])
    put(controller, session, when_full, KEYS[:3])  # their memory is free
    controller.put(session, m.Put(1, 1, [m.PutItem("p", TensorMeta("uint8", (1,)), NBYTES)]))
    controller.commit(session, 1)
    assert volume.memory.write([controller.catalog.newest["p"].offset], [b"p" * NBYTES])
    made = restored(log, records)
    assert state_of(made) == state_of(controller)
    assert volume.memory.read(made.catalog.newest["p"].offset, NBYTES) == b"p" * NBYTES
    assert before[3:] == [content(key) for key in KEYS[3:]]
    assert all(made.catalog.newest[key].data is None for key in KEYS[3:])
    anew = Log()
    made.write_state(anew)
    assert state_of(restored(anew, records)) == state_of(controller)
