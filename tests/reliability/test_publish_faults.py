"""Publishes and their readers that are interrupted, have no room, lose the server, or end early."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from tests.reliability import children
from tests.reliability.harness import MB, Account, account, kill, settled
from tests.reliability.publishers import (
    KEY,
    KINDS,
    RANKS,
    Columns,
    Publisher,
    check,
    pending,
    publish_all,
    published,
)
from tests.reliability.ranks import run_of
from tests.reliability.test_cancellation import Way, cancel, give_up, leave, moments
from tests.support import running_store, until

import torchstore_core as ts

AT_ONCE_S = 1.0
CAPACITY = 128 * MB


@pytest.fixture
async def address() -> AsyncIterator[str]:
    async with running_store(capacity=CAPACITY) as client:
        yield client.address


# ---- interrupted --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("way", "blocking"), [(cancel, True), (cancel, False), (leave, False), (give_up, True)]
)
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
    used = (await account()).used
    await publish()
    await settled(Account(1, used))
    assert not await pending()


@pytest.mark.parametrize(
    ("way", "kind"),
    [
        (cancel, "state dict"),
        (cancel, "one tensor"),
        (leave, "one tensor"),
        (give_up, "state dict"),
    ],
)
async def test_a_get_that_is_interrupted_writes_no_more(address: str, way: Way, kind: str):
    await publish_all(kind, 5)
    before = await account()
    mine = Columns(kind)

    async for got in moments(way, mine.get):
        if got is None:
            seen = mine.copies()
            await ts.put("other", seen)
            assert all(map(torch.equal, seen, mine.copies()))
        else:
            assert mine.number_of(got) == 5
    assert mine.nothing_else_written()
    await ts.delete_batch(["other"])
    await settled(before)


@pytest.mark.parametrize("way", [cancel, leave])
async def test_a_zero_copy_get_that_is_interrupted_holds_nothing(address: str, way: Way):
    await publish_all("state dict", 5)
    before = await account()

    async def get(**how: float) -> Any:
        return await ts.get_state_dict(KEY, **how)

    async for got in moments(way, get):
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
    took = 1.0
    for number in range(2, 14):
        await mine[1].put(number, number)
        state_dict = mine[0].state_dict(number)
        put = functools.partial(mine[0].put_this, state_dict, number)
        while await published(kind) != number:
            assert await published(kind) == number - 1
            begun = time.perf_counter()
            if await cancel(put, chance.uniform(0, took)) is None:
                hit += 1
            else:
                took = min(took, time.perf_counter() - begun)
        # It is there, also if the last put never heard of it; and cannot be put once more.
        with pytest.raises(ts.VersionGoneError):
            await put()
    assert hit > 3
    await settled(before)
    assert not await pending()


# ---- no room ------------------------------------------------------------------------------


async def fill_up(room: int) -> None:
    """Leave less than so many bytes free."""
    number = 0
    while (free := CAPACITY - (await account()).used) >= room:
        number += 1
        nbytes = min(free, 16 * MB)
        while True:  # what is free need not lie in one piece
            try:
                await ts.put(f"ballast{number}", torch.empty(nbytes, dtype=torch.uint8))
                break
            except ts.StoreFullError:
                nbytes -= room // 4


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
            assert await account() == before
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


async def test_a_rank_that_never_waits_for_the_others_fills_the_store_but_harms_no_reader(
    address: str,
):
    """Each of its versions waits for the others' parts. Who publishes must `wait` for its version
    now and then.
    """
    await publish_all("state dict", 1)
    one = (await account()).used
    mine = [Publisher("state dict", rank) for rank in range(RANKS)]
    ahead = 1
    with contextlib.suppress(ts.StoreFullError):
        while ahead < 3 * CAPACITY // one:
            ahead = await mine[0].put(ahead + 1)
    assert CAPACITY // one < ahead < 3 * CAPACITY // one
    assert [p.version for p in await pending()] == [*range(2, ahead + 1)]
    with pytest.raises(ts.StoreFullError):
        await mine[1].put(2)
    assert await published("state dict") == 1
    # A new start.
    await ts.delete(KEY)
    await settled(Account(1, 0))
    assert await publish_all("state dict", 9) > ahead
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


async def test_every_call_under_way_fails_at_once_when_the_server_is_killed(address: str):
    await publish_all("state dict", 1)
    held = await ts.get_state_dict(KEY)
    server = (await ts.status()).controller_pid
    begun = await ts.put_state_dict({"w": torch.ones(MB)}, "other", blocking=False)
    os.kill(server, signal.SIGSTOP)  # before the commit: nothing is answered any more
    tasks = {name: asyncio.ensure_future(call()) for name, call in calls().items()}
    tasks["commit"] = asyncio.ensure_future(begun._result())
    done, _ = await asyncio.wait(tasks.values(), timeout=0.1)
    assert not done
    start = time.monotonic()
    kill(server)
    await asyncio.wait(tasks.values())
    assert time.monotonic() - start < AT_ONCE_S
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
    async with running_store(capacity=4 * value.nbytes):
        await ts.put_state_dict({"w": value}, KEY)
        mine = torch.zeros_like(value).t()
        calls = [
            asyncio.ensure_future(ts.put_state_dict({"w": value.t()}, "other", blocking=blocking))
            for blocking in (True, False)
        ]
        reading = asyncio.ensure_future(ts.get_state_dict(KEY, {"w": mine}))

        async def copying() -> bool:
            seen = await account()
            return seen.unfinished == 2 * value.nbytes and seen.leased == value.nbytes

        await until(copying)
        await asyncio.sleep(seconds)
        start = time.monotonic()
        kill((await ts.status()).controller_pid)
        for call in calls:
            with pytest.raises(ts.StoreClosedError):
                await call
        # What is mapped stays readable: whoever reads it may come to the end.
        with contextlib.suppress(ts.StoreClosedError):
            assert (await reading)["w"] is mine
            assert children.uniform(mine) == 1
        assert time.monotonic() - start < 2 * AT_ONCE_S
