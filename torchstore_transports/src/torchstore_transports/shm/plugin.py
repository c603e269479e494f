"""Descriptor of the ``shm`` transport."""

from __future__ import annotations

import socket

from torchstore_core.contracts.hooks import hookimpl
from torchstore_core.contracts.transport import Bid, LinkContext, Refusal, TransportSpec

# The cost of a batch beyond its first control message: the commit (put), or the release and the
# page faults (get), and waking the copy threads.
_LATENCY_S = 110e-6
_BYTES_PER_S = 10e9


def _probe() -> str | None:
    if not hasattr(socket, "AF_UNIX") or not hasattr(socket, "send_fds"):
        return "this platform cannot pass file descriptors over Unix sockets"
    return None


def _bid(context: LinkContext) -> Bid | Refusal:
    if not context.same_host:
        return Refusal("the volume is on another host")
    if not context.offered:
        return Refusal("the volume does not offer shared memory")
    return Bid(_LATENCY_S, _BYTES_PER_S, "same host: one copy at memory speed, gets map")


@hookimpl
def torchstore_transport() -> TransportSpec:
    """See ``torchstore_core.contracts.hooks``."""
    return TransportSpec(
        "shm",
        bid=_bid,
        client="torchstore_transports.shm.link:ShmLink",
        server="torchstore_transports.shm.server:ShmServer",
        probe=_probe,
    )
