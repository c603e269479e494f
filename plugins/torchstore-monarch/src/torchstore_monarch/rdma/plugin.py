"""Descriptor of ``monarch-rdma``."""

from __future__ import annotations

import sys

from torchstore_core.contracts.hooks import hookimpl
from torchstore_core.contracts.rates import Rate, device_rate, network_rate
from torchstore_core.contracts.transport import Bid, LinkContext, Refusal, TransportSpec

# Registration, an endpoint call and the transfer. With hardware: a guess that only ranks it before
# every transport over sockets. Without: measured over Monarch's TCP fallback, and a share of slow
# networks that is less than that of monarch-rpc.
_LATENCY_S = 3e-3
_SHARE = 0.93
_FALLBACK_SHARE, _FALLBACK_BYTES_PER_S = 0.4, 0.25e9


def _bid(context: LinkContext) -> Bid | Refusal:
    if not context.offered:
        return Refusal("the volume is not hosted by a Monarch actor")
    if "monarch" not in sys.modules:
        return Refusal("this process is in no Monarch job")
    if (devices := device_rate(context)) is not None:
        return Bid(_LATENCY_S, devices.bytes_per_s * _SHARE, devices.reason)
    rate, most = network_rate(context), _FALLBACK_BYTES_PER_S
    if isinstance(rate, Rate):  # Monarch may know a way where addresses tell nothing
        most = min(most, rate.bytes_per_s * _FALLBACK_SHARE)
    return Bid(_LATENCY_S, most, "no RDMA device: Monarch's TCP fallback")


@hookimpl
def torchstore_transport() -> TransportSpec:
    """See ``torchstore_core.contracts.hooks``."""
    return TransportSpec(
        "monarch-rdma",
        bid=_bid,
        client="torchstore_monarch.rdma.link:RdmaLink",
        server="torchstore_monarch.rdma.server:RdmaServer",
        libraries=("torchmonarch",),
    )
