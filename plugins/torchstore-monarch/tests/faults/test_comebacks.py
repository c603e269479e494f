"""A server of a job that is killed comes back, and its volumes and relays with it."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
from collections.abc import Iterable

import pytest
import torch
from tests.monarch import acts
from tests.monarch.jobs import Job
from tests.monarch.loads import idle, under_load
from tests.monarch.losses import (
    AT_ONCE_S,
    MB,
    begins_anew,
    is_lost,
    leased_nothing,
    says_lost,
    try_get,
)
from tests.support import halt, until

import torchstore_core as ts
from torchstore_core.machine import copying
from torchstore_core.testing.timers import within

SPREAD = {"num_storage_volumes": 2, "strategy": "spread"}
PAUSE_S = 5.0  # on a busy machine; see benchmarks for what it takes


async def _lose_the_server(job: Job) -> int:
    """Kill it; its pid."""
    pid = int((await job.root(acts.status)).controller_pid)
    os.kill(pid, signal.SIGKILL)
    return pid


@pytest.mark.soak  # so it is on other hosts, below
async def test_everything_is_there_again(one_host: Job) -> None:
    await one_host.root(acts.initialize, SPREAD)
    await _comes_back(one_host)


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


@pytest.mark.soak
@pytest.mark.timeout(900)
async def test_under_load(one_host: Job) -> None:
    """No acknowledged write is lost, nothing is torn or older, nothing leaks."""
    await one_host.root(acts.initialize, {**SPREAD, "capacity": 1 << 30})
    await under_load(one_host, 100, random.randrange(1 << 30), _lose_the_server)


@pytest.mark.soak
@pytest.mark.timeout(900)
async def test_under_load_on_other_hosts(two_hosts: Job) -> None:
    await two_hosts.root(acts.initialize_on_hosts, {"strategy": "spread", "capacity": 1 << 30})
    await under_load(two_hosts, 100, random.randrange(1 << 30), _lose_the_server)


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
    await until(lambda: one_host.root(idle))


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
    await until(lambda: begins_anew(one_host), 30)
    assert not await one_host.at(0, acts.exists, "k")
