"""Jobs that the tests of a module share."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
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


# Each process of the tests has a network of its own.
_NETWORK = f"10.213.{os.getpid() % 250}"
CARRIERS = (
    "monarch-rpc",
    pytest.param("tcp", marks=pytest.mark.soak),
    "tcp over two networks",
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


def _ip(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=False)


def _make(*words: str) -> None:
    done = _ip(*words)
    if "not permitted" in done.stderr:
        pytest.skip(f"network namespaces are not permitted here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def spaces() -> Iterator[list[tuple[str, str]]]:
    """Two namespaces, each with its address; this one is at the other end of both cables."""
    if shutil.which("ip") is None:
        pytest.skip("iproute2 is not installed")
    made: list[tuple[str, str]] = []
    tag = f"{os.getpid() % 100_000}"
    try:
        _make("link", "add", f"tsb{tag}", "type", "bridge")
        _make("addr", "add", f"{_NETWORK}.1/24", "dev", f"tsb{tag}")
        _make("link", "set", f"tsb{tag}", "up")
        for number in (0, 1):
            space, cable, address = f"ts{tag}n{number}", f"ts{tag}v{number}", 2 + number
            _make("netns", "add", space)
            made.append((space, f"{_NETWORK}.{address}"))
            _make("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", space)
            _make("link", "set", cable, "master", f"tsb{tag}", "up")
            inside = ("netns", "exec", space, "ip")
            _make(*inside, "addr", "add", f"{_NETWORK}.{address}/24", "dev", "eth0")
            _make(*inside, "link", "set", "eth0", "up")
            _make(*inside, "link", "set", "lo", "up")
        yield made
    finally:
        for space, _ in made:
            _ip("netns", "delete", space)  # its end of the cable goes with it, and so the other
        _ip("link", "delete", f"tsb{tag}")


@pytest.fixture(scope="module")
def apart(spaces: list[tuple[str, str]]) -> Iterator[Job]:
    """A job over both; the root is in this namespace."""
    # For process groups of the tests' own: the hosts' names are not those of their addresses.
    gloo = ("env", "GLOO_SOCKET_IFNAME=eth0")
    wrappers = [["ip", "netns", "exec", space, *gloo] for space, _ in spaces]
    addresses = [f"tcp://{address}:26600" for _, address in spaces]
    with Job(
        workers=1,
        wrappers=wrappers,
        addresses=addresses,
        transport=f"tcp://{_NETWORK}.1:26600",
    ) as made:
        yield made
