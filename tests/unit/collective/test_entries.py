"""What a version of a state dict consists of: entries that are put, shared, or tied."""

from __future__ import annotations

import gc
import sys
from types import FrameType
from typing import Any

import pytest
from msgspec import structs
from tests.unit.collective.ranks import (
    Rank,
    a_store,
    content,
    newest,
    obj,
    pending,
    piece,
    ranks,
    tensor,
    tied,
    used,
)
from tests.unit.server.test_controller import HERE, facts

from torchstore_core.errors import (
    KeyNotFoundError,
    LayoutMismatchError,
    VersionGoneError,
)
from torchstore_core.server.controller import Controller
from torchstore_core.values import StateDictMeta, TensorMeta, TensorSlice
from torchstore_core.wire import messages as m

ALL = 1 << 62


def fetch(store: Controller, version: int = 0, wants: list[m.Want] | None = None) -> m.Fetched:
    session = store.open_session(facts(), HERE)
    try:
        return store.fetch(session, m.Fetch(1, 1, "k", version, wants, ALL))
    finally:
        store.close_session(session)


def paths(reply: m.Fetched) -> dict[str, bytes]:
    return {reply.names[at]: path for at, path in reply.paths.items()}


def at_path(item: m.PutItem, path: bytes) -> m.PutItem:
    return structs.replace(item, path=path)


# ---- partial puts -------------------------------------------------------------------------


def test_a_partial_put_shares_the_other_entries_at_no_memory(store: Controller) -> None:
    rank = Rank(store, "", 1)
    rank.put(tensor("a", 6400), tensor("b", 6400), obj("c"), fill=1)
    before = used(store)
    assert rank.put(tensor("b", 64), partial=True, keep=2, fill=2) == 2
    assert used(store) == before + 64
    assert content(store) == {"a": b"\1" * 6400, "b": b"\2" * 64, "c": b"1"}
    assert content(store, version=1) == {"a": b"\1" * 6400, "b": b"\1" * 6400, "c": b"1"}
    assert rank.put(tensor("d", 64), partial=True, keep=2, fill=3) == 3
    assert used(store) == before - 6400 + 128  # only the first version had that
    assert list(content(store)) == ["a", "b", "c", "d"]
    assert rank.put(tensor("e", 64)) == 4
    assert used(store) == 64


def test_shared_memory_is_free_when_the_last_version_with_it_is_gone(store: Controller) -> None:
    rank = Rank(store, "", 1)
    rank.put(tensor("a"), tensor("b"), tied("c", 0))
    for number in range(2, 12):
        assert rank.put(tensor("b"), partial=True, keep=3) == number
        assert used(store) == 640 * (1 + min(number, 3))
    store.delete(["k"], strict=True)
    assert used(store) == 0


@pytest.mark.parametrize("there", ["nothing", "a tensor", "only shards"])
def test_a_partial_put_needs_a_state_dict_before_it(store: Controller, there: str) -> None:
    if there == "a tensor":
        Rank(store).put(tensor("k"))
    elif there == "only shards":
        Rank(store).put(piece("k", 0, 5, 10))
    before = used(store)
    for version in (0, 9):
        with pytest.raises(KeyNotFoundError, match="put the whole state dict first") as caught:
            Rank(store, "0", 1).put(tensor("a"), partial=True, version=version)
        assert caught.type is KeyNotFoundError
        assert caught.value.details == {"missing": ["k"]}
    assert used(store) == before
    assert len(pending(store)) == (there == "only shards")


def test_a_partial_put_may_come_before_the_whole_one_is_finished(store: Controller) -> None:
    first, second = ranks(store)
    whole = [rank.begin(tensor(f"a{rank.who}"), tensor("b"), fill=1) for rank in (first, second)]
    part = [rank.begin(tensor("b", 64), partial=True, fill=2) for rank in (first, second)]
    assert [first.commit(part[0]), second.commit(part[1])] == [2, 2]
    assert newest(store) == 0
    told: list[list[int]] = []
    store.waiting.add(["k/a1"], 2, told.append)
    assert [first.commit(whole[0]), second.commit(whole[1])] == [1, 1]
    assert told == [[2]]
    assert newest(store) == 2
    assert content(store) == {"a0": b"\1" * 640, "b": b"\2" * 64, "a1": b"\1" * 640}
    assert used(store) == 2 * 640 + 64


