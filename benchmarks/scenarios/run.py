"""One run of the benchmarks, which every scenario is given."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from output.results import Metric

from torchstore_cli.bench import workload
from torchstore_cli.bench.floors import FLOOR_MAX
from torchstore_cli.bench.workers import Worker, Workers

MIB = 1 << 20
_WARM_UPS = 3


@dataclass
class Bench:
    """One run: its sizes, its processes, and what it found besides the metrics."""

    shapes: workload.Shapes
    repeat: int
    seed: int
    cycles: int
    entries: int
    quick: bool
    workers: Workers
    # Called with steps done, steps in all, and what is being done.
    progress: Callable[[int, int, str], None] = lambda done, total, what: None
    wrong: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    # What was not measured, and why.
    left_out: dict[str, str] = field(default_factory=dict)
    floors: list[Metric] = field(default_factory=list)

    @property
    def warm_ups(self) -> int:
        """Unmeasured rounds before the measured ones."""
        return min(_WARM_UPS, self.repeat)

    @property
    def nbytes(self) -> int:
        """Bytes of the set of weights."""
        return workload.nbytes(self.shapes)

    @property
    def capacity(self) -> int:
        """Capacity of the stores for weights: room for four versions. Only what is used costs
        memory.
        """
        return 4 * self.nbytes + 64 * MIB

    @property
    def patience(self) -> float:
        """Seconds that one command may take."""
        return 60.0 + 60.0 * self.nbytes / 1e9

    def check(self, reply: Mapping[str, Any], where: str) -> None:
        """Note the values that came back different from what was put."""
        self.wrong.extend(f"{where}: {name}" for name in reply["wrong"])

    def make(self, publisher: Worker, reader: Worker) -> int:
        """Make the set in the publisher and destinations in the reader; bytes of their floors."""
        options = {"shapes": self.shapes, "seed": self.seed, "limit": FLOOR_MAX}
        publisher.start("weights.make", filled=True, **options)
        reader.start("weights.make", filled=False, **options)
        made = publisher.result(self.patience)
        reader.result(self.patience)
        self.facts[f"set in {publisher.name}"] = made
        return int(made["floor_nbytes"])
