"""Which of the things that can happen does: a seed decides, or a schedule that was recorded."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

__all__ = ["Action", "Name", "Recorded", "Schedule"]

Name = tuple[str | int, ...]


class Action:
    """Something that may happen, again and again while it is enabled.

    Args:
        name: the same one in every run of the same plan.
        run: does it once.
    """

    __slots__ = ("at", "name", "rank", "run")

    def __init__(self, name: Name, run: Callable[[], None]) -> None:
        self.name = name
        self.run = run
        self.at = -1  # its place among those that are enabled
        self.rank = 0.0


class Schedule:
    """Chooses by a seed.

    Some seeds choose evenly. Others give every action a rank, and take the one of the highest rank
    most of the time: then whole connections and clients stand still while others run far ahead,
    which is where rare orders come from.
    """

    def __init__(self, source: random.Random) -> None:
        self._random = source.random
        self.enabled: list[Action] = []
        self._ranks: list[float] = []  # of those that are enabled, if that counts
        self._ranked = source.random() < 0.5
        self._evenly = source.choice((0.05, 0.2, 0.5))

    def enable(self, action: Action) -> None:
        if action.at < 0:
            enabled = self.enabled
            action.at = len(enabled)
            enabled.append(action)
            if self._ranked:
                action.rank = rank = action.rank or self._random()
                self._ranks.append(rank)

    def disable(self, action: Action) -> None:
        at = action.at
        if at >= 0:
            action.at = -1
            last = self.enabled.pop()
            if last is not action:
                self.enabled[at] = last
                last.at = at
            if self._ranked:
                rank = self._ranks.pop()
                if last is not action:
                    self._ranks[at] = rank

    def choose(self) -> Action | None:
        """What happens next; None if nothing can."""
        enabled = self.enabled
        count = len(enabled)
        if count < 2:
            return enabled[0] if count else None
        number = self._random()
        if not self._ranked:
            return enabled[int(self._random() * count)]
        ranks = self._ranks
        if number < self._evenly:
            at = int(self._random() * count)
            chosen = enabled[at]
            chosen.rank = ranks[at] = number
            return chosen
        return enabled[ranks.index(max(ranks))]


class Recorded(Schedule):
    """Follows names that were recorded, as far as what they name can happen; then everything else
    takes turns.
    """

    def __init__(self, names: Sequence[Name]) -> None:
        super().__init__(random.Random(0))
        self._ranked = False
        self._names = iter(names)
        self._by_name: dict[Name, Action] = {}
        self._turn = 0

    def enable(self, action: Action) -> None:
        super().enable(action)
        self._by_name[action.name] = action

    def choose(self) -> Action | None:
        if not self.enabled:
            return None
        for name in self._names:
            action = self._by_name.get(name)
            if action is not None and action.at >= 0:
                return action
        self._turn += 1
        return self.enabled[self._turn % len(self.enabled)]
