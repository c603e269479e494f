"""The log of a server: its records, compiled and in plain Python, and what does not count."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.copying.native import needs_native

from torchstore_core.server.keeping import log as module
from torchstore_core.server.keeping.log import Log, Record


def _without_native(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module as it is where it was built without a compiler."""
    monkeypatch.setitem(sys.modules, "torchstore_core._native", None)
    spec = importlib.util.find_spec(module.__name__)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


@pytest.fixture(params=[pytest.param("native", marks=needs_native), "fallback"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    found = module if request.param == "native" else _without_native(monkeypatch)
    assert (found._append is found._append_record) == (request.param == "fallback")
    return found


@pytest.fixture
def log(engine: ModuleType) -> Iterator[Log]:
    made = engine.Log()
    yield made
    made.close()


def test_a_log_grows_and_is_read_by_another(log: Log) -> None:
    bodies = [bytes([n % 251]) * (n * 997 % 70_000) for n in range(400)]
    for n, body in enumerate(bodies):
        log.append(n % 9, n, body)
    assert log.nbytes > sum(map(len, bodies)) > 1 << 22
    read = Log(log.fd)
    found = list(read)
    assert [record.body for record in found] == bodies
    assert found[7][:2] == (7, 7)
    assert found[6].at <= found[7].at <= time.monotonic()


def test_a_record_that_was_not_written_to_its_end_does_not_count(log: Log) -> None:
    log.append(1, 1, b"whole")
    log._memory[log.end : log.end + 64] = b"\x40" + bytes(63)  # a head, but the end was not moved
    assert [record.body for record in Log(log.fd)] == [b"whole"]


def test_records_are_copied_behind_a_state(log: Log) -> None:
    log.append(1, 1, b"before")
    mark = log.end
    log.append(2, 1, b"x" * (3 << 20))
    new = Log()
    new.append(9, 1, b"state")
    new.append_from(log, mark)
    new.append(7, 1, b"behind")
    assert [record.kind for record in Log(new.fd)] == [9, 2, 7]
    new.close()


def test_a_log_that_was_cleared_begins_anew(log: Log) -> None:
    log.append(1, 1, b"x" * 100)
    log.clear()
    log.append(2, 1, b"then")
    assert [record.body for record in Log(log.fd)] == [b"then"]


@needs_native
@given(
    st.lists(
        st.tuples(
            st.integers(0, (1 << 16) - 1),
            st.integers(0, (1 << 32) - 1),
            st.floats(allow_nan=False),
            st.binary(max_size=100).flatmap(lambda one: st.sampled_from([one, bytearray(one)])),
        ),
        max_size=20,
    )
)
def test_both_write_the_same(records: list[tuple[int, int, float, bytes | bytearray]]) -> None:
    def written(append: Callable[..., int]) -> tuple[list[Record], int]:
        log = Log()
        try:
            for record in records:
                end = append(log._memory, *record)
            log.refresh()
            assert not records or log.end == end
            return list(log), log.end
        finally:
            log.close()

    assert written(module._append) == written(module._append_record)


@pytest.mark.parametrize(("kind", "session"), [(1 << 16, 1), (1, 1 << 32), (-1, 1), (1, -1)])
def test_what_no_record_can_say_is_refused(log: Log, kind: int, session: int) -> None:
    with pytest.raises((OverflowError, module.struct.error)):
        log.append(kind, session, b"")
    assert list(log) == []
    assert log.nbytes == 0


def test_a_full_log_is_not_written_to(log: Log, engine: ModuleType) -> None:
    """Neither past its end, nor a part of a record."""
    memory = log._memory
    room = len(memory) - log.end
    before = bytes(memory[:])
    assert engine._append(memory, 1, 1, 2.5, bytes(room)) == -1
    assert engine._append(memory, 1, 1, 2.5, bytes(room - 20)) == -1
    assert bytes(memory[:]) == before
    assert engine._append(memory, 1, 1, 2.5, bytes(room - 26)) == len(memory) - 8


def test_memory_is_ready_before_records_need_it(engine: ModuleType) -> None:
    """Records that come one after the other, with time in between, cost no page faults."""
    log = engine.Log()
    due: list[Callable[[], None]] = []
    log.when_used = lambda: due.append(log.make_ready)
    log.make_ready()
    had = log.memory_nbytes
    for number in range(3_000):
        log.append(1, number, bytes(1000))
        assert log.end <= had - 24_000, "a record reached memory that was not ready long before"
        while due:
            due.pop()()
            had = log.memory_nbytes
    assert had < log.end + (128 << 10)
    assert [record.session for record in log] == list(range(3_000))
    log.close()


def test_a_long_log_is_noticed_once_whether_or_not_memory_is_ready(engine: ModuleType) -> None:
    log = engine.Log()
    noticed: list[str] = []
    log.when_used = lambda: noticed.append("used")
    log.expect(log.end + 100_000, lambda: noticed.append("long"))
    for _ in range(90):
        log.append(1, 1, bytes(1000))
    assert noticed == ["used"]  # and is not told again, because nobody did anything about it
    for _ in range(90):
        log.append(1, 1, bytes(1000))
    assert noticed.count("long") == 1
    log.clear()
    for _ in range(180):
        log.append(1, 1, bytes(1000))
    assert noticed.count("long") == 1
    log.close()
