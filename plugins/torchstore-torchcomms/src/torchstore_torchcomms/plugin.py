"""Descriptor of the ``torchcomms`` transport."""

from __future__ import annotations

import importlib.util

from torchstore_core.contracts.hooks import hookimpl
from torchstore_core.contracts.rates import network_rate
from torchstore_core.contracts.transport import Bid, LinkContext, Refusal, TransportSpec

# A handshake, and a round trip of the two threads that move the batch. Of the network it bids less
# than tcp and gloo do: the sockets of its gloo backend are the same, with one more library on top.
_LATENCY_S = 1.2e-3
_SHARE, _BYTES_PER_S = 0.65, 1.1e9
_BACKENDS = "torchcomms.backends"
_MISSING = "torchcomms is not installed"


def _probe() -> str | None:
    """Do not import torchcomms: that imports torch, and a placeholder raises."""
    try:
        found = importlib.util.find_spec("torchcomms")
    except (ImportError, ValueError):
        found = None
    if found is None:
        return _MISSING
    # Not at the top: a server where torchcomms is not installed saves 1.5 MB of modules.
    from importlib import metadata

    try:
        own = metadata.distribution("torchcomms")
    except metadata.PackageNotFoundError:
        return _MISSING
    # As a rule it has them itself; to look at all that is installed takes milliseconds.
    backends = own.entry_points.select(group=_BACKENDS)
    if not backends and not metadata.entry_points(group=_BACKENDS):
        return f"torchcomms {own.version} has no backends: it is a placeholder, or a broken build"
    return None


def _bid(context: LinkContext) -> Bid | Refusal:
    rate = network_rate(context)
    if isinstance(rate, Refusal):
        return rate
    bytes_per_s = min(rate.bytes_per_s * _SHARE, _BYTES_PER_S)
    return Bid(
        _LATENCY_S,
        bytes_per_s,
        f"torchcomms: send and receive, through torch at both ends; {rate.reason}",
    )


@hookimpl
def torchstore_transport() -> TransportSpec:
    """See ``torchstore_core.contracts.hooks``."""
    return TransportSpec(
        "torchcomms",
        bid=_bid,
        client="torchstore_torchcomms.link:TorchCommsLink",
        server="torchstore_torchcomms.server:TorchCommsServer",
        probe=_probe,
        isolated=True,
        listens=True,
        libraries=("torchcomms",),
    )
