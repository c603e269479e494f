"""The rules by which puts of several participants make versions, one at a time.

`test_joint_puts.py` has them all at once, in any order.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.collective.ranks import (
    Rank,
    a_store,
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

from torchstore_core import boxes
from torchstore_core.errors import (
    ConfigurationError,
    KeyNotFoundError,
    PartialPutError,
    StoreClosedError,
    VersionGoneError,
)
from torchstore_core.server.controller import Controller
from torchstore_core.wire import messages as m
from torchstore_core.wire.framing import encode


def test_what_is_missing_is_worked_out_only_for_who_asks(
    store: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shard is committed in a time that does not grow with the square of their number."""
    asked: list[object] = []
    find = boxes.missing
    monkeypatch.setattr(boxes, "missing", lambda *which: asked.append(which) or find(*which))
    rank = Rank(store, "", None)
    for start in range(0, 98, 2):
        rank.put(piece("t", start, start + 2, 100))
    assert not asked
    ((_, offset, shape),) = store.catalog.pending("t")[0].missing
    assert (offset, shape, len(asked)) == ((98,), (2,), 1)
    rank.put(piece("t", 98, 100, 100))
    assert newest(store, "t") == 1


# ---- counting -----------------------------------------------------------------------------


def test_the_nth_put_of_a_participant_makes_the_nth_version(store: Controller) -> None:
    first, second = ranks(store)
    assert [rows(first, number) for number in (1, 2, 3)] == [1, 2, 3]
    assert newest(store) == 0
    for number in (1, 2, 3):
        assert rows(second, number) == number
        assert (newest(store), numbers(store)) == (number, {number})
    assert not pending(store)


@given(st.data(), st.integers(2, 4))
def test_whatever_the_order_of_all_participants_each_counts_its_own_puts(
    data: st.DataObject, count: int
) -> None:
    """A version is there as soon as the last of them commits it, and it is no mixture."""
    with a_store() as store:
        everybody = ranks(store, count)
        begun = [0] * count
        done = [0] * count
        txns: list[list[int]] = [[] for _ in range(count)]
        for _ in range(data.draw(st.integers(1, 30))):
            who = data.draw(st.integers(0, count - 1))
            rank = everybody[who]
            if txns[who] and data.draw(st.booleans()):
                done[who] += 1
                assert rank.commit(txns[who].pop(0)) == done[who]
            else:
                begun[who] += 1
                part = piece("w", 9 * who, 9 * who + 9, 9 * count)
                txns[who].append(rank.begin(part, tensor("all"), fill=begun[who]))
            assert newest(store) == min(done)
            if min(done):
                got = content(store)
                assert set(got["w"]) == {min(done)}
                assert set(got["all"]) == {min(done)}


def test_one_that_is_alone_makes_a_version_with_each_put(store: Controller) -> None:
    for number in (1, 2, 3):
        assert Rank(store, "", 1).put(tensor("w"), fill=number) == number
        assert numbers(store) == {number}


def test_shards_of_a_key_are_counted_by_their_place_in_the_mesh(store: Controller) -> None:
    rank = Rank(store)
    for number in (1, 2):
        assert rank.put(piece("k", 0, 5, 10, (2,), (0,)), fill=number) == number
    for number in (1, 2):
        assert rank.put(piece("k", 5, 10, 10, (2,), (1,)), fill=number) == number
        assert (newest(store), numbers(store)) == (number, {number})


def test_shards_without_a_mesh_are_counted_by_their_box(store: Controller) -> None:
    rank = Rank(store)
    for number in (1, 2, 3):
        for start in (5, 0):
            assert rank.put(piece("k", start, start + 5, 10), fill=number) == number
        assert numbers(store) == {number}


def test_several_shards_may_come_in_one_put(store: Controller) -> None:
    rank = Rank(store)
    assert rank.put(piece("k", 0, 2, 10), piece("k", 7, 10, 10), fill=1) == 1
    with pytest.raises(PartialPutError):
        content(store)
    assert rank.put(piece("k", 2, 7, 10), fill=1) == 1
    assert content(store) == bytes([1]) * 10


