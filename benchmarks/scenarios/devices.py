"""Scenarios: tensors on a CUDA device."""

from __future__ import annotations

from measured.devices import GET, IN, OUT, PUT
from output.results import Metric
from scenarios.run import Bench

_SMALL = {f"k{number}": (2048,) for number in range(1000)}


def devices(bench: Bench) -> list[Metric]:
    """The set, and 1,000 × 4 KB, from a CUDA device into the store, and back into tensors there."""
    reader = bench.workers.get("reader")
    device = reader.call("devices.name")
    if not device:
        bench.left_out["tensors on a device"] = "torch sees no CUDA device"
        return []
    bench.facts["device"] = device
    metrics: list[Metric] = []
    total = 1 + bench.repeat
    for title, shapes in (("of the set", bench.shapes), ("of 1,000 × 4 KB", _SMALL)):
        bench.workers.opened(reader.call("store.open", capacity=bench.capacity))
        nbytes = reader.call("devices.make", bench.patience, shapes=shapes, seed=bench.seed)
        rounds: list[dict[str, float]] = []
        for turn in range(total):
            bench.progress(turn, total, f"put and get {title}, on a device")
            got = reader.call("devices.round", bench.patience, turn=turn)
            bench.check(got, f"devices, {title}, round {turn}")
            if turn:  # the first round is the warm-up: it page-locks memory
                rounds.append(got["times"])
        for mine, floor in ((PUT, OUT), (GET, IN)):
            rates = [nbytes / r[mine] / 1e9 for r in rounds]
            metric = Metric(f"{mine} {title}, on a device", "devices", "GB/s", rates)
            metric.against(floor, [nbytes / r[floor] / 1e9 for r in rounds], None, at_most=False)
            metrics.append(metric)
        reader.call("devices.drop")
        reader.call("store.close")
    return metrics
