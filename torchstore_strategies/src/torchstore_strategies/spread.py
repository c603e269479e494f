"""``spread``: fills all volumes evenly."""

from __future__ import annotations

from collections.abc import Sequence

from torchstore_core.contracts.hooks import hookimpl
from torchstore_core.contracts.strategy import ClientFacts, Strategy, VolumeFacts


class SpreadStrategy(Strategy, frozen=True, tag="spread"):
    """Prefers the volume with the most free memory. A batch is stored together."""

    def place(
        self,
        client: ClientFacts,
        volumes: Sequence[VolumeFacts],
        nbytes: int,
        keys: Sequence[str] = (),
    ) -> Sequence[int]:
        """Return the indices by free bytes, most first; among equals, the client's host first."""
        order = sorted(volumes, key=lambda v: (-v.free_bytes, v.host_id != client.host_id, v.index))
        return [v.index for v in order]


@hookimpl
def torchstore_strategy() -> type[Strategy]:
    """See ``torchstore_core.contracts.hooks``."""
    return SpreadStrategy
