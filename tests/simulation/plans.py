"""What a seed makes clients do, and what it makes go wrong."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

__all__ = ["Fault", "Operation", "Plan", "plan_of"]

KEYS = ("a", "b", "c")


@dataclass(frozen=True, eq=False, slots=True)
class Operation:
    """One call of one client.

    Args:
        number: of the operation, in its plan. What it puts is marked with it.
        kind: put, get, delete, wait, versions, exists.
        keys: what it is about.
        lines: how many cache lines each value has; 0: it is small and travels inside messages.
        version: to get, to put, or to wait for; 0: the newest, or the next.
        inline: whether a get wants small values inside the answer.
        hold: how many times a reader looks at what it has got again, before it gives it back.
        spare: gives back over the liveness connection.
        strict: of a delete.
    """

    number: int
    kind: str
    keys: tuple[str, ...]
    lines: tuple[int, ...] = ()
    version: int = 0
    inline: bool = False
    hold: int = 0
    spare: bool = False
    strict: bool = False

    def __str__(self) -> str:
        more = f" version {self.version}" if self.version else ""
        sizes = f" lines={list(self.lines)}" if self.lines else ""
        return f"#{self.number} {self.kind} {','.join(self.keys)}{more}{sizes}"


@dataclass(frozen=True, eq=False, slots=True)
class Fault:
    """Something that goes wrong once.

    Args:
        number: of the fault, in its plan.
        kind: crash, cut, cancel.
        client: to whom.
        after: at which step, unless a recorded schedule says when.
        keep: how many messages under way still arrive.
    """

    number: int
    kind: str
    client: int
    after: int
    keep: int = 99


@dataclass(frozen=True, slots=True)
class Plan:
    """A run.

    Attributes:
        capacities: of the volumes, in cache lines.
        scripts: the operations of each client, in order.
        channels: how many each client has besides its liveness connection.
        slots: how many operations of one client run at the same time.
    """

    capacities: tuple[int, ...]
    scripts: tuple[tuple[Operation, ...], ...]
    faults: tuple[Fault, ...] = ()
    channels: int = 1
    slots: int = 1
    keys: tuple[str, ...] = field(default=KEYS)

    @property
    def size(self) -> int:
        """How many operations and faults there are."""
        return sum(map(len, self.scripts)) + len(self.faults)


def plan_of(source: random.Random) -> Plan:
    """What a seed makes happen."""
    pick, chance = source.choice, source.random
    keys = KEYS[: pick((1, 1, 2, 3))]
    clients = pick((2, 2, 3, 4))
    total = pick((12, 20, 30, 45))
    scripts: list[list[Operation]] = [[] for _ in range(clients)]
    kinds = ["put"] * 5 + ["get"] * 6 + pick(([], ["delete"], ["delete"] * 3))
    kinds += pick(([], ["wait", "versions", "exists"]))
    inline = pick((0.0, 0.3, 0.9))
    for number in range(1, total + 1):
        kind = pick(kinds)
        count = 1 if len(keys) == 1 or chance() < 0.4 else source.randint(2, len(keys))
        some = tuple(source.sample(keys, count))
        lines = version = hold = 0
        sizes: tuple[int, ...] = ()
        if kind == "put":
            sizes = tuple([0 if chance() < inline else pick((1, 1, 2, 3)) for _ in some])
        elif kind == "get":
            if chance() < 0.2:
                some, version = some[:1], source.randint(1, 6)
            hold = pick((0, 0, 1, 3))
        elif kind == "wait":
            version = source.randint(1, 5)
        elif kind == "versions":
            some = some[:1]
        del lines
        small = chance() < inline
        operation = Operation(
            number, kind, some, sizes, version, small, hold, chance() < 0.3, chance() < 0.2
        )
        scripts[int(chance() * clients)].append(operation)
    faults: list[Fault] = []
    for number in range(1, 1 + pick((0, 0, 1, 2, 4))):
        kind = pick(("crash", "cut", "cancel", "cancel"))
        at = source.randint(5, total * 6)
        faults.append(Fault(number, kind, int(chance() * clients), at, pick((0, 1, 99, 99))))
    capacity = pick((6, 10, 16, 40))
    capacities = (capacity,) if chance() < 0.7 else (capacity, capacity)
    return Plan(
        capacities,
        tuple([tuple(script) for script in scripts]),
        tuple(sorted(faults, key=lambda fault: fault.after)),
        pick((1, 1, 2)),
        pick((1, 2, 3)),
        keys,
    )
