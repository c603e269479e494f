"""``local-rank``: each rank has a volume of its own."""

from __future__ import annotations

from collections.abc import Sequence

from torchstore_core.contracts.hooks import hookimpl
from torchstore_core.contracts.strategy import ClientFacts, Strategy, VolumeFacts


class LocalRankStrategy(Strategy, frozen=True, tag="local-rank"):
    """Rank r puts to volume ``r % volumes``.

    RANK takes precedence over LOCAL_RANK, whose numbers repeat on every host; a client that has
    neither uses its process id.
    """

    def place(
        self,
        client: ClientFacts,
        volumes: Sequence[VolumeFacts],
        nbytes: int,
        keys: Sequence[str] = (),
    ) -> Sequence[int]:
        """Return the rank's own volume, then the others in order, in case it is full or lost."""
        rank = client.rank
        if rank is None:
            rank = client.local_rank
        if rank is None:
            rank = client.pid
        first = rank % len(volumes)
        return [(first + i) % len(volumes) for i in range(len(volumes))]


@hookimpl
def torchstore_strategy() -> type[Strategy]:
    """See ``torchstore_core.contracts.hooks``."""
    return LocalRankStrategy
