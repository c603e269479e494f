"""Versions of a state dict that share entries: whatever comes and goes, each is what it was put as,
and what none of them has takes no memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from msgspec import structs
from tests.unit.collective.ranks import CAPACITY, Rank, content, tensor, tied, used
from tests.unit.server.test_controller import volumes

from torchstore_core.contracts.strategy import Strategy
from torchstore_core.errors import KeyNotFoundError
from torchstore_core.server.controller import Controller
from torchstore_core.server.index.records import Manifest, all_values
from torchstore_core.server.keeping.state import StateReader, written
from torchstore_core.wire import messages as m

NAMES = st.lists(st.sampled_from("abcdef"), unique=True, min_size=1, max_size=4)
SIZE = 64
#: By name: the number of the put and the name by which the value was put, and its path.
Content = dict[str, tuple[int, str, bytes]]


class Sharing(RuleBasedStateMachine):
    """Puts, holds and rewinds of one state dict, against plain dicts of what each version has."""

    @initialize(keep=st.integers(1, 3))
    def begin(self, keep: int) -> None:
        self.stack = ExitStack()
        self.store = Controller(self.stack.enter_context(volumes(CAPACITY)), Strategy())
        self.rank = Rank(self.store, "", 1)
        self.keep = keep
        self.fills = itertools.count(1)
        self.readable: dict[int, Content] = {}
        self.held: dict[int, tuple[int, int, Content]] = {}  # version and timeline, by id
        self.last = 0

    def teardown(self) -> None:
        if not hasattr(self, "stack"):
            return
        self.store.holds.unhold(self.rank.session, list(self.held))
        self.store.delete(["k"], strict=False)
        assert used(self.store) == 0
        self.stack.close()

    @rule(
        names=NAMES,
        tie=st.booleans(),
        partial=st.booleans(),
        back=st.integers(0, 3),
        has_path=st.sampled_from(["", "a", "ab", "abcdef"]),
    )
    def put(self, names: list[str], tie: bool, partial: bool, back: int, has_path: str) -> None:
        fill = next(self.fills) % 256
        items = [tied(n, 0) if tie and i else tensor(n, SIZE) for i, n in enumerate(names)]
        new: Content = {}
        for at, name in enumerate(names):
            path = b"%d" % fill if name in has_path else b""
            items[at] = structs.replace(items[at], path=path)
            new[name] = fill, names[0] if tie else name, path
        going_back = 0 < back <= self.last
        version = self.last - back + 1 if going_back else 0
        before = {v: one for v, one in self.readable.items() if not going_back or v < version}
        how: dict[str, Any] = {"fill": fill, "keep": self.keep, "partial": partial}
        if partial and not before:
            with pytest.raises(KeyNotFoundError):
                self.rank.put(*items, **how, version=version, rewind=going_back)
            return
        made = self.rank.put(*items, **how, version=version, rewind=going_back)
        assert made == version or not going_back
        if partial:
            new = before[max(before)] | new
        self.readable = dict(sorted((before | {made: new}).items())[-self.keep :])
        self.last = made

    @rule(ident=st.integers(1, 4), old=st.booleans())
    def hold(self, ident: int, old: bool) -> None:
        if self.readable and ident not in self.held:
            version = min(self.readable) if old else 0
            held = self.store.holds.hold(self.rank.session, m.Hold(1, ident, "k", version, "", -1))
            self.held[ident] = held.version, held.timeline, self.readable[held.version]

    @rule(ident=st.integers(1, 4))
    def unhold(self, ident: int) -> None:
        if self.held.pop(ident, None) is not None:
            self.store.holds.unhold(self.rank.session, [ident])

    @rule()
    def delete(self) -> None:
        self.store.delete(["k"], strict=False)
        self.readable = {}

    @rule()
    def come_back(self) -> None:
        """Another server has the state."""
        made = Controller(self.store.volumes, Strategy())
        reader = StateReader(made)
        for is_rest, body in written(self.store, {}):
            if is_rest:
                reader.finish(body)
            else:
                reader.add_values(body)
        self.store = self.rank.controller = made
        self.rank.session = made.sessions[self.rank.session.token]

    @invariant()
    def every_version_is_what_it_was_put_as(self) -> None:
        if not hasattr(self, "store"):
            return
        assert self.store.catalog.versions("k") == list(self.readable)
        for name in "abcdef":
            having = [version for version, one in self.readable.items() if name in one]
            assert self.store.catalog.versions(f"k/{name}") == having
        for version, expected in self.readable.items():
            assert content(self.store, version=version) == _bytes(expected)
            fetch = m.Fetch(1, 1, "k", version, None, 1 << 62)
            self.check(self.store.fetch(self.rank.session, fetch), expected)
        for version, timeline, expected in self.held.values():
            ref = m.FetchRef(1, 1, "k", version, None, 1 << 62, timeline=timeline)
            self.check(self.store.fetch(self.rank.session, ref), expected)

    def check(self, reply: m.Fetched, expected: Content) -> None:
        assert reply.names == list(expected)
        found = [entry.data for entry in reply.entries if entry is not None]
        assert found == list(_bytes(expected).values())
        paths = {reply.names[at]: path for at, path in reply.paths.items()}
        assert paths == {name: path for name, (_, _, path) in expected.items() if path}

    @invariant()
    def memory_has_what_is_there_and_nothing_else(self) -> None:
        if hasattr(self, "store"):
            every = [*self.readable.values(), *[one for _, _, one in self.held.values()]]
            there = {(fill, name) for one in every for fill, name, _ in one.values()}
            assert used(self.store) == SIZE * len(there)


def _bytes(one: Content) -> dict[str, bytes]:
    return {name: bytes([fill]) * SIZE for name, (fill, _, _) in one.items()}


TestSharing = Sharing.TestCase


class Unlooked(dict[str, Any]):
    """A dict that may be asked for a name, and changed, but not be looked through."""

    allowed = False

    def keys(self) -> Any:
        assert self.allowed, "somebody looks at all entries"
        return super().keys()

    def values(self) -> Any:
        assert self.allowed, "somebody looks at all entries"
        return super().values()

    def items(self) -> Any:
        assert self.allowed, "somebody looks at all entries"
        return super().items()

    def __iter__(self) -> Iterator[str]:
        assert self.allowed, "somebody looks at all entries"
        return super().__iter__()


@pytest.mark.parametrize("keep", [1, 3])
def test_a_partial_put_and_the_end_of_a_version_look_at_what_they_change(
    store: Controller, keep: int
) -> None:
    rank = Rank(store, "", 1)
    rank.put(tensor("a", 64), tensor("b", 64), fill=1, keep=keep)
    stored = store.catalog.newest["k"]
    assert type(stored) is Manifest
    stored._entries, stored._paths = Unlooked(stored._entries), Unlooked(stored._paths)
    looked = stored._entries, stored._paths
    store.holds.hold(rank.session, m.Hold(1, 1, "k", 0, "", -1))
    for number in range(2, 7):
        assert rank.put(tensor("b", 64), partial=True, fill=number, keep=keep) == number
        assert content(store, "k/a") == b"\1" * 64
        assert content(store, "k/b", number) == bytes([number]) * 64
    store.holds.unhold(rank.session, [1])
    assert used(store) == 64 * (1 + keep)
    if keep > 1:
        rank.put(tensor("a", 64), partial=True, keep=keep, version=5, rewind=True)
    newest = store.catalog.newest["k"]
    assert type(newest) is Manifest
    assert (newest._entries, newest._paths) == looked
    assert newest._entries is looked[0]
    for one in looked:
        one.allowed = True


def test_a_version_with_a_value_that_a_reference_reads_is_not_evicted(store: Controller) -> None:
    """Although it is the newest version of the key that has the value, for both."""
    rank = Rank(store, "", 1)
    rank.put(tensor("a", 64), tensor("b", 64), fill=1)
    store.holds.hold(rank.session, m.Hold(1, 1, "k", 0, "", -1))
    rank.put(tensor("b", 64), partial=True, fill=2)
    newest = store.catalog.newest["k"]
    assert type(newest) is Manifest
    shared, own = all_values(newest)
    can_evict = store.catalog.evictions.can_evict
    assert not can_evict("k", shared, newest_too=True)
    assert can_evict("k", own, newest_too=True)
    assert not can_evict("k", own, newest_too=False)
    store.holds.unhold(rank.session, [1])
    assert can_evict("k", shared, newest_too=True)
