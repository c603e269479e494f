"""``host``: a put stays on the client's host."""

from __future__ import annotations

from collections.abc import Sequence

from torchstore_core.contracts.hooks import hookimpl
from torchstore_core.contracts.strategy import ClientFacts, Strategy, VolumeFacts


class HostStrategy(Strategy, frozen=True, tag="host"):
    """Prefers volumes on the client's host, the emptiest first; then those on other hosts.

    Intended for stores with one volume per host, or a few.
    """

    def place(
        self,
        client: ClientFacts,
        volumes: Sequence[VolumeFacts],
        nbytes: int,
        keys: Sequence[str] = (),
    ) -> Sequence[int]:
        """Return the client's host first, and on each host the volume with the most free bytes."""
        order = sorted(volumes, key=lambda v: (v.host_id != client.host_id, -v.free_bytes, v.index))
        return [v.index for v in order]


@hookimpl
def torchstore_strategy() -> type[Strategy]:
    """See ``torchstore_core.contracts.hooks``."""
    return HostStrategy
