"""What is told of versions on their way, and what bounds them; see `test_generations.py`."""

from __future__ import annotations

import msgspec
import pytest
from tests.unit.collective.ranks import (
    Rank,
    content,
    newest,
    numbers,
    obj,
    pending,
    piece,
    ranks,
    rows,
    tensor,
    used,
)

from torchstore_core.errors import (
    KeyNotFoundError,
    PartialPutError,
    StoreFullError,
)
from torchstore_core.server.controller import Controller
from torchstore_core.server.index.collective import participants
from torchstore_core.server.serving import inspection
from torchstore_core.wire import messages as m

# ---- what is told of them -----------------------------------------------------------------


def test_the_error_says_which_boxes_and_who_are_missing(store: Controller) -> None:
    one, *_, four = ranks(store, 4)
    one.put(piece("w", 0, 50, 200), piece("w", 100, 130, 200), tensor("b"))
    four.begin(piece("w", 50, 60, 200))
    for key in ("k", "k/w", "k/no/such/entry"):
        with pytest.raises(PartialPutError) as caught:
            content(store, key)
        error = caught.value
        assert error.key == key
        assert error.details == {
            "version": 1,
            "missing": [["w", [50], [50]], ["w", [130], [70]]],
            "participants": 4,
            "committed": ["0"],
            "writing": ["3"],
            "missing_participants": ["1", "2"],
            "key": "k",
            "nbytes": 720,
        }
        for part in (
            "nothing from 1, 2;",
            "1 of 4 participants",
            "(0)",
            "1 writing (3)",
            "w[50]+[50], w[130]+[70]",
        ):
            assert part in error.message
        assert "ts.wait('k')" in error.message
    Rank(store).put(piece("t", 0, 5, 10))
    with pytest.raises(PartialPutError) as plain:
        content(store, "t")
    assert plain.value.details["missing"] == [["t", [5], [5]]]
    for known in (plain.value, error):  # programs find in both what they know from the other
        key = known.details["key"]
        (state,) = store.catalog.pending(key)
        assert known.details == msgspec.json.decode(msgspec.json.encode(state))
    with pytest.raises(PartialPutError):
        store.fetch(one.session, m.Fetch(1, 1, "k", 0, None, 0))
    with pytest.raises(PartialPutError):
        inspection.stat(store.catalog, store.volumes, "k")
    with pytest.raises(KeyNotFoundError) as other:
        content(store, "kk")
    assert other.type is KeyNotFoundError


def test_the_error_names_no_participant_that_has_no_name(store: Controller) -> None:
    """It said ``1 writing ()``."""
    Rank(store, "", 1).begin(tensor("w"))
    with pytest.raises(PartialPutError, match=r"\(none\); 1 writing; boxes"):
        content(store)


def test_the_error_stays_short(store: Controller) -> None:
    for who in range(300):
        Rank(store, f"participant {who}", 1000).put(piece("w", 2 * who, 2 * who + 1, 1000))
    with pytest.raises(PartialPutError) as caught:
        content(store)
    assert len(caught.value.message) < 1000
    assert len(caught.value.details["missing"]) == 100
    assert len(caught.value.details["committed"]) == 300


def test_stat_tells_of_versions_on_their_way(store: Controller) -> None:
    first, second = ranks(store)
    for number in (1, 2):
        assert [rows(rank, number, keep=2) for rank in (first, second)] == [number, number]
    rows(first, 3)
    second.begin(tensor("all", 64), tensor("mine"))
    found = inspection.stat(store.catalog, store.volumes, "k")
    assert (found.version, found.versions, found.parts) == (2, [1, 2], 4)
    missing = [("w", (100,), (100,)), ("mine", (0,), (640,))]
    assert found.pending == [m.Pending(3, 2, ["0"], ["1"], missing, "k", 165)]
    entry = inspection.stat(store.catalog, store.volumes, "k/w")
    assert (entry.version, entry.versions, entry.parts, entry.offset) == (2, [1, 2], 2, -1)


def test_tools_are_told_of_versions_on_their_way(store: Controller) -> None:
    one, *_, four = ranks(store, 4)
    one.put(piece("w", 0, 50, 200))
    four.begin(piece("w", 50, 60, 200))
    Rank(store).put(piece("t", 0, 5, 10))
    a, b = (Rank(store, who, 2, key="known") for who in "ab")
    for rank in (a, b, b):
        rank.put(tensor(rank.who, 3))
    first, count, nbytes = inspection.unfinished(store.catalog)
    assert {p.key: p for p in first} == {
        "k": m.Pending(1, 4, ["0"], ["3"], [], "k", 50, ["1", "2"]),  # ranks have numbers
        "t": m.Pending(1, 0, first[1].committed, [], [("t", (5,), (5,))], "t", 5),
        "known": m.Pending(2, 2, ["b"], [], [], "known", 3, ["a"]),  # it has put before
    }
    assert (count, nbytes) == (3, 58)
    listed, pending_versions, more = inspection.listing(store.catalog, store.volumes, "", "")
    assert sorted(pending_versions, key=lambda p: p.key) == sorted(first, key=lambda p: p.key)
    assert ({e.key.partition("/")[0] for e in listed}, more) == ({"known"}, False)
    for prefix, after, keys in (
        ("k", "", ["k", "known"]),
        ("", "k", ["known", "t"]),
        ("x", "", []),
    ):
        _, found, _ = inspection.listing(store.catalog, store.volumes, prefix, after)
        assert [p.key for p in found] == keys


