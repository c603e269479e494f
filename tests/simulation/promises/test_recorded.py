"""Histories of real processes that can be explained, and some that cannot."""

from __future__ import annotations

import pytest
from tests.simulation.promises.recorded import Record, Seen, explain
from tests.simulation.promises.violations import Violation


def put(number: int, start: float, end: float | None, **versions: int) -> Record:
    made = tuple(versions.values()) if end is not None else ()
    return Record(number, number, "put", tuple(versions), start, end, made)


def get(number: int, start: float, end: float, **seen: int | tuple[int, int]) -> Record:
    found = [Seen(*one) if isinstance(one, tuple) else Seen(one) for one in seen.values()]
    return Record(number, number, "get", tuple(seen), start, end, (), tuple(found))


def test_calls_that_overlap_have_happened_in_some_order() -> None:
    history = [
        put(1, 0, 1, a=1, b=1),
        put(2, 2, 9, a=2, b=2),
        get(3, 3, 4, a=2, b=2),
        get(4, 3, 4, a=1, b=1),
        get(5, 5, 6, a=2),
        put(6, 3, 8, b=3),
        get(7, 7, 10, a=2, b=6),
    ]
    assert explain(history) == len(history)


def test_what_a_process_has_put_that_was_killed_may_be_seen_or_not() -> None:
    history = [put(1, 0, 1, a=1), put(2, 2, None, a=0, b=0), put(3, 3, None, a=0)]
    assert explain([*history, get(4, 5, 6, a=(1, 1))]) == 2
    history += [get(4, 5, 6, a=(2, 2)), get(5, 7, 8, a=2)]
    assert explain(history) == 4
    with pytest.raises(Violation, match="after it had ended"):
        explain([*history, get(6, 9, 10, a=1)])


@pytest.mark.parametrize(
    ("read", "why"),
    [
        (get(3, 5, 6, a=1, b=1), "after it had ended"),  # an acknowledged put is lost
        (get(3, 5, 6, a=2, b=1), "no cut|after it had ended"),
        (get(3, 5, 6, a=0), "after it had ended"),
        (get(3, 5, 6, a=(2, 3)), "is read as version 3"),
    ],
)
def test_what_is_wrong(read: Record, why: str) -> None:
    with pytest.raises(Violation, match=why):
        explain([put(1, 0, 1, a=1, b=1), put(2, 2, 4, a=2, b=2), read])


def test_a_batch_that_is_seen_in_part_is_no_cut() -> None:
    history = [put(1, 0, 1, a=1, b=1), put(2, 2, 9, a=2, b=2), get(3, 3, 4, a=2, b=1)]
    with pytest.raises(Violation, match="no cut"):
        explain(history)


def test_no_reader_goes_back() -> None:
    history = [put(1, 0, 1, a=1), put(2, 2, 9, a=2), get(3, 3, 4, a=2), get(4, 5, 6, a=1)]
    with pytest.raises(Violation, match="after it had ended"):
        explain(history)


def test_no_version_is_made_twice() -> None:
    with pytest.raises(Violation, match="made twice"):
        explain([put(1, 0, 1, a=1), put(2, 2, 3, a=1)])
