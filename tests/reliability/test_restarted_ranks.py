"""Ranks that were killed in the middle of a publish and come back, one moment after the other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from tests.reliability import publishers
from tests.reliability.harness import Account, Child, account, kill, settled
from tests.reliability.publishers import KEY, KINDS, RANKS, pending, publish_all, published
from tests.support import until

import torchstore_core as ts

WAYS = pytest.mark.parametrize("explicit", [False, True], ids=["counted", "explicit"])


class Rank(Child):
    """A rank that publishes at the test's word."""

    def __init__(self, address: str, kind: str, rank: int, *, explicit: bool = False) -> None:
        super().__init__(publishers.obey, address, kind, rank)
        self._explicit = explicit

    async def do(self, what: str, number: int, version: int) -> Any:
        """Tell it; its answer."""
        self.tell((what, number, version if self._explicit else None))
        return await self.said()

    async def put(self, number: int, version: int) -> Any:
        """A publish: the version that it became, or the name of the error."""
        return await self.do("put", number, version)

    async def begin(self, number: int, version: int) -> None:
        """A publish up to the moment before its commit."""
        assert await self.do("begin", number, version) == "begun"


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """Ends the processes of a test."""
    with ExitStack() as stack:
        yield stack


async def run_of(stack: ExitStack, address: str, kind: str, *, explicit: bool) -> list[Rank]:
    """All ranks of a run."""
    ranks = [
        stack.enter_context(Rank(address, kind, rank, explicit=explicit)) for rank in range(RANKS)
    ]
    for rank in ranks:
        assert await rank.said() == "ready"
    return ranks


async def a_new_key() -> int:
    """Its first version."""
    ref = await ts.put(KEY, "deleted keys do not begin at 1 again")
    await ts.delete(KEY)
    return ref.version + 1


async def nobody_writes() -> bool:
    """Whether the server knows that all that was killed is gone."""
    seen = await account()
    return seen.sessions == 1 and not seen.unfinished


@pytest.mark.parametrize("first", range(RANKS))
@WAYS
@pytest.mark.parametrize("generation", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
async def test_what_one_rank_put_before_all_were_killed_is_not_completed_by_the_next_run(
    shared: ts.Client, stack: ExitStack, kind: str, generation: int, explicit: bool, first: int
):
    version = await a_new_key()
    before = 0
    old = await run_of(stack, shared.address, kind, explicit=explicit)
    if generation == 2:
        before = 1001
        assert [await rank.put(before, version) for rank in old] == [version] * 2
        version += 1
    assert await old[0].put(1002, version) == version
    await old[1].begin(1002, version)
    for rank in old:
        rank.kill()
    await until(nobody_writes)

    new = await run_of(stack, shared.address, kind, explicit=explicit)
    used: set[int] = set()
    for number in range(2001, 2004):
        one = await new[first].put(number, version)
        assert await published(kind) == before
        assert await new[1 - first].put(number, version) == one
        assert await published(kind) == number
        assert not await pending()
        before, version = number, one + 1
        used.add((await account()).used)
    assert len(used) == 1
    for rank in new:
        rank.kill()
    await ts.delete(KEY)
    await settled(Account(1, 0))
