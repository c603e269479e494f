"""The strategy contract: where a put goes, and which copy a get should use.

A strategy is data (a frozen msgspec Struct, so that it crosses processes without pickle) plus two
pure methods that the controller calls with plain facts. Its type is found by entry-point name in
group ``torchstore.strategies``.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

__all__ = ["ClientFacts", "Strategy", "VolumeFacts"]


class ClientFacts(msgspec.Struct, frozen=True, array_like=True):
    """Who asks. ``rank``: RANK, else LOCAL_RANK, else None. ``host_id``: see Topology."""

    pid: int
    host_id: str
    hostname: str
    rank: int | None = None
    local_rank: int | None = None


class VolumeFacts(msgspec.Struct, frozen=True, array_like=True):
    """One volume: its place in the store's list, its host, and its memory in bytes."""

    id: str
    index: int
    host_id: str
    capacity_bytes: int
    free_bytes: int


class Strategy(msgspec.Struct, frozen=True):
    """Base of all strategies.

    Subclass it as ``class Mine(Strategy, frozen=True, tag="mine")`` with the entry-point name as
    the tag; fields are the configuration.
    """

    def place(
        self, client: ClientFacts, volumes: Sequence[VolumeFacts], nbytes: int
    ) -> Sequence[int]:
        """Indices of the volumes to try for a put of ``nbytes`` bytes, best first.

        The first one with room gets the whole batch. An empty answer is an error of the strategy.
        """
        return range(len(volumes))

    def choose(self, client: ClientFacts, copies: Sequence[VolumeFacts]) -> int:
        """Index into ``copies`` of the copy a get should read."""
        return 0
