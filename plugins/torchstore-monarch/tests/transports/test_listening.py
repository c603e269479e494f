"""Where ``tcp`` listens in a job whose hosts have a network more than the engine uses."""

from __future__ import annotations

import ipaddress
import subprocess
from collections.abc import Iterator

import pytest
from tests.monarch import acts
from tests.monarch.jobs import Job

import torchstore_core as ts
from torchstore_core.testing.leftovers import listening
from torchstore_core.testing.networks import Namespace

MB = 1 << 20


def _do(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{words}: {done.stderr}"


def _other(space: Namespace) -> str:
    """The host's address in the network that the engine does not use."""
    return space.address.replace("10.213", "10.212")


@pytest.fixture(scope="module")
def two_cables(spaces: tuple[Namespace, Namespace]) -> tuple[Namespace, Namespace]:
    """Two hosts with a second cable between them, ``eth1``."""
    ends = [("name", "eth1", "netns", space.name) for space in spaces]
    _do("ip", "link", "add", *ends[0], "type", "veth", "peer", *ends[1])
    for space in spaces:
        inside = ("ip", "-n", space.name)
        _do(*inside, "addr", "add", f"{_other(space)}/24", "dev", "eth1")
        _do(*inside, "link", "set", "eth1", "up")
    return spaces


@pytest.fixture(
    params=[
        pytest.param("", id="as the engine says", marks=pytest.mark.soak),
        pytest.param("eth1", id="as the user says", marks=pytest.mark.soak),
    ]
)
def job(
    two_cables: tuple[Namespace, Namespace], request: pytest.FixtureRequest
) -> Iterator[tuple[Job, str]]:
    """A job over both hosts, and the address at which the first one is to listen."""
    chosen = [f"TORCHSTORE_BIND={request.param}"] if request.param else ["-u", "TORCHSTORE_BIND"]
    first = two_cables[0]
    with Job(
        workers=1,
        wrappers=[[*space.wrapper, "env", *chosen] for space in two_cables],
        addresses=[f"tcp://{space.address}:26601" for space in two_cables],
        transport=f"tcp://{first.address.rpartition('.')[0]}.1:26601",
    ) as made:
        yield made, _other(first) if request.param else first.address


async def _volume() -> tuple[int, list[str]]:
    """The volume's process, and what clients are told of its addresses."""
    session = await (await ts.client())._joined.session(10)
    info = session.volumes[0].info
    return info.pid, [one.address for one in info.topology.networks]


async def test_where_tcp_listens(job: tuple[Job, str]) -> None:
    made, wanted = job
    block = ["monarch-rpc", "monarch-rdma", "inline"]
    await made.root(acts.initialize_on_hosts, {"num_storage_volumes": 1, "block": block})
    pid, told = await made.at(1, _volume)
    assert told == [wanted]
    await made.at(1, acts.put_ones, "v", MB)
    assert await made.at(1, acts.get_shape, "v") == ((MB,), [1])
    assert set((await made.at(1, acts.transports)).values()) == {"tcp"}
    opened = {bytes.fromhex(address)[::-1] for address, _ in listening([pid])}
    assert opened == {ipaddress.ip_address(wanted).packed}
