"""Measurements beside their floors and targets: as numbers, as tables, as JSON."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.table import Table

_FORMATS = {
    "B": "{:.0f}",
    "GB/s": "{:.2f}",
    "ms": "{:.2f}",
    "µs": "{:.0f}",
    "MB": "{:.1f}",
    "": "{:.0f}",
}


def spread(values: Sequence[float]) -> dict[str, float]:
    """Min, median, max."""
    return {"min": min(values), "median": statistics.median(values), "max": max(values)}


@dataclass
class Comparison:
    """A measure beside one floor, round by round.

    Args:
        floor: its name.
        values: one a round, in the measure's unit.
        ratios: measure / floor, one a round; both were taken in the same round.
        target: for the median of the ratios; None: for information.
        at_most: the ratio should not exceed the target (else: reach it).
    """

    floor: str
    values: list[float]
    ratios: list[float]
    target: float | None
    at_most: bool

    @property
    def ok(self) -> bool | None:
        """Whether the target is met; None without one."""
        return _meets(statistics.median(self.ratios), self.target, self.at_most)

    def plain(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "floor": self.floor,
            "values": self.values,
            **spread(self.values),
            "ratios": self.ratios,
            "ratio": spread(self.ratios),
            "target": self.target,
            "bound": "at most" if self.at_most else "at least",
            "ok": self.ok,
        }


@dataclass
class Metric:
    """One thing measured: a value a round, its comparisons, and maybe a target of its own."""

    name: str
    scenario: str
    unit: str
    values: list[float]
    target: float | None = None  # the median is to be at most this
    comparisons: list[Comparison] = field(default_factory=list)
    note: str = ""
    series: list[float] = field(default_factory=list)  # how it went over time, if that is a story

    @property
    def ok(self) -> bool | None:
        """Whether its targets are met, all floors counted, so the strictest too; None without."""
        return self._judge(all)

    @property
    def ok_plain(self) -> bool | None:
        """Whether its own target is met, and that against one floor at least; None without."""
        return self._judge(any)

    def _judge(self, how: Callable[[list[bool]], bool]) -> bool | None:
        mine = _meets(statistics.median(self.values), self.target, True)
        others = [c.ok for c in self.comparisons if c.ok is not None]
        if mine is None and not others:
            return None
        return mine is not False and (not others or how(others))

    def against(
        self, floor: str, values: Sequence[float], target: float | None, *, at_most: bool
    ) -> None:
        """Compare with a floor that was measured in the same rounds."""
        ratios = [mine / its for mine, its in zip(self.values, values, strict=True)]
        self.comparisons.append(Comparison(floor, list(values), ratios, target, at_most))

    def plain(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "name": self.name,
            "scenario": self.scenario,
            "unit": self.unit,
            "values": self.values,
            **spread(self.values),
            "target": self.target,
            "comparisons": [c.plain() for c in self.comparisons],
            "note": self.note,
            "series": self.series,
            "ok": self.ok,
            "ok_plain": self.ok_plain,
        }


def _meets(value: float, target: float | None, at_most: bool) -> bool | None:
    if target is None:
        return None
    return value <= target if at_most else value >= target


def fastest(rounds: Sequence[Mapping[str, float]], kinds: Sequence[str]) -> str:
    """The kind of floor with the highest median rate over all rounds, which is what is shown: of an
    even number of rounds, it may not be the one with the shortest median time.
    """
    there = [kind for kind in kinds if kind in rounds[0]]
    return max(there, key=lambda kind: statistics.median(1 / r[kind] for r in rounds))


def _number(value: float, unit: str) -> str:
    return _FORMATS[unit].format(value)


def _verdict(ok: bool | None) -> str:
    return {True: "[green]ok[/]", False: "[bold red]miss[/]", None: "[dim]–[/]"}[ok]


def _range(values: Sequence[float], text: str) -> str:
    if len(values) < 2:
        return ""
    return f"{text.format(min(values))} – {text.format(max(values))}"


def floors_table(floors: Sequence[Metric]) -> Table:
    """All floors of the run, those that no measure is compared with included."""
    made = Table(title="floors of this run", title_style="bold", header_style="bold")
    for name in ("floor", "median", "min – max", "in the rounds of"):
        made.add_column(name, justify="right" if name.startswith("m") else "left")
    for at, floor in enumerate(floors):
        if at and floor.scenario != floors[at - 1].scenario:
            made.add_section()
        middle = f"{_number(statistics.median(floor.values), floor.unit)} {floor.unit}"
        made.add_row(floor.name, middle, _range(floor.values, _FORMATS[floor.unit]), floor.scenario)
    return made


def table(metrics: Sequence[Metric], title: str) -> Table:
    """One line for each measure and floor."""
    made = Table(title=title, title_style="bold", header_style="bold")
    made.add_column("measure")
    for name in ("median", "min – max", "floor of this run", "ratio", "min – max", "target"):
        made.add_column(name, justify="left" if name.startswith("floor") else "right")
    made.add_column("")
    scenario = metrics[0].scenario if metrics else ""
    for metric in metrics:
        if metric.scenario != scenario:
            scenario = metric.scenario
            made.add_section()
        values = metric.values
        mine = [
            metric.name,
            f"{_number(statistics.median(values), metric.unit)} {metric.unit}".rstrip(),
            _range(values, _FORMATS[metric.unit]),
        ]
        target = metric.target
        if target is not None or not metric.comparisons:
            limit = "" if target is None else f"≤ {target:g} {metric.unit}".rstrip()
            ok = _verdict(_meets(statistics.median(values), target, True))
            made.add_row(*mine, f"[dim]{metric.note}[/]", "", "", limit, ok)
            mine = ["", "", ""]
        for one in metric.comparisons:
            floor = f"{one.floor}: {_number(statistics.median(one.values), metric.unit)}"
            sign = "≤" if one.at_most else "≥"
            made.add_row(
                *mine,
                floor,
                f"{statistics.median(one.ratios):.2f}",
                _range(one.ratios, "{:.2f}"),
                "" if one.target is None else f"{sign} {one.target:.2f}",
                _verdict(one.ok),
            )
            mine = ["", "", ""]
    return made
