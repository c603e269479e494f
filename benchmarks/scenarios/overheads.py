"""Scenarios: costs that do not depend on bytes: small values, batches, starts, restarts, leaks."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from typing import Any

from output.results import Metric
from scenarios.run import MIB, Bench

from torchstore_cli.bench import echo
from torchstore_cli.bench.measuring import percentile

#: How many keys ``keys(prefix)`` finds.
_LISTED = 100


def small(bench: Bench) -> list[Metric]:
    """1 KB values, one operation at a time, from a second process, beside echoes of a frame.

    Nothing matters more than where the scheduler places two processes that wake each other: on one
    CPU an echo is a mere switch, on two it wakes an idle CPU. So echoes and store are measured in
    both placements. The target is for two CPUs, as processes of a job have them.
    """
    publisher = bench.workers.get("publisher")
    opened = publisher.call("store.open", capacity=256 * MIB)
    address = bench.workers.opened(opened)
    metrics: list[Metric] = []
    count, rounds = (100, bench.repeat) if bench.repeat < 5 else (200, 2 * bench.repeat)
    loops = [kind for kind in echo.kinds() if kind != echo.RAW]
    placements: dict[str, bool | None] = {"two CPUs": True, "one CPU": False}
    if echo.two_cpus() is None:
        placements = {"CPUs not chosen": None}
    total = len(loops) * len(placements) * (rounds + 1)
    step = 0
    for loop in loops:
        reader = bench.workers.get("reader", loop=loop)
        reader.call("store.connect", address=address)
        kinds = reader.call("small.start_echo")
        for placement, apart in placements.items():
            samples: list[dict[str, list[float]]] = []
            for turn in range(rounds + 1):
                bench.progress(step, total, f"1 KB put and get, {loop}, {placement}")
                step += 1
                reply = reader.call(
                    "small.one_by_one",
                    count=count,
                    nbytes=1024,
                    turn=turn,
                    server_pid=opened["server_pid"],
                    apart=apart,
                )
                bench.check(reply, f"1 KB, {loop}")
                if turn:  # the first round is the warm-up
                    samples.append(reply["samples"])
            for name in ("put", "get"):
                title = f"{name} 1 KB, {loop}, {placement}"
                target = 2.0 if apart is not False else None
                metrics.extend(small_metrics("small", title, name, kinds, samples, target))
            for kind in kinds:
                where = f"1 KB put and get, {loop}, {placement}"
                values = _medians(samples, kind)
                bench.floors.append(Metric(f"{kind} echo, p50", where, "µs", values))
        reader.call("small.end_echo")
        reader.call("store.close")
    publisher.call("store.close")
    return metrics


def _medians(samples: list[dict[str, list[float]]], kind: str) -> list[float]:
    """p50 in µs, by round."""
    return [statistics.median(each[kind]) * 1e6 for each in samples]


def small_metrics(
    scenario: str,
    title: str,
    name: str,
    kinds: list[str],
    samples: list[dict[str, list[float]]],
    target: float | None,
) -> list[Metric]:
    """p50 by round beside all echoes, the fastest first, and p99 by round, of a ``put`` or ``get``.

    Args:
        kinds: of echoes.
        samples: seconds of every operation and echo, by round.
        target: how many times as long as each echo the operation may take.
    """
    p50 = Metric(f"{title}, p50", scenario, "µs", _medians(samples, name))
    for kind in sorted(kinds, key=lambda kind: statistics.median(_medians(samples, kind))):
        p50.against(f"{kind} echo", _medians(samples, kind), target, at_most=True)
    p99 = [percentile(each[name], 0.99) * 1e6 for each in samples]
    return [p50, Metric(f"{title}, p99", scenario, "µs", p99)]


def batch(bench: Bench) -> list[Metric]:
    """1000 tensors of 4 KB in one put and one get, from a second process."""
    publisher, reader = bench.workers.get("publisher"), bench.workers.get("reader")
    address = bench.workers.opened(publisher.call("store.open", capacity=256 * MIB))
    reader.call("store.connect", address=address)
    rounds: list[dict[str, float]] = []
    total = bench.warm_ups + 3 * bench.repeat
    for turn in range(total):
        bench.progress(turn, total, "1000 × 4 KB")
        reply = reader.call("small.batch", count=1000, nbytes=4096, turn=turn)
        bench.check(reply, f"batch {turn}")
        if turn >= bench.warm_ups:
            rounds.append(reply["times"])
    reader.call("store.close")
    publisher.call("store.close")
    metrics: list[Metric] = []
    for name, target, clones in (("put", 12.0, 2.0), ("get", 8.0, 2.5)):
        title = f"{name} 1000 × 4 KB"
        metric = Metric(title, "batch", "ms", [r[name] * 1e3 for r in rounds], target)
        floor = [r["clone"] * 1e3 for r in rounds]
        metric.against("cloning each", floor, clones, at_most=True)
        metrics.append(metric)
    return metrics


def keys(bench: Bench) -> list[Metric]:
    """1 KB values and ``keys(prefix)`` in a store of a million keys, beside one of a thousand."""
    sizes = {"few": 1000, "many": 100_000 if bench.quick else 1_000_000}
    workers = {name: bench.workers.get(f"{name} keys") for name in sizes}
    opened: dict[str, dict[str, Any]] = {}
    for at, (name, worker) in enumerate(workers.items()):
        bench.progress(at, 2 + bench.repeat, f"{sizes[name]} keys")
        opened[name] = worker.call("keys.open", 300, keys=sizes[name], listed=_LISTED)
        bench.workers.opened(opened[name])
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in sizes}
    for turn in range(bench.repeat + 1):
        bench.progress(2 + turn, 3 + bench.repeat, "1 KB put, get and keys()")
        for name, worker in workers.items():
            measured = worker.call("keys.one_by_one", count=1000)
            if measured["found"] != _LISTED:
                bench.wrong.append(f"keys: {measured['found']} keys of a prefix that has {_LISTED}")
            if turn:  # the first round is the warm-up
                rounds[name].append(measured)
    for worker in workers.values():
        worker.call("store.close")
    many = f"of {sizes['many']:,} keys"
    metrics: list[Metric] = []
    for op in ("put", "get"):
        times = {name: [r[op] * 1e6 for r in rounds[name]] for name in sizes}
        metric = Metric(f"{op} 1 KB in a store {many}, p50", "keys", "µs", times["many"])
        metric.against("1,000 keys", times["few"], 1.15, at_most=True)
        metrics.append(metric)
    listed = [r["keys"] * 1e3 for r in rounds["many"]]
    each = [opened["many"]["bytes"]]
    return [
        *metrics,
        Metric(f"keys(prefix), {_LISTED} {many}", "keys", "ms", listed, 1.0),
        Metric(f"server memory a key, store {many}", "keys", "B", each, 600.0),
    ]


def restart(bench: Bench) -> list[Metric]:
    """The pause that a client sees when the server is killed, and its keeper starts it again."""
    sizes = {1_000: 1.0, 10_000: 1.0} if bench.quick else {10_000: 1.0, 1_000_000: 3.0}
    metrics: list[Metric] = []
    for count, target in sizes.items():
        worker = bench.workers.get(f"{count} keys kept")
        bench.progress(0, 1 + bench.repeat, f"{count:,} keys")
        opened = worker.call("keys.open", 300, keys=count, listed=0, keeper=True)
        bench.workers.opened(opened)
        seconds: list[float] = []
        for turn in range(bench.repeat):
            bench.progress(1 + turn, 1 + bench.repeat, f"kill the server of {count:,} keys")
            got = worker.call("keys.killed")
            bench.check(got, f"restart, {count:,} keys, round {turn}")
            seconds.append(got["seconds"] * 1e3)
        worker.call("store.close")
        name = f"pause when the server of {count:,} keys is killed"
        metrics.append(Metric(name, "restart", "ms", seconds, target * 1e3))
    return metrics


_IMPORT = """
import json, time, torch
a = time.perf_counter()
import torchstore_core
b = time.perf_counter()
torchstore_core.put
print(json.dumps([b - a, time.perf_counter() - a]))
"""


def imports(bench: Bench) -> list[Metric]:
    """Importing the package in a fresh interpreter that has torch already.

    No warm-up: this process has imported all of it, so the files are in the page cache.
    """
    times: list[list[float]] = []
    for turn in range(bench.repeat):
        bench.progress(turn, bench.repeat, "fresh interpreter")
        done = subprocess.run(
            [sys.executable, "-P", "-c", _IMPORT], capture_output=True, timeout=60, check=True
        )
        times.append(json.loads(done.stdout))
    bare, used = ([t[i] * 1e3 for t in times] for i in (0, 1))
    return [
        Metric("import torchstore_core, over torch", "import", "ms", bare, 50.0),
        Metric("… and the API, which loads on first use", "import", "ms", used, 50.0),
    ]


def start(bench: Bench) -> list[Metric]:
    """Starting a store with the defaults, and the size of its server at rest."""
    publisher = bench.workers.get("publisher")
    seconds: list[float] = []
    sizes: list[dict[str, int]] = []
    for turn in range(bench.repeat):
        bench.progress(turn, bench.repeat, "start, settle, stop")
        opened = publisher.call("store.open")
        bench.workers.opened(opened)
        seconds.append(opened["seconds"])
        if turn < -(-bench.repeat // 3):
            publisher.call("store.settle", 90)
            sizes.append(publisher.call("store.size", pid=opened["server_pid"]))
        publisher.call("store.close")
    rss = [size["rss"] / 1e6 for size in sizes]
    return [
        Metric("initialize(), server start", "start", "ms", [s * 1e3 for s in seconds], 300.0),
        Metric("server RSS, empty", "start", "MB", rss, 40.0),
    ]


def flat(bench: Bench) -> list[Metric]:
    """Growth of client and server over many cycles of put, get and delete.

    The server's log grows until it is written anew, for which there is a second one for a while:
    two descriptors more, and a share of the memory, which are not what these targets are about.
    """
    publisher, reader = bench.workers.get("publisher"), bench.workers.get("reader")
    opened = publisher.call("store.open", capacity=256 * MIB, prefault=0)
    reader.call("store.connect", address=bench.workers.opened(opened))
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
    note = f"highest growth in {bench.cycles} cycles"
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