def test_a_partial_put_that_waits_in_vain_goes_with_the_next_version(store: Controller) -> None:
    rank = Rank(store, "", 1)
    whole = rank.begin(tensor("a"))
    assert rank.put(tensor("b"), partial=True) == 2
    rank.abort(whole)
    assert newest(store) == 0
    with pytest.raises(KeyNotFoundError, match="put the whole state dict first"):
        rank.put(tensor("c"), partial=True)
    assert rank.put(tensor("a")) > 2
    assert list(content(store)) == ["a"]
    assert used(store) == 640
    assert not pending(store)


@pytest.mark.parametrize("keep", [1, 3])
def test_partial_versions_that_become_whole_at_once_build_on_each_other(
    store: Controller, keep: int
) -> None:
    """Also on one that nobody ever sees, because it is not kept."""
    first, second = ranks(store)
    alone = Rank(store, "", 1)
    alone.put(tensor("a", 64), tensor("b", 64), tensor("c", 64), keep=keep, fill=1)
    first.put(tensor("b", 65), obj("new"), partial=True, keep=keep, fill=2)
    assert alone.put(tensor("c", 66), partial=True, keep=keep, fill=3) == 3
    assert newest(store) == 1
    assert second.put(partial=True, keep=keep) == 2
    assert store.catalog.versions("k") == [1, 2, 3][-keep:]
    one, two, three = b"\1" * 64, b"\2" * 65, b"\3" * 66
    assert content(store) == {"a": one, "b": two, "c": three, "new": b"1"}
    if keep > 1:
        assert content(store, version=2) == {"a": one, "b": two, "c": one, "new": b"1"}


def test_a_partial_version_builds_on_a_whole_one_that_overtook_what_it_waited_for(
    store: Controller,
) -> None:
    first, alone = Rank(store, "0", 2), Rank(store, "", 1)
    assert first.put(tensor("a", 64), tensor("only here", 64), fill=1) == 1
    assert alone.put(tensor("b", 64), partial=True, version=4, fill=2) == 4
    assert newest(store) == 0
    assert alone.put(tensor("a", 65), tensor("b", 65), version=2, fill=3) == 2
    assert newest(store) == 4
    assert content(store) == {"a": b"\3" * 65, "b": b"\2" * 64}
    assert not pending(store)


def test_a_partial_version_does_not_wait_for_one_that_a_new_run_has_thrown_out(
    store: Controller,
) -> None:
    """It is there when the put begins that threw it out, however long that takes."""
    alone, everybody = Rank(store, "", 1), ranks(store, 3)
    alone.put(tensor("a"), tensor("b", 64), fill=1)
    for rank in everybody[:2]:
        assert rank.put(tensor(f"w{rank.who}")) == 2
    assert alone.put(tensor("b", 64), partial=True, fill=3) == 3
    everybody[2].begin(tensor("w2"))  # it lives beside the first one
    for rank in (everybody[0], everybody[2]):
        rank.die()
    assert newest(store) == 1  # the second one lives
    everybody[2].again().begin(tensor("w2"), obj("x"))
    assert newest(store) == 3
    assert content(store) == {"a": b"\1" * 640, "b": b"\3" * 64}
    assert pending(store) == [(4, [], ["2"])]


