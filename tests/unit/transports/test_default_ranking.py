"""Which transport is chosen where nobody has chosen one: the bids of all packages together."""

from __future__ import annotations

import sys

import msgspec
import pytest

from torchstore_core.contracts.transport import LinkContext
from torchstore_core.machine.networks import Network
from torchstore_core.machine.topology import probe
from torchstore_core.plugins.ranking import Policy, rank
from torchstore_core.plugins.registry import Registry
from torchstore_transports.tcp.wire.protocol import VERSION, Offer

SIZES = (64 << 20, 1 << 30)
DEVICES = ("rdma", "torchcomms-rdma", "monarch-rdma")
SOCKETS = ("tcp", "gloo", "torchcomms", "monarch-rpc")
MBITS = (0, 100, 1_000, 2_500, 10_000, 100_000, 200_000, 400_000)


def _link(mbits: int, *, devices: bool, same_host: bool, cpus: int, gpus: int = 8) -> LinkContext:
    """A link between two hosts of one network, or two processes of one host."""
    here = msgspec.structs.replace(
        probe(),
        host_id="here",
        cpus=cpus,
        cuda_devices=gpus,
        rdma_devices=("mlx5_0",) if devices else (),
        networks=(Network("eth0", "10.0.0.1", 24, mbits),),
        namespace="here",
    )
    there = msgspec.structs.replace(here, pid=0)
    if not same_host:
        networks = (Network("eth0", "10.0.0.2", 24, mbits),)
        there = msgspec.structs.replace(
            there, host_id="there", networks=networks, namespace="there"
        )
    return LinkContext(here, there, same_host, offered=False)


def _order(context: LinkContext, nbytes: int) -> list[str]:
    """The names of all installed transports that bid, the best first. Probes have no say: they
    would leave out those whose hardware or library this host does not have.
    """
    registry = Registry(block=())
    specs = [msgspec.structs.replace(spec, probe=None) for spec in registry.transports()]
    offers = {
        spec.name: spec.offer() if spec.offer is not None else b""
        for spec in specs
        if spec.server is not None
    }
    volume = context.volume
    offers["tcp"] = msgspec.msgpack.encode(Offer(VERSION, volume.namespace, volume.networks))
    ranking = rank(specs, context, offers, Policy())
    return [one.spec.name for one in ranking.order(nbytes, in_band=False)]


def _of(names: tuple[str, ...], order: list[str]) -> list[str]:
    return [name for name in names if name in order]


@pytest.fixture(autouse=True)
def everything(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.delenv("TORCHSTORE_BLOCK", raising=False)  # of the tests' own configuration
    monkeypatch.setenv("TORCHSTORE_CALIBRATION", f"{tmp_path}/none.json")
    monkeypatch.setitem(sys.modules, "monarch", sys)  # as in a job


@pytest.mark.parametrize("cpus", [1, 2, 64])
@pytest.mark.parametrize("mbits", MBITS)
def test_between_hosts(mbits: int, cpus: int) -> None:
    for nbytes in SIZES:
        order = _order(_link(mbits, devices=False, same_host=False, cpus=cpus), nbytes)
        assert order[0] == "tcp"
        # Without devices, UCX and Monarch's fallback go through the same sockets, and are slower.
        slow = [name for name in ("monarch-rdma", "rdma") if name in order]
        assert order == [*_of(SOCKETS, order), *slow]


@pytest.mark.parametrize("cpus", [1, 2, 64])
@pytest.mark.parametrize("mbits", MBITS)
def test_between_hosts_with_rdma_devices(mbits: int, cpus: int) -> None:
    link = _link(mbits, devices=True, same_host=False, cpus=cpus)
    order = _order(link, 1 << 30)
    assert order == [*_of(DEVICES, order), *_of(SOCKETS, order)]
    # The latencies of the other two are higher, so with less, tcp may be better on a fast network.
    order = _order(link, 64 << 20)
    assert order[0] == _of((*DEVICES, *SOCKETS), order)[0]
    assert _of(SOCKETS, order) == [name for name in order if name in SOCKETS]


@pytest.mark.parametrize("devices", [False, True])
@pytest.mark.parametrize("mbits", MBITS)
def test_on_one_host(mbits: int, devices: bool) -> None:
    for nbytes in SIZES:
        order = _order(_link(mbits, devices=devices, same_host=True, cpus=2), nbytes)
        assert order[0] == "shm"
        assert _of(SOCKETS, order) == [name for name in order if name in SOCKETS]


def test_devices_whose_rate_is_known() -> None:
    slow = _link(0, devices=True, same_host=False, cpus=64)
    fast = msgspec.structs.replace(
        slow,
        client=msgspec.structs.replace(slow.client, rdma_mbits_per_s=400_000),
        volume=msgspec.structs.replace(slow.volume, rdma_mbits_per_s=200_000),
    )
    spec = {one.name: one for one in Registry(block=()).transports()}.get("monarch-rdma")
    if spec is None:
        pytest.skip("torchstore-monarch is not installed")
    rates = []
    for context in (slow, fast):
        bid = spec.bid(msgspec.structs.replace(context, offered=True))
        rates.append(getattr(bid, "bytes_per_s", 0.0))
    assert rates == pytest.approx([12e9 * 0.93, 25e9 * 0.93])
