"""Descriptor of the ``tcp`` transport."""

from __future__ import annotations

import functools
import time

import msgspec

from torchstore_core.contracts.hooks import hookimpl
from torchstore_core.contracts.transport import Bid, LinkContext, Refusal, TransportSpec
from torchstore_core.machine.networks import Network, common, namespace_id, networks
from torchstore_transports.tcp.wire.protocol import VERSION, Offer

__all__ = ["torchstore_transport"]

# Waking a stream, a request and its answer, and waking the event loop.
_LATENCY_S = 300e-6
# Loopback: two copies through the kernel.
_LOOPBACK_BYTES_PER_S = 1.5e9
_UNKNOWN_MBITS_PER_S = 10_000
_EFFICIENCY = 0.9
_FRESH_S = 5.0
_LOOPBACK = Bid(_LATENCY_S, _LOOPBACK_BYTES_PER_S, "same host: over the loopback")


def _bid(context: LinkContext) -> Bid | Refusal:
    if not context.offered:
        return Refusal("the volume does not offer tcp")
    if not context.offer and context.same_host:  # of a hypothetical volume
        return _LOOPBACK
    try:
        offer = msgspec.msgpack.decode(context.offer, type=Offer)
    except msgspec.DecodeError as error:
        return Refusal(f"the volume's offer is not one of tcp: {error}")
    if offer.version != VERSION:
        return Refusal(f"the volume speaks version {offer.version} of tcp, not {VERSION}")
    if offer.namespace and offer.namespace == namespace_id():
        return _LOOPBACK
    return bid_between(_here(int(time.monotonic() / _FRESH_S)), offer.networks)


def bid_between(here: tuple[Network, ...], there: tuple[Network, ...]) -> Bid | Refusal:
    """Return the bid for two hosts with these addresses."""
    if not here or not there:
        who = "this host" if not here else "the volume's host"
        return Refusal(f"{who} has no address but that of its loopback")
    pairs = common(here, there)
    if pairs:
        mine, _ = pairs[0]
        rate = min(_mbits_per_s(one) for one in pairs[0])
        where = f"both hosts are in the network of {mine.interface} ({mine.address}/{mine.prefix})"
    else:
        families = [{":" in one.address for one in side} for side in (here, there)]
        if not families[0] & families[1]:
            return Refusal("one host has IPv4 addresses only, and the other IPv6 addresses only")
        rate = min(max(_mbits_per_s(one) for one in side) for side in (here, there))
        where = "the hosts share no network, so through a router"
    return Bid(_LATENCY_S, rate * 1e6 / 8 * _EFFICIENCY, f"{where}, {rate:,} Mbit/s")


def _mbits_per_s(network: Network) -> int:
    return network.mbits_per_s or _UNKNOWN_MBITS_PER_S


@functools.lru_cache(maxsize=1)
def _here(_period: int) -> tuple[Network, ...]:
    """Return the networks of this host. A new ``_period`` has them looked up again."""
    try:
        return networks()
    except OSError:
        return ()


@hookimpl
def torchstore_transport() -> TransportSpec:
    """See ``torchstore_core.contracts.hooks``."""
    return TransportSpec(
        "tcp",
        bid=_bid,
        client="torchstore_transports.tcp.link:TcpLink",
        server="torchstore_transports.tcp.server:TcpServer",
    )
