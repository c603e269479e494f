"""Publishes and their readers that are interrupted, have no room, lose the server, or end early."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import random
import signal
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from tests.reliability import children
from tests.reliability.harness import (
    MB,
    Account,
    Child,
    account,
    kill,
    settled,
    under_way,
    used_at_rest,
)
from tests.reliability.loops.test_cancellation import Way, cancel, give_up, leave, moments
from tests.reliability.loops.test_loops import LOOPS, NewLoop, open_fds
from tests.reliability.loops.test_steady import stays_flat
from tests.reliability.publishing import publishers
from tests.reliability.publishing.publishers import (
    KEY,
    KINDS,
    RANKS,
    WHOLE,
    Columns,
    Publisher,
    check,
    pending,
    publish_all,
    published,
)
from tests.reliability.publishing.ranks import run_of
from tests.support import before_commits, call_beside, running_store, stop, turn, until

import torchstore_core as ts
from torchstore_core.testing.timers import within

# Far less than any time-out here, however busy the machine is.
AT_ONCE_S = 5.0
CAPACITY = 128 * MB


@pytest.fixture
async def address() -> AsyncIterator[str]:
    async with running_store(capacity=CAPACITY) as client:
        yield client.address


# ---- interrupted --------------------------------------------------------------------------


@pytest.mark.parametrize(("way", "blocking"), [(cancel, True), (leave, False), (give_up, True)])
async def test_a_publish_that_is_interrupted_is_seen_whole_or_not_at_all(
    address: str, way: Way, blocking: bool
):
    mine = [Publisher("state dict", rank) for rank in range(RANKS)]
    numbers = current = 0
    made: list[dict[str, Any]] = []

    async def publish(**how: float) -> int:
        version = 0
        for publisher, state_dict in zip(mine, made, strict=True):
            version = await publisher.put_this(state_dict, numbers, blocking=blocking, **how)
        return version

    def make() -> None:
        nonlocal numbers
        numbers += 1
        made[:] = [publisher.state_dict(numbers) for publisher in mine]

    make()
    async for version in moments(way, publish):
        number = await published("state dict")
        assert number in ((current, numbers) if version is None else (numbers,))
        current = number
        make()
    used = await used_at_rest()
    await publish()
    await settled(Account(1, used))
    assert not await pending()


@pytest.mark.parametrize(
    ("way", "kind"),
    [(cancel, "state dict"), (leave, "one tensor"), (give_up, "state dict")],
)
async def test_a_get_that_is_interrupted_writes_no_more(address: str, way: Way, kind: str):
    await publish_all(kind, 5)
    before = await account()
    mine = Columns(kind)

    async for got in moments(way, mine.get):
        if got is None:
            seen = mine.copies()
            await ts.put("other", seen[0])  # a trip to the server: time to write, if anybody did
            assert all(map(torch.equal, seen, mine.copies()))
        else:
            assert mine.number_of(got) == 5
    assert mine.nothing_else_written()
    await ts.delete_batch(["other"])
    await settled(before)


async def test_a_zero_copy_get_that_is_interrupted_holds_nothing(address: str):
    await publish_all("state dict", 5)
    before = await account()

    async def get(**how: float) -> Any:
        return await ts.get_state_dict(KEY, **how)

    async for got in moments(cancel, get):
        assert got is None or check("state dict", got) == 5
        del got
    await settled(before)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_rank_that_is_interrupted_puts_the_same_version_again(address: str, kind: str):
    chance = random.Random(4)
    mine = [Publisher(kind, rank) for rank in range(RANKS)]
    await publish_all(kind, 1)
    before = await account()
    hit = 0
    took = 0.02
    for number in range(2, 14):
        await mine[1].put(number, number)
        state_dict = mine[0].state_dict(number)
        put = functools.partial(mine[0].put_this, state_dict, number)
        while await ts.latest_version(KEY) != number:
            async with call_beside():
                begun = time.perf_counter()
                done = await cancel(put, chance.uniform(0, took))
                ended = time.perf_counter()
            if done is None:
                hit += 1
            else:
                took = min(took, ended - begun)
        assert await published(kind) == number
        # It is there, also if the last put never heard of it; and cannot be put once more.
        with pytest.raises(ts.VersionGoneError):
            await put()
    assert hit > 3
    await settled(before)
    assert not await pending()


# ---- no room ------------------------------------------------------------------------------


async def fill_up(room: int) -> None:
    """Leave about so many bytes free."""
    number = 0
    while (spare := CAPACITY - (await account()).used - room) > 64 << 10:
        number += 1
        nbytes = min(spare, 16 * MB)
        while True:  # what is free need not lie in one piece
            try:
                await ts.put(f"ballast{number}", torch.empty(nbytes, dtype=torch.uint8))
                break
            except ts.StoreFullError:
                nbytes //= 2


@pytest.mark.parametrize("kind", KINDS)
async def test_a_publish_that_one_rank_has_no_room_for_stays_pending(address: str, kind: str):
    await publish_all(kind, 1)
    one = (await account()).used
    with ExitStack() as stack:
        ranks = await run_of(stack, address, kind)
        assert await ranks[0].put(2, 2) == 2
        await fill_up(one // 4)
        before = await account()
        for _ in range(3):
            assert await ranks[1].put(2, 2) == "StoreFullError"
            await settled(before)
            assert await published(kind) == 1
            assert [(p.committed, p.writing) for p in await pending()] == [(["0"], [])]
        await ts.delete_batch(await ts.keys("ballast"))
        assert await ranks[1].put(2, 2) == 2
        assert await published(kind) == 2
        # And if they give a version up.
        assert await ranks[1].put(3, 3) == 3
        await fill_up(one // 4)
        assert await ranks[0].put(3, 3) == "StoreFullError"
        await ts.delete_batch(await ts.keys("ballast"))
        assert [await rank.put(4, 4) for rank in ranks] == [4, 4]
        assert await published(kind) == 4
        await settled(Account(1 + RANKS, one))
        assert not await pending()


@pytest.mark.parametrize("full", [False, True])
async def test_a_rank_that_never_waits_for_the_others_does_not_fill_the_store(
    address: str, full: bool
):
    """The oldest of its versions, which wait for the others' parts, give way."""
    await publish_all("state dict", 1)
    one = (await account()).used
    mine = [Publisher("state dict", rank) for rank in range(RANKS)]
    assert await mine[0].put(2) == 2
    if full:
        await fill_up(2 * one)
    newest = 30
    for version in range(3, newest + 1):
        assert await mine[0].put(version) == version
    assert await published("state dict") == 1
    waiting = [p.version for p in await pending()]
    assert waiting == [*range(waiting[0], newest + 1)]
    assert 2 < waiting[0] < newest
    # The other one comes late for what has given way, and completes the rest.
    made: list[int] = []
    for version in range(2, newest + 1):
        assert await mine[1].put(version) == version
        if await ts.latest_version(KEY) == version:
            made.append(version)
    assert made[0] == waiting[0]
    assert made[-1] == newest
    assert full or made == waiting  # its own part needs room, too
    assert await published("state dict") == newest
    assert not await pending()
    await ts.delete_batch(await ts.keys("ballast"))
    await settled(Account(1, one))


