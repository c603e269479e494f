"""Descriptors that are wrong."""

from __future__ import annotations

import time
from typing import Any

import msgspec
from tests.transports.kit.broken.simple import Plugin, Simple, bid

from torchstore_core.contracts.hooks import hookimpl
from torchstore_core.contracts.transport import Bid, Refusal, TransportSpec


class Heavy(Plugin):
    """Its hook imports torch."""

    @hookimpl
    def torchstore_transport(self) -> TransportSpec:
        import torch

        limit = int(torch.iinfo(torch.int64).max)
        return msgspec.structs.replace(super().torchstore_transport(), max_bytes=limit)


_moods = iter(range(1 << 60))
_pauses = iter([0.0] * 50 + [1.0])  # seconds
BIDS: dict[str, Any] = {
    "nan": lambda _: Bid(float("nan"), 1e9, "?"),
    "negative": lambda _: Bid(-1.0, 1e9, "?"),
    "infinite": lambda _: Bid(1.0, float("inf"), "?"),
    "nothing": lambda _: Bid(1.0, 0.0, "?"),
    "networked": lambda context: Bid(1.0, max(n.prefix for n in context.volume.networks), "it"),
    "silent": lambda _: Bid(1.0, 1e9, ""),
    "wordless": lambda context: Refusal("") if not context.same_host else bid(context),
    "none": lambda _: None,
    "moody": lambda _: Bid(1.0 + next(_moods) // 40, 1e9, "?"),
    "slow": lambda context: (time.sleep(0.005), bid(context))[1],
    "slow_once": lambda context: (time.sleep(next(_pauses, 0.0)), bid(context))[1],
}


plugin_halfless = Plugin(Simple, Simple)  # type: ignore[arg-type]
plugin_speechless = Plugin(probe=lambda: "")


def __getattr__(name: str) -> Plugin:
    """``bid_x``: the plug-in with the bid ``x``; ``heavy``: the one with a heavy hook."""
    if name == "heavy":
        return Heavy()
    if name.removeprefix("bid_") not in BIDS:
        raise AttributeError(name)
    return Plugin(bid=BIDS[name.removeprefix("bid_")])
