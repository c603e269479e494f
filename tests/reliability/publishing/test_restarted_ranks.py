"""Ranks that were killed in the middle of a publish and come back, one moment after the other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from tests.reliability import children
from tests.reliability.harness import Account, Child, account, kill, settled
from tests.reliability.publishing import publishers
from tests.reliability.publishing.publishers import KEY, KINDS, pending, publish_all, published
from tests.reliability.publishing.ranks import Rank, run_of
from tests.support import until

import torchstore_core as ts

WAYS = pytest.mark.parametrize("explicit", [False, True], ids=["counted", "explicit"])


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """Ends the processes of a test."""
    with ExitStack() as stack:
        yield stack


async def a_new_key() -> int:
    """Its first version."""
    ref = await ts.put(KEY, "deleted keys do not begin at 1 again")
    await ts.delete(KEY)
    return ref.version + 1


async def nobody_writes() -> bool:
    """Whether the server knows that all that was killed is gone."""
    seen = await account()
    return seen.sessions == 1 and not seen.unfinished


async def nobody_reads() -> bool:
    """Whether the leases of tensors that are gone have ended, too."""
    return not (await account()).leased


@WAYS
@pytest.mark.parametrize("generation", [1, 2])
@pytest.mark.parametrize(("kind", "first"), [("state dict", 0), ("stages", 1), ("one tensor", 1)])
async def test_what_one_rank_put_before_all_were_killed_is_not_completed_by_the_next_run(
    shared: ts.Client, stack: ExitStack, kind: str, first: int, generation: int, explicit: bool
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
        await until(nobody_reads)
        used.add((await account()).used)
    assert len(used) == 1
    await nothing_is_left(new)


async def nothing_is_left(ranks: list[Rank]) -> None:
    """All that the store held was for the one key."""
    for rank in ranks:
        rank.kill()
    await ts.delete(KEY)
    await settled(Account(1, 0), 5)


@pytest.mark.parametrize("kind", KINDS)
async def test_what_a_rank_had_put_ahead_of_the_others_is_not_completed_by_the_next_run(
    shared: ts.Client, stack: ExitStack, kind: str
):
    version = await a_new_key()
    old = await run_of(stack, shared.address, kind)
    assert [await rank.put(1001, version) for rank in old] == [version] * 2
    for number in (1002, 1003, 1004):
        version += 1
        assert await old[0].put(number, version) == version
    for rank in old:
        rank.kill()
    await until(nobody_writes)
    assert len(await pending()) == 3

    new = await run_of(stack, shared.address, kind)
    for ahead in range(3):
        assert await new[1].put(2002 + ahead, version - 2 + ahead) == version - 2 + ahead
        assert await published(kind) == 1001
    for ahead in range(3):
        assert await new[0].put(2002 + ahead, version - 2 + ahead) == version - 2 + ahead
        assert await published(kind) == 2002 + ahead
    assert not await pending()
    await nothing_is_left(new)


@WAYS
@pytest.mark.parametrize("kind", KINDS)
async def test_a_rank_that_had_put_nothing_does_not_complete_the_last_run_either(
    shared: ts.Client, stack: ExitStack, kind: str, explicit: bool
):
    """It is new to the store, but the other one is not: that has come back."""
    version = await a_new_key()
    old = await run_of(stack, shared.address, kind, explicit=explicit)
    assert await old[0].put(1001, version) == version
    assert await old[0].put(1002, version + 1) == version + 1
    for rank in old:
        rank.kill()
    await until(nobody_writes)
    new = await run_of(stack, shared.address, kind, explicit=explicit)
    first = await new[0].put(2001, version)
    assert await new[1].put(2001, version) == first
    assert await published(kind) == 2001
    assert await new[1].put(2002, version + 1) == first + 1
    assert await published(kind) == 2001
    assert await new[0].put(2002, version + 1) == first + 1
    assert await published(kind) == 2002
    await nothing_is_left(new)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_killed_process_is_dead_though_a_forked_child_of_it_lives_on(
    shared: ts.Client, stack: ExitStack, kind: str
):
    version = await a_new_key()
    old = await run_of(stack, shared.address, kind)
    assert [await rank.put(1001, version) for rank in old] == [version] * 2
    old[0].tell("fork")
    forked = await old[0].said()
    try:
        version += 1
        assert await old[0].put(1002, version) == version
        await old[1].begin(1002, version)
        for rank in old:
            rank.kill()

        async def nobody_writes() -> bool:
            return not any(p.writing for p in await pending())

        await until(nobody_writes)
        new = await run_of(stack, shared.address, kind)
        assert await new[1].put(2002, version) == version
        assert await published(kind) == 1001
        assert await new[0].put(2002, version) == version
        assert await published(kind) == 2002
    finally:
        kill(forked)
    await nothing_is_left(new)


async def test_ranks_without_a_name_go_on_after_a_restart(shared: ts.Client, stack: ExitStack):
    """They are new to the store; that others of their kind were further does not hold them up."""
    version = await a_new_key()
    for number in (1001, 1002):
        run = await run_of(stack, shared.address, "state dict", explicit=False, named=False)
        for _ in range(3):
            assert [await rank.put(number, 0) for rank in run] == [version] * 2
            assert await published("state dict") == number
            number += 1
            version += 1
        for rank in run:
            rank.kill()
        await until(nobody_writes)
    await nothing_is_left(run)


@WAYS
@pytest.mark.parametrize("kind", KINDS)
async def test_what_a_rank_put_before_it_ended_counts_for_those_that_lived_beside_it(
    shared: ts.Client, stack: ExitStack, kind: str, explicit: bool
):
    version = await a_new_key()
    ranks = await run_of(stack, shared.address, kind, explicit=explicit)
    await ranks[1].begin(1001, version)
    ranks[1].kill()
    ranks[1] = stack.enter_context(Rank(shared.address, kind, 1, explicit=explicit))
    assert await ranks[1].said() == "ready"
    for number in (1001, 1002):
        assert [await rank.put(number, version) for rank in ranks] == [version] * 2
        version += 1
    assert await ranks[0].put(1003, version) == version
    ranks[0].kill()
    await until(lambda: sessions(2))
    assert await ranks[1].put(1003, version) == version
    assert await published(kind) == 1003
    await nothing_is_left(ranks)


async def sessions(expected: int) -> bool:
    """Whether so many processes are at the store."""
    return (await account()).sessions == expected


@WAYS
@pytest.mark.parametrize("kind", KINDS)
async def test_processes_one_after_the_other_make_one_version_though_one_of_them_was_killed(
    shared: ts.Client, stack: ExitStack, kind: str, explicit: bool
):
    version = await a_new_key()
    before = 0
    for number in (1001, 1002):
        for rank, ends in ((0, "put"), (1, "begin"), (1, "put")):
            with Rank(shared.address, kind, rank, explicit=explicit) as process:
                assert await process.said() == "ready"
                assert await published(kind) == before
                if ends == "put":
                    assert await process.put(number, version) == version
                else:
                    await process.begin(number, version)
            await until(nobody_writes)
        before = number
        assert await published(kind) == number
        version += 1
    await nothing_is_left([])


@pytest.mark.parametrize("kind", KINDS)
async def test_memory_of_a_version_that_is_never_finished_comes_back_with_the_next_one(
    shared: ts.Client, stack: ExitStack, kind: str
):
    version = await publish_all(kind, 1001)
    one = (await account()).used
    ranks = await run_of(stack, shared.address, kind)
    for ahead in (1, 2):
        assert await ranks[0].put(1001 + ahead, version + ahead) == version + ahead
    await ranks[1].begin(1002, version + 1)
    seen = await account()
    assert seen.used >= 2 * one
    assert 0 < seen.unfinished < one
    ranks[1].kill()
    await until(lambda: sessions(2))
    seen = await account()
    assert one < seen.used < 3 * one
    assert seen.unfinished == 0
    assert await published(kind) == 1001
    assert [p.version for p in await pending()] == [version + 1, version + 2]
    # Whoever publishes it.
    assert await publish_all(kind, 1004, version + 3) == version + 3
    await settled(Account(2, one))
    assert await pending() == []
    assert await published(kind) == 1004
    await nothing_is_left(ranks)


async def test_a_replica_that_comes_back_does_not_catch_up(shared: ts.Client, stack: ExitStack):
    """Others made the versions while it was away. One that was there the whole time, and only is
    slower, puts what they have put.
    """
    version = await a_new_key()

    def replica(at: int) -> Child:
        return stack.enter_context(Child(publishers.replicate, shared.address, at))

    async def put(child: Child, number: int) -> int:
        child.tell(number)
        return int(await child.said())

    async def now() -> int:
        return children.uniform(await ts.get(KEY))

    replicas = [replica(0), replica(1)]
    assert [await put(each, 1) for each in replicas] == [version] * 2
    for ahead in (1, 2, 3):
        assert await put(replicas[0], 1 + ahead) == version + ahead
        assert await now() == 1 + ahead
    assert await put(replicas[1], 2) == version + 1
    assert await now() == 4
    replicas[1].kill()
    await until(lambda: sessions(2))
    replicas[1] = replica(1)
    assert await put(replicas[1], 5) == version + 4
    assert await now() == 5
    assert await put(replicas[0], 5) == version + 4
    assert await put(replicas[0], 6) == version + 5
    assert await now() == 6
    for each in replicas:
        each.kill()
    await nothing_is_left([])
