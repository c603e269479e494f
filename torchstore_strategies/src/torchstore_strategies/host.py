"""``host``: a put stays on the client's host."""

from __future__ import annotations

from collections.abc import Sequence

from torchstore_core.contracts.hooks import hookimpl
from torchstore_core.contracts.strategy import ClientFacts, Strategy, VolumeFacts


class HostStrategy(Strategy, frozen=True, tag="host"):
    """Volumes of the client's host first, the emptiest of them first; then the other hosts'.

    Made for one volume a host, or a few.
    """

    def place(
        self,
        client: ClientFacts,
        volumes: Sequence[VolumeFacts],
        nbytes: int,
        keys: Sequence[str] = (),
    ) -> Sequence[int]:
        """Indices by (on another host, least free bytes last)."""
        order = sorted(volumes, key=lambda v: (v.host_id != client.host_id, -v.free_bytes, v.index))
        return [v.index for v in order]


@hookimpl
def torchstore_strategy() -> type[Strategy]:
    """See ``torchstore_core.contracts.hooks``."""
    return HostStrategy
