"""Requests that wait for many keys: what each put costs meanwhile, and when they are answered."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.unit.collective.ranks import Rank, a_store, obj

from torchstore_core.server.controller import Controller
from torchstore_core.server.index.records import Stored


@pytest.fixture
def store() -> Iterator[Controller]:
    with a_store() as controller:
        yield controller


def test_a_put_under_requests_that_wait_for_many_keys_looks_at_few(store: Controller) -> None:
    looked: list[Stored] = []
    is_lost = store.lost_volumes.is_lost

    def counted(stored: Stored) -> bool:
        looked.append(stored)
        return is_lost(stored)

    store.waiting._is_lost = counted
    names = [f"k{number}" for number in range(500)]
    some: list[list[bool]] = []
    every: list[list[int]] = []
    store.waiting.add_any([(name, 0, -1) for name in names], len(names), some.append)
    store.waiting.add(names, 1, every.append)
    rank = Rank(store)
    for name in names:
        assert not some
        assert not every
        rank.begin(obj(name))
    assert some == [[True] * len(names)]
    assert every == [[1] * len(names)]
    assert len(looked) <= 5 * len(names)


def test_a_key_that_changes_again_and_again_is_one_of_those_that_are_waited_for(
    store: Controller,
) -> None:
    some: list[list[bool]] = []
    store.waiting.add_any([(name, 0, -1) for name in "abcd"], 3, some.append)
    rank = Rank(store)
    for name in "aaaabbbb":
        rank.begin(obj(name))
    assert some == []
    rank.begin(obj("d"))
    assert some == [[True, True, False, True]]


def test_one_put_can_be_all_that_is_waited_for(store: Controller) -> None:
    some: list[list[bool]] = []
    store.waiting.add_any([("a", 1, -1), ("a", 2, -1)], 2, some.append)
    Rank(store).begin(obj("a"), version=2)
    assert some == [[True, True]]
