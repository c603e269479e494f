"""``kill -9`` of each kind of process of a job: what is lost, what is not, and how soon."""

from __future__ import annotations

import os
import signal
import socket
import struct
import time
from collections.abc import Iterator

import psutil
import pytest
import torch
from tests.monarch import acts
from tests.monarch.jobs import Job
from tests.support import until

import torchstore_core as ts
from torchstore_core.clients.stores import table as stores

MB = 1 << 20
# The engine itself sees a killed process after some 9 s: on one host nobody waits for it.
AT_ONCE_S = 4.0


@pytest.fixture
def own_job() -> Iterator[Job]:
    """One host, two workers; for one test."""
    with Job(workers=2) as made:
        yield made


@pytest.fixture
def own_hosts() -> Iterator[Job]:
    """As ``hosts``, for one test."""
    with Job(workers=1, hosts=2) as made:
        yield made


async def _lost(job: Job, worker: int, key: str) -> bool:
    try:
        await job.at(worker, acts.get, key)
    except ts.ObjectLostError as error:
        return error.key == key
    except ts.TransportError:  # the engine knows it, the server does not yet
        return False
    return False


async def _put_on_both(job: Job, **arguments: object) -> tuple[str, str]:
    """A store of two volumes, and a key of 1 MB on each."""
    await job.root(acts.initialize, {"num_storage_volumes": 2, "strategy": "spread", **arguments})
    await job.at(0, acts.put_ones, "first", MB)
    await job.at(0, acts.put_ones, "second", MB)
    assert [v.used_bytes for v in (await job.root(acts.status)).volumes] == [MB, MB]
    return "first", "second"


async def test_a_volume_on_this_host(own_job: Job) -> None:
    first, second = await _put_on_both(own_job)
    held = await own_job.at(1, acts.put_ones_and_hold, "held")
    victim, other = (await own_job.root(acts.status)).volumes
    users = {await own_job.at(i, acts.pid) for i in (0, 1)}
    os.kill(victim.pid, signal.SIGKILL)
    begun = time.monotonic()
    for worker in (0, 1):
        await until(lambda worker=worker: _lost(own_job, worker, first), AT_ONCE_S)
    took = time.monotonic() - begun
    assert took < AT_ONCE_S
    assert await own_job.at(1, acts.get_shape, second) == ((MB,), [1])
    assert await own_job.at(1, acts.held_sum, held) == MB  # its pages are mapped
    lost, living = (await own_job.root(acts.status)).volumes
    assert lost.lost
    assert not living.lost
    assert living.pid == other.pid
    for i in range(4):  # puts go where there is memory
        await own_job.at(i % 2, acts.put_ones, f"new{i}", MB)
        assert await own_job.root(acts.get_shape, f"new{i}") == ((MB,), [1])
    await own_job.at(0, acts.put_ones, first, MB)
    assert await own_job.at(1, acts.get_shape, first) == ((MB,), [1])
    # Later the engine sees it too, and tells who owns the process: not the user's job.
    await until(lambda: "part of a store has failed" in own_job.output(), 30)
    assert own_job.ended() is None
    assert await own_job.root(acts.failures) == []
    assert users < own_job.processes()
    assert await own_job.at(1, acts.get_shape, first) == ((MB,), [1])
    await own_job.at(0, acts.shutdown)
    await own_job.root(acts.initialize)
    await own_job.at(0, acts.put, "again", 1)
    assert await own_job.at(1, acts.get, "again") == 1
    await own_job.root(acts.shutdown)
    await until(lambda: own_job.directories() == [])


async def test_a_volume_that_had_replicas(own_job: Job) -> None:
    strategy = ts.ReplicatedStrategy(copies=2)
    await own_job.root(acts.initialize, {"num_storage_volumes": 2, "strategy": strategy})
    await own_job.at(0, acts.put_ones, "k", MB)
    victim = (await own_job.root(acts.status)).volumes[0]
    os.kill(victim.pid, signal.SIGKILL)
    await until(lambda: own_job.root(_is_lost, 0), AT_ONCE_S)
    for worker in (0, 1):
        assert await own_job.at(worker, acts.get_shape, "k") == ((MB,), [1])


