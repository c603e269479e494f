"""Keys by prefix: what is found is what a look at all of them would find, without that look."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.collective.ranks import Rank, a_store, obj
from tests.unit.server.test_controller import HERE, facts, inline

from torchstore_core.server.controller import Controller
from torchstore_core.server.index.key_names import KeyNames
from torchstore_core.server.index.records import Manifest
from torchstore_core.server.serving import inspection
from torchstore_core.wire import messages as m

Name = st.text(alphabet="a/b\U0010ffff", min_size=1, max_size=4)
Prefix = st.text(alphabet="a/b\U0010ffff", max_size=5)


@given(st.sets(Prefix), Prefix, Prefix, st.none() | st.integers(0, 5))
def test_starting(keys: set[str], prefix: str, after: str, limit: int | None) -> None:
    order = KeyNames({})
    order.add(keys)
    found = sorted(key for key in keys if key.startswith(prefix) and (not after or key > after))
    assert order.starting(prefix, after, limit) == found[:limit]


def all_names(store: Controller) -> set[str]:
    names: set[str] = set()
    for key, stored in store.catalog.newest.items():
        names.add(key)
        if isinstance(stored, Manifest):
            names |= {f"{key}/{name}" for name in stored.entries}
    return names


Step = st.one_of(
    st.tuples(st.just("put"), Name, st.booleans()),
    st.tuples(st.just("dict"), Name, st.lists(Name, max_size=4, unique=True)),
    st.tuples(st.just("delete"), Name, st.none()),
)


@given(st.lists(Step, max_size=12), Prefix, Prefix, st.none() | st.integers(1, 6))
def test_names_are_those_of_a_look_at_everything(
    steps: list[tuple[str, str, Any]], prefix: str, after: str, limit: int | None
) -> None:
    with a_store() as store:
        session = store.open_session(facts(), HERE)
        for what, key, how in steps:
            if what == "put":
                there = store.catalog.newest.get(key)
                version = there.version + 1 if how and there else 0  # said: by another way
                store.put(session, m.Put(1, 1, [inline(key, b"x")], version))
            elif what == "dict":
                Rank(store, "", 1, key).put(*[obj(name) for name in how])
            else:
                store.delete([key], strict=False)
        names = all_names(store)
        found = sorted(name for name in names if name.startswith(prefix) and name > after)
        assert store.catalog.names.page(prefix, after, limit or 100) == found[: limit or 100]
        assert store.keys(prefix) == sorted(name for name in names if name.startswith(prefix))


class Unlooked(dict[str, Any]):
    """A dict that may be asked for a key, but not be looked through."""

    def __iter__(self) -> Iterator[str]:
        raise AssertionError("somebody looks at all keys")

    def items(self) -> Any:
        raise AssertionError("somebody looks at all keys")

    keys = values = items


def test_a_prefix_costs_what_it_finds() -> None:
    with a_store() as store, pytest.MonkeyPatch.context() as monkeypatch:
        session = store.open_session(facts(), HERE)
        for start in range(0, 5000, 500):
            items = [inline(f"model/{i:05}", b"") for i in range(start, start + 500)]
            store.put(session, m.Put(1, 1, items))
        Rank(store, "", 1, "model/00077x").put(obj("w"), obj("v"))
        unlooked = Unlooked(store.catalog.newest)
        monkeypatch.setattr(store.catalog, "newest", unlooked)
        monkeypatch.setattr(store.catalog.names, "_newest", unlooked)
        looked: list[str] = []
        order = store.catalog.names._keys
        compare = order.irange

        def irange(*bounds: Any) -> Iterator[str]:
            for key in compare(*bounds):
                looked.append(key)
                yield key

        monkeypatch.setattr(order, "irange", irange)
        assert store.keys("model/0007") == [
            *[f"model/0007{i}" for i in range(8)],
            *["model/00077x", "model/00077x/v", "model/00077x/w"],
            *["model/00078", "model/00079"],
        ]
        assert len(looked) == 11
        looked.clear()
        page, _, more = inspection.listing(store.catalog, store.volumes, "model/", "model/00098")
        assert (len(page), more) == (4901, False)
        monkeypatch.setattr(m, "MAX_LISTED", 10)
        looked.clear()
        page, _, more = inspection.listing(store.catalog, store.volumes, "model/", "model/00098")
        assert ([one.key for one in page][:2], len(page), more) == (
            ["model/00099", "model/00100"],
            10,
            True,
        )
        assert len(looked) == 11
