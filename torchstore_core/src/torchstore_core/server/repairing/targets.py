"""Which values lack copies, and where a further copy goes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence

from torchstore_core.contracts.strategy import Strategy
from torchstore_core.errors import PluginError
from torchstore_core.server.index.records import Value
from torchstore_core.server.memory import strategy_calls
from torchstore_core.server.memory.volume_record import VolumeRecord
from torchstore_core.server.repairing.backlog import Entry

log = logging.getLogger(__name__)


class Targets:
    """How many copies values should have, and on which volumes.

    Attributes:
        open: the volumes that take new copies.
        wanted: the copies that a value should have on these; 0 if there is none.
    """

    def __init__(self, volumes: Sequence[VolumeRecord], strategy: Strategy) -> None:
        self._volumes = volumes
        self._strategy = strategy
        self._complained = False
        self.open = list(volumes)
        self.wanted = 1

    def look_again(self) -> None:
        """A volume was lost, is drained, or is back in service."""
        self._complained = False
        self.open = [v for v in self._volumes if not v.closed]
        self.wanted = min(self.copies, len(self.open))

    @property
    def copies(self) -> int:
        """How many copies the strategy wants."""
        try:
            return strategy_calls.copies(self._strategy)
        except PluginError as error:
            log.warning("nothing is repaired: %s", error.message)
            return 1

    def entry(self, key: str, value: Value) -> Entry:
        """A value for the backlog, with the number of its copies on volumes that are alive."""
        return Entry(value, key, sum(not self._volumes[at].lost for at, _ in value.places))

    def lacks(self, value: Value) -> bool:
        """Whether another copy of a value is to be made."""
        if value.data is not None or value.offset < 0 or not value.uses:
            return False
        if self._volumes[value.volume].lost:
            return False
        staying = sum(not self._volumes[at].draining for at, _ in value.places)
        return staying < max(1, self.wanted)

    def leaves(self, value: Value) -> list[int]:
        """The volumes that are drained and have a copy of a value."""
        return [at for at, offset in value.places if offset >= 0 and self._volumes[at].draining]

    def reserve(
        self,
        entry: Entry,
        order: Callable[[Entry], Sequence[int]],
        only: int = -1,
        reserved: Collection[int] = (),
    ) -> tuple[int, int] | None:
        """Allocate memory for a further copy of a value; returns the volume and the offset, or None
        if there is no room.

        Args:
            order: see :meth:`order`.
            only: reserve it only if this volume is the best one; -1: whichever is.
            reserved: volumes that are left alone.

        Raises:
            Delayed: a volume is being asked whether its host has the memory.
        """
        value = entry.value
        has = {at for at, _ in value.places}
        for at in order(entry):
            volume = self._volumes[at]
            if at in has or at in reserved or volume.closed or volume.free < value.nbytes:
                continue
            if only not in (-1, at):
                return None
            offset = volume.allocator.allocate(value.nbytes)
            if offset is not None:
                return at, offset
        return None

    def why_not(self, entry: Entry) -> str:
        """Why no further copy of a value can be made."""
        has = {at for at, _ in entry.value.places}
        others = [v for v in self.open if v.index not in has]
        if not others:
            return "no other volume is left"
        most = max(min(v.free, v.allocator.largest_free) for v in others)
        return (
            f"no room: {entry.key!r} has {entry.value.nbytes:,} bytes, and the other volumes have "
            f"at most {most:,} in one piece"
        )

    def order(self) -> Callable[[Entry], Sequence[int]]:
        """Return a function of a value that gives the volumes to try for a further copy, best
        first: those that the strategy names, then the emptiest ones.
        """
        facts = tuple([v.facts() for v in self._volumes])
        others = [v.index for v in sorted(self.open, key=lambda v: -v.free)]

        def order(entry: Entry) -> Sequence[int]:
            value = entry.value
            if len(facts) == 1:
                return others
            staying = [at for at, _ in value.places if not facts[at].lost]
            try:
                named = strategy_calls.order_for_copy(
                    self._strategy, value.creator, facts, value.nbytes, entry.key, staying
                )
            except PluginError as error:
                if not self._complained:  # it is likely to fail for every other value, too
                    self._complained = True
                    log.warning("copies go to the emptiest volumes: %s", error.message)
                named = []
            return list(dict.fromkeys([*named, *others]))

        return order
