"""Descriptor of ``monarch-rdma``."""

from __future__ import annotations

import sys

from torchstore_core.contracts.hooks import hookimpl
from torchstore_core.contracts.transport import Bid, LinkContext, Refusal, TransportSpec

# Registration, an endpoint call and the transfer. With hardware: a guess that only ranks it before
# every transport over sockets. Without: measured over Monarch's TCP fallback.
_LATENCY_S = 3e-3
_BYTES_PER_S = 10e9
_FALLBACK_BYTES_PER_S = 0.25e9


def _bid(context: LinkContext) -> Bid | Refusal:
    if not context.offered:
        return Refusal("the volume is not hosted by a Monarch actor")
    if "monarch" not in sys.modules:
        return Refusal("this process is in no Monarch job")
    if context.client.rdma_devices and context.volume.rdma_devices:
        return Bid(_LATENCY_S, _BYTES_PER_S, "RDMA devices on both hosts")
    return Bid(_LATENCY_S, _FALLBACK_BYTES_PER_S, "no RDMA device: Monarch's TCP fallback")


@hookimpl
def torchstore_transport() -> TransportSpec:
    """See ``torchstore_core.contracts.hooks``."""
    return TransportSpec(
        "monarch-rdma",
        bid=_bid,
        client="torchstore_monarch.rdma.link:RdmaLink",
        server="torchstore_monarch.rdma.server:RdmaServer",
    )
