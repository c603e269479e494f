"""The process of a controller's actor is killed: another one leads to the same server."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.monarch import acts
from tests.monarch.jobs import Job
from tests.monarch.loads import under_load
from tests.monarch.losses import MB, begins_anew
from tests.support import until, until_none

import torchstore_core as ts
from torchstore_core.testing.timers import within

SPREAD = {"num_storage_volumes": 2, "strategy": "spread"}

# The engine needs some seconds for a process, and more on a busy machine.
PAUSE_S = 20.0
_NAME = b"HYPERACTOR_PROCESS_NAME=torchstore_controller"


def controllers(job: Job) -> set[int]:
    """The processes of the actors that lead to servers."""
    found = set()
    for pid in job.processes():
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if b"bootstrap_main" in command and any(one.startswith(_NAME) for one in environment):
            found.add(pid)
    return found


async def another(job: Job, *before: int) -> int:
    """Wait for an actor in another process."""
    return int(await until(lambda: next(iter(controllers(job) - {*before}), None), PAUSE_S))


_go = threading.Event()


async def _hold_back() -> None:
    """In the root: from now on no controller is started before it may."""
    from torchstore_monarch.actors.directory import Directory

    real = Directory._lead_once

    async def late(self: Any, store: Any) -> None:
        await asyncio.to_thread(_go.wait, 60)
        await real(self, store)

    Directory._lead_once = late
    _go.clear()


async def _let_go() -> None:
    _go.set()


async def test_clients_of_its_host_notice_nothing(one_host: Job) -> None:
    """And others find the store while there is no controller."""
    await one_host.root(acts.initialize, {"num_storage_volumes": 2})
    held, before = await _put_and_hold(one_host)
    await one_host.root(_hold_back)
    pid = await another(one_host)
    os.kill(pid, signal.SIGKILL)
    await one_host.root(acts.put_ones, "of the root", MB)
    assert await one_host.at(0, acts.get_shape, "of the root") == ((MB,), [1])
    await _is_kept(one_host, held, before)
    assert not controllers(one_host) - {pid}
    await one_host.root(_let_go)
    await another(one_host, pid)
    await _is_kept(one_host, held, before)


async def test_clients_of_other_hosts_wait(two_hosts: Job) -> None:
    await two_hosts.root(acts.initialize_on_hosts, {"strategy": "spread"})
    held, before = await _put_and_hold(two_hosts)
    pid = await another(two_hosts)
    for _ in range(2):
        os.kill(pid, signal.SIGKILL)
        async with within(PAUSE_S):
            await _is_kept(two_hosts, held, before)
        pid = await another(two_hosts, pid)


async def _put_and_hold(job: Job) -> tuple[int, Any]:
    """What is held, and the status."""
    await job.at(0, acts.put_ones, "first", MB)
    await job.at(1, acts.put_ones, "second", MB, 2)
    held = await job.at(1, acts.put_ones_and_hold, "held")
    return held, await job.root(acts.status)


async def _is_kept(job: Job, held: int, before: Any) -> None:
    """All is what and where it was, and more can be put."""
    assert await job.at(0, acts.get_shape, "second") == ((MB,), [2])
    assert await job.at(1, acts.get_shape, "first") == ((MB,), [1])
    await job.at(1, acts.put_ones, "third", MB, 3)
    assert await job.at(0, acts.get_shape, "third") == ((MB,), [3])
    assert await job.at(1, acts.held_sum, held) == MB
    after = await job.root(acts.status)
    assert after.controller_pid == before.controller_pid
    assert after.keeper_pid == before.keeper_pid
    assert [v.pid for v in after.volumes] == [v.pid for v in before.volumes]
    ages = {session.pid: session.age_s for session in after.sessions}
    assert all(ages[session.pid] > session.age_s for session in before.sessions)
    assert not [session for session in after.sessions if session.role == "orphan"]


async def _is_led() -> None:
    """Return when the store has a controller that is not known to be dead."""
    from torchstore_monarch import job

    await (await job.directory()).find.call_one("torchstore", True)


async def _lose_the_controller(job: Job) -> None:
    """Kill it, once it leads."""
    await job.root(_is_led)
    for pid in controllers(job):
        os.kill(pid, signal.SIGKILL)


async def _lose_more(job: Job) -> None:
    """Kill the server, too, now and then: shortly before, or shortly after."""
    server = (await job.root(acts.status)).controller_pid if random.random() < 0.3 else 0
    first = random.random() < 0.5
    if server and first:
        os.kill(server, signal.SIGKILL)
    await _lose_the_controller(job)
    if server and not first:
        os.kill(server, signal.SIGKILL)


@pytest.mark.soak
@pytest.mark.timeout(900)
async def test_under_load(one_host: Job) -> None:
    await one_host.root(acts.initialize, {**SPREAD, "capacity": 1 << 30})
    await under_load(one_host, 30, random.randrange(1 << 30), _lose_the_controller)


@pytest.mark.soak
@pytest.mark.timeout(900)
async def test_under_load_on_other_hosts(two_hosts: Job) -> None:
    await two_hosts.root(acts.initialize_on_hosts, {"strategy": "spread", "capacity": 1 << 30})
    await under_load(two_hosts, 30, random.randrange(1 << 30), _lose_more)


@pytest.mark.soak
async def test_it_is_killed_again_before_it_leads(one_host: Job) -> None:
    """As soon as its process is there: the engine sees that after some seconds."""
    await one_host.root(acts.initialize)
    await one_host.at(0, acts.put_ones, "k", MB)
    pids = [await another(one_host)]
    for _ in range(2):
        os.kill(pids[-1], signal.SIGKILL)
        pids.append(await another(one_host, *pids))
    await one_host.root(_is_led)
    assert await one_host.at(1, acts.get_shape, "k") == ((MB,), [1])
    await one_host.root(acts.shutdown)
    await until(lambda: not controllers(one_host), 10)


async def test_the_server_dies_with_it(two_hosts: Job) -> None:
    """The keeper starts the one, the directory the other."""
    await two_hosts.root(acts.initialize_on_hosts, {"strategy": "host"})
    for worker in (0, 1):
        await two_hosts.at(worker, acts.put_ones, f"k{worker}", MB)
    before = await two_hosts.root(acts.status)
    os.kill(await another(two_hosts), signal.SIGKILL)
    os.kill(before.controller_pid, signal.SIGKILL)
    async with within(PAUSE_S):
        for worker in (0, 1):
            assert await two_hosts.at(worker, acts.get_shape, f"k{1 - worker}") == ((MB,), [1])
    after = await two_hosts.root(acts.status)
    assert after.keeper_pid == before.keeper_pid
    assert after.incarnation == before.incarnation
    assert [v.pid for v in after.volumes] == [v.pid for v in before.volumes]


@pytest.mark.parametrize("what", [pytest.param("keeper", marks=pytest.mark.soak), "switchboard"])
async def test_the_store_ends_with_what_it_cannot_do_without(one_host: Job, what: str) -> None:
    await one_host.root(acts.initialize)
    await one_host.at(0, acts.put_ones, "k", MB)
    status = await one_host.root(acts.status)
    switchboard = psutil.Process(status.keeper_pid).ppid()
    gone = {await another(one_host), switchboard, status.keeper_pid, status.controller_pid}
    if what == "keeper":  # with all that would come back
        for pid in gone - {switchboard}:
            os.kill(pid, signal.SIGKILL)
    else:
        os.kill(switchboard, signal.SIGKILL)
    await until(lambda: not gone & one_host.processes(), 10)
    with pytest.raises(ts.StoreClosedError, match="what it had is lost"):
        await one_host.at(0, acts.get, "k")
    await until(lambda: begins_anew(one_host), 30)
    assert not await one_host.at(0, acts.exists, "k")


@pytest.mark.parametrize("later_s", [0.0, pytest.param(1.0, marks=pytest.mark.soak)])
async def test_a_shutdown_meanwhile(one_host: Job, later_s: float) -> None:
    """While it dies, and while another one starts."""
    before = one_host.processes()
    await one_host.root(acts.initialize)
    await one_host.at(0, acts.put_ones, "k", MB)
    os.kill(await another(one_host), signal.SIGKILL)
    await asyncio.sleep(later_s)
    await one_host.root(acts.shutdown)
    await until(lambda: one_host.processes() <= before and not one_host.directories(), 60)


@pytest.mark.soak  # a moment later than in the test above
async def test_it_is_killed_while_it_is_shut_down(one_host: Job) -> None:
    before = one_host.processes()
    await one_host.root(acts.initialize)
    pid = await another(one_host)
    ending = asyncio.ensure_future(one_host.root(acts.shutdown))
    os.kill(pid, signal.SIGKILL)
    await ending
    await until(lambda: one_host.processes() <= before and not one_host.directories(), 60)


@pytest.mark.parametrize("started", [False, True])
async def test_it_is_killed_while_the_store_starts(one_host: Job, started: bool) -> None:
    """Before, or after it has started a server: then there is no store, and no server."""
    before = one_host.processes()
    beginning = asyncio.ensure_future(one_host.root(acts.initialize))
    pid = await another(one_host)
    if started:
        await until(lambda: psutil.Process(pid).children(), 10)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(ts.TorchStoreError):
        await beginning
    await until(lambda: one_host.processes() <= before and not one_host.directories(), 60)


@pytest.mark.soak
async def test_the_program_dies_with_it() -> None:
    """Nobody starts another one, and nothing waits for it."""
    with Job(workers=1) as job:
        await job.root(acts.initialize, {"num_storage_volumes": 2})
        await job.at(0, acts.put_ones, "k", MB)
        os.kill(await another(job), signal.SIGKILL)
        os.kill(job.pid, signal.SIGKILL)
        await until(lambda: not job.processes(), 15)
        assert job.directories() == []


async def test_other_stores_and_other_clients(two_hosts: Job) -> None:
    """Bytes between hosts go through its process, too; and its host has clients of its own."""
    block = ["tcp", "monarch-rdma"]
    wanted = {"strategy": "host", "block": block}
    await two_hosts.root(acts.initialize_on_hosts, wanted)
    for worker in (0, 1):
        await two_hosts.at(worker, acts.put_ones, f"k{worker}", 4 * MB)
    assert await two_hosts.root(acts.get_shape, "k0") == ((4 * MB,), [1])
    os.kill(await another(two_hosts), signal.SIGKILL)
    await two_hosts.root(acts.initialize, {"store_name": "other"})
    await two_hosts.root(acts.put, "k", 1, "other")
    async with within(PAUSE_S):
        for key in ("k0", "k1"):  # the link to the one is broken, the other one is new
            assert await until(lambda key=key: _try(two_hosts, key), PAUSE_S) == ((4 * MB,), [1])
        for worker in (0, 1):
            got = await two_hosts.at(worker, acts.get_shape, f"k{1 - worker}")
            assert got == ((4 * MB,), [1])
    assert (await two_hosts.root(acts.transports)).popitem()[1] == "monarch-rpc"
    assert await two_hosts.root(acts.get, "k", "other") == 1
    await two_hosts.root(acts.shutdown, "other")
    assert await two_hosts.root(acts.drain, 0)
    assert await two_hosts.at(1, acts.get_shape, "k0") == ((4 * MB,), [1])


async def _try(job: Job, key: str) -> object:
    """None: the bytes find no way now."""
    try:
        return await job.root(acts.get_shape, key)
    except ts.TransportError:
        return None


@pytest.mark.soak  # its relay is in the tests of actors that end
async def test_a_host_without_an_agent() -> None:
    """Its clients have a relay of their own, which nobody but itself knows."""
    with Job(workers=1, hosts=1) as job:
        await job.root(acts.initialize)
        await job.at(0, acts.put, "k", 1)
        for value in (2, 3):
            pid = await another(job)
            os.kill(pid, signal.SIGKILL)
            async with within(PAUSE_S):
                assert await job.at(0, acts.get, "k") == value - 1
                await job.at(0, acts.put, "k", value)
            assert await job.root(acts.get, "k") == value
            await another(job, pid)
        await job.root(acts.shutdown)
        await until_none(job.left)
        assert job.ended() is None