# ---- the server is killed -----------------------------------------------------------------


def calls() -> dict[str, Callable[[], Awaitable[Any]]]:
    """Everything that can be under way."""
    mine = [Publisher(kind, 0) for kind in KINDS]
    columns = Columns("state dict")
    return {
        "put_state_dict": lambda: mine[0].put(9, 9),
        "put_state_dict in the background": lambda: mine[0].put(9, 9, blocking=False),
        "put of a shard": lambda: mine[1].put(9, 9),
        "get_state_dict": lambda: ts.get_state_dict(KEY),
        "get_state_dict in place": columns.read,
        "get_state_dict later": lambda: ts.get_state_dict(KEY, min_version=9),
        "get of an entry": lambda: ts.get(f"{KEY}/all"),
        "get of a dict": lambda: ts.get(KEY),
        "wait": lambda: ts.wait(KEY, min_version=9),
        "versions": lambda: ts.versions(KEY),
        "latest_version": lambda: ts.latest_version(KEY),
    }


async def test_every_call_under_way_fails_at_once_when_the_server_is_killed():
    async with running_store(capacity=CAPACITY, keeper=False):
        await publish_all("state dict", 1)
        held = await ts.get_state_dict(KEY)
        server = (await ts.status()).controller_pid
        with before_commits(lambda: stop(server)):  # nothing is answered any more
            begun = await ts.put_state_dict({"w": torch.ones(MB)}, "other", blocking=False)
        tasks = {name: asyncio.ensure_future(call()) for name, call in calls().items()}
        tasks["commit"] = asyncio.ensure_future(begun._result())
        done, _ = await asyncio.wait(tasks.values(), timeout=0.1)
        assert not done
        async with within(AT_ONCE_S):
            kill(server)
            await asyncio.wait(tasks.values())
        ends = {name: type(task.exception()) for name, task in tasks.items()}
        assert ends == dict.fromkeys(tasks, ts.StoreClosedError)
        assert begun.done()
        for call in calls().values():
            with pytest.raises(ts.StoreClosedError):
                await call()
        assert check("state dict", held) == 1


