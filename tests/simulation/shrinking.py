"""Makes what a seed has found as small as it can, and tells it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from msgspec.structs import replace
from tests.simulation.machine.scheduling import Name, Recorded, Schedule
from tests.simulation.plans import Plan, plan_of
from tests.simulation.promises.violations import Violation
from tests.simulation.world import World

__all__ = ["Finding", "find", "told"]

T = TypeVar("T")

_MOST_RUNS = 2000


@dataclass(frozen=True)
class Finding:
    """A run that breaks a promise.

    Args:
        names: of the actions of the run, in order.
    """

    seed: int
    plan: Plan
    names: Sequence[Name]
    violation: Violation


def find(
    seed: int, *, small: bool = True, ended: Callable[[World], None] | None = None
) -> Finding | None:
    """What a seed finds.

    Args:
        seed: of the run.
        small: without all operations, faults and delays that it finds it without, too.
        ended: is told of a run that finds nothing.
    """
    source = random.Random(seed)
    plan = plan_of(source, seed)
    world = World(plan, Schedule(source))
    try:
        world.run()
    except Violation as violation:
        found = Finding(seed, plan, world.names, violation)
        return _Shrinking(found).smallest() if small else found
    if ended is not None:
        ended(world)
    return None


def told(found: Finding) -> str:
    """What happens in a run, line by line, and how to see it again."""
    lines: list[str] = []
    violation = found.violation
    world = World(found.plan, Recorded(found.names), recorded=True, say=lines.append)
    try:
        world.run()
    except Violation as again:
        violation = again
    return "\n".join(
        [
            f"seed {found.seed} breaks a promise, with {found.plan.size} operations and faults:",
            *lines,
            f"=> {violation}",
            f"again: python -m tests.simulation {found.seed}",
        ]
    )


class _Shrinking:
    """Takes things away from a finding for as long as the same kind of violation stays."""

    def __init__(self, found: Finding) -> None:
        self._best = found
        self._runs = 0

    def smallest(self) -> Finding:
        if not self._try(self._best.plan, self._best.names):
            return self._best  # it does not happen again: better big than wrong
        before = (-1, -1)
        while before != (before := (self._best.plan.size, len(self._best.names))):
            self._without(self._parts(), self._try_parts)
            self._without(list(self._best.names), self._try_names)
        return self._best

    def _parts(self) -> list[int]:
        """The operations, and minus the faults, by number."""
        plan = self._best.plan
        operations = [one.number for script in plan.scripts for one in script]
        return [-fault.number for fault in plan.faults] + operations

    def _try_parts(self, kept: Sequence[int]) -> bool:
        wanted = set(kept)
        plan = self._best.plan
        scripts = [[one for one in some if one.number in wanted] for some in plan.scripts]
        faults = [fault for fault in plan.faults if -fault.number in wanted]
        fewer = replace(plan, scripts=tuple(map(tuple, scripts)), faults=tuple(faults))
        return self._try(fewer, self._best.names)

    def _try_names(self, kept: Sequence[Name]) -> bool:
        most = len(self._best.names)
        return self._try(self._best.plan, kept, most=most)

    def _try(self, plan: Plan, names: Sequence[Name], most: int = 1 << 30) -> bool:
        """Whether this run breaks the same promise; then it is the best one."""
        self._runs += 1
        world = World(plan, Recorded(names), recorded=True)
        try:
            world.run()
        except Violation as violation:
            if violation.kind != self._best.violation.kind or len(world.names) > most:
                return False
            self._best = Finding(self._best.seed, plan, world.names, violation)
            return True
        return False

    def _without(self, items: list[T], works: Callable[[Sequence[T]], bool]) -> None:
        """Take away halves, quarters, and so on down to single items."""
        size = len(items) // 2
        while size and self._runs < _MOST_RUNS:
            at = 0
            while at < len(items) and self._runs < _MOST_RUNS:
                fewer = items[:at] + items[at + size :]
                if works(fewer):
                    items = fewer
                else:
                    at += size
            size //= 2