# ---- replicas -----------------------------------------------------------------------------


def test_replicas_are_stored_once(store: Controller) -> None:
    everybody = ranks(store, 3)
    for rank in everybody:
        rank.put(tensor("all", 640), piece("w", 0, 64, 128), piece("w", 64, 128, 128))
        assert rank.grants[0] is None or rank is everybody[0]
    assert used(store) == 640 + 128
    assert newest(store) == 1


def test_a_late_replica_stores_nothing_and_learns_its_version(store: Controller) -> None:
    mesh = (2, 2)
    copies = [[Rank(store) for _ in range(2)] for _ in range(2)]

    def put(copy: int, half: int, fill: int) -> int:
        part = piece("k", 64 * half, 64 * half + 64, 128, mesh, (copy, half))
        return copies[copy][half].put(part, fill=fill)

    for number in (1, 2):
        assert [put(0, 0, number), put(0, 1, number)] == [number, number]
        assert newest(store) == number
    for number in (1, 2):
        for half in (0, 1):
            assert put(1, half, 99) == number
            assert copies[1][half].grants == [None]
    assert (newest(store), numbers(store), used(store)) == (2, {2}, 128)
    assert put(1, 0, 3) == 3  # for once it is the first
    assert [put(0, half, 3) for half in (0, 1)] == [3, 3]
    assert (newest(store), numbers(store), used(store)) == (3, {3}, 128)


def test_a_replica_whose_version_becomes_whole_meanwhile_changes_nothing(
    store: Controller,
) -> None:
    first, second = Rank(store), Rank(store)
    parts = [piece("k", 0, 64, 64, (2,), (at,)) for at in (0, 1)]
    begun = first.begin(parts[0], fill=1)
    late = second.begin(parts[1])
    assert second.grants == [None]
    assert first.commit(begun) == 1
    assert second.commit(late) == 1
    assert (newest(store), numbers(store), used(store)) == (1, {1}, 64)


def test_a_shard_that_is_still_being_written_is_no_part_of_the_version(store: Controller) -> None:
    """Others cover what it covers; when it is done, nobody wants it any more."""
    rank = Rank(store)
    writing = rank.begin(piece("k", 0, 100, 200), fill=9)
    for start, stop in ((0, 50), (50, 200)):
        assert rank.put(piece("k", start, stop, 200), fill=1) == 1
    assert numbers(store) == {1}
    ((entry,), _) = store.locate(rank.session, m.Locate(1, 1, [m.Want("k")], 1 << 62))
    assert [part.offset for part in entry.parts or ()] == [(0,), (50,)]
    before = used(store)
    assert rank.commit(writing) == 1
    assert used(store) == before - 128
    assert numbers(store) == {1}


@pytest.mark.parametrize("entry", [tensor("all"), obj("all"), piece("all", 0, 64, 128)])
def test_what_a_replica_relied_on_is_missed_when_its_writer_gives_up(
    store: Controller, entry: m.PutItem
) -> None:
    first, second = ranks(store)
    lost = first.begin(entry, tensor("more"))
    assert second.put(entry, obj("own1"), tensor("more2")) == 1
    first.abort(lost)
    # The first one comes again, but without that entry: then the version is not whole.
    assert first.put(tensor("more")) == 1
    assert newest(store) == 0
    (state,) = store.catalog.pending("k")
    assert {name for name, _, _ in state.missing} == {"all"}
    assert [rank.put(entry, tensor("w"), fill=2) for rank in (second, first)] == [2, 2]
    assert newest(store) == (2 if entry.part is None else 0)


