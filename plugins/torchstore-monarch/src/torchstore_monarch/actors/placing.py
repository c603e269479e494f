"""Decides which agents get the volumes. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

__all__ = ["spread"]


def spread(hosts: Sequence[str], volumes: int) -> list[int]:
    """Return the index of the agent for each volume, given the agents' hosts.

    With as many volumes as agents, each agent gets one, in order. With fewer volumes, hosts take
    turns. With more, agents get several, in turns.
    >>> spread(["a", "a", "b", "b"], 2), spread(["a", "a", "b", "b"], 4), spread(["a"], 2)
    ([0, 2], [0, 1, 2, 3], [0, 0])
    """
    if volumes >= len(hosts):
        return [i % len(hosts) for i in range(volumes)]
    by_host: dict[str, list[int]] = {}
    for at, host in enumerate(hosts):
        by_host.setdefault(host, []).append(at)
    turns = [at for turn in zip_longest(*by_host.values()) for at in turn if at is not None]
    return turns[:volumes]
