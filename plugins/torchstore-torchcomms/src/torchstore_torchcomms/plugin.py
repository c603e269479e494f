"""Descriptor of the ``torchcomms`` transport."""

from __future__ import annotations

import importlib.metadata
import importlib.util

from torchstore_core.contracts.hooks import hookimpl
from torchstore_core.contracts.transport import Bid, LinkContext, Refusal, TransportSpec

# A handshake, and a round trip of the two threads that move the batch. The rate is that of the gloo
# backend over a loopback interface on a busy machine with two cores.
_LATENCY_S = 1.2e-3
_BYTES_PER_S = 1.9e9


def _probe() -> str | None:
    """Do not import torchcomms: that imports torch, and a placeholder raises."""
    try:
        found = importlib.util.find_spec("torchcomms")
        version = importlib.metadata.version("torchcomms")
    except (ImportError, ValueError):
        found = None
    if found is None:
        return "torchcomms is not installed"
    if not importlib.metadata.entry_points(group="torchcomms.backends"):
        return f"torchcomms {version} has no backends: it is a placeholder, or a broken build"
    return None


def _bid(context: LinkContext) -> Bid | Refusal:
    return Bid(_LATENCY_S, _BYTES_PER_S, "torchcomms: send and receive, through torch at both ends")


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
    )
