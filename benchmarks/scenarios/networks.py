"""Scenarios: a set of weights to and from a server by way of the network."""

from __future__ import annotations

import importlib.util
import os
import statistics
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from inputs.layouts import COLUMNS, ROWS
from output.results import Metric
from scenarios.monarch_jobs import Actor
from scenarios.run import MIB, Bench
from scenarios.transfers import rates

from torchstore_cli.bench.workers import Worker
from torchstore_core.testing.networks import Namespace, two_networks

# Rounds until the link has settled on a number of streams: four widths, some of them twice.
_SETTLING = 10
_WORKER = Path(__file__).parents[1] / "worker.py"
_TRANSPORTS = ("tcp", "monarch-rpc")
_NAME = "small"
_SMALL = 1024
_CALLS = 40


def networks(bench: Bench) -> list[Metric]:
    """Puts and gets over tcp: loopback, two networks, a Monarch job; 1 KB of another host."""
    metrics = _loopback(bench)
    metrics += _between_networks(bench)
    if importlib.util.find_spec("torchstore_monarch") is not None:
        metrics += _in_job(bench)
    return metrics


def _loopback(bench: Bench) -> list[Metric]:
    """Beside plain sockets with as many streams."""
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
    return [
        _beside_sockets(bench, f"{way} over tcp", way, rounds, got["streams"][way], 0.90)
        for way in ("put", "get")
    ]


def _beside_sockets(
    bench: Bench,
    title: str,
    way: str,
    rounds: list[dict[str, float]],
    streams: int,
    target: float,
) -> Metric:
    metric = Metric(title, "networks", "GB/s", rates(rounds, way, bench.nbytes))
    floors = [kind for kind in rounds[0] if kind.startswith(f"plain {way}")]
    used = f"plain {way}, {streams}"
    for floor in (used, *(one for one in floors if one != used)):
        at_least = target if floor == used else None
        metric.against(floor, rates(rounds, floor, bench.nbytes), at_least, at_most=False)
    return metric


# ---- two networks -------------------------------------------------------------------------


def _between_networks(bench: Bench) -> list[Metric]:
    """A state dict in rows, from a server in one network into columns in the other. Nothing where
    network namespaces cannot be made.
    """
    try:
        with (
            two_networks() as (there, here),
            _worker(bench, "publisher", there) as source,
            _worker(bench, "reader", here) as target,
        ):
            return _resharded(bench, source, target, there)
    except pytest.skip.Exception as reason:
        bench.facts["networks"] = str(reason)
        return []


@contextmanager
def _worker(bench: Bench, name: str, network: Namespace) -> Iterator[Worker]:
    """A measured process in a network."""
    command = [*network.wrapper, sys.executable, str(_WORKER), "asyncio"]
    worker = Worker(f"{name} in a network", command, dict(os.environ))
    bench.workers.started[worker.pid] = worker.name
    try:
        yield worker
    finally:
        worker.close()


def _resharded(bench: Bench, source: Worker, target: Worker, there: Namespace) -> list[Metric]:
    parts = {"shapes": bench.shapes, "seed": bench.seed, "ranks": (0, 1), "world": 2}
    source.start("dicts.make", layout=ROWS, filled=True, **parts)
    target.start("dicts.make", layout=COLUMNS, filled=False, **parts)
    source.result(bench.patience)
    nbytes = int(target.result(bench.patience)["nbytes"])
    address = bench.workers.opened(source.call("store.open", capacity=bench.capacity))
    target.call("store.connect", address=address, prefer=["tcp"])
    target.call("networks.open", address=there.address, wrapper=there.wrapper)
    rounds: list[dict[str, float]] = []
    received: list[float] = []
    total = _SETTLING + bench.repeat
    for turn in range(total):
        bench.progress(turn, total, "rows to columns between two networks, plain sockets")
        source.call("dicts.mark", bench.patience, number=turn + 1)
        source.call("dicts.put", bench.patience, number=turn + 1)
        got = target.call("networks.round", 10 * bench.patience, number=turn + 1, turn=turn)
        bench.check(got, f"two networks, round {turn}")
        if turn >= _SETTLING:
            rounds.append(got["times"])
            received.append(got["received"] / MIB)
    target.call("networks.close")
    target.call("store.close")
    source.call("store.close")
    title = "get over tcp, rows to columns, two networks"
    get = _beside_sockets(bench, title, "get", rounds, got["streams"], 0.75)
    wire = Metric("… bytes on the wire", "networks", "MB", received)
    wire.against("bytes of the destination", [nbytes / MIB] * len(received), 1.01, at_most=True)
    return [get, wire]


