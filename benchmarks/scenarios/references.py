"""Scenarios: objects that live as long as the references to them."""

from __future__ import annotations

from output.results import Metric
from scenarios.run import MIB, Bench

# The share of Ray's time that it may take.
OF_RAY = 1 / 3


def references(bench: Bench) -> list[Metric]:
    """put_object, get and del of 1 KB and of 64 MB, beside a key, and beside Ray if installed."""
    reader = bench.workers.get("reader")
    bench.workers.opened(reader.call("store.open", capacity=1024 * MIB))
    metrics: list[Metric] = []
    total = 1 + bench.repeat
    for title, nbytes, count in (("1 KB", 1024, 200), ("64 MB", 64 * MIB, 4)):
        known = reader.call("references.make", bench.patience, nbytes=nbytes, seed=bench.seed)
        rounds: list[dict[str, float]] = []
        for turn in range(total):
            bench.progress(turn, total, f"put_object, get, del of {title}")
            got = reader.call("references.cycle", bench.patience, count=count, turn=turn)
            bench.check(got, f"references, {title}, round {turn}")
            if turn:  # the first round is the warm-up
                rounds.append(got["times"])
        times = [r["references"] * 1e6 for r in rounds]
        metric = Metric(f"put_object, get, del {title}", "references", "µs", times)
        for floor in known:
            target = OF_RAY if floor.startswith("ray") else None
            metric.against(floor, [r[floor] * 1e6 for r in rounds], target, at_most=True)
        if len(known) == 1:
            metric.note = "Ray is not installed: not compared with it"
        metrics.append(metric)
        if nbytes >= MIB:
            in_place = [r["in place"] * 1e6 for r in rounds]
            name = f"put_object, get, del {title} made by ts.empty"
            metric = Metric(name, "references", "µs", in_place)
            for floor in known[1:]:
                metric.against(floor, [r[floor] * 1e6 for r in rounds], OF_RAY, at_most=True)
            metric.against("put_object, get, del of any", times, None, at_most=True)
            metrics.append(metric)
    reader.call("references.drop")
    reader.call("store.close")
    return metrics
