"""Scenarios: what is paid whatever the bytes: small values, batches, imports, starts, leaks."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys

from plan import MIB, WARM_UPS, Bench
from results import Metric, percentile


def small(bench: Bench) -> list[Metric]:
    """1 KB values, one operation at a time, from a second process, beside echoes of a frame."""
    publisher = bench.crew.get("publisher")
    address = bench.crew.opened(publisher.call("store.open", capacity=256 * MIB))
    metrics: list[Metric] = []
    count, rounds = (100, bench.repeat) if bench.repeat < 5 else (200, 3 * bench.repeat)
    loops: list[str] = ["asyncio", "uvloop"] if sys.platform != "win32" else ["asyncio"]
    for at, loop in enumerate(loops):
        reader = bench.crew.get("reader", loop=loop)
        reader.call("store.connect", address=address)
        kinds = reader.call("small.start_echo")
        samples: list[dict[str, list[float]]] = []
        for turn in range(rounds + 1):
            step = at * (rounds + 1) + turn
            bench.progress(step, len(loops) * (rounds + 1), f"1 KB put and get, {loop}")
            reply = reader.call("small.one_by_one", count=count, nbytes=1024, turn=turn)
            bench.check(reply, f"1 KB, {loop}")
            if turn:  # the first round is the warm-up
                samples.append(reply["samples"])
        reader.call("small.end_echo")
        reader.call("store.close")
        for name in ("put", "get"):
            metrics.extend(_small_metrics(f"{name} 1 KB, {loop}", name, loop, kinds, samples))
    publisher.call("store.close")
    return metrics


def _small_metrics(
    title: str, name: str, loop: str, kinds: list[str], samples: list[dict[str, list[float]]]
) -> list[Metric]:
    """p50 by round, beside the echo on the same kind of event loop and the raw one; p99."""

    def medians(kind: str) -> list[float]:
        return [statistics.median(each[kind]) * 1e6 for each in samples]

    p50 = Metric(f"{title}, p50", "small", "µs", medians(name))
    for kind in dict.fromkeys((loop, "asyncio", "raw")):
        if kind in kinds:
            p50.against(f"{kind} echo", medians(kind), 2.0, at_most=True)
    p99 = [percentile(each[name], 0.99) * 1e6 for each in samples]
    return [p50, Metric(f"{title}, p99", "small", "µs", p99)]


def batch(bench: Bench) -> list[Metric]:
    """1000 tensors of 4 KB in one put and one get, from a second process."""
    publisher, reader = bench.crew.get("publisher"), bench.crew.get("reader")
    address = bench.crew.opened(publisher.call("store.open", capacity=256 * MIB))
    reader.call("store.connect", address=address)
    rounds: list[dict[str, float]] = []
    total = WARM_UPS + 3 * bench.repeat
    for turn in range(total):
        bench.progress(turn, total, "1000 × 4 KB")
        reply = reader.call("small.batch", count=1000, nbytes=4096, turn=turn)
        bench.check(reply, f"batch {turn}")
        if turn >= WARM_UPS:
            rounds.append(reply["times"])
    reader.call("store.close")
    publisher.call("store.close")
    return [
        Metric(f"{name} 1000 × 4 KB", "batch", "ms", [r[name] * 1e3 for r in rounds], target)
        for name, target in (("put", 12.0), ("get", 8.0))
    ]


_IMPORT = """
import json, time, torch
a = time.perf_counter()
import torchstore_core
b = time.perf_counter()
torchstore_core.put
print(json.dumps([b - a, time.perf_counter() - a]))
"""


def imports(bench: Bench) -> list[Metric]:
    """Importing the package in a fresh interpreter that has torch already."""
    times: list[list[float]] = []
    total = bench.repeat + 1
    for turn in range(total):
        bench.progress(turn, total, "fresh interpreter")
        done = subprocess.run(
            [sys.executable, "-P", "-c", _IMPORT], capture_output=True, timeout=60, check=True
        )
        if turn:  # the first one fills the page cache
            times.append(json.loads(done.stdout))
    bare, used = ([t[i] * 1e3 for t in times] for i in (0, 1))
    return [
        Metric("import torchstore_core, over torch", "import", "ms", bare, 50.0),
        Metric("… and the API, which loads on first use", "import", "ms", used, 50.0),
    ]


def start(bench: Bench) -> list[Metric]:
    """Starting a store with the defaults, and the size of its server at rest."""
    publisher = bench.crew.get("publisher")
    seconds: list[float] = []
    sizes: list[dict[str, int]] = []
    for turn in range(bench.repeat):
        bench.progress(turn, bench.repeat, "start, settle, stop")
        opened = publisher.call("store.open")
        bench.crew.opened(opened)
        seconds.append(opened["seconds"])
        if turn < 3:
            publisher.call("store.settle", 90)
            sizes.append(publisher.call("store.size", pid=opened["server_pid"]))
        publisher.call("store.close")
    rss = [size["rss"] / 1e6 for size in sizes]
    return [
        Metric("initialize(), server start", "start", "ms", [s * 1e3 for s in seconds], 300.0),
        Metric("server RSS, empty", "start", "MB", rss, 40.0),
    ]


def flat(bench: Bench) -> list[Metric]:
    """Many put/get/delete cycles: what grows?"""
    publisher, reader = bench.crew.get("publisher"), bench.crew.get("reader")
    opened = publisher.call("store.open", capacity=256 * MIB, prefault=0)
    reader.call("store.connect", address=bench.crew.opened(opened))
    steps = 10
    sizes: list[dict[str, dict[str, int]]] = []
    for step in range(steps + 1):
        bench.progress(step, steps + 1, f"{bench.cycles} put/get/delete cycles")
        # The first lot is the warm-up: what it reaches is the level that should stay.
        count = bench.cycles // steps if step else max(200, bench.cycles // 20)
        reply = reader.call("small.cycles", 120, count=count, server_pid=opened["server_pid"])
        bench.check(reply, "cycles")
        sizes.append(reply["sizes"])
    reader.call("store.close")
    publisher.call("store.close")
    metrics: list[Metric] = []
    note = f"growth over {bench.cycles} cycles, highest of {steps} samples"
    for who in ("client", "server"):
        for what, title, unit, scale, target in (
            ("fds", "descriptors", "", 1.0, 0.0),
            ("maps", "mappings", "", 1.0, 8.0),
            ("rss", "RSS", "MB", 1e6, 2.0),
        ):
            series = [(size[who][what] - sizes[0][who][what]) / scale for size in sizes]
            worst = [max(series[1:])]
            metrics.append(
                Metric(f"{title} of {who}", "flat", unit, worst, target, note=note, series=series)
            )
    return metrics
