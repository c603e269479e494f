"""What a measured process costs: control messages that it sends, memory that it has at most."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import torchstore_core as ts

#: Kinds of requests that nobody waits for, as they are called on the wire.
NO_REPLY = {"abort", "release", "cancel", "keep"}


async def operations() -> dict[str, int]:
    """How many requests of each kind the server has had, this one included."""
    return (await ts.status()).operations


async def messages_since(before: dict[str, int]) -> int:
    """Control messages since then, replies included, without those of the counting itself."""
    requests = Counter(await operations())
    requests.subtract(before)
    requests.subtract(["Status"])
    return sum(n if kind.lower() in NO_REPLY else 2 * n for kind, n in requests.items())


def reset_peak() -> None:
    """Let :func:`peak_rss` begin anew."""
    Path("/proc/self/clear_refs").write_text("5")


def peak_rss() -> int:
    """The highest number of bytes that this process had resident."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(dict(line.split(":", 1) for line in lines)["VmHWM"].split()[0]) * 1024
