"""The picture of a run: throughput and latency beside floors, other targets, growth over time."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes
from output.results import Metric

_MEASURE, _STRICT, _OTHER, _LIMIT = "#3b6ea5", "#c0392b", "#e08e0b", "#c0392b"


def plot(metrics: Sequence[Metric], report: dict[str, Any], path: Path) -> None:
    """Write the picture of a run."""
    panels = [
        (_beside_floors, [m for m in metrics if m.unit == "GB/s"], "GB/s (longer is better)"),
        (_latencies, [m for m in metrics if m.unit == "µs"], "µs, logarithmic (shorter is better)"),
        (_against_limits, [m for m in metrics if _limits(m)], "share of its limit"),
        (_growth, [m for m in metrics if m.series and m.unit == "MB"], "tenths of all cycles"),
    ]
    panels = [panel for panel in panels if panel[1]]
    if not panels:
        return
    heights = [max(2.0, 0.42 * len(chosen) + 1.2) for _, chosen, _ in panels]
    figure, axes = pyplot.subplots(
        len(panels),
        1,
        figsize=(11, sum(heights)),
        height_ratios=heights,
        squeeze=False,
        layout="constrained",
    )
    for axis, (draw, chosen, label) in zip(axes[:, 0], panels, strict=True):
        draw(axis, chosen)
        axis.set_xlabel(label)
        axis.spines[["top", "right"]].set_visible(False)
    size, cpus = report["workload"]["nbytes"] / 1e9, report["machine"]["cpus"]
    figure.suptitle(
        f"{report['workload']['tensors']} tensors, {size:.2f} GB · {cpus} CPUs · "
        f"torch {report['machine']['torch']} · {report['started']}",
        fontsize=10,
    )
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _bars(axis: Axes, rows: Sequence[tuple[str, Sequence[float]]]) -> None:
    """One bar a row (the median of its values), with a line from min to max."""
    places = range(len(rows))
    middle = [statistics.median(values) for _, values in rows]
    low = [x - min(values) for x, (_, values) in zip(middle, rows, strict=True)]
    high = [max(values) - x for x, (_, values) in zip(middle, rows, strict=True)]
    axis.barh(places, middle, height=0.55, color=_MEASURE, zorder=2)
    axis.errorbar(
        middle, places, xerr=[low, high], fmt="none", ecolor="#1b2a3a", capsize=2.5, zorder=4
    )
    axis.set_yticks(places, [name for name, _ in rows], fontsize=8)
    axis.invert_yaxis()
    axis.grid(axis="x", color="#dddddd", zorder=0)


def _beside_floors(axis: Axes, metrics: Sequence[Metric]) -> None:
    _bars(axis, [(m.name, m.values) for m in metrics])
    seen: set[str] = set()
    for place, metric in enumerate(metrics):
        for at, one in enumerate(metric.comparisons):
            color = _OTHER if at else _STRICT
            label = ("other floors" if at else "strictest floor, or peer") + " of the same rounds"
            axis.plot(
                [statistics.median(one.values)] * 2,
                [place - 0.38, place + 0.38],
                color=color,
                linewidth=2.2,
                zorder=5,
                label=None if label in seen else label,
            )
            seen.add(label)
    if seen:
        axis.legend(fontsize=7, loc="lower right", bbox_to_anchor=(1, 1), ncols=2, frameon=False)


def _latencies(axis: Axes, metrics: Sequence[Metric]) -> None:
    axis.set_xscale("log")
    _beside_floors(axis, metrics)


def _limits(metric: Metric) -> list[tuple[list[float], str]]:
    """A metric's values as shares of what it may cost at most, and how that is said: of its own
    target, or of those beside something else.
    """
    if metric.series:
        return []
    middle = f"{statistics.median(metric.values):.2f}"
    found: list[tuple[list[float], str]] = []
    if metric.target:
        shares = [value / metric.target for value in metric.values]
        found.append((shares, f"{middle} of {metric.target:g} {metric.unit}"))
    for one in metric.comparisons:
        if one.at_most and one.target and metric.unit != "µs":
            shares = [ratio / one.target for ratio in one.ratios]
            found.append((shares, f"{middle} {metric.unit}, limit {one.target:.2f} × {one.floor}"))
    return found


def _against_limits(axis: Axes, metrics: Sequence[Metric]) -> None:
    rows = [(metric, *limit) for metric in metrics for limit in _limits(metric)]
    _bars(axis, [(metric.name, shares) for metric, shares, _ in rows])
    axis.axvline(1.0, color=_LIMIT, linewidth=1.5, zorder=5)
    for place, (_, shares, text) in enumerate(rows):
        axis.text(
            max(shares),
            place,
            f"  {text}",
            va="center",
            fontsize=7,
            color="#444444",
            backgroundcolor="white",
            zorder=6,
        )
    axis.margins(x=0.18)


def _growth(axis: Axes, metrics: Sequence[Metric]) -> None:
    for metric in metrics:
        axis.plot(range(len(metric.series)), metric.series, marker="o", label=metric.name)
        axis.axhline(metric.target or 0.0, color=_LIMIT, linewidth=1.0, linestyle="--")
    axis.legend(fontsize=8, loc="center right")
    axis.set_ylabel("RSS growth, MB", fontsize=8)
    axis.grid(color="#dddddd")
