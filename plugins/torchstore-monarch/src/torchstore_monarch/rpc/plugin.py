"""Descriptor of ``monarch-rpc``."""

from __future__ import annotations

from torchstore_core.contracts.hooks import hookimpl
from torchstore_core.contracts.rates import Rate, network_rate
from torchstore_core.contracts.transport import Bid, LinkContext, Refusal, TransportSpec

# An endpoint call, and the rate of the bytes in it (measured: 0.8 ms, 0.3 GB/s); of a slow network
# it bids a share that is less than that of any transport with sockets of its own.
_LATENCY_S = 1.5e-3
_SHARE, _BYTES_PER_S = 0.5, 0.3e9


def _bid(context: LinkContext) -> Bid | Refusal:
    if not context.offered:
        return Refusal("the volume is not hosted by a Monarch actor")
    rate, most = network_rate(context), _BYTES_PER_S
    if isinstance(rate, Rate):  # Monarch may know a way where addresses tell nothing
        most = min(most, rate.bytes_per_s * _SHARE)
    return Bid(_LATENCY_S, most, "Monarch endpoint calls; works everywhere")


@hookimpl
def torchstore_transport() -> TransportSpec:
    """See ``torchstore_core.contracts.hooks``."""
    return TransportSpec(
        "monarch-rpc",
        bid=_bid,
        client="torchstore_monarch.rpc.link:RpcLink",
        server="torchstore_monarch.rpc.server:RpcServer",
        loop_bound=True,
        libraries=("torchmonarch",),
    )
