"""Partial versions wait for older ones on their way: what drops those lets them become whole."""

from __future__ import annotations

import pytest
from tests.unit.collective.ranks import Rank, content, newest, obj, pending, tensor
from tests.unit.server.test_lost_parts import controller_of

from torchstore_core.errors import KeyNotFoundError
from torchstore_core.server.controller import Controller
from torchstore_strategies import SingletonStrategy


def waiting_for_version_2(store: Controller) -> list[list[int]]:
    """Puts the versions 1, which is whole, and 3, which is partial and waits; who waits is told."""
    alone = Rank(store, "", 1)
    told: list[list[int]] = []
    assert alone.put(obj("a"), obj("b"), version=1) == 1
    assert store.waiting.add(["k"], 3, told.append) is not None
    assert alone.put(obj("b", b"3"), partial=True, version=3) == 3
    return told


def a_run_that_is_left_over(store: Controller, version: int = 0) -> Rank:
    """Of three participants one has put, lives no more, and another process has its rank; one has
    put and lives; the third one is about to put, and is returned.
    """
    first, second = (Rank(store, str(who), 3, rank=who) for who in range(2))
    first.put(tensor("w0"), version=version)
    second.put(tensor("w1"), version=version)
    first.die()
    first.again()
    return Rank(store, "2", 3, rank=2)


def test_a_version_on_its_way_is_given_up(store: Controller) -> None:
    writer = Rank(store, "0", 2)
    writing = writer.begin(tensor("w"), version=2)
    told = waiting_for_version_2(store)
    assert (newest(store), told) == (1, [])
    writer.abort(writing)
    assert (newest(store), told) == (3, [[3]])
    assert content(store) == {"a": b"1", "b": b"3"}


def test_a_version_on_its_way_is_left_over(store: Controller) -> None:
    last = a_run_that_is_left_over(store, version=2)
    told = waiting_for_version_2(store)
    assert (newest(store), told) == (1, [])
    writing = last.begin(tensor("w2"))
    assert (newest(store), told) == (3, [[3]])
    assert pending(store) == [(4, [], ["2"])]
    assert last.commit(writing) == 4


def test_a_version_on_its_way_is_lost_with_a_volume() -> None:
    with controller_of(SingletonStrategy(), 1 << 16, 1 << 16) as store:
        Rank(store, "0", 2).put(tensor("w"), version=2)
        told = waiting_for_version_2(store)
        assert (newest(store), told) == (1, [])
        store.lose_volume(0, "it is gone")
        assert (newest(store), told) == (3, [[3]])


def test_a_put_that_is_refused_drops_nothing(store: Controller) -> None:
    """What is left over is no base of a partial version; but only a put that comes drops it."""
    last = a_run_that_is_left_over(store)
    before = pending(store)
    assert before == [(1, ["0", "1"], [])]
    with pytest.raises(KeyNotFoundError, match="the version before"):
        last.put(tensor("w2"), partial=True)
    assert pending(store) == before
    assert last.put(tensor("w2")) == 2
    assert pending(store) == [(2, ["2"], [])]