@pytest.mark.parametrize("forked", [False, True])
@pytest.mark.parametrize("writing", [False, True])
def test_a_partial_version_does_not_wait_for_a_process_that_has_ended(
    store: Controller, writing: bool, forked: bool
) -> None:
    """Also if a forked child of it still reads what it inherited, and keeps its session."""
    alone, first = Rank(store, "", 1), Rank(store, "0", 2)
    alone.put(tensor("a"), tensor("b", 64), fill=1)
    (first.begin if writing else first.put)(tensor("a"))
    assert alone.put(tensor("b", 64), partial=True, fill=3) == 3
    assert newest(store) == 1
    (store.end_session if forked else store.close_session)(first.session)
    assert newest(store) == 3
    assert content(store) == {"a": b"\1" * 640, "b": b"\3" * 64}


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_one_participant_may_put_all_of_its_entries_and_another_some(
    store: Controller, order: tuple[int, int]
) -> None:
    """Whoever comes first: entries that nobody puts are those of the version before."""
    everybody = ranks(store)
    for rank in everybody:
        rank.put(tensor(f"a{rank.who}", 64), tensor(f"b{rank.who}", 64), fill=1)
    puts: list[dict[str, Any]] = [{"partial": False}, {"partial": True}]
    for at in order:
        rank = everybody[at]
        assert rank.put(tensor(f"a{rank.who}", 64), fill=2, **puts[at]) == 2
    got = content(store)
    assert {name: set(data) for name, data in got.items()} == {
        "a0": {2},
        "b0": {1},
        "a1": {2},
        "b1": {1},
    }


def test_a_partial_put_takes_the_path_of_what_it_replaces_too(store: Controller) -> None:
    rank = Rank(store, "", 1)
    rank.put(at_path(obj("a.b"), b"nested"), at_path(obj("c"), b"list"), obj("d"))
    rank.put(obj("a.b", b"flat"), at_path(obj("d"), b"new"), partial=True)
    assert paths(fetch(store)) == {"c": b"list", "d": b"new"}
    assert content(store) == {"a.b": b"flat", "c": b"1", "d": b"1"}


# ---- what was given up does not stay ------------------------------------------------------


def test_nothing_of_a_put_that_was_given_up_becomes_part_of_the_version(
    store: Controller,
) -> None:
    first, second = ranks(store)
    gone = [
        at_path(tensor("a", 64), b"old path"),
        tied("tied to a", 0),
        at_path(obj("gone"), b"x"),
        piece("empty", 5, 5, 10),
        piece("empty too", 0, 0, 0),
        tensor("both"),
        piece("halves", 0, 50, 100),
    ]
    first.abort(first.begin(*gone))
    second.put(tensor("both"), piece("halves", 50, 100, 100))
    lost = first.begin(*gone)
    assert pending(store) == [(1, ["1"], ["0"])]
    first.abort(lost)
    assert first.put(at_path(tensor("a", 65), b"new path"), piece("halves", 0, 50, 100)) == 1
    reply = fetch(store)
    assert set(reply.names) == {"both", "halves", "a"}
    assert paths(reply) == {"a": b"new path"}
    assert reply.same_as == []
    assert used(store) == 640 + 128 + 64 + 64


def test_an_entry_may_come_back_with_another_shape_once_nobody_puts_the_first_one(
    store: Controller,
) -> None:
    first, second = ranks(store)
    second.put(obj("own1"))
    for items in ([piece("w", 0, 5, 10)], [piece("w", 10, 10, 10)], [tensor("w", 10)]):
        first.abort(first.begin(*items, tensor("more")))
    assert first.put(piece("w", 0, 10, 20), piece("w", 10, 20, 20), fill=1) == 1
    assert content(store)["w"] == b"\1" * 20


def test_what_another_participant_still_puts_keeps_its_shape(store: Controller) -> None:
    first, second = ranks(store)
    lost = first.begin(piece("w", 0, 10, 10), piece("v", 0, 5, 10), tensor("more"))
    second.put(piece("w", 0, 10, 10), piece("v", 10, 10, 10))
    first.abort(lost)
    for name in ("w", "v"):
        if name == "v":  # of the other one nobody has any bytes: who puts it now says how it is
            with pytest.raises(LayoutMismatchError):
                first.put(piece(name, 0, 10, 20))
    assert first.put(piece("w", 0, 10, 10), tensor("v", 10), fill=1) == 1
    assert content(store) == {"v": b"\1" * 10, "w": b"\1" * 10}


