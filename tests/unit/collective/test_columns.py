"""Puts and gets in columns: the store is as after the same puts and gets one by one."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from tests.unit.collective.ranks import Rank, a_store, content, tensor, used
from tests.unit.server.test_controller import HERE, facts

from torchstore_core.clients.moving.entries import entries_of
from torchstore_core.errors import KeyNotFoundError, ProtocolError
from torchstore_core.server.controller import Controller
from torchstore_core.server.index.items import one_by_one
from torchstore_core.server.index.records import SessionRecord
from torchstore_core.values import ObjectMeta, TensorMeta
from torchstore_core.wire import messages as m
from torchstore_core.wire.columns import FEWEST, Kind, in_a_row, kinds_of

CAPACITY = 1 << 18
MANY = FEWEST + 8
NAMES = [f"n{at}" for at in range(MANY)]
ids = itertools.count(1)


@pytest.fixture
def store() -> Iterator[Controller]:
    with a_store(CAPACITY) as controller:
        yield controller


@pytest.fixture
def session(store: Controller) -> SessionRecord:
    return store.open_session(facts(), HERE)


def in_columns(names: Sequence[str], sizes: Sequence[int]) -> m.ItemColumns:
    by_size = {size: TensorMeta("uint8", (size,)) for size in sizes}
    return m.ItemColumns(list(names), *kinds_of([by_size[size] for size in sizes], sizes))


def published(key: str, participants: int = 1, who: str = "") -> m.Publication:
    return m.Publication(key, who, participants)


def put(
    store: Controller,
    session: SessionRecord,
    names: Sequence[str],
    sizes: Sequence[int],
    *,
    group: m.Publication | None = None,
    columns: bool = True,
) -> tuple[list[int], list[m.Grant | None]]:
    """Put and commit; the versions and the places."""
    txn = next(ids)
    request = m.Put(1, txn, [], 0, group, columns=in_columns(names, sizes))
    if not columns:
        items = [tensor(name, size) for name, size in zip(names, sizes, strict=True)]
        request = structs.replace(request, items=items, columns=None)
    _, grants = store.put(session, request)
    assert grants is not None
    if len(grants) == 1 and len(names) > 1:
        (first,) = grants
        assert first is not None
        grants = [m.Grant(first.volume, 0, at) for at in in_a_row(first.offset, sizes)]
    assert len(grants) == len(names)
    return store.commit(session, txn), grants


Step = tuple[str, list[int], list[int]]
steps = st.lists(
    st.tuples(
        st.sampled_from(["batch", "dict", "hold", "delete"]),
        st.lists(st.integers(0, MANY - 1), min_size=1, max_size=MANY, unique=True),
        st.lists(st.integers(1, 200), min_size=MANY, max_size=MANY),
    ),
    max_size=8,
)


@given(steps)
def test_the_store_is_as_after_puts_one_by_one(steps: list[Step]) -> None:
    """Versions, places, accounts and what can be read; also when memory is in pieces."""
    with a_store(CAPACITY) as one, a_store(CAPACITY) as other:
        sessions = [
            (one, one.open_session(facts(), HERE)),
            (other, other.open_session(facts(), HERE)),
        ]
        for what, chosen, lengths in steps:
            names = [NAMES[at] for at in chosen]
            sizes = [lengths[at] for at in chosen]
            seen: list[object] = []
            lease = next(ids)
            for (store, session), columns in zip(sessions, (True, False), strict=True):
                if what == "delete":
                    seen.append(store.delete(names, strict=False))
                elif what == "hold":
                    keys = [name for name in names if name in store.catalog.newest]
                    seen.append(located(store, session, lease, keys, columns=columns))
                else:
                    group = published("d") if what == "dict" else None
                    seen.append(put(store, session, names, sizes, group=group, columns=columns))
                    if group is not None:
                        seen[-1] = seen[-1], fetched(store, session, next(ids), None)
            assert seen[0] == seen[1]
            accounts = [
                (v.used, v.leased, v.unfinished) for v in (one.volumes[0], other.volumes[0])
            ]
            assert accounts[0] == accounts[1]


def located(
    store: Controller, session: SessionRecord, lease: int, keys: list[str], *, columns: bool
) -> list[m.Entry]:
    request = m.LocateKeys(1, lease, [], -1, [], keys)
    entries, leased = store.locate(session, request if columns else one_by_one(request))
    assert leased is bool(keys)
    if isinstance(entries, m.EntryColumns):
        assert len(keys) >= FEWEST
        return entries_of(entries)
    assert not columns or len(keys) < FEWEST
    return entries


def fetched(
    store: Controller, session: SessionRecord, lease: int, keys: list[str] | None
) -> dict[str, m.Entry | None]:
    request = m.Fetch(1, lease, "d", 0, None, -1)
    if keys is not None:
        request = m.FetchKeys(1, lease, "d", 0, [], -1, [], keys)
    reply = store.fetch(session, request)
    entries = reply.entries if reply.columns is None else entries_of(reply.columns)
    names = reply.names if keys is None else keys
    store.release(session, [lease], [])
    return dict(zip(names, entries, strict=True))


def test_one_grant_stands_for_values_in_a_row(store: Controller, session: SessionRecord) -> None:
    _, grants = store.put(session, m.Put(1, 1, [], columns=in_columns(NAMES, [100] * MANY)))
    assert grants == [m.Grant(0, 0, 0)]
    assert used(store) == 128 * MANY
    store.abort(session, [1])
    assert used(store) == 0


def test_entries_that_others_store_have_no_grant(store: Controller) -> None:
    """Two participants put the same entries: the second has nothing to write, the third some."""
    first, second = Rank(store, "0", 3), Rank(store, "1", 3)
    first.begin(*[tensor(name) for name in NAMES])
    columns = in_columns(NAMES, [640] * MANY)
    _, grants = store.put(
        second.session, m.Put(1, 1 << 40, [], 0, published("k", 3, "1"), columns=columns)
    )
    assert grants == [None] * MANY
    names = [*NAMES[5:], "new"]
    columns = in_columns(names, [640] * len(names))
    _, grants = store.put(
        second.session, m.Put(1, 1 << 41, [], 0, published("k", 3, "2"), columns=columns)
    )
    assert grants is not None
    assert [grant is None for grant in grants] == [name != "new" for name in names]


def test_a_lease_keeps_all_values_unchanged(store: Controller, session: SessionRecord) -> None:
    put(store, session, NAMES, [64] * MANY)
    entries = located(store, session, 7, NAMES, columns=True)
    before = {entry.grant.offset for entry in entries if entry.grant}
    assert store.volumes[0].leased == 64 * MANY
    _, places = put(store, session, NAMES, [64] * MANY)
    assert before.isdisjoint({place.offset for place in places if place})
    store.release(session, [], [(7, list(range(1, MANY)))])
    assert used(store) == 64 * (MANY + 1)
    store.release(session, [7], [])
    assert (used(store), store.volumes[0].leased) == (64 * MANY, 0)


def test_what_does_not_fit_comes_one_by_one(store: Controller, session: SessionRecord) -> None:
    put(store, session, NAMES, [64] * MANY)
    whole = m.LocateKeys(1, 1, [], 1 << 62, [], NAMES)
    entries, leased = store.locate(session, whole)
    assert isinstance(entries, list)
    assert not leased
    assert [entry.data for entry in entries] == [bytes(64)] * MANY
    Rank(store).put(m.PutItem("o", ObjectMeta("msgpack"), 3, b"abc"))
    entries, _ = store.locate(session, m.LocateKeys(1, 1, [], 3, [], [*NAMES, "o"]))
    assert isinstance(entries, list)
    assert entries[-1].data == b"abc"
    with pytest.raises(KeyNotFoundError) as caught:
        store.locate(session, m.LocateKeys(1, 2, [], -1, [], [*NAMES, "no"]))
    assert caught.value.details["missing"] == ["no"]
    with pytest.raises(ProtocolError, match="in use"):
        store.locate(session, m.LocateKeys(1, 1, [], -1, [], NAMES))


def test_entries_of_a_state_dict(store: Controller, session: SessionRecord) -> None:
    """In the order of the request; names that are not asked for are told."""
    put(store, session, NAMES, range(65, 65 + MANY), group=published("d"))
    order = NAMES[::-1]
    entries = fetched(store, session, next(ids), order)
    assert [entry.nbytes for entry in entries.values() if entry] == list(range(64 + MANY, 64, -1))
    reply = store.fetch(session, m.FetchKeys(1, next(ids), "d", 0, [], -1, [], order[3:]))
    assert reply.columns is not None
    assert sorted(reply.names) == sorted(order[:3])
    missing = fetched(store, session, next(ids), ["no", *order])
    assert missing["no"] is None
    assert {name: entry for name, entry in missing.items() if entry} == entries
    assert set(content(store, "d")) == set(NAMES)


@pytest.mark.parametrize(
    "columns",
    [
        m.ItemColumns(["a", "b"], [Kind(TensorMeta("uint8", (0,)), 0)], b""),
        m.ItemColumns(["a", "b"], [Kind(TensorMeta("uint8", (1,)), -1)], b""),
        m.ItemColumns(["a", "b"], [Kind(TensorMeta("uint8", (1,)), 1 << 60)], b""),
        m.ItemColumns(["a", ""], [Kind(TensorMeta("uint8", (1,)), 1)], b""),
        m.ItemColumns(["a", "b" * (m.MAX_KEY + 1)], [Kind(TensorMeta("uint8", (1,)), 1)], b""),
        m.ItemColumns(["a", "b"], [Kind(TensorMeta("uint8", (1,)), 1)], b"\1\0"),
        m.ItemColumns(["a"] * 4, [Kind(TensorMeta("uint8", (1,)), (1 << 60) - 1)], b""),
        m.ItemColumns([], [], b""),
    ],
)
@pytest.mark.parametrize("group", [None, published("d")])
def test_columns_that_are_none_are_refused(
    store: Controller,
    session: SessionRecord,
    columns: m.ItemColumns,
    group: m.Publication | None,
) -> None:
    if not columns.keys and group is not None:
        return  # an empty state dict is one
    with pytest.raises(ProtocolError):
        store.put(session, m.Put(1, 1, [], 0, group, columns=columns))
    with pytest.raises(ProtocolError, match="or one by one"):
        store.put(session, m.Put(1, 1, [tensor("a")], 0, group, columns=columns))
    assert used(store) == 0


def test_a_name_comes_once_in_a_state_dict(store: Controller, session: SessionRecord) -> None:
    columns = in_columns(["a", "b", "a"], [1, 1, 1])
    with pytest.raises(ProtocolError, match="comes twice"):
        store.put(session, m.Put(1, 1, [], 0, published("d"), columns=columns))