async def _is_lost(index: int) -> bool:
    return bool((await ts.status()).volumes[index].lost)


async def test_a_volume_on_another_host(own_hosts: Job) -> None:
    """Its relay dies with it: known when that was silent for 15 s, or when the engine says it."""
    await own_hosts.root(acts.initialize_on_workers_hosts, {"strategy": "host"})
    for worker in (0, 1):
        await own_hosts.at(worker, acts.put_ones, f"k{worker}", MB)
        assert await own_hosts.at(1 - worker, acts.get_shape, f"k{worker}") == ((MB,), [1])
    victim = (await own_hosts.root(acts.status)).volumes[3]
    assert victim.host_id == "host1"
    await own_hosts.root(acts.kill, victim.pid)
    await until(lambda: own_hosts.root(_is_lost, 3), 25)
    assert await own_hosts.at(0, acts.get_shape, "k0") == ((MB,), [1])
    assert own_hosts.ended() is None


async def test_the_process_of_a_relay(own_hosts: Job) -> None:
    """It is silent from then on: after 15 s the volumes that were attached through it are lost, and
    all that was held through it is given back, as no volume of its host is left. Its host finds the
    way again.
    """
    await own_hosts.root(acts.initialize_on_hosts, {"strategy": "host"})
    for worker in (0, 1):
        await own_hosts.at(worker, acts.put_ones, f"k{worker}", MB)
    await own_hosts.at(1, acts.put_ones_and_hold, "held")
    victim = (await own_hosts.root(acts.status)).volumes[1]
    assert victim.host_id == "host1"
    begun = time.monotonic()
    await own_hosts.root(acts.kill, victim.pid)
    # Others go on meanwhile.
    assert await own_hosts.at(0, acts.get_shape, "k0") == ((MB,), [1])
    with pytest.raises((ts.TransportError, ts.ObjectLostError, ts.StoreClosedError)):
        await own_hosts.at(0, acts.get_shape, "k1")
    await until(lambda: _lost(own_hosts, 0, "k1"), 25)
    print(f"after {time.monotonic() - begun:.1f} s")
    assert await own_hosts.root(_is_lost, 1)
    await until(lambda: own_hosts.root(_leased_nothing), 5)
    # The host has no agent now; a client of it has a relay of its own.
    assert await until(lambda: _try_get(own_hosts, 1, "k0"), 15) == ((MB,), [1])
    await own_hosts.at(1, acts.put_ones, "new", 2 * MB)
    assert await own_hosts.at(0, acts.get_shape, "new") == ((2 * MB,), [1])
    assert own_hosts.ended() is None


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
        await until(lambda: job.root(_is_lost, lost), 25)
        left = [16 * MB if i != lost else 0 for i in range(2)]
        assert await job.root(_leased) == left
        roles = {s.pid: s.role for s in (await job.root(acts.status)).sessions}
        assert roles[client] == "orphan"
        assert await job.root(_fill, 8 * MB) == 2  # of 32 MB in the other
        assert await job.at(0, _mapped_values) == [7]
        # It finds another way to the store, and goes on.
        assert await until(lambda: _try_get(job, 0, "fill0"), 15) == ((8 * MB,), [200])
        await until(lambda: _leased_are(job, left))  # that get gives back what it leased
        await job.root(acts.kill, client)
        await until(lambda: job.root(_leased_nothing), AT_ONCE_S)
        assert await job.root(_fill, 8 * MB) == 4
        await job.root(acts.shutdown)
        await until(lambda: job.directories() == [])


async def _leased_nothing() -> bool:
    return (await acts.books())[1:] == (0, 0)


async def _try_get(job: Job, worker: int, key: str) -> object:
    try:
        return await job.at(worker, acts.get_shape, key)
    except ts.StoreClosedError:
        return None


