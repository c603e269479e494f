"""What is copied first."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from torchstore_core.contracts.strategy import ClientFacts
from torchstore_core.server.index.records import Value
from torchstore_core.server.repairing.backlog import Backlog, Entry
from torchstore_core.server.repairing.rates import Rate
from torchstore_core.values import TensorMeta

FACTS = ClientFacts(1, "host", "host")
META = TensorMeta("uint8", (8,))


def value(key: str) -> Value:
    return Value(key, META, 8, 0, None, 0, FACTS, uses=1)


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=20))
def test_values_with_the_fewest_copies_come_first(adds: list[tuple[int, bool]]) -> None:
    backlog = Backlog()
    for at, (copies, first) in enumerate(adds):
        backlog.add(Entry(value(str(at)), str(at), copies), first=first)
    assert len(backlog) == len(adds)
    assert backlog.nbytes == 8 * len(adds)
    taken = []
    while (entry := backlog.take()) is not None:
        taken.append(entry)
    assert [entry.copies for entry in taken] == sorted(copies for copies, _ in adds)
    assert {entry.key for entry in taken} == {str(at) for at in range(len(adds))}
    assert len(backlog) == backlog.nbytes == 0


def test_a_value_moves_up_when_it_loses_another_copy_and_only_then() -> None:
    backlog = Backlog()
    one, two = value("one"), value("two")
    backlog.add(Entry(two, "two", 1))
    backlog.add(Entry(one, "one", 2))
    backlog.add(Entry(two, "two", 2))
    backlog.add(Entry(one, "one", 0))
    assert backlog.nbytes == 16
    assert [backlog.take().key for _ in range(2)] == ["one", "two"]  # type: ignore[union-attr]
    assert backlog.take() is None


def test_what_is_freed_is_forgotten() -> None:
    backlog = Backlog()
    gone, there = value("gone"), value("there")
    backlog.add(Entry(gone, "gone", 1))
    backlog.add(Entry(there, "there", 1))
    backlog.forget(gone)
    backlog.forget(gone)
    assert len(backlog) == 1
    assert backlog.take().value is there  # type: ignore[union-attr]


def test_a_rate_is_of_the_time_in_which_something_was_done() -> None:
    rate = Rate()
    assert rate.per_second() == 0
    rate.begin()
    rate.add(1000)
    assert rate.per_second() >= 1000