# ---- a Monarch job ------------------------------------------------------------------------


def _in_job(bench: Bench) -> list[Metric]:
    """Between two hosts of a job: the set by ``tcp`` and by ``monarch-rpc``; small values beside
    bare calls of the engine.
    """
    root = bench.workers.get("job-hosts")
    root.call("job.begin", actors=1, hosts=2)
    for pid in root.call("job.pids"):
        bench.workers.started[pid] = "actor"
    actor = Actor(root, 1, "host 1")
    root.call("job.introduce", one=1, other=2)  # the third is where the controller is
    for name in _TRANSPORTS:
        root.call(
            "job.open", mesh="hosts", transport=name, store_name=name, capacity=bench.capacity
        )
    metrics = _by_transports(bench, actor)
    actor.call("far.close", stores=_TRANSPORTS)
    for name in _TRANSPORTS:
        root.call("job.close", store_name=name)
    root.call("job.open", mesh="hosts", store_name=_NAME, capacity=64 * MIB)
    metrics.append(_small(bench, actor))
    actor.call("far.close", stores=[_NAME])
    root.call("job.close", store_name=_NAME)
    bench.workers.drop("job-hosts")
    return metrics


def _by_transports(bench: Bench, actor: Actor) -> list[Metric]:
    actor.call("far.make", bench.patience, shapes=bench.shapes, seed=bench.seed)
    rounds: list[dict[str, float]] = []
    total = _SETTLING + bench.repeat
    for turn in range(total):
        bench.progress(turn, total, f"put and get in a job by {' and '.join(_TRANSPORTS)}")
        measured = turn >= _SETTLING
        stores = _TRANSPORTS if measured else _TRANSPORTS[:1]
        got = actor.call("far.round", 10 * bench.patience, stamp=turn, turn=turn, stores=stores)
        bench.check(got, f"a job, round {turn}")
        if measured:
            rounds.append(got["times"])
    metrics = []
    for way in ("put", "get"):
        best, other = (rates(rounds, f"{way}, {one}", bench.nbytes) for one in _TRANSPORTS)
        metric = Metric(f"{way} over tcp, two hosts of a job", "networks", "GB/s", best)
        metric.against(_TRANSPORTS[1], other, 3.0, at_most=False)
        metrics.append(metric)
    return metrics


def _small(bench: Bench, actor: Actor) -> Metric:
    actor.call("far.put_small", store=_NAME, nbytes=_SMALL)
    rounds: list[tuple[float, float]] = []
    total = bench.warm_ups + 3 * bench.repeat
    for turn in range(total):
        bench.progress(turn, total, "1 KB of another host and bare calls, in turns")
        got = actor.call("far.get_small", store=_NAME, count=_CALLS)
        bench.check(got, "1 KB of another host")
        if turn >= bench.warm_ups:
            rounds.append((statistics.median(got["gets"]), statistics.median(got["calls"])))
    gets, calls = ([times[at] * 1e6 for times in rounds] for at in range(2))
    metric = Metric("get 1 KB from another host's volume", "networks", "µs", gets)
    metric.against("bare endpoint call", calls, 1.3, at_most=True)
    return metric