@pytest.mark.parametrize("seconds", [0.0, 0.02])
async def test_copies_under_way_end_when_the_server_is_killed(seconds: float):
    # Transposed bytes take long to copy.
    value = torch.ones(8192, 8192, dtype=torch.uint8)
    async with running_store(capacity=4 * value.nbytes, keeper=False):
        await ts.put_state_dict({"w": value}, KEY)
        server = (await ts.status()).controller_pid
        mine = torch.zeros_like(value).t()

        async def put(*, blocking: bool) -> None:
            made = await ts.put_state_dict({"w": value.t()}, "other", blocking=blocking)
            if isinstance(made, ts.PendingPut):  # it had no more to copy
                await made

        async def all_three() -> None:
            works = put(blocking=True), put(blocking=False), ts.get_state_dict(KEY, {"w": mine})
            tasks[:] = map(asyncio.ensure_future, works)
            await asyncio.wait(tasks)

        async def copying() -> bool:
            seen = await account()
            return seen.unfinished == 2 * value.nbytes and seen.leased == value.nbytes

        tasks: list[asyncio.Future[Any]] = []
        waiting = await under_way(all_three, copying, seconds)
        *calls, reading = tasks
        async with within(2 * AT_ONCE_S):
            kill(server)
            for call in calls:
                with pytest.raises(ts.StoreClosedError):
                    await call
            # What is mapped stays readable: whoever reads it may come to the end.
            with contextlib.suppress(ts.StoreClosedError):
                assert (await reading)["w"] is mine
                assert children.uniform(mine) == 1
        await waiting


# ---- processes and loops that end early ---------------------------------------------------


async def test_a_process_that_ends_before_its_commit_has_published_all_or_nothing(address: str):
    await ts.put_state_dict({"w": torch.zeros(WHOLE, dtype=torch.int32), "number": 0}, KEY)
    before = await account()
    current = 0
    for number, moment in enumerate(["ends", "killed at once", "killed a step later"] * 2, 1):
        with Child(publishers.publish_and_end, address, number, moment) as child:
            assert await child.ended() == (0 if moment == "ends" else -signal.SIGKILL)
        await settled(before)
        got = await ts.get_state_dict(KEY)
        assert children.uniform(got["w"]) == got["number"]
        assert got["number"] in (current, number)
        current = got["number"]
        del got
    await settled(before)


@pytest.mark.parametrize("new_loop", LOOPS)
@pytest.mark.parametrize("end", ["closed", "all cancelled"])
def test_a_loop_that_ends_under_a_publish_leaves_nothing_behind(new_loop: NewLoop, end: str):
    value = torch.ones(MB)

    async def begin(number: int) -> ts.PendingPut | None:
        pending = await ts.put_state_dict({"w": value, "n": number}, KEY, blocking=False)
        if end == "closed":
            return pending
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        return None

    asyncio.run(ts.initialize(capacity=64 * MB, prefault=0))
    try:
        asyncio.run(begin_and_wait(value))
        used = asyncio.run(account()).used
        descriptors = threads = 0
        for number in range(5):
            loop = new_loop()
            held = loop.run_until_complete(begin(number))
            loop.close()
            del held, loop
            asyncio.run(ts.reset_client())
            gc.collect()  # a task that will never end is a cycle
            asyncio.run(settled(Account(1, used)))
            descriptors = descriptors or asyncio.run(open_fds())
            threads = threads or threading.active_count()
        asyncio.run(until(lambda: as_few_fds(descriptors)))
        asyncio.run(until(lambda: threading.active_count() <= threads))
        assert asyncio.run(ts.get(f"{KEY}/n")) in range(5)
    finally:
        asyncio.run(ts.shutdown())


