"""``replicated``: several copies, so that losing a volume does not lose its keys."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from msgspec.structs import force_setattr

from torchstore_core.contracts.hooks import hookimpl
from torchstore_core.contracts.strategy import ClientFacts, Strategy, VolumeFacts
from torchstore_core.errors import ConfigurationError
from torchstore_strategies.host import HostStrategy


class ReplicatedStrategy(Strategy, frozen=True, tag="replicated"):
    """Stores several copies of every value, on different hosts as far as there are enough hosts.

    A put writes all copies before it becomes visible. A get reads the copy on its own host if there
    is one, else the first.

    Small values are sent inside the message and held once, by the controller: they survive the
    loss of any volume.

    Copies that are lost with a volume are made again in the background, on the volumes that are
    left. Copies only protect values where volumes run in several processes, as with Monarch: the
    runtimes ``local`` and ``spmd`` run all volumes of a host in one process, and lose them together
    with it.

    Args:
        base: decides where the first copy goes, and in which order the other volumes are tried. It
            must not make copies itself.
        copies: number of copies; while fewer volumes are alive, one on each of them.
        transport: see ``Strategy``; None: the transport of ``base``.

    Raises:
        ConfigurationError: ``copies`` is not a whole number or is below one; ``base`` is not a
            strategy or makes copies itself.

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
        """The same as for the base strategy."""
        return self.base.by_key

    def place(
        self,
        client: ClientFacts,
        volumes: Sequence[VolumeFacts],
        nbytes: int,
        keys: Sequence[str] = (),
    ) -> Sequence[int]:
        """Return one volume of each host in the base strategy's order, then a second one of each,
        and so on. Volumes that the base strategy does not name come last, and so do those that are
        lost or have no room for the put.
        """
        return self._apart(client, volumes, nbytes, keys, ())

    def place_copy(
        self,
        client: ClientFacts,
        volumes: Sequence[VolumeFacts],
        nbytes: int,
        key: str,
        copies: Sequence[int],
    ) -> Sequence[int]:
        """Return the volumes of hosts that have the fewest copies first, otherwise in the order of
        :meth:`place`.
        """
        return self._apart(client, volumes, nbytes, (key,), copies)

    def _apart(
        self,
        client: ClientFacts,
        volumes: Sequence[VolumeFacts],
        nbytes: int,
        keys: Sequence[str],
        copies: Sequence[int],
    ) -> Sequence[int]:
        order = list(dict.fromkeys(self.base.place(client, volumes, nbytes, keys)))
        # The base strategy decides where the first copy goes; the others may go anywhere.
        order += [v.index for v in volumes if v.index not in order]
        usable = [at for at in order if not volumes[at].lost and volumes[at].free_bytes >= nbytes]
        usable = [at for at in usable if at not in copies]
        on_host = Counter(volumes[at].host_id for at in copies)
        turns: dict[int, int] = {}
        for at in usable:
            host = volumes[at].host_id
            turns[at] = on_host[host]
            on_host[host] += 1
        usable.sort(key=turns.__getitem__)
        return [*usable, *(at for at in order if at not in turns)]

    def choose(self, client: ClientFacts, copies: Sequence[VolumeFacts]) -> int:
        """Choose as the base strategy does: by default the copy on the client's host."""
        return self.base.choose(client, copies)


@hookimpl
def torchstore_strategy() -> type[Strategy]:
    """See ``torchstore_core.contracts.hooks``."""
    return ReplicatedStrategy
