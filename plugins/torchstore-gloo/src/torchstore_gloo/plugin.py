"""Descriptor of the ``gloo`` transport."""

from __future__ import annotations

import sys

from torchstore_core.contracts.hooks import hookimpl
from torchstore_core.contracts.rates import network_rate
from torchstore_core.contracts.transport import Bid, LinkContext, Refusal, TransportSpec

# A handshake, and a round trip of the two threads that move the batch. Of the network it bids less
# than tcp does, and for each processor too: its sockets are the same, and it authenticates nobody.
_LATENCY_S = 1e-3
_SHARE, _BYTES_PER_S = 0.7, 1.2e9


def _probe() -> str | None:
    if sys.platform != "linux":
        return "gloo's pairs are only known to work on Linux"
    return None


def _bid(context: LinkContext) -> Bid | Refusal:
    rate = network_rate(context)
    if isinstance(rate, Refusal):
        return rate
    bytes_per_s = min(rate.bytes_per_s * _SHARE, _BYTES_PER_S)
    return Bid(
        _LATENCY_S,
        bytes_per_s,
        f"gloo: one TCP connection, through torch at both ends; {rate.reason}",
    )


@hookimpl
def torchstore_transport() -> TransportSpec:
    """See ``torchstore_core.contracts.hooks``."""
    return TransportSpec(
        "gloo",
        bid=_bid,
        client="torchstore_gloo.link:GlooLink",
        server="torchstore_gloo.server:GlooServer",
        probe=_probe,
        isolated=True,
        listens=True,
        libraries=("torch",),
    )
