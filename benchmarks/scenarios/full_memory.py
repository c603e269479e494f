"""Scenario: more values than memory, through a store that spills, beside the raw disk."""

from __future__ import annotations

from typing import Any

from output.results import Metric
from scenarios.run import MIB, Bench

from torchstore_cli.bench.measuring import percentile

_COUNT = 32
_IDLE_S = 2.0


def spilling(bench: Bench) -> list[Metric]:
    """2 GB through a store of 512 MB, there and back; small gets of another client meanwhile."""
    total = 256 * MIB if bench.quick else 2048 * MIB
    publisher, reader = bench.workers.get("publisher"), bench.workers.get("reader")
    arguments = {"count": _COUNT, "nbytes": total // _COUNT, "seed": bench.seed}
    opened = publisher.call("spilling.open", bench.patience, capacity=total // 4, **arguments)
    bench.workers.opened(opened)
    publisher.call("spilling.open_with_room", bench.patience)
    reader.call("store.connect", address=opened["address"])
    rounds: list[dict[str, Any]] = []
    idle: list[float] = []
    room: list[float] = []
    disk: list[float] = []
    busy: list[float] = []
    for turn in range(1 + bench.repeat):
        bench.progress(turn, 1 + bench.repeat, "more than memory")
        quiet = reader.call("spilling.small", seconds=_IDLE_S)
        publisher.start("spilling.round_with_room", seconds=_IDLE_S)
        beside: list[float] = reader.call("spilling.small", seconds=_IDLE_S)
        bench.check(publisher.result(10 * bench.patience), f"with room, round {turn}")
        publisher.start("spilling.raw_round", seconds=_IDLE_S)
        dd: list[float] = reader.call("spilling.small", seconds=_IDLE_S)
        bench.check(publisher.result(10 * bench.patience), f"raw disk, round {turn}")
        publisher.start("spilling.round")
        others: list[float] = reader.call("spilling.small", seconds=_IDLE_S)
        found = publisher.result(10 * bench.patience)
        bench.check(found, f"spilling, round {turn}")
        if turn:  # the first round is the warm-up
            rounds.append(found)
            idle.append(percentile(quiet, 0.99) * 1e6)
            room.append(percentile(beside, 0.99) * 1e6)
            disk.append(percentile(dd, 0.99) * 1e6)
            busy.append(percentile(others, 0.99) * 1e6)
    reader.call("store.close")
    publisher.call("spilling.close")
    publisher.call("store.close")
    size = f"{total // MIB} MiB through {total // 4 // MIB} MiB"
    both, raw, puts, gets = [], [], [], []
    for each in rounds:
        moved = each["written"] + each["read"]
        both.append(moved / (each["put"] + each["get"]) / 1e9)
        disk_s = each["written"] / each["raw write"] + each["read"] / each["raw read"]
        raw.append(moved / disk_s / 1e9)
        puts.append(total / each["put"] / 1e9)
        gets.append(each["read"] / each["get"] / 1e9)
    metric = Metric(f"spill and bring back, {size}", "spilling", "GB/s", both)
    metric.against("raw disk, the same bytes", raw, 0.8, at_most=False)
    back = Metric(f"bring back, {size}", "spilling", "GB/s", gets)
    back.against("raw disk", [each["raw read"] / 1e9 for each in rounds], 0.8, at_most=False)
    out = Metric(f"put, {size}", "spilling", "GB/s", puts)
    out.against("raw disk", [each["raw write"] / 1e9 for each in rounds], None, at_most=False)
    small = Metric("get 1 KB meanwhile, p99", "spilling", "µs", busy)
    small.against("while nothing else happens", idle, 3.0, at_most=True)
    small.against("while the raw disk has the same bytes", disk, None, at_most=True)
    small.against("while the values go through another store, with room", room, None, at_most=True)
    return [metric, out, back, small]