@pytest.mark.parametrize("where", ["same host", "another host"])
async def test_a_client_actor(where: str) -> None:
    """What it held is free at once, on whatever host: its own one watches it."""
    with Job(workers=2) if where == "same host" else Job(workers=1, hosts=2) as job:
        start = acts.initialize if where == "same host" else acts.initialize_on_hosts
        await job.root(start, {"strategy": "host"})
        await job.at(1, acts.put_ones_and_hold, "held")
        await job.at(1, acts.begin_put, "unfinished", 2 * MB)
        await until(lambda: _books_are(job, 3, MB, 2 * MB))
        await job.root(acts.kill, await job.at(1, acts.pid))
        await until(lambda: _books_are(job, 1, 0, 0), AT_ONCE_S)
        await job.root(acts.put_ones, "after", MB)
        assert await job.at(0, acts.get_shape, "after") == ((MB,), [1])
        assert job.ended() is None


async def _books_are(job: Job, *expected: int) -> bool:
    books = await job.root(acts.books)
    return bool(books == expected)


async def _get_within(key: str, timeout: float) -> str:
    """How a get of this very process's ends: "value", or the name of the error."""
    try:
        await ts.get(key, timeout=timeout)
    except ts.TorchStoreError as error:
        return type(error).__name__
    return "value"


async def test_a_whole_host(own_hosts: Job) -> None:
    """Nobody is left there who could say so: a get of what lies there ends in its time, and says
    what has become of it.
    """
    await own_hosts.root(acts.initialize_on_hosts, {"strategy": "host"})
    for worker in (0, 1):
        await own_hosts.at(worker, acts.put_ones, f"k{worker}", MB)
    assert await own_hosts.at(0, acts.get_shape, "k1") == ((MB,), [1])
    host = own_hosts.host_pids()[1]
    pids = {host, *_below(host)}
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    begun = time.monotonic()
    said = await own_hosts.at(0, _get_within, "k1", 3.0)
    assert said in ("StoreTimeoutError", "TransportUnavailableError", "ObjectLostError")
    assert time.monotonic() - begun < 3.0 + AT_ONCE_S
    await until(lambda: _lost(own_hosts, 0, "k1"), 25)
    assert await own_hosts.at(0, acts.get_shape, "k0") == ((MB,), [1])


def _below(pid: int) -> list[int]:
    return [child.pid for child in psutil.Process(pid).children(recursive=True)]


async def test_the_controller(own_hosts: Job) -> None:
    await own_hosts.root(acts.initialize_on_hosts, {"strategy": "host"})
    await own_hosts.at(0, acts.put_ones, "k", MB)
    assert await own_hosts.at(1, acts.get_shape, "k") == ((MB,), [1])
    held = await own_hosts.at(0, acts.put_ones_and_hold, "held")
    status = await own_hosts.root(acts.status)
    await own_hosts.root(acts.kill, status.controller_pid)
    begun = time.monotonic()
    with pytest.raises(ts.StoreClosedError):
        await own_hosts.root(acts.get, "k")
    assert time.monotonic() - begun < AT_ONCE_S
    # On other hosts: when the relay has not heard of it for 10 s, or the engine says so.
    for worker in (0, 1):
        with pytest.raises((ts.StoreClosedError, ts.StoreTimeoutError)):
            await own_hosts.at(worker, acts.get, "k")
    print(f"after {time.monotonic() - begun:.1f} s")
    assert await own_hosts.at(0, acts.held_sum, held) == MB
    # The name is free again as soon as the engine has seen it.
    await until(lambda: _can_initialise(own_hosts), 30)
    await own_hosts.at(0, acts.put_ones, "k", MB, 2)
    assert await own_hosts.at(1, acts.get_shape, "k") == ((MB,), [2])
    pids = {v.pid for v in status.volumes}
    await until(lambda: not pids & own_hosts.processes(), 30)
    await own_hosts.root(acts.shutdown)
    await until(lambda: own_hosts.directories() == [], 10)
    assert own_hosts.ended() is None


async def _can_initialise(job: Job) -> bool:
    try:
        await job.root(acts.initialize_on_hosts, {"strategy": "host"})
    except ts.ConfigurationError:
        return False
    return True