def test_tools_are_told_a_page_at_a_time(store: Controller) -> None:
    for number in range(m.MAX_PENDING + 1):
        Rank(store).put(piece(f"{number:04}".ljust(m.MAX_KEY, "-"), 0, 1, 2))
    first, count, _ = inspection.unfinished(store.catalog)
    assert (len(first), count) == (m.MAX_PENDING, m.MAX_PENDING + 1)
    for number in range(100):
        who = [f"{i:02}".ljust(m.MAX_KEY, "=") for i in range(3)]
        Rank(store, who[number % 3], 4, key=f"k{number}").put(tensor("w", 1))
    pages, after, more = [], "", True
    while more:
        listed, found, more = inspection.listing(store.catalog, store.volumes, "", after)
        assert not listed
        assert sum(len(p.key) + sum(map(len, p.committed)) for p in found) <= m.MAX_LISTED_CHARS
        pages.append([p.key for p in found])
        after = pages[-1][-1]
    keys = [key for page in pages for key in page]
    assert len(pages) > 1
    assert keys == sorted(store.catalog.histories)


def test_who_has_waited_longest_is_answered_first(store: Controller) -> None:
    answered: list[int] = []

    def wait(number: int) -> None:
        waiter = store.waiting.add(["x"], 1, lambda _: answered.append(number))
        assert waiter is not None

    for number in range(100):
        wait(number)
    Rank(store).begin(obj("x"))
    assert answered == list(range(100))


def test_who_waits_is_woken_by_the_last_participant(store: Controller) -> None:
    first, second = ranks(store)
    told: dict[str, list[list[int]]] = {}
    for names in (["k"], ["k/w"], ["k/own1", "k"], ["k/never"], ["kk"], ["t"]):
        told[" ".join(names)] = fired = []
        assert store.waiting.add(names, 2, fired.append) is not None
    for number in (1, 2):
        for rank in (first, second):
            assert not any(told.values())
            rows(rank, number)
    assert told == {
        "k": [[2]],
        "k/w": [[2]],
        "k/own1 k": [[2, 2]],
        "k/never": [],
        "kk": [],
        "t": [],
    }
    for start in (0, 5):
        assert not told["t"]
        Rank(store).put(piece("t", start, start + 5, 10), version=2)
    assert told["t"] == [[2]]


# ---- bounds -------------------------------------------------------------------------------


def test_a_put_that_finds_no_room_leaves_its_version_as_it_is(store: Controller) -> None:
    first, second = ranks(store)
    assert rows(first, 1) == 1
    before = used(store)
    for how in ({}, {"version": 1}):
        with pytest.raises(StoreFullError):
            second.put(piece("w", 100, 200, 200), tensor("huge", 1 << 20), **how)
    assert used(store) == before
    assert pending(store) == [(1, ["0"], [])]
    assert rows(second, 1) == 1
    assert numbers(store) == {1}


def test_replicas_need_no_room(store: Controller) -> None:
    first, second = ranks(store)
    first.put(tensor("all", 1 << 16))
    assert second.put(tensor("all", 1 << 16)) == 1
    assert newest(store) == 1


def test_versions_that_nobody_can_finish_make_room_for_others(store: Controller) -> None:
    gone, other = ranks(store)
    gone.put(tensor("w", 20_000))
    gone.key = "two"
    gone.put(tensor("w", 20_000))
    other.key = "three"
    other.put(tensor("w", 20_000), fill=3)
    with pytest.raises(StoreFullError) as caught:  # they all live
        Rank(store).put(tensor("plain", 40_000))
    assert caught.value.details["waiting"] == {"k": 20_000, "two": 20_000, "three": 20_000}
    gone.die()
    assert Rank(store).put(tensor("plain", 40_000)) == 1
    assert [len(pending(store, key)) for key in ("k", "two", "three")] == [0, 0, 1]
    with pytest.raises(StoreFullError):
        Rank(store).put(tensor("more", 40_000))
    last = other.again()
    last.who = "0"
    assert last.put(obj("own")) == 1
    assert content(store, "three")["w"] == b"\3" * 20_000


def test_one_that_is_ahead_of_the_others_makes_room_for_itself(store: Controller) -> None:
    """What it put first is dropped; the others are late for that, and go on with the rest."""
    first, second = ranks(store)
    for number in (1, 2, 3, 4, 5):
        assert first.put(tensor("w", 20_000), fill=number) == number
    assert [version for version, *_ in pending(store)] == [3, 4, 5]
    writing = second.begin(obj("own"), tensor("mine", 64), version=3)
    with pytest.raises(StoreFullError):  # what somebody writes is not dropped
        first.put(tensor("w", 60_000))
    assert [version for version, *_ in pending(store)] == [3]
    assert second.commit(writing) == 3
    assert set(content(store)["w"]) == {3}
    assert second.put(obj("own")) == 4
    assert newest(store) == 3


