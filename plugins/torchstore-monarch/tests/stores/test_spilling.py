"""Stores of a job spill: each volume to a file on its host."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch
from tests.monarch import acts
from tests.monarch.jobs import Job
from tests.monarch.losses import end_store
from tests.support import noise, until

import torchstore_core as ts

MB = 1 << 20
SPILLS = {"strategy": "host", "capacity": 32 * MB, "when_full": "spillable"}


@pytest.fixture
async def two_hosts(hosts: Job) -> AsyncIterator[Job]:
    """A worker, and a volume of 16 MB, on each of two hosts; the server is on a third."""
    yield hosts
    await end_store(hosts)


def _value(key: str, at: int) -> torch.Tensor:
    """Large, small, and small enough for a message, in turn."""
    nbytes = (3 * MB + 64 * at, 90_000, 2000)[at % 3]
    return noise(nbytes, at + len(key))


async def _put(key: str, begin: int, end: int) -> None:
    for at in range(begin, end):
        await ts.put(f"{key}{at}", _value(key, at))


async def _is_there(key: str, begin: int, end: int) -> bool:
    """Whether all of them are what was put; some are fetched in place."""
    for at in range(begin, end):
        wanted = _value(key, at)
        into = torch.empty_like(wanted) if at % 2 else None
        got = await ts.get(f"{key}{at}", into)
        if not torch.equal(got if into is None else into, wanted):
            return False
    return True


@pytest.mark.parametrize(
    "url",
    [
        pytest.param("", id="files"),
        pytest.param("memory://me:secret@", id="objects", marks=pytest.mark.soak),
    ],
)
async def test_more_than_fits_and_a_server_that_is_killed(
    two_hosts: Job, tmp_path: Path, url: str
) -> None:
    where = {"spill": f"{url}{tmp_path}", "spill_capacity": 256 * MB}
    await two_hosts.root(acts.initialize_on_hosts, {**SPILLS, **where})
    await asyncio.gather(*[two_hosts.at(n, _put, f"host{n}/", 0, 24) for n in (0, 1)])
    before = await two_hosts.root(acts.status)
    assert before.spill.capacity_bytes == 256 * MB
    assert before.spill.directory == f"{url and 'memory://***@'}{tmp_path}"
    assert before.spill.spilled_bytes > 2 * (24 * MB - 16 * MB)
    working = [
        *[asyncio.ensure_future(two_hosts.at(n, _put, f"host{n}/", 24, 48)) for n in (0, 1)],
        *[
            asyncio.ensure_future(two_hosts.at(1 - n, _is_there, f"host{n}/", 0, 24))
            for n in (0, 1)
        ],
    ]
    for _ in range(2):  # while they write and read
        pid = (await two_hosts.root(acts.status)).controller_pid
        os.kill(pid, signal.SIGKILL)
    assert await asyncio.gather(*working) == [None, None, True, True]
    for n in (0, 1):
        assert await two_hosts.at(n, _is_there, f"host{n}/", 0, 48)
    after = await two_hosts.root(acts.status)
    assert after.controller_pid != before.controller_pid
    assert after.incarnation == before.incarnation
    assert [volume.pid for volume in after.volumes] == [volume.pid for volume in before.volumes]
    assert list(tmp_path.iterdir()) == []  # the files have no names
    # A volume is drained, and taken away with its disk, while the server is killed once more.
    draining = asyncio.ensure_future(two_hosts.root(_drain, 0))
    await until(functools.partial(_is_draining, two_hosts), 60)
    os.kill((await two_hosts.root(acts.status)).controller_pid, signal.SIGKILL)
    assert await draining
    os.kill(after.volumes[0].pid, signal.SIGKILL)
    for n in (0, 1):
        assert await two_hosts.at(1, _is_there, f"host{n}/", 0, 48)


async def _drain(volume: int) -> bool:
    return (await ts.drain(volume, timeout=200)).done


async def _is_draining(job: Job) -> bool:
    return (await job.root(acts.status)).volumes[0].draining


async def _lost(key: str, count: int) -> list[str]:
    """What is said of those that are lost; the others are what was put."""
    said: list[str] = []
    for at in range(count):
        try:
            assert torch.equal(await ts.get(f"{key}{at}"), _value(key, at))
        except ts.ObjectLostError as error:
            said.append(error.message)
    return said


@pytest.mark.soak  # without an engine: test_attached_spilling
async def test_a_volume_that_is_killed_while_it_spills(two_hosts: Job, tmp_path: Path) -> None:
    """What is in its memory, or on its disk, is lost, and nothing else."""
    await two_hosts.root(acts.initialize_on_hosts, {**SPILLS, "spill": str(tmp_path)})
    # When one volume is full, the strategy takes the other one; both spill.
    await two_hosts.at(0, _put, "k", 0, 36)
    status = await two_hosts.root(acts.status)
    working = asyncio.ensure_future(two_hosts.at(0, _lost, "k", 36))
    os.kill(status.volumes[1].pid, signal.SIGKILL)
    said = await working + await two_hosts.at(0, _lost, "k", 36)
    assert 4 <= len(said) < 60
    assert all("torchstore-1 is gone" in one for one in said)
    await two_hosts.at(0, _put, "more", 0, 24)
    assert await two_hosts.at(0, _is_there, "more", 0, 24)
    after = await two_hosts.root(acts.status)
    assert after.spill.spilled_bytes > 4 * MB
    assert not after.spill.trouble
