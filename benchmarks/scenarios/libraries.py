"""Scenario: a set of weights over the transports that use a library, beside the library alone."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from output.results import Metric
from scenarios.run import Bench
from scenarios.transfers import rates

from torchstore_cli.bench.workers import Worker

_WORKER = Path(__file__).parents[1] / "worker.py"


class _Case(NamedTuple):
    """What is measured: a transport, the library that it uses, and where it is used.

    ``modules``: what has to be installed.
    """

    title: str
    transport: str
    library: str
    modules: tuple[str, ...]
    target: float
    environment: dict[str, str]


_NIXL = ("torchstore_rdma", "nixl_cu12")
# UCX over TCP, on one host as between two.
_TCP = {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "lo"}
_CASES = (
    _Case("rdma, same host", "rdma", "nixl", _NIXL, 0.90, {}),
    _Case("rdma, UCX over TCP", "rdma", "nixl", _NIXL, 0.90, _TCP),
    _Case("gloo", "gloo", "gloo", ("torchstore_gloo",), 0.85, {}),
    _Case(
        "torchcomms",
        "torchcomms",
        "torchcomms",
        ("torchstore_torchcomms", "torchcomms._comms_gloo"),
        0.85,
        {"GLOG_minloglevel": "2"},
    ),
)


def libraries(bench: Bench) -> list[Metric]:
    """Puts and gets over rdma, gloo and torchcomms, beside the libraries alone."""
    metrics: list[Metric] = []
    for case in _CASES:
        missing = [name for name in case.modules if not _is_there(name)]
        if missing:
            bench.left_out[case.title] = f"{missing[0]} is not installed"
            continue
        metrics += _measured(bench, case)
    return metrics


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ImportError:  # what contains it is not there, or is a placeholder
        return False


def _measured(bench: Bench, case: _Case) -> list[Metric]:
    environment = {**os.environ, **case.environment}
    worker = Worker(case.title, [sys.executable, str(_WORKER), "asyncio"], environment)
    bench.workers.started[worker.pid] = worker.name
    rounds: list[dict[str, float]] = []
    try:
        opened = worker.call(
            "libraries.open",
            bench.patience + 60,
            shapes=bench.shapes,
            seed=bench.seed,
            capacity=bench.capacity,
            transport=case.transport,
            library=case.library,
        )
        bench.workers.opened(opened)
        worker.call("store.settle", 90)
        total = bench.warm_ups + bench.repeat
        for turn in range(total):
            bench.progress(turn, total, f"put and get by {case.title} and its library")
            got = worker.call("libraries.round", 10 * bench.patience, stamp=turn, turn=turn)
            bench.check(got, f"{case.title}, round {turn}")
            if turn >= bench.warm_ups:
                rounds.append(got["times"])
        worker.call("libraries.close")
    finally:
        worker.close()
    metrics = []
    for way in ("put", "get"):
        name = f"{way} over {case.title}"
        metric = Metric(name, "libraries", "GB/s", rates(rounds, way, bench.nbytes))
        for kind in (one for one in rounds[0] if one.startswith(f"bare {way}, ")):
            floor = kind.removeprefix(f"bare {way}, ")
            metric.against(floor, rates(rounds, kind, bench.nbytes), case.target, at_most=False)
        metrics.append(metric)
    return metrics