@pytest.mark.parametrize("how", ["given up", "put again", "died"])
@pytest.mark.parametrize(
    ("there", "other"),
    [
        (tensor("w", 10), tensor("w", 20)),
        (tensor("w", 10), piece("w", 0, 20, 20)),
        (tensor("w", 10), obj("w")),
        (obj("w"), tensor("w", 10)),
        (piece("w", 0, 10, 10), tensor("w", 20)),
    ],
)
def test_a_shape_that_another_participant_relies_on_is_not_changed_by_who_stored_it(
    store: Controller, there: m.PutItem, other: m.PutItem, how: str
) -> None:
    """The replica has put it, too, and was told that it is stored: it is that or nothing."""
    first, second, third = ranks(store, 3)
    begun = first.begin(there, tensor("more"), version=4, fill=1)
    assert second.put(there, obj("own1"), version=4) == 4
    if how == "put again":
        first.commit(begun)
    elif how == "given up":
        first.abort(begun)
    else:
        first.die()
        first = first.again()
    with pytest.raises(LayoutMismatchError, match="another participant puts it as"):
        first.put(other, version=4)
    assert third.put(obj("own2"), version=4) == 4
    assert newest(store) == 0
    assert first.put(there, tensor("more"), version=4, fill=2) == 4
    assert set(content(store)) == {"w", "more", "own1", "own2"}
    assert len(content(store)["w"]) == there.nbytes


def test_a_shape_is_free_when_all_who_relied_on_it_are_gone(store: Controller) -> None:
    first, second, third = ranks(store, 3)
    third.put(obj("own2"), version=4)
    begun = first.begin(tensor("w", 10), version=4)
    relies = second.begin(tensor("w", 10), tensor("mine"), version=4)
    first.abort(begun)
    second.abort(relies)
    assert second.put(tensor("w", 20), version=4, fill=1) == 4
    assert first.put(tensor("w", 20), version=4, fill=2) == 4
    assert content(store)["w"] == b"\1" * 20


# ---- tied entries, empty shards -----------------------------------------------------------


def test_tied_entries_share_their_bytes_and_say_so(store: Controller) -> None:
    first, second = ranks(store)
    first.put(tensor("w"), tied("head", 0), piece("s", 0, 5, 10), tied("s2", 2), fill=1)
    second.put(tensor("w"), tied("other", 0), piece("s", 5, 10, 10), tied("s3", 2), fill=1)
    assert used(store) == 640 + 64 + 64
    reply = fetch(store)
    assert set(reply.names) == {"w", "head", "s", "s2", "other", "s3"}
    roots = {name: name for name in reply.names}
    for at, first_at in reply.same_as:
        assert first_at < at
        roots[reply.names[at]] = roots[reply.names[first_at]]
    assert roots["head"] == roots["other"] == roots["w"]
    assert roots["s2"] == roots["s3"] == roots["s"]
    got = content(store)
    assert got["head"] == got["other"] == got["w"] == b"\1" * 640
    assert got["s3"] == got["s2"] == got["s"] == b"\1" * 10
    # A lease on them all is on one value; it is given back as often as it was given out.
    session = store.open_session(facts(), HERE)
    assert store.fetch(session, m.Fetch(1, 5, "k", 0, None, -1)).leased
    assert store.volumes[0].leased == 640 + 64 + 64
    store.delete(["k"], strict=True)
    assert used(store) == 640 + 64 + 64
    store.release(session, [], [(5, [0, 2])])
    assert store.volumes[0].leased > 0
    store.release(session, [5], [])
    assert (used(store), store.volumes[0].leased) == (0, 0)


def test_an_entry_that_one_ties_and_another_puts_is_what_was_put(store: Controller) -> None:
    for order in ((0, 1), (1, 0)):
        everybody = ranks(store)
        puts = [[tensor("w"), tied("head", 0)], [tensor("head", 64)]]
        for at in order:
            everybody[at].put(*puts[at], fill=at + 1)
        assert content(store) == {"w": b"\1" * 640, "head": b"\2" * 64}


