"""Scenarios: a set of weights to and from a server by way of the network."""

from __future__ import annotations

from output.results import Metric
from scenarios.run import Bench
from scenarios.transfers import rates

# Rounds until the link has settled on a number of streams: four widths, some of them twice.
_SETTLING = 10


def networks(bench: Bench) -> list[Metric]:
    """Puts and gets over tcp on the loopback, beside plain sockets with as many streams."""
    worker = bench.workers.get("reader")
    opened = worker.call(
        "network.open",
        bench.patience + 60,
        shapes=bench.shapes,
        seed=bench.seed,
        capacity=bench.capacity,
    )
    bench.workers.opened(opened)
    worker.call("store.settle", 90)
    rounds: list[dict[str, float]] = []
    total = _SETTLING + bench.repeat
    for turn in range(total):
        bench.progress(turn, total, "put, get, plain sockets")
        got = worker.call("network.round", 10 * bench.patience, stamp=turn, turn=turn)
        bench.check(got, f"networks, round {turn}")
        if turn >= _SETTLING:
            rounds.append(got["times"])
    worker.call("network.close")
    metrics = []
    for way in ("put", "get"):
        metric = Metric(f"{way} over tcp", "networks", "GB/s", rates(rounds, way, bench.nbytes))
        floors = [kind for kind in rounds[0] if kind.startswith(f"plain {way}")]
        used = f"plain {way}, {got['streams'][way]}"
        for floor in (used, *(one for one in floors if one != used)):
            target = 0.90 if floor == used else None
            metric.against(floor, rates(rounds, floor, bench.nbytes), target, at_most=False)
        metrics.append(metric)
    return metrics
