"""Who starts, ends, finds and gives up stores at the same time; and what does not end by itself."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from tests.monarch import acts
from tests.monarch.jobs import Job, running
from tests.support import until, until_none

import torchstore_core as ts
from torchstore_core.machine import topology
from torchstore_core.testing.timers import within
from torchstore_monarch.protocol import Led, StoreRequest, outcome, result

MB = 1 << 20
RACE = {"store_name": "race"}
_soak = pytest.mark.soak


@pytest.fixture(scope="module")
def others_job() -> Iterator[Job]:
    """One host, two workers, and a store ``innocent`` that nothing is done to."""
    with Job(workers=2) as made:
        asyncio.run(made.root(acts.initialize, {"store_name": "innocent"}))
        for worker in (0, 1):
            asyncio.run(made.at(worker, acts.put, f"k{worker}", worker, "innocent"))
        yield made


async def _is_as_before(job: Job, before: tuple[set[int], set[str]]) -> None:
    """Nothing is left of ``race``; the other store is there; the name can be used."""
    await until(lambda: (job.processes(), set(job.directories())) == before, 60)
    for worker in (0, 1):
        assert await job.at(worker, acts.get, f"k{worker}", "innocent") == worker
    await job.at(0, acts.initialize, RACE)
    assert await job.at(1, acts.keys, "race") == []
    await job.at(1, acts.shutdown, "race")
    await until(lambda: (job.processes(), set(job.directories())) == before, 60)
    assert job.ended() is None
    assert await job.root(acts.failures) == []


def _now(job: Job) -> tuple[set[int], set[str]]:
    return job.processes(), set(job.directories())


@contextmanager
def _reaching(step: str, then: Callable[[], None] | None = None) -> Iterator[threading.Event]:
    """In the root: set when the directory calls that function of its module for a store."""
    from torchstore_monarch.actors import directory

    real, reached = getattr(directory, step), threading.Event()

    def call(*args: Any) -> Any:
        reached.set()
        if then is not None:
            then()
        return real(*args)

    setattr(directory, step, call)
    try:
        yield reached
    finally:
        setattr(directory, step, real)


async def _shut_down_at(step: str) -> str:
    with _reaching(step) as reached:
        start = asyncio.ensure_future(acts.initialize(RACE))
        await asyncio.to_thread(reached.wait, 30)
        await asyncio.gather(*(acts.shutdown("race") for _ in range(3)))
        try:
            return await start
        except ts.StoreClosedError as error:
            return error.message


@pytest.mark.parametrize("step", [pytest.param("_volume_procs", marks=_soak), "spread"])
async def test_a_shutdown_while_the_store_starts(others_job: Job, step: str) -> None:
    """It ends the start; no other store of the job has anything to do with that."""
    before = _now(others_job)
    said = await others_job.root(_shut_down_at, step)
    assert said == "store 'race' was shut down while it was being initialized"
    await _is_as_before(others_job, before)


async def _shut_down_before_it_is_joined() -> str:
    from torchstore_core.clients.stores import joined

    find_by = joined.find_by

    async def shut_down_first(*args: Any) -> Any:
        joined.find_by = find_by
        await acts.shutdown("race")
        return await find_by(*args)

    joined.find_by = shut_down_first
    try:
        return await acts.initialize(RACE)
    except ts.StoreClosedError as error:
        return error.message
    finally:
        joined.find_by = find_by


async def test_a_shutdown_between_the_start_and_the_first_session(others_job: Job) -> None:
    """The store was complete, but `initialize` had not returned: the same error."""
    before = _now(others_job)
    said = await others_job.root(_shut_down_before_it_is_joined)
    assert said == "store 'race' was shut down while it was being initialized"
    await _is_as_before(others_job, before)


async def _cancel_at(step: str) -> str:
    with _reaching(step) as reached:
        start = asyncio.ensure_future(acts.initialize(RACE))
        await asyncio.to_thread(reached.wait, 30)
        start.cancel()
        try:
            return await start
        except asyncio.CancelledError:
            return "cancelled"


@pytest.mark.parametrize("step", ["_volume_procs", pytest.param("spread", marks=_soak)])
async def test_an_initialize_that_is_cancelled_leaves_nothing(others_job: Job, step: str) -> None:
    before = _now(others_job)
    assert await others_job.root(_cancel_at, step) == "cancelled"
    await _is_as_before(others_job, before)


async def _end_of_token(token: str) -> bool:
    from torchstore_monarch import job

    return await job.end("race", 10, token)


async def test_a_cancelled_initialize_ends_no_other_store_of_its_name(others_job: Job) -> None:
    before = _now(others_job)
    await others_job.at(0, acts.initialize, RACE)
    await others_job.at(0, acts.put, "k", 1, "race")
    with pytest.raises(ts.ConfigurationError):
        await others_job.at(1, acts.initialize, RACE)
    assert not await others_job.at(1, _end_of_token, "the token of another")
    assert await others_job.at(1, acts.get, "k", "race") == 1
    await others_job.at(1, acts.shutdown, "race")
    await _is_as_before(others_job, before)


async def _create_given_up() -> None:
    from torchstore_monarch.actors import directory

    made = directory.Directory()
    made._given_up.append("token")
    asked = StoreRequest("race", 1, "singleton", b"{}", None, 0, 5.0, (), "token")
    await made._create(asked, None)


async def test_what_is_given_up_before_it_is_begun_is_not_begun(others_job: Job) -> None:
    with pytest.raises(ts.StoreClosedError, match="given up"):
        await others_job.root(_create_given_up)


async def _fail_at(step: str) -> None:
    def fail() -> None:
        raise ValueError("something odd")

    with _reaching(step, fail):
        await acts.initialize(RACE)


async def test_what_is_no_error_of_ours_arrives_as_one(others_job: Job) -> None:
    before = _now(others_job)
    with pytest.raises(ts.TorchStoreError, match="ValueError: something odd"):
        await others_job.root(_fail_at, "spread")
    await _is_as_before(others_job, before)


async def test_cancellation_is_no_error_of_an_endpoint() -> None:
    async def fail(error: BaseException) -> None:
        raise error

    with pytest.raises(ts.TorchStoreError, match="KeyError: 'x'"):
        result(await outcome(fail(KeyError("x"))))
    with pytest.raises(asyncio.CancelledError):
        await outcome(fail(asyncio.CancelledError()))


# ---- slices of meshes ---------------------------------------------------------------------


async def _initialize_on_first_of_each_host() -> list[str]:
    from tests.monarch.root import HERE

    mesh = HERE.workers.slice(procs=0)
    await acts.initialize({"mesh": mesh, "num_storage_volumes": 2, "strategy": "host"})
    return [volume.host_id for volume in (await ts.status()).volumes]


@pytest.mark.soak
async def test_one_process_of_each_host() -> None:
    """A slice of a mesh whose members are not in a row."""
    with Job(workers=2, hosts=2) as job:
        pids = [await job.at(worker, acts.pid) for worker in range(4)]
        assert await job.root(_initialize_on_first_of_each_host) == ["host0", "host1"]
        assert [v.pid for v in (await job.root(acts.status)).volumes] == [pids[0], pids[2]]
        await job.at(1, acts.put_ones, "k", MB)
        assert await job.at(3, acts.get_shape, "k") == ((MB,), [1])
        await job.root(acts.shutdown)
        await until_none(job.left)
        assert await job.at(0, acts.pid) == pids[0]


# ---- first calls --------------------------------------------------------------------------

_adoptions: list[None] = []


async def _count_adoptions() -> None:
    from torchstore_monarch import job

    real = job.use_this_actor

    def use_this_actor(host: Any) -> Any:
        _adoptions.append(None)
        return real(host)

    job.use_this_actor = use_this_actor


async def _adoptions_so_far() -> int:
    return len(_adoptions)


async def _first_calls(store_name: str) -> None:
    """At the same time in this loop and in loops of other threads; the very first is cancelled."""
    from torchstore_monarch import job

    real, reached = job.directory, threading.Event()

    async def directory() -> Any:
        reached.set()
        return await real()

    job.directory = directory
    first = asyncio.ensure_future(job.find(store_name, 30))
    await asyncio.to_thread(reached.wait, 30)
    first.cancel()
    job.directory = real

    def elsewhere() -> None:
        asyncio.run(_find_often(store_name))

    await asyncio.gather(_find_often(store_name), *(asyncio.to_thread(elsewhere) for _ in range(3)))
    assert first.cancelled() or first.done()


async def _find_often(store_name: str) -> None:
    from torchstore_monarch import job

    found = await asyncio.gather(*(job.find(store_name, 30) for _ in range(8)))
    assert len(set(found)) == 1


async def test_first_calls_of_a_process_at_the_same_time() -> None:
    """It gets one actor, and a relay with one for each store, on a host without an agent."""
    with Job(workers=1, hosts=1) as job:
        await job.at(0, _count_adoptions)
        for number, name in enumerate(("a", "b"), 1):
            await job.root(acts.initialize, {"store_name": name})
            before = set(job.directories())
            await job.at(0, _first_calls, name)
            assert await job.at(0, _adoptions_so_far) == 1 + number
            assert len(set(job.directories()) - before) == 1, number
            await job.at(0, acts.put, "k", 1, name)
            assert await job.root(acts.get, "k", name) == 1


async def _make_at_once() -> tuple[bool, list[str], int]:
    from torchstore_monarch import job

    made: list[int] = []
    go = threading.Event()

    async def make() -> int:
        made.append(1)
        await asyncio.to_thread(go.wait, 10)
        if len(made) == 1:
            raise ts.TransportError("once")
        return len(made)

    calls = [asyncio.ensure_future(job._once("test", make)) for _ in range(3)]
    await until(lambda: made)
    calls[0].cancel()
    await asyncio.wait([calls[0]])
    go.set()
    errors = await asyncio.gather(*calls[1:], return_exceptions=True)
    await until(lambda: not job._making)
    said = [str(error) for error in errors]
    return calls[0].cancelled(), said, await job._once("test", make)


async def test_one_makes_for_all(others_job: Job) -> None:
    """Whoever is cancelled; and what it fails with, all get, and the next ones try again."""
    cancelled, said, made = await others_job.root(_make_at_once)
    assert cancelled
    assert [text.startswith("once") for text in said] == [True, True]
    assert made == 2


# ---- what does not end by itself ----------------------------------------------------------


async def test_what_does_not_end_is_killed(others_job: Job) -> None:
    """A shutdown raises nothing, and in its time it ends what does not answer."""
    before = _now(others_job)
    await others_job.root(acts.initialize, {**RACE, "num_storage_volumes": 2})
    status = await others_job.root(acts.status, "race")
    stuck = {status.controller_pid, status.volumes[0].pid}
    for pid in stuck:
        os.kill(pid, signal.SIGSTOP)
    async with within(14):
        await others_job.root(acts.shutdown, "race")
    await until(lambda: not (stuck | {v.pid for v in status.volumes}) & running())
    await _is_as_before(others_job, before)


@pytest.mark.soak  # what does not end is killed above
async def test_a_shutdown_that_is_not_waited_for(others_job: Job) -> None:
    """The job does not answer in time: nothing is raised, and the store ends all the same."""
    before = _now(others_job)
    await others_job.at(0, acts.initialize, RACE)
    status = await others_job.at(0, acts.status, "race")
    os.kill(status.controller_pid, signal.SIGSTOP)
    await others_job.at(0, _shut_down_within, 0.001)
    await until(lambda: status.controller_pid not in running(), 20)
    await _is_as_before(others_job, before)


async def _shut_down_within(timeout: float) -> None:
    await ts.shutdown("race", timeout=timeout)


async def _to_be_killed(own_agents: bool, host_id: str) -> tuple[set[int], int, int]:
    from torchstore_monarch.actors import directory

    here = topology.probe()
    store = directory._Store(StoreRequest("race", 1, "singleton", b"{}", None, 0, 5.0, ()))
    store.own_agents = own_agents
    led = Led(host_id or here.host_id, "", os.getppid(), 0, 0)
    directory._note_processes(store, led, [here])
    return set(store.processes), os.getppid(), os.getpid()


async def test_processes_of_the_user_are_not_killed(others_job: Job) -> None:
    for own in (False, True):
        for host_id in ("", "another host"):
            noted, controller, agent = await others_job.root(_to_be_killed, own, host_id)
            expected = ({agent} if own else set()) | (set() if host_id else {controller})
            assert noted == expected
