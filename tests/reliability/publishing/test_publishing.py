"""Two ranks publish one version after the other; readers of another layout see whole ones only."""

from __future__ import annotations

import asyncio
import functools
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack

import pytest
from tests.reliability.harness import MB, Account, Child, account, fds, settled
from tests.reliability.publishing import publishers
from tests.reliability.publishing.publishers import (
    KEY,
    KINDS,
    RANKS,
    pending,
    publish_all,
    published,
)
from tests.reliability.publishing.ranks import Readers
from tests.support import halt, running_store, until

import torchstore_core as ts

# One whole publish takes 10 MB. Eight can be alive: the newest, two on their way, the one that each
# reader reads, and two that the zero-copy reader holds; a killed process's for a moment, and what
# a reader on a busy machine has let go without the server knowing it yet.
CAPACITY = 512 * MB
# Far below what two slow cores do, far above what a stuck reader does.
MIN_READS = 30
RUN = 100_000


@pytest.fixture
async def server() -> AsyncIterator[int]:
    """A store; its server's pid."""
    async with running_store(capacity=CAPACITY):
        yield (await ts.status()).controller_pid


async def advanced(by: int) -> int:
    """Wait for so many new versions; the newest."""
    target = await ts.latest_version(KEY) + by
    return (await ts.wait(KEY, min_version=target, timeout=20))[KEY].version


async def have_seen_enough(readers: Readers) -> bool:
    """Whether there were so many publishes, and each reader has seen several of them."""
    seen = await readers.seen()
    return await ts.latest_version(KEY) > MIN_READS and all(
        reads >= MIN_READS and changes >= MIN_READS // 2 for reads, changes, _ in seen
    )


async def stopped(ranks: Sequence[Child]) -> int:
    """The ranks publish no more; the highest version that one of them began."""
    for rank in ranks:
        rank.tell("end")
    return max([await rank.said() for rank in ranks])


async def nothing_is_left(kind: str, server: int, before: Account, descriptors: int) -> None:
    """The next publish leaves the store as it was: one version, no leases, no unfinished puts."""
    version = 1 + max([await ts.latest_version(KEY), *(p.version for p in await pending())])
    await publish_all(kind, 7, version)
    assert await published(kind) == 7
    await settled(before, 5)
    assert not await pending()
    # The log that it has written anew, if it has, lasts until the server has been idle for a while.
    await until(lambda: fds(server) <= descriptors, 20)


# ---- while all goes well ------------------------------------------------------------------


@pytest.mark.parametrize("kind", [KINDS[0], pytest.param(KINDS[1], marks=pytest.mark.soak)])
async def test_readers_of_another_layout_see_whole_versions_in_order(server: int, kind: str):
    address = await ts.address()
    assert await publish_all(kind, 1) == 1
    before, descriptors = await account(), fds(server)
    with ExitStack() as stack:
        readers = Readers(stack, address, kind)
        ranks = [
            stack.enter_context(Child(publishers.publish, address, kind, rank, 1, 1, False))
            for rank in range(RANKS)
        ]
        await until(lambda: have_seen_enough(readers), 60)
        last = await stopped(ranks)
        newest = await ts.latest_version(KEY)
        assert last - 2 <= newest <= last  # as far ahead as a rank goes
        # The n-th publish of each rank is the n-th version.
        await readers.reach(newest)
        assert [number for _, _, number in await readers.seen()] == [newest] * 2
        await readers.end()
    await nothing_is_left(kind, server, before, descriptors)


# ---- while ranks are killed ---------------------------------------------------------------


@pytest.mark.parametrize("kind", [pytest.param(KINDS[0], marks=pytest.mark.soak), KINDS[1]])
async def test_readers_go_on_with_the_last_whole_version_while_a_rank_is_dead(
    server: int, kind: str
):
    await ranks_are_killed(server, kind, seconds=0.0)


@pytest.mark.soak
@pytest.mark.parametrize("kind", KINDS)
async def test_ranks_are_killed_for_minutes(server: int, kind: str):
    await ranks_are_killed(server, kind, seconds=180.0)


