"""What the network between two hosts carries: the common basis of the bids of all transports.

A transport bids a share of it, and no more than its own processors can move. So transports over the
same sockets rank by what they make of them, whatever the network.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from typing import NamedTuple

from torchstore_core.contracts.transport import LinkContext, Refusal
from torchstore_core.machine.networks import BIND, Network, common

__all__ = ["LOOPBACK_RATE", "UNKNOWN_MBITS_PER_S", "Rate", "between_networks", "device_rate"]
__all__ += ["network_rate"]

#: The rate that is assumed for an interface whose rate the system does not know.
UNKNOWN_MBITS_PER_S = 10_000

# What RDMA devices whose rate the system does not state are assumed to move.
_DEVICES_BYTES_PER_S = 12e9
# Through an adapter and back on one host: less than shared memory, which is always there.
_ONE_HOST_BYTES_PER_S = 5e9


class Rate(NamedTuple):
    """Bytes per second, before anything is lost to protocols; and why, as text for people."""

    bytes_per_s: float
    reason: str


#: What a loopback interface moves, both of whose ends share the processors (measured with two).
LOOPBACK_RATE = Rate(1.7e9, "same host: over the loopback")


def network_rate(context: LinkContext) -> Rate | Refusal:
    """Return what the network between a client and a volume carries; a refusal if they have no
    addresses at which one could reach the other.
    """
    here, there = context.client, context.volume
    if here.namespace and here.namespace == there.namespace:
        return LOOPBACK_RATE
    return between_networks(here.networks, there.networks)


def between_networks(here: Iterable[Network], there: Iterable[Network]) -> Rate | Refusal:
    """Return what the network between two hosts with these addresses carries.

    >>> mine, other = Network("eth0", "10.0.0.1", 24, 1000), Network("eth0", "10.0.0.2", 24)
    >>> between_networks([mine], [other]).bytes_per_s
    125000000.0
    """
    sides = [tuple(one for one in side if not _is_loopback(one)) for side in (here, there)]
    for who, side in zip(("this host", "the volume's host"), sides, strict=True):
        if not side:
            return Refusal(f"{who} has no address but that of its loopback, or {BIND} names none")
    pairs = common(*sides)
    if pairs:
        mine, _ = pairs[0]
        mbits = min(_mbits_per_s(one) for one in pairs[0])
        where = f"both hosts are in the network of {mine.interface} ({mine.address}/{mine.prefix})"
    else:
        families = [{":" in one.address for one in side} for side in sides]
        if not families[0] & families[1]:
            return Refusal("one host has IPv4 addresses only, and the other IPv6 addresses only")
        mbits = min(max(_mbits_per_s(one) for one in side) for side in sides)
        where = "the hosts share no network, so through a router"
    return Rate(mbits * 1e6 / 8, f"{where}, {mbits:,} Mbit/s")


def device_rate(context: LinkContext) -> Rate | None:
    """Return what the RDMA devices of both hosts carry between them, which is not less than what
    the network does; None if one of the hosts has none.
    """
    here, there = context.client, context.volume
    if not here.rdma_devices or not there.rdma_devices:
        return None
    if context.same_host:
        return Rate(_ONE_HOST_BYTES_PER_S, "RDMA devices, through the adapter and back")
    known = [place.rdma_mbits_per_s for place in (here, there) if place.rdma_mbits_per_s]
    devices = min(known) * 1e6 / 8 if known else _DEVICES_BYTES_PER_S
    network = network_rate(context)
    floor = 0.0 if isinstance(network, Refusal) else network.bytes_per_s
    return Rate(max(devices, floor), "RDMA devices on both hosts")


def _mbits_per_s(network: Network) -> int:
    return network.mbits_per_s or UNKNOWN_MBITS_PER_S


def _is_loopback(network: Network) -> bool:
    return ipaddress.ip_address(network.address).is_loopback
