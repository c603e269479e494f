"""Descriptor of ``files``. Every client and every server imports it: nothing heavy here."""

from __future__ import annotations

import os

from torchstore_core.contracts.hooks import hookimpl
from torchstore_core.contracts.transport import Bid, LinkContext, Refusal, TransportSpec

# Measured: a batch of nothing, and what a large one adds per byte.
_LATENCY_S = 300e-6
_BYTES_PER_S = 4e9


def _probe() -> str | None:
    return None if os.path.isdir("/proc/self/fd") else "this system has no /proc"


def _bid(context: LinkContext) -> Bid | Refusal:
    if not context.same_host:
        return Refusal("the volume is on another host")
    return Bid(_LATENCY_S, _BYTES_PER_S, "the volume's memory as a file")


@hookimpl
def torchstore_transport() -> TransportSpec:
    """What the entry point is for: the transport of this name."""
    return TransportSpec(
        "files",
        bid=_bid,
        client="torchstore_files.link:FilesLink",
        server="torchstore_files.server:FilesServer",
        probe=_probe,
    )
