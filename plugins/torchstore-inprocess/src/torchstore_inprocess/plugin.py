"""Descriptor of the ``inprocess`` transport."""

from __future__ import annotations

from torchstore_core.contracts.hooks import hookimpl
from torchstore_core.contracts.transport import Bid, LinkContext, Refusal, TransportSpec


def _bid(context: LinkContext) -> Bid | Refusal:
    same = (context.client.host_id, context.client.pid) == (
        context.volume.host_id,
        context.volume.pid,
    )
    if not (same and context.same_host):
        return Refusal("the volume is in another process")
    return Bid(60e-6, 10e9, "the volume is in this very process")


@hookimpl
def torchstore_transport() -> TransportSpec:
    """See ``torchstore_core.contracts.hooks``."""
    return TransportSpec(
        "inprocess",
        bid=_bid,
        client="torchstore_inprocess.transport:InProcessLink",
        server="torchstore_inprocess.transport:InProcessServer",
    )