async def as_few_fds(before: int) -> bool:
    """Whether there are no more descriptors than before."""
    return await open_fds() <= before


async def begin_and_wait(value: torch.Tensor) -> None:
    """A first publish, in the background too."""
    await (await ts.put_state_dict({"w": value, "n": -1}, KEY, blocking=False))


async def test_a_fork_under_a_publish_in_the_background(address: str):
    """Parent and child are one rank each."""
    await publish_all("state dict", 1)
    before = await account()
    mine = Publisher("state dict", 0)
    for number in range(2, 6):
        value = mine.state_dict(number)
        how = {"participants": RANKS, "participant": 0, "blocking": False}
        commit = await ts.put_state_dict(value, KEY, **how)
        assert isinstance(commit, ts.PendingPut)
        assert not commit.done()
        with Child(publishers.publish_here, 1, number, start="fork") as child:
            assert await child.said() == (await commit).version == number
            assert await published("state dict") == number
        await settled(before)
    assert not await pending()


# ---- old versions -------------------------------------------------------------------------


async def test_what_a_killed_reader_held_of_an_old_version_comes_back(address: str):
    for number in (1, 2):
        for rank in range(RANKS):
            await Publisher("state dict", rank).put(number, keep=2)
    two = (await account()).used
    with Child(publishers.hold_version, address, 1) as reader:
        assert await reader.said() == 1
        leased = (await account()).leased
        assert leased > 0
        for number in (3, 4):
            for rank in range(RANKS):
                await Publisher("state dict", rank).put(number, keep=2)
        assert await ts.versions(KEY) == [3, 4]
        await settled(Account(2, two + leased, leased))
        reader.tell("still there?")
        assert await reader.said() == 1
        reader.kill()
    await settled(Account(1, two))
    assert check("state dict", await ts.get_state_dict(KEY, version=3)) == 3
    with pytest.raises(ts.VersionGoneError):
        await ts.get_state_dict(KEY, version=1)


@pytest.mark.parametrize("there", [0, 1])
async def test_a_get_of_a_version_that_does_not_come_gives_up_and_writes_nothing(
    address: str, there: int
):
    for number in range(1, there + 1):
        await publish_all("state dict", number)
    await Publisher("state dict", 0).put(there + 1)  # not whole
    before = await account()
    mine = Columns("state dict")
    empty = mine.copies()
    ways: list[Way] = [cancel, leave, give_up]
    for at, seconds in enumerate([0.0, 1e-4, 1e-3, 0.02] * 6):
        get = functools.partial(mine.get, min_version=there + 1)
        assert await ways[at % len(ways)](get, seconds) is None
    assert all(map(torch.equal, mine.copies()[:2], empty[:2]))
    operations = (await ts.status()).operations
    assert operations["Wait"] - operations["Cancel"] <= 1
    assert await account() == before
    getting = asyncio.ensure_future(mine.get(min_version=there + 1))
    waiting = asyncio.ensure_future(ts.wait(f"{KEY}/all", min_version=there + 1))
    await turn()
    await Publisher("state dict", 1).put(there + 1)
    assert mine.number_of(await getting) == there + 1
    assert (await waiting)[f"{KEY}/all"].version == there + 1


# ---- many cycles --------------------------------------------------------------------------


@pytest.mark.soak
@pytest.mark.parametrize("cycles", [400, 30_000])
async def test_cycles_of_publishes_leave_nothing_behind(address: str, cycles: int):
    server = (await ts.status()).controller_pid
    with Child(publishers.publish_cycle, address, cycles) as child:
        await stays_flat(child, server, cycles, 180 + cycles / 50)
