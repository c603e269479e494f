"""Descriptor of the ``gloo`` transport."""

from __future__ import annotations

import sys

from torchstore_core.contracts.hooks import hookimpl
from torchstore_core.contracts.transport import Bid, LinkContext, Refusal, TransportSpec

# A handshake, and a round trip of the two threads that move the batch. The rate is that of one
# connection over a loopback interface on a busy machine with two cores.
_LATENCY_S = 1e-3
_BYTES_PER_S = 2.0e9


def _probe() -> str | None:
    if sys.platform != "linux":
        return "gloo's pairs are only known to work on Linux"
    return None


def _bid(context: LinkContext) -> Bid | Refusal:
    return Bid(_LATENCY_S, _BYTES_PER_S, "gloo: one TCP connection, through torch at both ends")


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
    )
