"""Scenarios: what a get gains from where values lie: in memory that can be mapped, on volumes that
are read at the same time.
"""

from __future__ import annotations

from output.results import Metric
from scenarios.run import MIB, Bench

TENSORS = 36
VOLUMES = 4


def mapped(bench: Bench) -> list[Metric]:
    """Zero-copy get of 36 large tensors, and of a dict, beside mappings, and ray.get if there."""
    nbytes = (1 if bench.quick else 8) * MIB
    reader = bench.workers.get("reader")
    bench.workers.opened(reader.call("store.open", capacity=3 * TENSORS * nbytes))
    floors = reader.call(
        "mapped.make", bench.patience, count=TENSORS, nbytes=nbytes, seed=bench.seed
    )
    rounds: list[dict[str, float]] = []
    total = bench.warm_ups + 3 * bench.repeat
    for turn in range(total):
        bench.progress(turn, total, f"{TENSORS} × {nbytes // MIB} MiB, mapped")
        got = reader.call("mapped.get", bench.patience, turn=turn)
        bench.check(got, f"mapped, round {turn}")
        if turn >= bench.warm_ups:
            rounds.append(got["times"])
    reader.call("mapped.drop")
    reader.call("store.close")
    title = f"get zero-copy {TENSORS} × {nbytes // MIB} MiB"
    metric = Metric(title, "mapped", "ms", [r["get"] * 1e3 for r in rounds])
    for floor in floors:
        target = 1.0 if floor == "ray.get" else None
        metric.against(floor, [r[floor] * 1e3 for r in rounds], target, at_most=True)
    title = f"get zero-copy a dict of {TENSORS} × {nbytes // MIB} MiB"
    whole = Metric(title, "mapped", "ms", [r["object"] * 1e3 for r in rounds])
    for floor in floors:
        ray = floor == "ray.get"
        there = [r["ray.get of the object" if ray else floor] * 1e3 for r in rounds]
        whole.against(floor, there, 1.0 if ray else None, at_most=True)
    return [metric, whole]


def volumes(bench: Bench) -> list[Metric]:
    """In-place get of 4 values from 4 volumes, each behind a transport with a fixed rate."""
    nbytes = (16 if bench.quick else 256) * MIB
    reader = bench.workers.get("reader")
    bench.progress(0, 1, "putting the values")
    opened = reader.call(
        "volumes.open", bench.patience + 120, volumes=VOLUMES, nbytes=nbytes, seed=bench.seed
    )
    bench.workers.opened(opened)
    rounds: list[dict[str, float]] = []
    total = 1 + min(bench.repeat, 5)
    for turn in range(total):
        bench.progress(turn, total, f"{VOLUMES} × {nbytes // MIB} MiB from {VOLUMES} volumes")
        got = reader.call("volumes.get", bench.patience + 60, turn=turn)
        bench.check(got, f"several volumes, round {turn}")
        if turn:  # the first round is the warm-up
            rounds.append(got["times"])
    reader.call("volumes.close")
    title = f"get {VOLUMES} × {nbytes // MIB} MiB, {VOLUMES} volumes"
    rates = [VOLUMES * nbytes / r["all"] / 1e9 for r in rounds]
    metric = Metric(title, "volumes", "GB/s", rates)
    one = [nbytes / r["one"] / 1e9 for r in rounds]
    metric.against("one volume's rate", one, 1.8, at_most=False)
    return [metric]