def test_a_tensor_is_not_there_when_only_its_replica_is_committed(store: Controller) -> None:
    first, second = Rank(store), Rank(store)
    parts = [piece("k", 0, 64, 64, (2,), (at,)) for at in (0, 1)]
    lost = first.begin(parts[0])
    kept = second.begin(parts[1])
    first.abort(lost)
    assert second.commit(kept) == 1
    with pytest.raises(PartialPutError, match=r"still missing: k\[0\]\+\[64\]"):
        content(store)
    assert first.put(parts[0], fill=1) == 1
    assert numbers(store) == {1}


# ---- processes that die -------------------------------------------------------------------


def test_one_that_dies_and_comes_back_alone_continues_its_version(store: Controller) -> None:
    first, second = ranks(store)
    assert rows(second, 1) == 1
    before = used(store)
    first.begin(piece("w", 0, 100, 200), tensor("all", 64))
    assert used(store) > before
    first.die()
    assert used(store) == before
    assert pending(store) == [(1, ["1"], [])]
    assert rows(first.again(), 1) == 1
    assert numbers(store) == {1}


def test_one_that_dies_with_several_versions_begun_goes_on_with_the_first(
    store: Controller,
) -> None:
    first, second = ranks(store)
    for _ in range(3):
        first.begin(piece("w", 0, 100, 200))
    assert [rows(second, number) for number in (1, 2)] == [1, 2]
    first.die()
    first = first.again()
    assert [rows(first, number) for number in (1, 2)] == [1, 2]
    assert (newest(store), numbers(store)) == (2, {2})


def test_what_it_put_before_it_died_counts(store: Controller) -> None:
    first, second = ranks(store)
    assert rows(first, 1) == 1
    first.die()
    assert rows(second, 1) == 1
    assert numbers(store) == {1}
    first = first.again()
    assert [rows(first, 2), rows(second, 2)] == [2, 2]
    assert numbers(store) == {2}


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_what_all_left_behind_is_not_completed_by_the_next_run(
    store: Controller, order: tuple[int, int], explicit: bool
) -> None:
    old = ranks(store)
    how = {"version": 7} if explicit else {}
    version = rows(old[0], 1, **how)
    old[1].begin(piece("w", 100, 200, 200), **how)
    for rank in old:
        rank.die()
    new = [rank.again() for rank in old]
    got = rows(new[order[0]], 2, **how)
    assert newest(store) == 0
    assert rows(new[order[1]], 2, **how) == got
    assert (got == version) is explicit
    assert (newest(store), numbers(store)) == (got, {2})
    assert not pending(store)
    assert used(store) == 128 + 128 + 64 + 2  # nothing of the old run


@pytest.mark.parametrize("first", [0, 1])
def test_a_rank_that_is_new_to_the_store_does_not_complete_what_the_run_before_left(
    store: Controller, first: int
) -> None:
    """The other one of that run had not put anything yet; that a process of its rank lives says
    that it is a new run.
    """
    old = [Rank(store, str(who), 2, rank=who) for who in (0, 1)]
    assert rows(old[0], 1) == 1
    for rank in old:
        rank.die()
    new = [rank.again() for rank in old]
    version = rows(new[first], 2)
    assert newest(store) == 0
    assert rows(new[1 - first], 2) == version
    assert numbers(store) == {2}


def test_processes_that_come_one_after_the_other_make_one_version(store: Controller) -> None:
    for who in ("0", "1"):
        rank = Rank(store, who, 2)
        assert rows(rank, 1) == 1
        rank.die()
    assert numbers(store) == {1}


def test_a_process_that_has_ended_puts_no_more(store: Controller) -> None:
    """Its connections may still be open, and have requests in them: a forked child holds them."""
    rank = Rank(store, "0", 1)
    rank.session.end()
    for count in (None, 1):
        rank.participants = count
        with pytest.raises(StoreClosedError):
            rank.put(tensor("w"))
    assert used(store) == 0


# ---- giving up ----------------------------------------------------------------------------


