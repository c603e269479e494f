"""Jobs that the tests of a module share."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from tests.monarch import acts
from tests.monarch.jobs import Job

from torchstore_core.testing.networks import Namespace, two_networks


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


CARRIERS = (
    "monarch-rpc",
    # test_namespaces, and the tests of cables, have stores over networks.
    *(pytest.param(name, marks=pytest.mark.soak) for name in ("tcp", "tcp over two networks")),
)


@pytest.fixture(scope="module", params=CARRIERS)
def hosts_store(request: pytest.FixtureRequest) -> Iterator[Job]:
    """A volume on each of two hosts, strategy ``host``, and one transport between them: over the
    loopback, or between network namespaces, where nothing else connects the hosts.
    """
    carrier, _, apart = str(request.param).partition(" ")
    block = {"monarch-rpc", "monarch-rdma", "tcp"} - {carrier}
    job: Job = request.getfixturevalue("apart" if apart else "hosts")
    arguments = {"strategy": "host", "block": sorted(block)}
    asyncio.run(job.root(acts.initialize_on_hosts, arguments))
    yield job
    asyncio.run(job.root(acts.shutdown))


@pytest.fixture
def carrier(hosts_store: Job, request: pytest.FixtureRequest) -> str:
    """The transport between the hosts of ``hosts_store``."""
    return str(request.node.callspec.params["hosts_store"]).partition(" ")[0]


@pytest.fixture(scope="module")
def spaces() -> Iterator[tuple[Namespace, Namespace]]:
    """Two namespaces; this one is at the other end of both cables."""
    with two_networks(here=True) as both:
        yield both


@pytest.fixture(scope="module")
def apart(spaces: tuple[Namespace, Namespace]) -> Iterator[Job]:
    """A job over both; the root is in this namespace."""
    # For process groups of the tests' own: the hosts' names are not those of their addresses.
    gloo = ("env", "GLOO_SOCKET_IFNAME=eth0")
    wrappers = [[*space.wrapper, *gloo] for space in spaces]
    addresses = [f"tcp://{space.address}:26600" for space in spaces]
    network = spaces[0].address.rpartition(".")[0]
    with Job(
        workers=1,
        wrappers=wrappers,
        addresses=addresses,
        transport=f"tcp://{network}.1:26600",
    ) as made:
        yield made
