"""The jobs that lose processes, and end their stores after each test. Files that take them share
them: conftest.py of the root gives all of these to one process.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.monarch.jobs import Job
from tests.monarch.losses import end_store

_HERE = Path(__file__).parent
_jobs: dict[str, Job] = {}


def _shared(name: str, *, workers: int, hosts: int = 0) -> Job:
    if name not in _jobs:
        _jobs[name] = Job(workers, hosts).__enter__()
    return _jobs[name]


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    """They end with the last test of this folder."""
    if nextitem is None or nextitem.path.parent != _HERE:
        while _jobs:
            _, job = _jobs.popitem()
            job.__exit__(None, None, None)


@pytest.fixture
async def two_hosts() -> AsyncIterator[Job]:
    """A worker on each of two hosts; the server is on a third."""
    job = _shared("two hosts", workers=1, hosts=2)
    yield job
    await end_store(job)


@pytest.fixture
async def one_host() -> AsyncIterator[Job]:
    """One host, two workers."""
    job = _shared("one host", workers=2)
    yield job
    await end_store(job)
