"""Jobs that the tests of a module share."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from tests.monarch import acts
from tests.monarch.jobs import Job


@pytest.fixture(scope="module")
def job() -> Iterator[Job]:
    """One host: the root client and two workers."""
    with Job(workers=2) as made:
        yield made


@pytest.fixture(scope="module")
def hosts() -> Iterator[Job]:
    """Three hosts: the root client on one, a worker on each of the other two."""
    with Job(workers=1, hosts=2) as made:
        yield made


@pytest.fixture(scope="module")
def job_store(job: Job) -> Job:
    """The job ``job`` with a store."""
    asyncio.run(job.root(acts.initialize))
    return job


@pytest.fixture(scope="module")
def hosts_store(hosts: Job) -> Job:
    """The job ``hosts`` with a volume on each of the workers' hosts; strategy ``host``, and
    between hosts ``monarch-rpc``.
    """
    arguments = {"strategy": "host", "block": ["monarch-rdma"]}
    asyncio.run(hosts.root(acts.initialize_on_hosts, arguments))
    return hosts
