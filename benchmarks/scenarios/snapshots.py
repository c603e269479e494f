"""Scenario: snapshots on the local disk, beside other libraries and what the machine can do."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from output.results import Metric, fastest
from scenarios.run import MIB, Bench
from scenarios.transfers import rates

from torchstore_cli.bench import workload

RAW, FLUSHED, CACHED = "raw parallel write", "raw write and fsync", "page cache into memory"
COPIES, PLAIN = ("streaming copy", "memmove"), "copy_ of each tensor"
PEER = "torchsnapshot"
_LARGE = 8
_BUDGET = 64 * MIB
_CHANGED = 0.02
_LAYOUTS = ((2, 4), (4, 2), (4, 1))
_UNCOUNTED = (
    "/proc/self/io counts no bytes read from a disk: the kernel does not account for them, or the "
    "folder is in memory"
)

_Rounds = list[dict[str, float]]


def snapshots(bench: Bench) -> list[Metric]:
    """Take, restore and read snapshots, beside torchsnapshot, DCP, torch.save and safetensors."""
    side = max(64, int((bench.nbytes / 0.76e9 * 105e6 / 2) ** 0.5) // 64 * 64)
    large = {f"layer.{at}.weight": (side, side) for at in range(_LARGE)}
    sets = {f"{_LARGE} × {side * side * 2 / 1e6:.0f} MB": large}
    sets[f"{len(bench.shapes)} tensors"] = dict(bench.shapes)
    metrics: list[Metric] = []
    with tempfile.TemporaryDirectory(prefix="torchstore-bench-", dir=".") as folder:
        for name, of in sets.items():
            metrics += _whole(bench, name, of, f"{folder}/{len(metrics)}")
        metrics += _trainer(bench, large, f"{folder}/trainer")
        metrics += _layouts(bench, large, f"{folder}/layouts")
        metrics += _single(bench, f"{folder}/many")
    return metrics


def _listed(of: workload.Shapes) -> list[tuple[str, list[int]]]:
    return [(name, list(shape)) for name, shape in of.items()]


def _whole(bench: Bench, name: str, of: workload.Shapes, folder: str) -> list[Metric]:
    """Save and load a whole set."""
    Path(folder).mkdir(parents=True)
    worker = bench.workers.get("reader")
    made = worker.call(
        "snapshot-files.make", bench.patience, shapes=_listed(of), seed=bench.seed, folder=folder
    )
    nbytes, peers = int(made["nbytes"]), made["peers"]
    if PEER not in peers:
        bench.left_out[f"beside {PEER}"] = f"it is not installed; pip install {PEER}"
    saves, loads = _Rounds(), _Rounds()
    total = 2 * (1 + bench.repeat)
    patience = 10 * bench.patience
    for turn in range(1 + bench.repeat):
        bench.progress(turn, total, f"saving {name}")
        saves.append(worker.call("snapshot-files.save", patience, turn=turn, peers=peers))
    worker.call("snapshot-files.prepare_loads", patience, peers=peers)
    for turn in range(1 + bench.repeat):
        bench.progress(1 + bench.repeat + turn, total, f"loading {name}")
        reply = worker.call("snapshot-files.load", patience, turn=turn, peers=peers)
        bench.check(reply, f"restore of {name}, round {turn}")
        loads.append(reply["times"])
    worker.call("snapshot-files.drop")
    del saves[0], loads[0]  # the warm-up
    metrics: list[Metric] = []
    for kind, floor, others in (("take", RAW, peers), ("take, fsync", FLUSHED, [])):
        metric = Metric(f"{kind}, {name}", "snapshots", "GB/s", rates(saves, kind, nbytes))
        metric.against(floor, rates(saves, floor, nbytes), 0.9, at_most=False)
        for peer in others:
            metric.against(peer, rates(saves, peer, nbytes), 1.0, at_most=False)
        metrics.append(metric)
    copy = fastest(loads, COPIES)
    kinds = ("restore", 0.8), ("restore, streaming", 0.8), ("restore, verify=False", 0.8)
    for kind, target in kinds:
        metric = Metric(f"{kind}, {name}", "snapshots", "GB/s", rates(loads, kind, nbytes))
        for floor in (copy, PLAIN):
            metric.against(floor, rates(loads, floor, nbytes), target, at_most=False)
        metric.against(CACHED, rates(loads, CACHED, nbytes), None, at_most=False)
        for peer in peers if kind == "restore" else []:
            metric.against(peer, rates(loads, peer, nbytes), 1.0, at_most=False)
        metrics.append(metric)
    return metrics


def _milliseconds(rounds: Sequence[Mapping[str, float]], kind: str) -> list[float]:
    return [each[kind] * 1e3 for each in rounds]


def _trainer(bench: Bench, of: workload.Shapes, folder: str) -> list[Metric]:
    """What a snapshot in the background costs the program."""
    Path(folder).mkdir()
    worker = bench.workers.get("publisher")
    worker.call("trainer.make", bench.patience, shapes=_listed(of), seed=bench.seed, folder=folder)
    peak = worker.call("trainer.peak", 10 * bench.patience, budget=_BUDGET)
    bench.check(peak, "async_take with a budget")
    part = worker.call("trainer.incremental", 10 * bench.patience, share=_CHANGED)
    bench.check(part, "incremental take")
    bench.workers.opened(worker.call("store.open", capacity=4 * workload.nbytes(of) + 64 * MIB))
    worker.call("store.settle")
    rounds = _Rounds()
    for turn in range(1 + bench.repeat):
        bench.progress(turn, 1 + bench.repeat, "async_take beside a put")
        reply = worker.call("trainer.round", 10 * bench.patience, turn=turn)
        bench.check(reply, f"async_take, round {turn}")
        rounds.append(reply["times"])
    worker.call("trainer.drop")
    worker.call("store.close")
    bench.workers.drop("publisher")  # and with it the writer, and the store of its own
    first = Metric("blocked by the first async_take", "snapshots", "ms", [])
    first.values = _milliseconds(rounds[:1], "async_take")
    del rounds[0]
    blocked = Metric(
        "blocked by async_take", "snapshots", "ms", _milliseconds(rounds, "async_take")
    )
    blocked.against("put_state_dict", _milliseconds(rounds, "put"), 1.2, at_most=True)
    blocked.against("dcp.async_save", _milliseconds(rounds, "dcp.async_save"), 1.0, at_most=True)
    steps = []
    for name, kind in (("step while writing", "step"), ("step on all processors", "wide step")):
        step = Metric(name, "snapshots", "ms", _milliseconds(rounds, f"{kind}, writing"))
        step.against(f"{kind} alone", _milliseconds(rounds, f"{kind}, alone"), 1.15, at_most=True)
        beside = _milliseconds(rounds, f"{kind}, dcp writing")
        step.against(f"{kind} beside dcp", beside, None, at_most=True)
        steps.append(step)
    memory = Metric(
        "extra memory, budget 64 MiB",
        "snapshots",
        "MB",
        [max(peak["nbytes"], 1) / 1e6],
        target=round(1.1 * _BUDGET / 1e6, 1),
    )
    processes = Metric("writer and server, idle", "snapshots", "MB", [peak["processes"] / 1e6])
    name = f"incremental take, {_CHANGED:.0%} changed"
    written = Metric(f"written by {name}", "snapshots", "MB", [part["written"] / 1e6])
    written.against("bytes of the tensors", [part["nbytes"] / 1e6], 0.03, at_most=True)
    seconds = Metric(name, "snapshots", "ms", [part["seconds"] * 1e3])
    return [first, blocked, *steps, memory, processes, written, seconds]


def _layouts(bench: Bench, of: workload.Shapes, folder: str) -> list[Metric]:
    """Restore on other numbers of ranks than the snapshot was taken on."""
    Path(folder).mkdir()
    metrics: list[Metric] = []
    listed, last = _listed(of), ""
    for at, (source, target) in enumerate(_LAYOUTS):
        bench.progress(at, len(_LAYOUTS), f"{source} → {target} ranks")
        ranks = [bench.workers.get(f"rank{rank}") for rank in range(source)]
        path = f"{folder}/{source}"
        if path != last:
            for worker in ranks:
                worker.call("snapshot-access.make", shapes=listed, seed=bench.seed)
            for rank, worker in enumerate(ranks):
                meeting = f"{folder}/meeting-{at}"
                fields: dict[str, Any] = {"meeting": str(Path(meeting).resolve())}
                worker.start("snapshot-access.take", path=path, rank=rank, world=source, **fields)
            for worker in ranks:
                worker.result(10 * bench.patience)
            last = path
        reply = ranks[0].call(
            "snapshot-access.reshard",
            10 * bench.patience,
            path=path,
            world=target,
            repeat=bench.repeat,
        )
        name = f"{source} → {target} ranks"
        bench.check(reply, name)
        nbytes = int(reply["nbytes"])
        metric = Metric(f"restore, {name}", "snapshots", "GB/s", [])
        metric.values = rates(reply["rounds"], "restore", nbytes)
        copy = rates(reply["rounds"], "copy", nbytes)
        metric.against("streaming copy", copy, 0.5, at_most=False)
        moved = Metric(f"read from disk, {name}", "snapshots", "MB", [reply["read"] / 1e6])
        moved.against("bytes of the destination", [nbytes / 1e6], 1.01, at_most=True)
        metrics.append(metric)
        if reply["read"]:
            metrics.append(moved)
        else:
            bench.left_out[moved.name] = _UNCOUNTED
    for rank in range(1, max(source for source, _ in _LAYOUTS)):
        bench.workers.drop(f"rank{rank}")
    return metrics


def _single(bench: Bench, folder: str) -> list[Metric]:
    """Read one of many tensors."""
    count, nbytes = (100, 64 << 10) if bench.quick else (1000, 256 << 10)
    worker = bench.workers.get("rank0")
    worker.call("snapshot-access.make", shapes=[], seed=bench.seed)
    worker.call(
        "snapshot-access.make_many", 10 * bench.patience, path=folder, count=count, nbytes=nbytes
    )
    replies = []
    for turn in range(1 + bench.repeat):
        bench.progress(turn, 1 + bench.repeat, f"1 of {count} tensors")
        replies.append(
            worker.call(
                "snapshot-access.read_one", path=folder, count=count, nbytes=nbytes, turn=turn
            )
        )
        bench.check(replies[-1], f"read_object, round {turn}")
    bench.workers.drop("rank0")
    del replies[0]
    name = f"read_object, 1 of {count}"
    read = Metric(name, "snapshots", "ms", _milliseconds(replies, "seconds"), target=10.0)
    opened = Metric(f"{name}, with its manifest", "snapshots", "ms", [], target=10.0)
    opened.values = _milliseconds(replies, "opened")
    if not all(reply["read"] for reply in replies):
        bench.left_out[f"read from disk, 1 of {count}"] = _UNCOUNTED
        return [read, opened]
    moved = Metric(f"read from disk, 1 of {count}", "snapshots", "MB", [])
    moved.values = [reply["read"] / 1e6 for reply in replies]
    allowed = [reply["allowed"] / 1e6 for reply in replies]
    moved.against("its bytes, manifest, 64 KiB", allowed, 1.0, at_most=True)
    return [read, opened, moved]