async def ranks_are_killed(server: int, kind: str, seconds: float) -> None:
    """One at a time, in the middle of publishing; it comes back and goes on. Four times, and until
    the seconds are over.
    """
    chance = random.Random(5)
    address = await ts.address()
    await publish_all(kind, 1)
    before, descriptors = await account(), fds(server)
    in_the_middle = rounds = 0
    with ExitStack() as stack:

        def start(rank: int) -> Child:
            args = (address, kind, rank, 0, 1, True)
            return stack.enter_context(Child(publishers.publish, *args))

        readers = Readers(stack, address, kind)
        ranks = [start(rank) for rank in range(RANKS)]
        end = time.monotonic() + seconds
        while rounds < 4 or time.monotonic() < end:
            rounds += 1
            await advanced(2)
            victim = chance.randrange(RANKS)
            in_the_middle += await killed(ranks[victim], victim, chance, writing=rounds % 2 > 0)
            # The other one goes on until it is too far ahead.
            await until(lambda: waits(1 - victim))  # noqa: B023
            await until(functools.partial(has_nothing_pending, victim))
            newest = await ts.latest_version(KEY)
            await readers.go_on()
            assert [number for _, _, number in await readers.seen()] == [newest] * 2
            ranks[victim] = start(victim)
        await advanced(2)
        last = await stopped(ranks)
        assert last - 2 <= await ts.latest_version(KEY) <= last
        await readers.go_on()
        await readers.end()
    assert in_the_middle >= rounds // 2 > 1
    await nothing_is_left(kind, server, before, descriptors)


async def killed(child: Child, rank: int, chance: random.Random, *, writing: bool) -> bool:
    """Kill a rank at a random moment (``writing``: of a put); whether that was in a put.

    It is stopped first, so that there is time to look.
    """
    while True:
        await asyncio.sleep(chance.uniform(0, 0.02))
        await halt(child.pid)
        if any(str(rank) in p.writing for p in await pending()):
            child.kill()
            return True
        if not writing:
            child.kill()
            return False
        os.kill(child.pid, signal.SIGCONT)


async def has_nothing_pending(rank: int) -> bool:
    """Whether there is nothing of a rank that was killed in a version that is not whole."""
    return not any(str(rank) in p.committed + p.writing for p in await pending())


async def waits(rank: int) -> bool:
    """Whether a rank is as far ahead as it goes without the others."""
    target = await ts.latest_version(KEY) + 2
    return any(p.version == target and p.committed == [str(rank)] for p in await pending())


# ---- while all ranks start again ----------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "explicit"),
    [
        (KINDS[0], False),
        pytest.param(KINDS[0], True, marks=pytest.mark.soak),
        pytest.param(KINDS[1], False, marks=pytest.mark.soak),
        pytest.param(KINDS[1], True, marks=pytest.mark.soak),
    ],
)
async def test_versions_of_two_runs_are_never_mixed(server: int, kind: str, explicit: bool):
    await all_are_restarted(server, kind, explicit, rounds=4)


@pytest.mark.soak
@pytest.mark.parametrize("explicit", [False, True], ids=["counted", "explicit"])
@pytest.mark.parametrize("kind", KINDS)
async def test_all_are_restarted_for_minutes(server: int, kind: str, explicit: bool):
    await all_are_restarted(server, kind, explicit, rounds=150)


async def all_are_restarted(server: int, kind: str, explicit: bool, rounds: int) -> None:
    """All ranks are killed in the middle of publishing, and begin a new run, in any order."""
    chance = random.Random(11)
    address = await ts.address()
    await publish_all(kind, 1)
    before, descriptors = await account(), fds(server)
    with ExitStack() as stack:
        readers = Readers(stack, address, kind)
        for number in range(1, rounds + 1):
            ranks: dict[int, Child] = {}
            for rank in in_any_order(chance):
                args = (address, kind, rank, number * RUN, 1, explicit)
                ranks[rank] = stack.enter_context(Child(publishers.publish, *args))
            await readers.reach(number * RUN)
            await advanced(2)
            if number == rounds:
                break
            writing = number % 2 > 0
            for rank in in_any_order(chance):
                await killed(ranks[rank], rank, chance, writing=writing)
                writing = False  # the other one may not even be able to begin
        await stopped([*ranks.values()])
        await readers.go_on()
        await readers.end()
    await nothing_is_left(kind, server, before, descriptors)


def in_any_order(chance: random.Random) -> list[int]:
    """The ranks."""
    return chance.sample(range(RANKS), RANKS)
