"""The jobs that lose processes, and end their stores after each test."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from tests.monarch.jobs import Job
from tests.monarch.losses import end_store


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
