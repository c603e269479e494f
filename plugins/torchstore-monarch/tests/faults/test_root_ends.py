"""A store lives until its root client ends, however it ends; then nothing of it is left."""

from __future__ import annotations

import os
import signal

import pytest
from tests.monarch import acts
from tests.monarch.jobs import Job
from tests.support import named_memory, until

# The engine ends its processes when it sees that the root is gone.
_SOON_S = 30.0


async def _fail() -> None:
    from tests.monarch.root import HERE

    HERE.error = RuntimeError("what users do")


async def _end(job: Job, how: str) -> int:
    """End the root client; its exit status."""
    if how == "normally":
        job.leave()
    elif how == "exception":
        await job.root(_fail)
        job.leave()
    else:
        os.kill(job.pid, signal.SIGKILL)
    status = await until(lambda: None if job.ended() is None else str(job.ended()), _SOON_S)
    return int(status)


@pytest.mark.soak  # with other hosts, below, there is more to be ended
@pytest.mark.parametrize(
    ("how", "status"), [("normally", 0), ("exception", 1), ("kill -9", -signal.SIGKILL)]
)
async def test_one_host(how: str, status: int) -> None:
    with Job(workers=1) as job:
        await job.root(acts.initialize, {"num_storage_volumes": 2})
        await job.at(0, acts.put_ones_and_hold, "k")
        assert await job.root(acts.get_shape, "k") == ((1 << 20,), [1])
        assert len(job.directories()) >= 2
        shared = named_memory(job.processes())
        assert await _end(job, how) == status
        await until(lambda: not job.processes(), _SOON_S)
        assert job.directories() == []
        assert not [path for path in shared if path.exists()]


async def test_volumes_on_other_hosts() -> None:
    """The user's own processes on other hosts live on, as Monarch has it: nothing of the store
    does.
    """
    with Job(workers=1, hosts=2) as job:
        await job.root(acts.initialize_on_hosts, {"strategy": "host"})
        for worker in (0, 1):
            await job.at(worker, acts.put_ones, f"k{worker}", 1 << 20)
        users = {await job.at(i, acts.pid) for i in (0, 1)} | set(job.host_pids())
        shared = named_memory(job.processes())
        assert await _end(job, "kill -9") == -signal.SIGKILL
        await until(lambda: job.processes() <= users, _SOON_S)
        await until(lambda: not job.directories(), _SOON_S)
        assert not [path for path in shared if path.exists()]


async def _has_no_maps(job: Job, worker: int) -> bool:
    return bool(await job.at(worker, acts.store_maps) == 0)


@pytest.mark.soak
async def test_a_store_in_the_users_processes_ends_without_them() -> None:
    """``mesh=`` processes of the user: after a shutdown they are as before."""
    with Job(workers=2) as job:
        await job.at(0, acts.pid)  # it is up
        before = job.processes()
        for _ in range(2):
            await job.root(acts.initialize_on_workers, {"num_storage_volumes": 2})
            await job.at(1, acts.put_ones, "k", 1 << 20)
            assert await job.at(0, acts.get_shape, "k") == ((1 << 20,), [1])
            await job.root(acts.shutdown)
            await until(lambda: job.processes() <= before)
            assert job.directories() == []
            for worker in (0, 1):
                await until(lambda worker=worker: _has_no_maps(job, worker))