def test_an_entry_that_is_tied_for_those_who_have_some_of_it_may_be_empty_for_others(
    store: Controller,
) -> None:
    for order in ((0, 1), (1, 0)):
        everybody = ranks(store)
        puts = [
            [piece("w", 0, 10, 10), tied("head", 0)],
            [piece("w", 10, 10, 10), piece("head", 10, 10, 10)],
        ]
        for at in order:
            everybody[at].put(*puts[at], fill=1)
        assert content(store) == {"w": b"\1" * 10, "head": b"\1" * 10}
        assert fetch(store).same_as == [(1, 0)]


def test_participants_may_disagree_about_what_is_tied(store: Controller) -> None:
    """The shards that one ties to those of another entry are shards of both."""
    for order in ((0, 1, 2), (2, 1, 0), (1, 0, 2)):
        everybody = ranks(store, 3)
        puts = [
            [piece("w", 0, 10, 30), tied("head", 0)],
            [piece("w", 10, 20, 30), piece("head", 10, 20, 30)],
            [piece("w", 20, 30, 30), tied("head", 0)],
        ]
        version = 0
        for at in order:
            version = everybody[at].put(*puts[at], fill=at + 1)
        assert version == newest(store)
        expected = b"\1" * 10 + b"\2" * 10 + b"\3" * 10
        assert content(store) == {"w": expected, "head": expected}
        assert used(store) == 4 * 64
        session = store.open_session(facts(), HERE)
        assert store.fetch(session, m.Fetch(1, 5, "k", 0, None, -1)).leased
        store.delete(["k"], strict=True)
        assert used(store) == 4 * 64
        store.release(session, [], [(5, [0])])  # the other entry still has its shards
        assert used(store) >= 3 * 64
        store.release(session, [5], [])
        assert used(store) == 0


def test_shards_that_were_tied_go_with_who_put_them(store: Controller) -> None:
    first, second = ranks(store)
    first.put(piece("w", 0, 10, 20), tied("head", 0), fill=1)
    second.begin(piece("w", 10, 20, 20), piece("head", 10, 20, 20))
    second.die()
    (pending,) = store.catalog.pending("k")
    assert {(name, at) for name, at, _ in pending.missing} == {("w", (10,))}
    second.again().put(piece("w", 10, 20, 20), tied("head", 0), fill=2)
    expected = b"\1" * 10 + b"\2" * 10
    assert content(store) == {"w": expected, "head": expected}
    assert used(store) == 2 * 64


def test_ties_to_entries_that_nobody_has_any_of_end_nowhere(store: Controller) -> None:
    first, second = ranks(store)
    empty = [piece("a", 5, 5, 10), tied("b", 0)]
    first.put(*empty)
    second.put(tensor("x", 64), tied("a", 0), tied("b", 0), fill=1)
    assert content(store) == {"x": b"\1" * 64, "a": b"\1" * 64, "b": b"\1" * 64}
    first.put(*empty)
    second.put(piece("b", 5, 5, 10), tied("a", 0))
    assert newest(store) == 1
    assert {name for name, _, _ in store.catalog.pending("k")[0].missing} == {"a", "b"}


def test_empty_shards_take_part_and_need_no_memory(store: Controller) -> None:
    first, second = ranks(store)
    first.put(piece("w", 10, 10, 10), piece("none", 0, 0, 0))
    assert used(store) == 0
    second.put(piece("w", 0, 10, 10), piece("none", 0, 0, 0), fill=1)
    assert content(store) == {"w": b"\1" * 10, "none": b""}
    grid = TensorMeta("uint8", (0, 4))
    for half in (0, 1):
        part = TensorSlice((0, 2 * half), (0, 2), (0, 4), (2,), (half,))
        assert Rank(store).put(m.PutItem("t", grid, 0, b"", part)) == 1
    assert content(store, "t") == b""
    Rank(store).put(piece("shards", 10, 10, 10))
    with pytest.raises(KeyNotFoundError):
        content(store, "shards")


# ---- what readers ask for -----------------------------------------------------------------


