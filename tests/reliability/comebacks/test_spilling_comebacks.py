"""A server that is killed while values are on disk, or on their way, comes back with them."""

from __future__ import annotations

import asyncio
import functools
import gc
import os
import random
import signal
from pathlib import Path

import pytest
import torch
from tests.api.full_memory.test_random_use import User
from tests.object_storage.object_store import BUCKET, object_store
from tests.reliability.harness import MB, directory_of, is_running, kill
from tests.support import running_store, turn, until

import torchstore_core as ts

SMALL = 64
_SOME = torch.randint(0, 1 << 60, (4 * MB // 8,), generator=torch.manual_seed(0))


def value(seed: int, nbytes: int = 4 * MB) -> torch.Tensor:
    """Numbers that no other seed has."""
    return (_SOME + seed).repeat(-(-nbytes // (4 * MB)))[: nbytes // 8]


async def lose_the_server() -> int:
    pid = (await ts.status()).controller_pid
    kill(pid)
    return pid


async def _nothing_is_left() -> bool:
    status = await ts.status()
    used = sum(v.used_bytes + v.leased_bytes + v.unfinished_bytes for v in status.volumes)
    spill = status.spill
    return not (used or spill.disk_bytes or spill.spilled or spill.clean_bytes)


def _done(tasks: list[asyncio.Future[None]], least: int) -> bool:
    return sum(task.done() for task in tasks) >= least


async def through(place: Path | str, capacity: int, count: int, nbytes: int, kills: int) -> None:
    """Put ``count`` values into a store that has no memory for them, and kill it meanwhile."""
    async with running_store(capacity=capacity, spill=place, timeout=60) as store:
        directory = directory_of(store.address)
        at_once = asyncio.Semaphore(3)

        async def put(at: int) -> None:
            async with at_once:
                ref = await ts.put(f"k{at}", value(at, nbytes), when_full="spillable", timeout=60)
                assert ref.version == 1

        async def check(at: int) -> None:
            async with at_once:
                got = await ts.get(f"k{at}", torch.empty(nbytes // 8, dtype=torch.int64))
                assert torch.equal(got, value(at, nbytes)), at

        lives = {(await ts.status()).controller_pid}
        for todo in (put, check):  # the second time it is killed while values are read
            tasks = [asyncio.ensure_future(todo(at)) for at in range(count)]
            step = count // (kills + 1)
            for turn in range(kills):
                await until(functools.partial(_done, tasks, (turn + 1) * step), 90)
                lives.add(await lose_the_server())
            await asyncio.gather(*tasks)
        lives.add((await ts.status()).controller_pid)
        assert len(lives) == 2 * kills + 1
        spill = (await ts.status()).spill
        assert spill.spilled_bytes >= count * nbytes - capacity
        assert spill.disk_bytes >= spill.spilled_bytes
        mapped = await ts.get("k0")
        await lose_the_server()
        assert torch.equal(mapped, value(0, nbytes))
        assert torch.equal(await ts.get("k1"), value(1, nbytes))
        if isinstance(place, Path):
            assert list(place.iterdir()) == []  # the file has no name
        await ts.delete_batch(await ts.keys())
        del mapped
        gc.collect()
        await until(_nothing_is_left, 10)
    assert not directory.exists()
    assert not any(map(is_running, lives))


async def test_what_is_acknowledged_is_read_back(tmp_path: Path) -> None:
    await through(tmp_path / "spill", 16 * MB, 16, 4 * MB, 2)


@pytest.mark.parametrize(("count", "kills"), [(8, 1), pytest.param(12, 2, marks=pytest.mark.soak)])
async def test_what_is_acknowledged_is_read_back_from_object_storage(
    count: int, kills: int
) -> None:
    with object_store() as objects:
        await through(f"s3://{BUCKET}/spilled", 16 * MB, count, 4 * MB, kills)
        assert not objects.listed()


@pytest.mark.soak
@pytest.mark.timeout(900)
async def test_two_gigabytes_through_a_small_store(tmp_path: Path) -> None:
    await through(tmp_path / "spill", 256 * MB, 64, 32 * MB, 6)


async def test_calls_that_wait_for_the_disk_go_on(tmp_path: Path) -> None:
    """They were delayed when the server died; small values and other clients' waits are there."""
    async with running_store(capacity=16 * MB, spill=tmp_path, timeout=60):
        for at in range(8):
            await ts.put(f"k{at}", value(at), when_full="spillable")
        pid = (await ts.status()).controller_pid
        os.kill(pid, signal.SIGSTOP)
        puts = [
            asyncio.ensure_future(ts.put(f"more{at}", value(at + 50), when_full="spillable"))
            for at in range(4)
        ]
        wanted = torch.empty(4 * MB // 8, dtype=torch.int64)
        get = asyncio.ensure_future(ts.get("k0", wanted))
        await turn()
        os.kill(pid, signal.SIGCONT)  # it begins with them, and dies at some point
        kill(pid)
        assert [ref.version for ref in await asyncio.gather(*puts)] == [1] * 4
        assert torch.equal(await get, value(0))
        for at in range(4):
            assert torch.equal(await ts.get(f"more{at}"), value(at + 50))


@pytest.mark.thorough
async def test_random_use_while_it_is_killed(tmp_path: Path) -> None:
    await used_while_killed(tmp_path, 5, 6)


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(5))
async def test_random_use_while_it_is_killed_for_long(tmp_path: Path, seed: int) -> None:
    await used_while_killed(tmp_path, seed, 60)


async def used_while_killed(folder: Path, seed: int, kills: int) -> None:
    """Clients that put, get, lease and delete, of which some values may be evicted."""
    chance = random.Random(seed)
    async with running_store(capacity=8 * MB, spill=folder, timeout=60):
        users = [User(name, seed + at) for at, name in enumerate("abc")]
        stop = asyncio.Event()

        async def work(user: User) -> None:
            while not stop.is_set():
                await user.step()
            user.check_held()

        working = [asyncio.ensure_future(work(user)) for user in users]
        for _ in range(kills):
            await asyncio.sleep(chance.uniform(0.2, 0.6))  # how long it may work
            assert not any(task.done() for task in working)
            await lose_the_server()
        stop.set()
        await asyncio.gather(*working)
        for user in users:
            for key in list(user.there):
                await user.get(key)
            user.check_held()
            user.held.clear()
        await ts.delete_batch(await ts.keys())
        gc.collect()
        await until(_nothing_is_left, 10)
