"""``pinned``: pins keys to volumes by their prefix."""

from __future__ import annotations

from collections.abc import Sequence

from torchstore_core.contracts.hooks import hookimpl
from torchstore_core.contracts.strategy import ClientFacts, Strategy, VolumeFacts


class PinnedStrategy(Strategy, frozen=True, tag="pinned"):
    """Keys that start with a prefix go to its volume, all others to the one with the most room.

    Args:
        pins: prefixes, and the index of the volume of each; the first that fits counts.
    """

    pins: tuple[tuple[str, int], ...] = ()

    @property
    def by_key(self) -> bool:
        """A batch is spread: each of its keys has a place of its own."""
        return True

    def place(
        self,
        client: ClientFacts,
        volumes: Sequence[VolumeFacts],
        nbytes: int,
        keys: Sequence[str] = (),
    ) -> Sequence[int]:
        """The key's own volume first; the others in case that it is full, or lost."""
        pinned = [at % len(volumes) for prefix, at in self.pins if keys[0].startswith(prefix)]
        by_room = sorted(volumes, key=lambda v: (-v.free_bytes, v.index))
        return list(dict.fromkeys([*pinned[:1], *(v.index for v in by_room)]))


@hookimpl
def torchstore_strategy() -> type[Strategy]:
    """What the entry point is for: the class of this name."""
    return PinnedStrategy
