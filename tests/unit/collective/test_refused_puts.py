"""Puts of shards and state dicts that contradict others, or themselves: nothing changes."""

from __future__ import annotations

import pytest
from msgspec import structs
from tests.unit.collective.ranks import (
    Rank,
    a_store,
    newest,
    numbers,
    obj,
    pending,
    piece,
    ranks,
    tensor,
    tied,
    used,
)

from torchstore_core.errors import (
    LayoutMismatchError,
    ProtocolError,
)
from torchstore_core.server.controller import Controller
from torchstore_core.values import ObjectMeta, StateDictMeta, TensorMeta, TensorSlice
from torchstore_core.wire import messages as m


def test_a_participant_may_not_be_of_another_shape_or_dtype(store: Controller) -> None:
    first, second = ranks(store)
    assert first.put(tensor("w", 100), obj("o"), piece("s", 0, 64, 128)) == 1
    before = used(store)
    wrong = [
        tensor("w", 101),
        obj("w"),
        m.PutItem("o", tensor("x").meta, 640),
        piece("s", 64, 128, 129),
        piece("s", 64, 64, 129),
        m.PutItem("s", piece("s", 0, 1, 128).meta, 128, None, piece("s", 64, 128, 128).part),
    ]
    for item in wrong:
        with pytest.raises(LayoutMismatchError) as caught:
            second.put(tensor("more"), item)
        assert caught.value.key == item.key
    assert used(store) == before
    assert pending(store) == [(1, ["0"], [])]
    assert second.put(tensor("w", 100), piece("s", 64, 128, 128)) == 1
    assert newest(store) == 1


def test_what_waits_for_one_that_is_refused_again_waits_no_longer(store: Controller) -> None:
    """A put of a participant that comes again takes the place of the one before, also if it is
    refused: then nobody who lives is left to finish the version.
    """
    assert Rank(store, "0", 1).put(tensor("w"), obj("o")) == 1
    gone, again = Rank(store, "0", 3), Rank(store, "1", 3)
    assert gone.put(tensor("w"), version=2) == again.put(obj("o"), version=2) == 2
    assert Rank(store, "0", 1).put(obj("o", b"2"), version=3, partial=True) == 3
    gone.die()
    assert newest(store) == 1  # the other one may come
    with pytest.raises(LayoutMismatchError):
        again.put(tensor("w", 100), version=2)
    assert newest(store) == 3


GROUP = m.Publication("k", "0", 2)
W = TensorMeta("uint8", (4, 6))


def shard(
    offsets: tuple[int, ...] = (0, 0),
    shape: tuple[int, ...] = (2, 6),
    whole: tuple[int, ...] = (4, 6),
    nbytes: int = 12,
    mesh: tuple[int, ...] = (),
    at: tuple[int, ...] = (),
) -> m.PutItem:
    return m.PutItem("w", W, nbytes, None, TensorSlice(offsets, shape, whole, mesh, at))


