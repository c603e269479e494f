"""``kill -9`` on other hosts than the root's: of a process there, of the controller, of a host; and
one that stands still.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import psutil
import pytest
from tests.monarch import acts
from tests.monarch.jobs import Job
from tests.monarch.losses import (
    AT_ONCE_S,
    MB,
    end_store,
    is_lost,
    leased_nothing,
    put_hold_and_die,
    says_lost,
    try_get,
)
from tests.support import halt, resume, until, until_none

import torchstore_core as ts
from torchstore_core.testing.timers import within


@pytest.fixture
async def two_hosts(hosts: Job) -> AsyncIterator[Job]:
    """A worker on each of two hosts; all tests here have stores of their own in the same job."""
    yield hosts
    await end_store(hosts)


@pytest.mark.soak
async def test_a_volume_on_another_host(two_hosts: Job) -> None:
    """Its relay dies with it: known when that was silent for 15 s, or when the engine says it."""
    await two_hosts.root(acts.initialize_on_workers_hosts, {"strategy": "host"})
    for worker in (0, 1):
        await two_hosts.at(worker, acts.put_ones, f"k{worker}", MB)
        assert await two_hosts.at(1 - worker, acts.get_shape, f"k{worker}") == ((MB,), [1])
    victim = (await two_hosts.root(acts.status)).volumes[3]
    assert victim.host_id == "host1"
    await two_hosts.root(acts.kill, victim.pid)
    await until(lambda: two_hosts.root(is_lost, 3), 25)
    assert await two_hosts.at(0, acts.get_shape, "k0") == ((MB,), [1])
    assert two_hosts.ended() is None


async def test_volumes_of_a_host_that_is_taken_away(two_hosts: Job) -> None:
    """What is on its volumes goes to the other host; then it is killed."""
    await two_hosts.root(acts.initialize_on_workers_hosts, {"strategy": "host"})
    await two_hosts.at(1, acts.put_tensors, "w", 4, MB, "torchstore")
    volumes = (await two_hosts.root(acts.status)).volumes
    leaving = [at for at, volume in enumerate(volumes) if volume.host_id == "host1"]
    assert len(leaving) == 2
    assert sum(volumes[at].used_bytes for at in leaving) == 4 * MB
    for at in leaving:
        assert await two_hosts.root(acts.drain, at)
    status = await two_hosts.root(acts.status)
    assert [status.volumes[at].used_bytes for at in leaving] == [0, 0]
    assert status.repair.copied_bytes >= 4 * MB
    await two_hosts.at(1, acts.put_tensors, "new", 2, MB, "torchstore")
    for at in leaving:
        await two_hosts.root(acts.kill, volumes[at].pid)
    for worker in (0, 1):
        for prefix, number in (("w", 4), ("new", 2)):
            right = acts.tensors_are_right, prefix, number, MB, "torchstore"
            assert await until(lambda w=worker, r=right: _right(two_hosts, w, *r), 30)
    assert two_hosts.ended() is None


async def _right(job: Job, worker: int, act: Any, *arguments: Any) -> bool:
    """Whether a worker finds the values right; False while it looks for a way to the store."""
    try:
        return bool(await job.at(worker, act, *arguments))
    except (ts.StoreClosedError, ts.TransportError):
        return False


async def test_the_process_of_a_relay(two_hosts: Job) -> None:
    """It is silent from then on: after 15 s the volumes that were attached through it are lost, and
    all that was held through it is given back, as no volume of its host is left. Its host finds the
    way again.
    """
    await two_hosts.root(acts.initialize_on_hosts, {"strategy": "host"})
    for worker in (0, 1):
        await two_hosts.at(worker, acts.put_ones, f"k{worker}", MB)
    await two_hosts.at(1, acts.put_ones_and_hold, "held")
    victim = (await two_hosts.root(acts.status)).volumes[1]
    assert victim.host_id == "host1"
    await two_hosts.root(acts.kill, victim.pid)
    # Others go on meanwhile.
    assert await two_hosts.at(0, acts.get_shape, "k0") == ((MB,), [1])
    with pytest.raises((ts.TransportError, ts.ObjectLostError, ts.StoreClosedError)):
        await two_hosts.at(0, acts.get_shape, "k1")
    await until(lambda: says_lost(two_hosts, 0, "k1"), 25)
    assert await two_hosts.root(is_lost, 1)
    await until(lambda: two_hosts.root(leased_nothing))
    # The host has no agent now; a client of it has a relay of its own.
    assert await until(lambda: try_get(two_hosts, 1, "k0"), 15) == ((MB,), [1])
    await two_hosts.at(1, acts.put_ones, "new", 2 * MB)
    assert await two_hosts.at(0, acts.get_shape, "new") == ((2 * MB,), [1])
    assert two_hosts.ended() is None


async def test_hosts_that_stand_still_while_their_store_ends(two_hosts: Job) -> None:
    """Longer than their relays wait for an answer: they ask who leads to the server, and the engine
    stops them before they are told. Whoever has the answer lives on, and with it the job.
    """
    await two_hosts.root(acts.initialize_on_hosts, {"strategy": "host"})
    agents = [volume.pid for volume in (await two_hosts.root(acts.status)).volumes]
    for pid in agents:
        await halt(pid)
    ending = asyncio.ensure_future(two_hosts.root(acts.shutdown))
    await asyncio.wait([ending], timeout=4.0)
    for pid in agents:
        resume(pid)
    await ending
    await until(lambda: not {*agents} & two_hosts.processes(), 60)
    await two_hosts.root(acts.initialize_on_hosts, {"strategy": "host"})
    await two_hosts.at(0, acts.put_ones, "k", MB)
    assert await two_hosts.at(1, acts.get_shape, "k") == ((MB,), [1])


async def test_the_server_and_its_keeper(two_hosts: Job) -> None:
    """A server alone comes back, see ``test_comebacks``."""
    await two_hosts.root(acts.initialize_on_hosts, {"strategy": "host"})
    await two_hosts.at(0, acts.put_ones, "k", MB)
    assert await two_hosts.at(1, acts.get_shape, "k") == ((MB,), [1])
    held = await two_hosts.at(0, acts.put_ones_and_hold, "held")
    status = await two_hosts.root(acts.status)
    async with within(25):
        async with within(AT_ONCE_S):
            await two_hosts.root(acts.kill, status.keeper_pid)  # and with it the server
            gone = {status.keeper_pid, status.controller_pid}
            await until(lambda: not gone & two_hosts.processes())
            with pytest.raises(ts.StoreClosedError):
                await two_hosts.root(acts.get, "k")
        # On other hosts: when the relay has not heard of it for 10 s, or the engine says so.
        for worker in (0, 1):
            with pytest.raises((ts.StoreClosedError, ts.StoreTimeoutError)):
                await two_hosts.at(worker, acts.get, "k")
    assert await two_hosts.at(0, acts.held_sum, held) == MB
    # The name is free again as soon as the engine has seen it.
    await until(lambda: _can_initialise(two_hosts), 30)
    await two_hosts.at(0, acts.put_ones, "k", MB, 2)
    assert await two_hosts.at(1, acts.get_shape, "k") == ((MB,), [2])
    pids = {v.pid for v in status.volumes}
    await until(lambda: not pids & two_hosts.processes(), 30)
    await two_hosts.root(acts.shutdown)
    await until_none(two_hosts.left)
    assert two_hosts.ended() is None


async def _can_initialise(job: Job) -> bool:
    try:
        await job.root(acts.initialize_on_hosts, {"strategy": "host"})
    except ts.ConfigurationError:
        return False
    return True


@pytest.mark.soak  # so it is on one host: see test_kills
async def test_a_client_actor() -> None:
    with Job(workers=1, hosts=2) as job:
        await job.root(acts.initialize_on_hosts, {"strategy": "host"})
        await put_hold_and_die(job)


async def _get_within(key: str, timeout: float) -> str:
    """How a get of this very process's ends: "value", or the name of the error."""
    try:
        await ts.get(key, timeout=timeout)
    except ts.TorchStoreError as error:
        return type(error).__name__
    return "value"


def _below(pid: int) -> list[int]:
    return [child.pid for child in psutil.Process(pid).children(recursive=True)]


async def test_a_whole_host(hosts: Job) -> None:
    """Nobody is left there who could say so: a get of what lies there ends in its time, and says
    what has become of it. Last: the job has a host less after it.
    """
    await hosts.root(acts.initialize_on_hosts, {"strategy": "host"})
    for worker in (0, 1):
        await hosts.at(worker, acts.put_ones, f"k{worker}", MB)
    assert await hosts.at(0, acts.get_shape, "k1") == ((MB,), [1])
    host = hosts.host_pids()[1]
    pids = {host, *_below(host)}
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    async with within(3.0 + AT_ONCE_S):
        said = await hosts.at(0, _get_within, "k1", 3.0)
    assert said in ("StoreTimeoutError", "TransportUnavailableError", "ObjectLostError")
    await until(lambda: says_lost(hosts, 0, "k1"), 25)
    assert await hosts.at(0, acts.get_shape, "k0") == ((MB,), [1])
