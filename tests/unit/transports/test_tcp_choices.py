"""What ``tcp`` decides: its bid, where it listens, how many streams it uses."""

from __future__ import annotations

import msgspec
import pytest

from torchstore_core.contracts.rates import Rate, between_networks
from torchstore_core.contracts.transport import Bid, LinkContext, Refusal
from torchstore_core.errors import ConfigurationError
from torchstore_core.machine.networks import (
    LOOPBACK,
    Network,
    common,
    local_address_to,
    namespace_id,
    networks,
    own,
    reachable,
)
from torchstore_core.machine.topology import probe
from torchstore_transports.inline.plugin import torchstore_transport as inline
from torchstore_transports.shm.plugin import torchstore_transport as shm
from torchstore_transports.tcp.moving.widths import CHOICES, LARGE, Widths
from torchstore_transports.tcp.plugin import torchstore_transport
from torchstore_transports.tcp.serving.addresses import addresses_for
from torchstore_transports.tcp.wire.protocol import VERSION, Greeting, Offer

GB = 10**9
A = Network("eth0", "10.1.0.1", 16, 10_000)
B = Network("eth3", "10.1.0.2", 16, 25_000)
FAST_A, FAST_B = Network("ib0", "10.2.0.1", 24, 200_000), Network("ib0", "10.2.0.2", 24, 200_000)
BRIDGE = Network("docker0", "172.17.0.1", 16, 400_000)
ELSEWHERE = Network("eth0", "192.168.5.5", 24)
SIX = Network("eth0", "fd00::5", 64)


def _context(offer: bytes, *, same_host: bool = False, offered: bool = True) -> LinkContext:
    return LinkContext(probe(), probe(), same_host, offered, offer=offer)


def _offer(namespace: str, *there: Network, version: int = VERSION) -> bytes:
    return msgspec.msgpack.encode(Offer(version, namespace, there))


def test_on_one_host_it_is_for_what_is_large_and_not_shared() -> None:
    bid = torchstore_transport().bid
    context = _context(_offer(namespace_id()), same_host=True)
    ours, theirs, small = bid(context), shm().bid(context), inline().bid(context)
    assert isinstance(ours, Bid)
    assert bid(_context(b"", same_host=True)) == ours
    assert isinstance(theirs, Bid)
    assert isinstance(small, Bid)
    for nbytes in (1, 1 << 20, GB):
        assert theirs.cost_s(nbytes) * 2 < ours.cost_s(nbytes)
    assert small.cost_s(10_000) < ours.cost_s(10_000)
    assert small.cost_s(1 << 20) > ours.cost_s(1 << 20)


@pytest.mark.parametrize(
    ("here", "there", "gbits"),
    [
        ([A], [B], 10),
        ([A, FAST_A], [FAST_B, B], 200),
        ([A, BRIDGE], [B, BRIDGE], 10),  # both have that address, so neither reaches the other
        ([A], [ELSEWHERE], 10),
        ([FAST_A], [ELSEWHERE], 10),
    ],
)
def test_the_best_common_network(here: list[Network], there: list[Network], gbits: int) -> None:
    rate = between_networks(here, there)
    assert isinstance(rate, Rate)
    assert rate.bytes_per_s == gbits * GB / 8


@pytest.mark.parametrize(
    ("here", "there", "why"),
    [
        ([], [B], "this host"),
        ([A], [], "the volume's host"),
        ([A], [Network("", LOOPBACK, 32)], "the volume's host"),
        ([A], [SIX], "IPv6 addresses only"),
    ],
)
def test_refusals(here: list[Network], there: list[Network], why: str) -> None:
    refusal = between_networks(here, there)
    assert isinstance(refusal, Refusal)
    assert why in refusal.reason


def test_offers_that_cannot_be_used() -> None:
    bid = torchstore_transport().bid
    for context, why in (
        (_context(b"", offered=False), "does not offer"),
        (_context(b"\xff"), "not one of tcp"),
        (_context(_offer("x", B, version=99)), "version 99"),
        (_context(_offer("another namespace")), "no address but"),
    ):
        refusal = bid(context)
        assert isinstance(refusal, Refusal)
        assert why in refusal.reason