def test_one_that_gives_up_gets_its_place_back(store: Controller) -> None:
    first, second = ranks(store)
    rows(second, 1)
    for _ in range(3):
        first.abort(first.begin(piece("w", 0, 100, 200), tensor("all", 64)))
    assert rows(first, 1) == 1
    assert numbers(store) == {1}


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_that_are_given_up_together_leave_the_place_before_both(
    store: Controller, order: tuple[int, int]
) -> None:
    first, second = ranks(store)
    txns = [first.begin(tensor("all")) for _ in range(2)]
    first.abort(*(txns[at] for at in order))
    assert not pending(store)
    assert [rows(first, 1), rows(second, 1)] == [1, 1]


def test_a_version_that_everybody_gave_up_leaves_nothing(store: Controller) -> None:
    first, second = ranks(store)
    txns = [rank.begin(tensor("all"), obj("o")) for rank in (first, second)]
    second.abort(txns[1])
    first.abort(txns[0])
    assert used(store) == 0
    assert not store.catalog.histories
    with pytest.raises(KeyNotFoundError) as caught:
        content(store)
    assert caught.type is KeyNotFoundError


# ---- newer versions -----------------------------------------------------------------------


def end_by_commit(rank: Rank, txn: int) -> None:
    assert rank.commit(txn) == 1


def end_by_abort(rank: Rank, txn: int) -> None:
    rank.abort(txn)


def end_by_death(rank: Rank, txn: int) -> None:
    rank.die()


@pytest.mark.parametrize("end", [end_by_commit, end_by_abort, end_by_death])
@pytest.mark.parametrize("newer", ["state dict", "plain", "other layout", "delete"])
def test_an_older_version_is_dropped_and_its_memory_comes_back(
    store: Controller, newer: str, end: Callable[[Rank, int], None]
) -> None:
    """That of a put which is still being written, too, but not before it ends."""
    first, second, third = ranks(store, 3)
    first.put(tensor("a", 640))
    writing = second.begin(tensor("b", 128))
    assert used(store) == 640 + 128
    left = 0
    if newer == "state dict":
        for rank in (first, third):
            rank.put(tensor("a", 64), version=5)
        Rank(store, "1", 3).put(tensor("a", 64), version=5)
        left = 64
    elif newer == "plain":
        assert Rank(store).put(tensor("k", 64)) == 2
        left = 64
    elif newer == "other layout":
        assert Rank(store, "", 1).put(tensor("a", 64)) == 2
        left = 64
    else:
        assert store.delete(["k"], strict=True) == 1
    assert not pending(store)
    assert (used(store), store.volumes[0].unfinished) == (left + 128, 128)
    before = newest(store)
    end(second, writing)
    assert (used(store), store.volumes[0].unfinished) == (left, 0)
    assert newest(store) == before


def test_versions_of_two_layouts_are_on_their_way_beside_each_other(store: Controller) -> None:
    """A new layout, or another number of participants, begins a version of its own."""
    two, three = ranks(store, 2), ranks(store, 3)
    rank = Rank(store)
    assert two[0].put(tensor("w"), fill=1) == 1
    assert three[0].put(tensor("w"), fill=2) == 2
    assert rank.put(piece("k", 0, 5, 10, (2,), (0,)), fill=3) == 3
    assert rank.put(piece("k", 0, 5, 20, (2,), (0,)), fill=4) == 4
    assert [version for version, *_ in pending(store)] == [1, 2, 3, 4]
    assert two[1].put(tensor("w"), fill=1) == 1
    assert (newest(store), numbers(store)) == (1, {1})
    assert rank.put(piece("k", 5, 10, 10, (2,), (1,)), fill=3) == 3
    assert (newest(store), numbers(store)) == (3, {3})
    assert [version for version, *_ in pending(store)] == [4]
    # Those that were overtaken are late with what they still had to put; then they go on.
    assert three[1].put(tensor("w"), fill=2) == 2
    assert [three[0].put(tensor("w"), fill=5), three[1].put(tensor("w"), fill=5)] == [5, 5]
    assert newest(store) == 3
    assert three[2].put(tensor("w"), fill=2) == 2
    assert three[2].put(tensor("w"), fill=5) == 5
    assert (newest(store), numbers(store)) == (5, {5})