@pytest.mark.parametrize(
    "items",
    [
        [shard((-1, 0))],
        [shard((0, -1), (2, 7))],
        [shard((0, 0), (-2, 6))],
        [shard((3, 0))],
        [shard((0, 1))],
        [shard((1 << 63, 0))],
        [shard((0, 0), (1 << 63, 6))],
        [shard((0,), (2,))],
        [shard((0, 0), (2,))],
        [shard((0, 0, 0), (2, 6, 1))],
        [shard((), ())],
        [shard(whole=(4, 7))],
        [shard(whole=(4,))],
        [shard(whole=())],
        [shard(nbytes=13)],
        [shard(nbytes=0)],
        [shard(nbytes=-12)],
        [shard((4, 0), (0, 6), nbytes=12)],
        [shard(), shard()],
        [shard(), shard((2, 0), nbytes=24)],
        [shard((4, 0), (0, 6), nbytes=0), shard(), shard((2, 0), nbytes=24)],
        [shard(), structs.replace(shard((2, 0)), meta=TensorMeta("int8", (4, 6)))],
        [shard(), structs.replace(shard(), part=None)],
        [structs.replace(shard(nbytes=24), part=None), shard()],
        [shard((0, 0), (4, 6), nbytes=24), shard()],
        [shard(mesh=(2,))],
        [shard(at=(0,))],
        [shard(mesh=(2, 2), at=(0,))],
        [shard(mesh=(1,) * 65, at=(0,) * 65)],
        [
            m.PutItem(
                "w",
                TensorMeta("uint8", (1,) * 65),
                1,
                None,
                TensorSlice((0,) * 65, (1,) * 65, (1,) * 65),
            )
        ],
        [m.PutItem("w", ObjectMeta("x"), 12, None, shard().part)],
        [m.PutItem("w", StateDictMeta(1), 12, None, shard().part)],
        [m.PutItem("w", StateDictMeta(1), 12)],
        [m.PutItem("w", StateDictMeta(1), 1, b"x")],
        [m.PutItem("", W, 24)],
        [m.PutItem("", W, 0, b"", TensorSlice((4, 0), (0, 6), (4, 6)))],
        [obj("a"), tied("", 0)],
        [m.PutItem("x" * (m.MAX_KEY + 1), W, 24)],
        [tied("a", 0)],
        [tied("a", 1), obj("b")],
        [tied("a", -2)],
        [tied("a", 1 << 63)],
        [obj("a"), tied("b", 0), tied("c", 1)],
        [obj("a"), tied("a", 0)],
        [obj("a"), obj("a")],
        [m.PutItem("a", ObjectMeta("x"), 5, b"1234")],
        [m.PutItem("a", ObjectMeta("x"), 1 << 60)],
    ],
)
@pytest.mark.parametrize("version", [0, 3])
def test_a_put_that_contradicts_itself_changes_nothing(
    store: Controller, items: list[m.PutItem], version: int
) -> None:
    first, second = ranks(store)
    first.put(tensor("before"), obj("o"), version=version, fill=1)
    before = used(store), pending(store)
    for group in (GROUP, None):
        made = [*items, obj("fine")]
        if group is None:
            made = [structs.replace(item, same_as=-1) for item in made]
            if items[-1].part is None:
                continue
        with pytest.raises(ProtocolError):
            store.put(first.session, m.Put(1, 1, made, version, group))
    assert (used(store), pending(store)) == before
    assert not first.session.txns
    assert second.put(obj("own1"), version=version) == (version or 1)
    assert numbers(store) == {1, ord("1")}


@pytest.mark.parametrize(
    "group",
    [
        m.Publication("", "0", 1),
        m.Publication("x" * (m.MAX_KEY + 1), "0", 1),
        m.Publication("k", "x" * (m.MAX_KEY + 1), 1),
        m.Publication("k", "0", 0),
        m.Publication("k", "0", -1),
        m.Publication("k", "0", 1, keep=-1),
    ],
)
def test_a_state_dict_that_makes_no_sense_is_refused(
    store: Controller, group: m.Publication
) -> None:
    session = Rank(store).session
    with pytest.raises(ProtocolError):
        store.put(session, m.Put(1, 1, [tensor("w")], 0, group))
    assert used(store) == 0


@pytest.mark.parametrize("version", [-1, -(1 << 63), 1 << 63, (1 << 64) - 1])
def test_a_version_that_makes_no_sense_is_refused(store: Controller, version: int) -> None:
    """One more than it must fit the wire, too."""
    for count in (None, 1):
        with pytest.raises(ProtocolError):
            Rank(store, "0", count).put(tensor("k"), version=version)
    assert used(store) == 0
    assert Rank(store).put(tensor("k")) == 1


def test_huge_shapes_are_taken_as_they_come(store: Controller) -> None:
    """The server has no tensors; it only must not count beyond what the wire can say."""
    huge = (1 << 40, 1 << 40, 1 << 40)
    part = TensorSlice((1 << 39, 0, 5), (1, 1, 1), huge)
    rank = Rank(store, "0", 1)
    assert rank.put(m.PutItem("w", TensorMeta("uint8", huge), 4, None, part)) == 1
    (state,) = store.catalog.pending("k")
    assert state.missing
    for _, offset, shape in state.missing:
        assert max(*offset, *shape) <= 1 << 40
    assert newest(store) == 0


@pytest.mark.parametrize("deleted", [False, True])
def test_the_number_of_a_version_that_was_dropped_is_not_used_again(deleted: bool) -> None:
    """Whoever has put a part of it was told that number, and may have passed it on."""
    with a_store(1024) as store:
        first, second = ranks(store)
        assert first.put(tensor("a", 320)) == 1
        assert first.put(tensor("a", 320)) == 2
        assert second.put(tensor("b", 640)) == 1  # there is room for it without version 2 only
        assert (newest(store), pending(store)) == (1, [])
        if deleted:
            store.delete(["k"], strict=True)
        assert -Rank(store).begin(obj("k")) == 3
