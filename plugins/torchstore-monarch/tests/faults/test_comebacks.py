"""A server of a job that is killed comes back, and its volumes and relays with it."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
from collections.abc import AsyncIterator, Iterable

import psutil
import pytest
import torch
from tests.monarch import acts
from tests.monarch.jobs import Job
from tests.monarch.losses import (
    AT_ONCE_S,
    MB,
    end_store,
    is_lost,
    leased_nothing,
    says_lost,
    try_get,
)
from tests.reliability.comebacks import loads
from tests.support import halt, until

import torchstore_core as ts
from torchstore_core.machine import copying
from torchstore_core.testing.timers import within

SPREAD = {"num_storage_volumes": 2, "strategy": "spread"}
_TASKS = 3  # of a worker under load
PAUSE_S = 5.0  # on a busy machine; see benchmarks for what it takes


@pytest.fixture
async def two_hosts(hosts: Job) -> AsyncIterator[Job]:
    """A worker on each of two hosts; the server is on a third."""
    yield hosts
    await end_store(hosts)


@pytest.fixture
async def one_host(job: Job) -> AsyncIterator[Job]:
    """One host, two workers."""
    yield job
    await end_store(job)


async def _lose_the_server(job: Job) -> int:
    """Kill it; its pid."""
    pid = int((await job.root(acts.status)).controller_pid)
    os.kill(pid, signal.SIGKILL)
    return pid


async def test_everything_is_there_again(one_host: Job) -> None:
    await one_host.root(acts.initialize, SPREAD)
    await _comes_back(one_host)


@pytest.mark.quick
async def test_everything_is_there_again_on_other_hosts(two_hosts: Job) -> None:
    """Their volumes and clients come through relays."""
    await two_hosts.root(acts.initialize_on_hosts, {"strategy": "spread"})
    await _comes_back(two_hosts)


async def _comes_back(job: Job) -> None:
    await job.at(0, acts.put_ones, "first", MB)
    await job.at(1, acts.put_ones, "second", MB, 2)
    await job.root(acts.put, "object", {"a": 1})
    held = await job.at(1, acts.put_ones_and_hold, "held")
    before = await job.root(acts.status)
    assert before.keeper_pid
    for _ in range(2):
        pid = await _lose_the_server(job)
        async with within(PAUSE_S):
            assert await job.at(0, acts.get_shape, "second") == ((MB,), [2])
        assert await job.at(1, acts.get_shape, "first") == ((MB,), [1])
        assert await job.root(acts.get, "object") == {"a": 1}
        assert await job.at(1, acts.held_sum, held) == MB
        after = await job.root(acts.status)
        assert after.controller_pid not in (0, pid)
        assert after.keeper_pid == before.keeper_pid
        assert after.incarnation == before.incarnation
        assert [v.pid for v in after.volumes] == [v.pid for v in before.volumes]
        assert [v.used_bytes for v in after.volumes] == [v.used_bytes for v in before.volumes]
        assert len(after.sessions) == len(before.sessions)
    await job.at(0, acts.put_ones, "first", MB, 3)
    assert await job.at(1, acts.get_shape, "first") == ((MB,), [3])


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


async def _under_load(job: Job, kills: int, seed: int) -> None:
    print(f"{seed=}")
    chance = random.Random(seed)
    before = await job.root(acts.status)
    working = [asyncio.ensure_future(job.at(n, _work, n, seed, timeout=600)) for n in (0, 1)]
    for _ in range(kills):
        await _advance(job)
        await asyncio.sleep(chance.uniform(0, 0.5))  # whatever they do then
        await _lose_the_server(job)
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
    await until(lambda: job.root(_idle), 30)
    await job.root(_delete_all)
    await until(lambda: job.root(_empty), 30)  # references on their way have their grace
    await until(lambda: len(os.listdir(f"/proc/{after.controller_pid}/fd")) < 60)
    await until(lambda: len(os.listdir(f"/proc/{after.keeper_pid}/fd")) < 30)


async def _idle() -> bool:
    return all(not (v.leased_bytes or v.unfinished_bytes) for v in (await ts.status()).volumes)


async def _empty() -> bool:
    return not any(v.used_bytes for v in (await ts.status()).volumes)


async def _delete_all() -> None:
    await ts.delete_batch([key for key in await ts.keys() if not key.count("/model/")])


@pytest.mark.parametrize("kills", [3, pytest.param(100, marks=pytest.mark.soak)])
@pytest.mark.timeout(900)
async def test_under_load(one_host: Job, kills: int) -> None:
    """No acknowledged write is lost, nothing is torn or older, nothing leaks."""
    await one_host.root(acts.initialize, {**SPREAD, "capacity": 1 << 30})
    await _under_load(one_host, kills, random.randrange(1 << 30))


@pytest.mark.soak
@pytest.mark.timeout(900)
async def test_under_load_on_other_hosts(two_hosts: Job) -> None:
    await two_hosts.root(acts.initialize_on_hosts, {"strategy": "spread", "capacity": 1 << 30})
    await _under_load(two_hosts, 100, random.randrange(1 << 30))


_go = threading.Event()


async def _hold_back() -> None:
    """From now on this process writes nothing before it may."""
    run = copying.run

    async def late(tasks: Iterable[copying.Task], nbytes: int) -> None:
        await asyncio.to_thread(_go.wait, 60)
        copying.run = run
        await run(tasks, nbytes)

    copying.run = late


async def _let_go() -> None:
    _go.set()


async def _put_many(number: int) -> list[int]:
    """Puts that are being written when the server dies; their versions."""
    value = torch.arange(float(4 * MB))
    puts = [asyncio.ensure_future(ts.put(f"k{n}", value + n)) for n in range(number)]
    versions = [ref.version for ref in await asyncio.gather(*puts)]
    for n in range(number):
        assert torch.equal(await ts.get(f"k{n}"), value + n)
    return versions


async def _unfinished() -> bool:
    return any(v.unfinished_bytes for v in (await ts.status()).volumes)


async def test_a_put_that_is_being_written_is_finished(one_host: Job) -> None:
    await one_host.root(acts.initialize, {**SPREAD, "capacity": 1 << 30})
    await one_host.at(0, _hold_back)
    putting = asyncio.ensure_future(one_host.at(0, _put_many, 6))
    await until(lambda: one_host.root(_unfinished))
    await _lose_the_server(one_host)
    await one_host.at(0, _let_go)
    assert await putting == [1] * 6
    await until(lambda: one_host.root(_idle))


async def test_a_volume_that_dies_with_the_server_is_lost(one_host: Job) -> None:
    """And nothing else."""
    await one_host.root(acts.initialize, SPREAD)
    await one_host.at(0, acts.put_ones, "first", MB)
    await one_host.at(0, acts.put_ones, "second", MB)
    victim = (await one_host.root(acts.status)).volumes[0].pid
    await halt(victim)  # it cannot attach again
    await _lose_the_server(one_host)
    assert await one_host.at(1, acts.get_shape, "second") == ((MB,), [1])
    os.kill(victim, signal.SIGKILL)
    await until(lambda: says_lost(one_host, 1, "first"), AT_ONCE_S)
    for _ in range(2):  # the log knows it
        await _lose_the_server(one_host)
        assert await says_lost(one_host, 1, "first")
        assert await one_host.root(is_lost, 0)
        assert await one_host.at(1, acts.get_shape, "second") == ((MB,), [1])
        await one_host.at(0, acts.put_ones, "third", MB)


@pytest.mark.soak
async def test_a_relay_that_dies_with_the_server(two_hosts: Job) -> None:
    """What came through it is given up, or kept for its clients, as if it had died alone."""
    await two_hosts.root(acts.initialize_on_hosts, {"strategy": "host"})
    for worker in (0, 1):
        await two_hosts.at(worker, acts.put_ones, f"k{worker}", MB)
    held = await two_hosts.at(1, acts.put_ones_and_hold, "held")
    victim = (await two_hosts.root(acts.status)).volumes[1]
    assert victim.host_id == "host1"
    await two_hosts.root(acts.kill, victim.pid)
    await _lose_the_server(two_hosts)
    assert await two_hosts.at(0, acts.get_shape, "k0") == ((MB,), [1])
    await until(lambda: says_lost(two_hosts, 0, "k1"), 25)
    assert await two_hosts.root(is_lost, 1)
    assert await two_hosts.at(1, acts.held_sum, held) == MB
    await until(lambda: two_hosts.root(leased_nothing), 15)
    for _ in range(2):
        assert await until(lambda: try_get(two_hosts, 1, "k0"), 15) == ((MB,), [1])
        await _lose_the_server(two_hosts)
        assert await two_hosts.root(is_lost, 1)


async def test_without_a_keeper_it_does_not_come_back(one_host: Job) -> None:
    await one_host.root(acts.initialize, {"keeper": False})
    await one_host.at(0, acts.put_ones, "k", MB)
    assert not (await one_host.root(acts.status)).keeper_pid
    await _lose_the_server(one_host)
    with pytest.raises(ts.StoreClosedError, match="what it had is lost"):
        await one_host.at(0, acts.get, "k")
    await until(lambda: _begins_anew(one_host), 30)
    assert not await one_host.at(0, acts.exists, "k")


async def test_the_process_of_the_controllers_actor(one_host: Job) -> None:
    """It owns the server and the keeper, and both end with it."""
    await one_host.root(acts.initialize)
    await one_host.at(0, acts.put_ones, "k", MB)
    status = await one_host.root(acts.status)
    owner = psutil.Process(status.keeper_pid).ppid()
    os.kill(owner, signal.SIGKILL)
    gone = {owner, status.keeper_pid, status.controller_pid}
    await until(lambda: not gone & one_host.processes(), 10)
    with pytest.raises(ts.StoreClosedError, match="what it had is lost"):
        await one_host.at(0, acts.get, "k")
    await until(lambda: _begins_anew(one_host), 30)


async def _begins_anew(job: Job) -> bool:
    try:
        await job.root(acts.initialize)
    except ts.ConfigurationError:  # the engine has not seen it yet
        return False
    return True