def test_common_networks_need_both_prefixes() -> None:
    wide, narrow = Network("a", "10.0.0.1", 8), Network("b", "10.9.0.1", 24)
    assert not common([wide], [narrow])
    assert common([A], [B]) == ((A, B),)


def test_this_host() -> None:
    found = {network: local_address_to(network.address) for network in networks()}
    # Cables to network namespaces of other tests come and go meanwhile.
    for network in found.keys() & set(networks()):
        assert found[network] == network.address
        assert network.contains(network.address)
    assert LOOPBACK not in {network.address for network in networks()}
    assert local_address_to(LOOPBACK) == LOOPBACK
    assert local_address_to("no address") is None
    assert namespace_id() == namespace_id() != ""


def test_where_to_listen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHSTORE_BIND", raising=False)
    neighbour = Greeting(VERSION, namespace_id(), networks())
    assert addresses_for(neighbour) == [LOOPBACK]
    # A client with our own addresses, but in another network: nowhere, least of all the loopback.
    assert addresses_for(Greeting(VERSION, "another", networks())) == []
    assert addresses_for(Greeting(VERSION, "another", (Network("x", LOOPBACK, 8),))) == []
    monkeypatch.setenv("TORCHSTORE_BIND", "127.0.0.2, ::1")
    assert addresses_for(neighbour) == ["127.0.0.2", "::1"]
    monkeypatch.setenv("TORCHSTORE_BIND", "no-such-interface")
    with pytest.raises(ConfigurationError, match="no-such-interface"):
        addresses_for(neighbour)


def test_where_the_engine_says_other_hosts_reach_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHSTORE_BIND", raising=False)
    stranger = Greeting(VERSION, "another", (Network("x", "203.0.113.9", 24),))
    assert addresses_for(stranger, (A, B)) == [A.address, B.address]
    assert addresses_for(Greeting(VERSION, namespace_id(), ()), (A,)) == [LOOPBACK]
    assert reachable((A,)) == (A,)
    mine = networks()
    found = own([*(one.address for one in mine), LOOPBACK, "203.0.113.9"])
    lasting = {*mine} & {*networks()}  # cables to network namespaces of other tests come and go
    assert [one for one in found if one in lasting] == [one for one in mine if one in lasting]
    monkeypatch.setenv("TORCHSTORE_BIND", "127.0.0.2")
    assert addresses_for(stranger, (A,)) == ["127.0.0.2"]
    assert [one.address for one in reachable((A,))] == ["127.0.0.2"]


@pytest.mark.parametrize(
    ("rates", "best"),
    [
        ({1: 1.0, 2: 1.9, 4: 3.5, 8: 6.0}, 8),
        ({1: 2.0, 2: 1.5, 4: 1.2, 8: 1.0}, 1),
        ({1: 1.0, 2: 2.0, 4: 2.05, 8: 2.0}, 2),
        ({1: 1.0, 2: 1.5, 4: 2.0, 8: 1.5}, 4),
    ],
)
def test_streams_climb_to_the_best_width(rates: dict[int, float], best: int) -> None:
    widths = Widths()
    chosen = []
    for _ in range(200):
        width = widths.choose(LARGE)
        chosen.append(width)
        widths.record(width, LARGE, 1 / rates[width])
    assert widths.best() == best
    assert chosen[20:].count(best) > 0.9 * len(chosen[20:])
    assert set(chosen) <= set(CHOICES)
    assert widths.choose(1000) == 1
    assert widths.choose(LARGE - 1) == best


def test_streams_follow_a_network_that_changes() -> None:
    widths = Widths()
    for step in range(600):
        width = widths.choose(LARGE)
        widths.record(width, LARGE, 1 / width if step < 100 else width)
    assert widths.best() == 1