def test_a_version_begun_too_far_ahead_drops_the_oldest(store: Controller) -> None:
    first, second = ranks(store)
    writing = second.begin(tensor("w", 64))
    for number in range(1, 41):
        assert first.put(tensor("w", 64), fill=number) == number
    waiting = [version for version, *_ in pending(store)]
    assert (waiting[0], waiting[-1], len(waiting)) == (1, 40, 17)
    assert used(store) == 64 * len(waiting)
    second.abort(writing)
    assert second.put(obj("own")) == 1
    late = [second.put(obj("own")) for _ in range(24)]
    assert late == [*range(2, 26)]
    assert (newest(store), numbers(store)) == (25, {25})


def test_partial_versions_that_wait_are_dropped_only_for_what_others_bring_too(
    store: Controller,
) -> None:
    """Each alone is all that its participant puts: what nobody else brings would be lost."""
    alone, slow = Rank(store, "", 1), Rank(store, "0", 2)
    alone.put(tensor("a", 64), tensor("b", 64), fill=1)
    slow.put(tensor("w", 64))
    for number in range(1, 41):
        names = ["a", f"new{number}"] if number % 10 == 0 else ["a"]
        alone.put(*(tensor(name, 64) for name in names), partial=True, fill=number)
    assert newest(store) == 1
    assert len(pending(store)) <= 1 + 16 + 3
    slow.die()
    got = content(store)
    assert {name: data[0] for name, data in got.items()} == {
        "a": 40,
        "b": 1,
        "new10": 10,
        "new20": 20,
        "new30": 30,
        "new40": 40,
    }


def test_a_partial_version_that_waits_for_its_base_makes_no_room_for_others(
    store: Controller,
) -> None:
    """Who put it may have left: it waits for nothing but the one that somebody is writing."""
    alone, other = Rank(store, "", 1), Rank(store, "", 1)
    whole = alone.begin(tensor("a", 64), tensor("b", 64), fill=1)
    assert other.put(tensor("b", 640), partial=True, fill=2) == 2
    other.die()
    with pytest.raises(StoreFullError):
        Rank(store).put(tensor("plain", 65_500))
    assert alone.commit(whole) == 1
    assert content(store) == {"a": b"\1" * 64, "b": b"\2" * 640}


def test_a_partial_version_whose_base_was_given_up_makes_room_for_others(
    store: Controller,
) -> None:
    alone, other = Rank(store, "", 1), Rank(store, "", 1)
    whole = alone.begin(tensor("a", 64))
    other.put(tensor("b", 640), partial=True)
    other.die()
    alone.abort(whole)
    assert Rank(store).put(tensor("plain", 65_500)) == 1
    assert not pending(store)


def test_a_put_that_fails_does_not_keep_others_from_becoming_whole(store: Controller) -> None:
    """A partial version waits for what is older; here a put that finds no room drops that."""
    alone, (first, _) = Rank(store, "", 1), ranks(store)
    alone.put(tensor("a", 640), tensor("b", 640), fill=1)
    assert first.put(tensor("w", 30_000)) == 2
    assert alone.put(tensor("b", 640), partial=True, fill=3) == 3
    assert newest(store) == 1
    with pytest.raises(StoreFullError):
        first.put(tensor("w", 1 << 20))  # for that nothing is dropped
    assert len(pending(store)) == 2
    with pytest.raises(StoreFullError):
        first.put(tensor("w", 65_000))
    assert newest(store) == 3
    assert numbers(store) == {1, 3}


def test_participants_that_come_and_go_are_not_remembered_for_ever(
    store: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(participants, "_MAX_PARTICIPANTS", 8)
    stays = Rank(store, "stays", 2)
    for number in range(1, 50):
        assert stays.put(tensor("all"), fill=number) == number
        other = Rank(store, f"{number}", 2)
        abandoned = other.begin(obj("x"), tensor("y"), version=1000)
        other.abort(abandoned)
        assert other.put(obj("own"), version=number) == number
        assert numbers(store) == {number}
        other.die()
    (line,) = store.catalog.histories["k"].sequences.values()
    assert len(line.participants) == 8


def test_layouts_that_come_and_go_are_not_remembered_for_ever(store: Controller) -> None:
    rank = Rank(store)
    on_its_way = Rank(store, "0", 2)
    assert on_its_way.put(tensor("w"), version=1000, fill=1) == 1000
    for size in range(2, 60):
        half = size // 2
        for start, stop, at in ((0, half, 0), (half, size, 1)):
            assert rank.put(piece("k", start, stop, size, (2,), (at,)), version=size) == size
        assert len(content(store)) == size
    assert len(store.catalog.histories["k"].sequences) <= 17
    assert Rank(store, "1", 2).put(obj("own1")) == 1000
    assert numbers(store) == {1}