# ---- naming a version ---------------------------------------------------------------------


def test_a_version_that_is_named_is_that_version(store: Controller) -> None:
    first, second = ranks(store)
    assert rows(first, 1, version=40) == 40
    assert rows(first, 3, version=42) == 42
    assert rows(second, 1, version=40) == 40
    assert (newest(store), numbers(store)) == (40, {1})
    assert rows(second, 2, version=41) == 41
    assert rows(second, 3) == 42  # one that does not say so goes on from there
    assert (newest(store), numbers(store)) == (42, {3})
    assert not pending(store)
    for old in (1, 40, 41, 42):
        with pytest.raises(VersionGoneError) as caught:
            rows(first, 9, version=old)
        assert caught.value.key == "k"
        assert caught.value.details == {"current": 42}
    assert numbers(store) == {3}
    assert rows(first, 4) == 43


def test_a_version_that_was_deleted_is_not_put_again(store: Controller) -> None:
    rank = Rank(store)
    assert rank.put(tensor("k"), version=9) == 9
    store.delete(["k"], strict=True)
    with pytest.raises(VersionGoneError, match="all up to 9 were used before"):
        rank.put(tensor("k"), version=9)
    assert rank.put(tensor("k")) == 10
    first, _ = ranks(store)
    first.key = "pending"
    assert first.put(tensor("w"), version=5) == 5
    assert store.delete(["pending"], strict=True) == 1
    assert rank.put(tensor("pending")) == 6


def test_a_participant_that_puts_a_version_again_replaces_what_it_put(store: Controller) -> None:
    first, second = ranks(store)
    items = piece("w", 0, 100, 200), tensor("once", 640), obj("once more")
    assert first.put(*items, version=3, fill=1) == 3
    assert rows(first, 2, version=3) == 3
    assert used(store) == 128 + 64 + 1
    assert rows(second, 2, version=3) == 3
    assert numbers(store) == {2}
    assert set(content(store)) == {"w", "all", "own0", "own1"}


def test_a_participant_cannot_put_a_version_twice_at_once(store: Controller) -> None:
    first, second = ranks(store)
    begun = first.begin(tensor("all"), version=3, fill=1)
    for rank in (first, first.again()):
        with pytest.raises(ConfigurationError, match="participant 0 is putting version 3") as e:
            rank.put(tensor("all"), version=3)
        assert "each have a participant= of their own" in e.value.message
    assert first.commit(begun) == 3
    assert second.put(obj("own"), version=3) == 3
    assert numbers(store) == {1}


def test_a_version_of_another_layout_is_refused_while_those_who_put_it_live(
    store: Controller,
) -> None:
    two, three = ranks(store, 2), ranks(store, 3)
    assert two[0].put(tensor("w"), version=5) == 5
    for put in (
        lambda: three[0].put(tensor("w"), version=5),
        lambda: Rank(store).put(piece("k", 0, 1, 2), version=5),
        lambda: Rank(store).put(tensor("k"), version=5),
    ):
        with pytest.raises(VersionGoneError, match="on its way with another layout"):
            put()
    assert pending(store) == [(5, ["0"], [])]
    # A run that ended does not hold up the next one, which has another number of ranks.
    for rank in two:
        rank.die()
    assert [rank.put(tensor("w"), version=5, fill=2) for rank in three] == [5, 5, 5]
    assert (newest(store), numbers(store), used(store)) == (5, {2}, 640)


def test_versions_stay_within_what_the_wire_can_say(store: Controller) -> None:
    rank = Rank(store)
    highest = (1 << 63) - 1
    assert rank.put(obj("k"), version=highest) == highest
    assert rank.put(obj("k")) == highest + 1
    encode(m.Committed(1, [newest(store)]))
    store.delete(["k"], strict=True)
    assert rank.put(obj("k")) == highest + 2
