"""Descriptor of the ``tcp`` transport."""

from __future__ import annotations

import msgspec

from torchstore_core.contracts.hooks import hookimpl
from torchstore_core.contracts.rates import LOOPBACK_RATE, Rate, between_networks
from torchstore_core.contracts.transport import Bid, LinkContext, Refusal, TransportSpec
from torchstore_transports.tcp.wire.protocol import VERSION, Offer

__all__ = ["torchstore_transport"]

# Waking a stream, a request and its answer, and waking the event loop.
_LATENCY_S = 300e-6
# What headers and acknowledgements leave of a network.
_SHARE = 0.9
# What a stream moves with a processor at each end (measured), and how many streams there are.
_STREAM_BYTES_PER_S, _STREAMS = 1.5e9, 8


def _bid(context: LinkContext) -> Bid | Refusal:
    if not context.offered:
        return Refusal("the volume does not offer tcp")
    if not context.offer and context.same_host:  # of a hypothetical volume
        return _bid_at(LOOPBACK_RATE, 1)
    try:
        offer = msgspec.msgpack.decode(context.offer, type=Offer)
    except msgspec.DecodeError as error:
        return Refusal(f"the volume's offer is not one of tcp: {error}")
    if offer.version != VERSION:
        return Refusal(f"the volume speaks version {offer.version} of tcp, not {VERSION}")
    if offer.namespace and offer.namespace == context.client.namespace:
        return _bid_at(LOOPBACK_RATE, 1)  # both ends share the processors
    processors = min(context.client.cpus, context.volume.cpus)
    return _bid_at(between_networks(context.client.networks, offer.networks), processors)


def _bid_at(rate: Rate | Refusal, processors: int) -> Bid | Refusal:
    if isinstance(rate, Refusal):
        return rate
    most = _STREAM_BYTES_PER_S * max(1, min(processors, _STREAMS))
    return Bid(_LATENCY_S, min(rate.bytes_per_s * _SHARE, most), rate.reason)


@hookimpl
def torchstore_transport() -> TransportSpec:
    """See ``torchstore_core.contracts.hooks``."""
    return TransportSpec(
        "tcp",
        bid=_bid,
        client="torchstore_transports.tcp.link:TcpLink",
        server="torchstore_transports.tcp.server:TcpServer",
        listens=True,
    )
