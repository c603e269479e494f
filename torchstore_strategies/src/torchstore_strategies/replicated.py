"""``replicated``: several copies, so that a lost volume is no lost key."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import force_setattr

from torchstore_core.contracts.hooks import hookimpl
from torchstore_core.contracts.strategy import ClientFacts, Strategy, VolumeFacts
from torchstore_core.errors import ConfigurationError
from torchstore_strategies.host import HostStrategy


class ReplicatedStrategy(Strategy, frozen=True, tag="replicated"):
    """Copies of every value, on different hosts as far as there are so many.

    A put writes all copies before it is visible. A get reads the one on its own host if there is
    one, else the first.

    Small values ride in the message and lie with the controller, once: no volume's loss harms them.

    A lost copy is not made again until its key is put again. And copies protect only where volumes
    are in several processes, as with Monarch: the runtimes ``local`` and ``spmd`` have all volumes
    of a host in one, which they are lost with.

    Args:
        base: where the first copy goes, and in which order the others are tried. It has no copies
            of its own.
        copies: how many; while fewer volumes live, as many as there are.
        transport: see ``Strategy``; if it is None, that of ``base``.

    Raises:
        ConfigurationError: ``copies`` is no whole number, or below one; ``base`` is no strategy,
            or makes copies itself.

    >>> ReplicatedStrategy(copies=3).copies
    3
    """

    base: Strategy = HostStrategy()
    copies: int = 2

    def __post_init__(self) -> None:
        if type(self.copies) is not int or self.copies < 1:
            raise ConfigurationError(
                f"copies is a whole number and at least 1, not {self.copies!r}"
            )
        if not isinstance(self.base, Strategy):
            raise ConfigurationError(
                f"base is a strategy, as in ReplicatedStrategy(HashStrategy()), not {self.base!r}"
            )
        if isinstance(self.base, ReplicatedStrategy) or self.base.copies != 1:
            raise ConfigurationError(
                f"base makes copies itself ({self.base!r}), which would not be made; give its own "
                "base, and copies= as many as there are to be in all"
            )
        if self.transport is None and self.base.transport is not None:
            force_setattr(self, "transport", self.base.transport)

    @property
    def by_key(self) -> bool:
        """As the base strategy."""
        return self.base.by_key

    def place(
        self,
        client: ClientFacts,
        volumes: Sequence[VolumeFacts],
        nbytes: int,
        keys: Sequence[str] = (),
    ) -> Sequence[int]:
        """In the base strategy's order one volume of each host, then the second of each, and so on;
        volumes that it does not name come last, and so do those that cannot take it.
        """
        order = list(dict.fromkeys(self.base.place(client, volumes, nbytes, keys)))
        # The first copy is where the base strategy says; the others may go anywhere.
        order += [v.index for v in volumes if v.index not in order]
        usable = [at for at in order if not volumes[at].lost and volumes[at].free_bytes >= nbytes]
        turns: dict[int, int] = {}
        on_host: dict[str, int] = {}
        for at in usable:
            host = volumes[at].host_id
            turns[at] = on_host[host] = on_host.get(host, -1) + 1
        usable.sort(key=turns.__getitem__)
        return [*usable, *(at for at in order if at not in turns)]

    def choose(self, client: ClientFacts, copies: Sequence[VolumeFacts]) -> int:
        """As the base strategy: by default the one on the client's host."""
        return self.base.choose(client, copies)


@hookimpl
def torchstore_strategy() -> type[Strategy]:
    """See ``torchstore_core.contracts.hooks``."""
    return ReplicatedStrategy
