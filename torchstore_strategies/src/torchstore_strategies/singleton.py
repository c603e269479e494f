"""``singleton``: everything on the first volume (the default)."""

from __future__ import annotations

from collections.abc import Sequence

from torchstore_core.contracts.hooks import hookimpl
from torchstore_core.contracts.strategy import ClientFacts, Strategy, VolumeFacts


class SingletonStrategy(Strategy, frozen=True, tag="singleton"):
    """Puts all values on volume 0.

    >>> SingletonStrategy().place(ClientFacts(1, "h", "h"), [], 0)
    (0,)
    """

    def place(
        self,
        client: ClientFacts,
        volumes: Sequence[VolumeFacts],
        nbytes: int,
        keys: Sequence[str] = (),
    ) -> Sequence[int]:
        """Return volume 0 and no other."""
        return (0,)


#: The name of this strategy in TorchStore.
ControllerStorageVolumes = SingletonStrategy


@hookimpl
def torchstore_strategy() -> type[Strategy]:
    """See ``torchstore_core.contracts.hooks``."""
    return SingletonStrategy