def test_a_reader_gets_what_it_asks_for_and_hears_of_the_rest(store: Controller) -> None:
    rank = Rank(store, "", 1)
    items = [tensor("a", 64), piece("w", 0, 50, 100), piece("w", 50, 100, 100), obj("o")]
    rank.put(*items, keep=2, fill=1)
    rank.put(tensor("a", 64), keep=2, fill=2)
    reply = fetch(store, 1, [m.Want("w", 0, ((60,), (10,))), m.Want("no"), m.Want("a", 77)])
    assert (reply.version, reply.names, reply.paths, reply.same_as) == (1, ["o"], {}, [])
    w, no, a = reply.entries
    assert no is None
    assert w is not None
    assert w.parts is not None
    assert [part.offset for part in w.parts] == [(50,)]
    assert (w.version, w.nbytes) == (1, 100)
    assert a is not None
    assert a.data == b"\1" * 64
    assert fetch(store).version == 2
    with pytest.raises(VersionGoneError):
        fetch(store, 3)
    for key in ("k/a", "plain"):
        Rank(store).put(obj("plain"))
        with pytest.raises(LayoutMismatchError, match="is no state dict"):
            store.fetch(rank.session, m.Fetch(1, 1, key, 0, None, ALL))
    ((entry,), leased) = store.locate(rank.session, m.Locate(1, 1, [m.Want("k")], -1))
    assert (entry.meta, entry.data, entry.grant, entry.parts) == (
        StateDictMeta(1),
        None,
        None,
        None,
    )
    assert not leased


@pytest.mark.parametrize(
    "box",
    [
        ((0,), (100,)),
        ((49,), (2,)),
        ((-5,), (1 << 63,)),
        ((), ()),
        ((0, 0), (1, 1)),
        ((0,), ()),
        ((), (5,)),
    ],
)
def test_a_box_that_is_wider_than_one_shard_or_makes_no_sense_gets_both(
    store: Controller, box: m.Box
) -> None:
    rank = Rank(store)
    rank.put(piece("k", 0, 50, 100), piece("k", 50, 100, 100))
    ((entry,), leased) = store.locate(rank.session, m.Locate(1, 1, [m.Want("k", 0, box)], -1))
    assert entry.parts is not None
    assert len(entry.parts) == 2
    assert leased
    assert store.volumes[0].leased == 128


@pytest.mark.parametrize("box", [((100,), (5,)), ((0,), (0,)), ((1 << 63,), (1,)), ((5,), (-5,))])
def test_a_box_that_holds_nothing_leases_nothing(store: Controller, box: m.Box) -> None:
    rank = Rank(store)
    rank.put(piece("k", 0, 50, 100), piece("k", 50, 100, 100))
    ((entry,), leased) = store.locate(rank.session, m.Locate(1, 1, [m.Want("k", 0, box)], -1))
    assert entry.parts == []
    assert not leased
    assert store.volumes[0].leased == 0


@pytest.mark.parametrize("before", [False, True], ids=["first version", "next version"])
@pytest.mark.parametrize("asks", ["get", "delete"])
def test_how_much_is_on_its_way_does_not_count_for_who_asks_for_something_else(
    before: bool, asks: str
) -> None:
    """Everybody else waits for as long as the server takes to find out what to say."""
    assert _calls(1000, asks, before=before) == _calls(200, asks, before=before)


def _calls(count: int, asks: str, *, before: bool) -> int:
    """The calls that it takes to refuse something while so many entries are on their way."""
    calls = 0

    def note(frame: FrameType, event: str, _: Any) -> None:
        nonlocal calls
        calls += event == "call"

    with a_store() as store:
        rank = Rank(store, "", 1)
        if before:
            rank.put(tensor("t"))
        rank.begin(tensor("t"), *[obj(str(at)) for at in range(count)])
        profile = sys.getprofile()
        gc.disable()  # what it calls back counts for whatever runs
        sys.setprofile(note)
        try:
            if asks == "get":
                store.locate(rank.session, m.Locate(1, 1, [m.Want("k/no")], 0))
            else:
                store.delete(["k/no"], strict=True)
        except KeyNotFoundError:  # of which PartialPutError is one
            return calls
        finally:
            sys.setprofile(profile)
            gc.enable()
    raise AssertionError("it was not refused")
