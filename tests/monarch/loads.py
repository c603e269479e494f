"""Workers of a job under load, while parts of its store are killed."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Awaitable, Callable

from tests.monarch import acts
from tests.monarch.jobs import Job
from tests.reliability.comebacks import loads
from tests.support import until

import torchstore_core as ts

__all__ = ["idle", "under_load"]

_TASKS = 3  # of a worker


class _Load:
    """What this process does until it is told to stop."""

    stopped = False
    begun = 0  # calls, of all tests

    def poll(self) -> bool:
        self.begun += not self.stopped
        return self.stopped


_load = _Load()


async def _work(index: int, seed: int) -> tuple[int, float]:
    """Put, get, delete and hold on keys of its own, and check all that comes; how many calls there
    were, and how long the longest took.
    """
    _load.stopped = False
    counts = await asyncio.gather(*[loads.one(_load, index, n, seed) for n in range(_TASKS)])  # type: ignore[arg-type]
    return sum(calls for calls, _ in counts), max(longest for _, longest in counts)


async def _stop() -> None:
    _load.stopped = True


async def _begun() -> int:
    return _load.begun


async def _advance(job: Job) -> None:
    """Wait until each worker has ended a call that it had begun, and begun others."""
    for n in (0, 1):
        more = await job.at(n, _begun) + _TASKS + 1

        async def advanced(at: int = n, more: int = more) -> bool:
            return bool(await job.at(at, _begun) >= more)

        await until(advanced, 30)


async def under_load(
    job: Job, kills: int, seed: int, lose: Callable[[Job], Awaitable[object]]
) -> None:
    """Kill something again and again while both workers put and get: no acknowledged write is lost,
    nothing is torn or older, nothing leaks.
    """
    print(f"{seed=}")
    chance = random.Random(seed)
    before = await job.root(acts.status)
    working = [asyncio.ensure_future(job.at(n, _work, n, seed, timeout=600)) for n in (0, 1)]
    for _ in range(kills):
        await _advance(job)
        await asyncio.sleep(chance.uniform(0, 0.5))  # whatever they do then
        await lose(job)
        for work in working:
            assert not work.done(), await work
    await _advance(job)
    for n in (0, 1):
        await job.at(n, _stop)
    counts = [await work for work in working]
    assert all(calls > kills for calls, _ in counts), (seed, counts)
    print(f"{kills} kills, {counts}")
    after = await job.root(acts.status)
    assert [v.pid for v in after.volumes] == [v.pid for v in before.volumes]
    await until(lambda: job.root(idle), 30)
    await job.root(_delete_all)
    await until(lambda: job.root(_empty), 30)  # references on their way have their grace
    await until(lambda: len(os.listdir(f"/proc/{after.controller_pid}/fd")) < 60)
    await until(lambda: len(os.listdir(f"/proc/{after.keeper_pid}/fd")) < 30)


async def idle() -> bool:
    return all(not (v.leased_bytes or v.unfinished_bytes) for v in (await ts.status()).volumes)


async def _empty() -> bool:
    return not any(v.used_bytes for v in (await ts.status()).volumes)


async def _delete_all() -> None:
    await ts.delete_batch([key for key in await ts.keys() if not key.count("/model/")])
