"""``kill -9`` of processes of a store on one host: what is lost, what is not, and how soon."""

from __future__ import annotations

import os
import signal
import socket
import struct
from collections.abc import AsyncIterator

import pytest
import torch
from tests.monarch import acts
from tests.monarch.jobs import Job
from tests.monarch.losses import (
    AT_ONCE_S,
    MB,
    REPAIRED_S,
    end_store,
    is_lost,
    is_repaired,
    leased_nothing,
    put_hold_and_die,
    says_lost,
    try_get,
)
from tests.support import until

import torchstore_core as ts
from torchstore_core.clients.stores import table as stores
from torchstore_core.testing.timers import within


@pytest.fixture
async def one_host(job: Job) -> AsyncIterator[Job]:
    """One host, two workers; all tests here have stores of their own in the same job."""
    yield job
    await end_store(job)


async def _put_on_both(job: Job, **arguments: object) -> tuple[str, str]:
    """A store of two volumes, and a key of 1 MB on each."""
    await job.root(acts.initialize, {"num_storage_volumes": 2, "strategy": "spread", **arguments})
    await job.at(0, acts.put_ones, "first", MB)
    await job.at(0, acts.put_ones, "second", MB)
    assert [v.used_bytes for v in (await job.root(acts.status)).volumes] == [MB, MB]
    return "first", "second"


async def test_a_volume_on_this_host(one_host: Job) -> None:
    first, second = await _put_on_both(one_host)
    held = await one_host.at(1, acts.put_ones_and_hold, "held")
    victim, other = (await one_host.root(acts.status)).volumes
    users = {await one_host.at(i, acts.pid) for i in (0, 1)}
    os.kill(victim.pid, signal.SIGKILL)
    async with within(AT_ONCE_S):
        for worker in (0, 1):
            await until(lambda worker=worker: says_lost(one_host, worker, first))
    assert await one_host.at(1, acts.get_shape, second) == ((MB,), [1])
    assert await one_host.at(1, acts.held_sum, held) == MB  # its pages are mapped
    lost, living = (await one_host.root(acts.status)).volumes
    assert lost.lost
    assert not living.lost
    assert living.pid == other.pid
    for i in range(4):  # puts go where there is memory
        await one_host.at(i % 2, acts.put_ones, f"new{i}", MB)
        assert await one_host.root(acts.get_shape, f"new{i}") == ((MB,), [1])
    await one_host.at(0, acts.put_ones, first, MB)
    assert await one_host.at(1, acts.get_shape, first) == ((MB,), [1])
    # Later the engine sees it too, and tells who owns the process: not the user's job.
    await until(lambda: "part of a store has failed" in one_host.output(), 30)
    assert one_host.ended() is None
    assert await one_host.root(acts.failures) == []
    assert users < one_host.processes()
    assert await one_host.at(1, acts.get_shape, first) == ((MB,), [1])
    await one_host.at(0, acts.shutdown)
    await one_host.root(acts.initialize)
    await one_host.at(0, acts.put, "again", 1)
    assert await one_host.at(1, acts.get, "again") == 1
    await one_host.root(acts.shutdown)
    await until(lambda: one_host.directories() == [])


async def test_a_volume_that_had_replicas(one_host: Job) -> None:
    """And has them again a little later, on the volumes that are left."""
    strategy = ts.ReplicatedStrategy(copies=2)
    await one_host.root(acts.initialize, {"num_storage_volumes": 3, "strategy": strategy})
    await one_host.at(0, acts.put_tensors, "k", 3, MB, "torchstore")
    for victim in (0, 1):
        os.kill((await one_host.root(acts.status)).volumes[victim].pid, signal.SIGKILL)
        await until(lambda at=victim: one_host.root(is_lost, at), AT_ONCE_S)
        for worker in (0, 1):
            assert await one_host.at(worker, acts.tensors_are_right, "k", 3, MB, "torchstore")
        await until(lambda: one_host.root(is_repaired), REPAIRED_S)
    assert (await one_host.root(acts.status)).repair.copied_bytes >= MB


_mapped: list[torch.Tensor] = []


async def _hold_deleted(number: int, nbytes: int) -> None:
    """Tensors of zero-copy gets, all 7, whose keys are gone again."""
    for i in range(number):
        await ts.put(f"k{i}", torch.full((nbytes,), 7, dtype=torch.uint8))
        _mapped.append(await ts.get(f"k{i}"))
        await ts.delete(f"k{i}")


async def _mapped_values() -> list[int]:
    """Which values they have by now."""
    return torch.cat(_mapped).unique().tolist()


async def _fill(nbytes: int) -> int:
    """How many tensors of other values find room."""
    for i in range(100):
        try:
            await ts.put(f"fill{i}", torch.full((nbytes,), 200, dtype=torch.uint8))
        except ts.StoreFullError:
            return i
    return 100


async def _relay_pid() -> int:
    """Of the process through whose relay this one speaks with the store."""
    session = await stores.find("torchstore").session(10)
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(session.address.partition(":")[2])
        peer = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", peer)[0])


async def _leased() -> list[int]:
    return [v.leased_bytes for v in (await ts.status()).volumes]


async def _leased_are(job: Job, expected: list[int]) -> bool:
    return bool(await job.root(_leased) == expected)


@pytest.mark.soak  # tests/unit/remote/test_relay.py has it without an engine
async def test_a_relays_clients_read_on_what_lives_on_their_host() -> None:
    """Two agents on a host, each with a relay; a client has mapped memory of both. When one agent
    is killed, its clients' leases on the other's memory stay until they end themselves.
    """
    with Job(workers=1, hosts=1) as job:
        arguments = {"num_storage_volumes": 2, "strategy": "spread", "capacity": 64 * MB}
        await job.root(acts.initialize_on_hosts, arguments)
        await job.at(0, _hold_deleted, 4, 8 * MB)
        assert await job.root(_leased) == [16 * MB, 16 * MB]
        client, relay = await job.at(0, acts.pid), await job.at(0, _relay_pid)
        pids = [volume.pid for volume in (await job.root(acts.status)).volumes]
        assert len({*pids, client}) == 3
        lost = pids.index(relay)
        await job.root(acts.kill, relay)
        await until(lambda: job.root(is_lost, lost), 25)
        left = [16 * MB if i != lost else 0 for i in range(2)]
        assert await job.root(_leased) == left
        roles = {s.pid: s.role for s in (await job.root(acts.status)).sessions}
        assert roles[client] == "orphan"
        assert await job.root(_fill, 8 * MB) == 2  # of 32 MB in the other
        assert await job.at(0, _mapped_values) == [7]
        # It finds another way to the store, and goes on.
        assert await until(lambda: try_get(job, 0, "fill0"), 15) == ((8 * MB,), [200])
        await until(lambda: _leased_are(job, left))  # that get gives back what it leased
        await job.root(acts.kill, client)
        await until(lambda: job.root(leased_nothing), AT_ONCE_S)
        assert await job.root(_fill, 8 * MB) == 4
        await job.root(acts.shutdown)
        await until(lambda: job.directories() == [])


async def test_a_client_actor(one_host: Job) -> None:
    """Last: the job has a worker less after it."""
    await one_host.root(acts.initialize, {"strategy": "host"})
    await put_hold_and_die(one_host)
