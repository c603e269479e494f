"""A server of a job that is killed comes back, and its volumes and relays with it."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator

import pytest
from tests.monarch import acts
from tests.monarch.jobs import Job
from tests.monarch.losses import MB, end_store
from tests.support import until

import torchstore_core as ts

PAUSE_S = 5.0  # on a busy machine; see benchmarks for what it takes


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
    await one_host.root(acts.initialize, {"num_storage_volumes": 2, "strategy": "spread"})
    await one_host.at(0, acts.put_ones, "first", MB)
    await one_host.at(1, acts.put_ones, "second", MB, 2)
    await one_host.root(acts.put, "object", {"a": 1})
    held = await one_host.at(1, acts.put_ones_and_hold, "held")
    before = await one_host.root(acts.status)
    assert before.keeper_pid
    for _ in range(2):
        pid = await _lose_the_server(one_host)
        begun = time.monotonic()
        assert await one_host.at(0, acts.get_shape, "second") == ((MB,), [2])
        assert time.monotonic() - begun < PAUSE_S
        assert await one_host.at(1, acts.get_shape, "first") == ((MB,), [1])
        assert await one_host.root(acts.get, "object") == {"a": 1}
        assert await one_host.at(1, acts.held_sum, held) == MB
        after = await one_host.root(acts.status)
        assert after.controller_pid not in (0, pid)
        assert after.keeper_pid == before.keeper_pid
        assert after.incarnation == before.incarnation
        assert [v.pid for v in after.volumes] == [v.pid for v in before.volumes]
        assert [v.used_bytes for v in after.volumes] == [v.used_bytes for v in before.volumes]
        assert len(after.sessions) == len(before.sessions)
    await one_host.at(0, acts.put_ones, "first", MB, 3)
    assert await one_host.at(1, acts.get_shape, "first") == ((MB,), [3])
