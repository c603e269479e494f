"""Scenarios: a whole set of weights from one process to another, or from a device and back, beside
copies in memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from measured.devices import GET, IN, OUT, PUT
from output.results import Metric, fastest
from scenarios.run import Bench

from torchstore_cli.bench import floors

_SMALL = {f"k{number}": (2048,) for number in range(1000)}


def rates(rounds: Sequence[Mapping[str, float]], kind: str, nbytes: int) -> list[float]:
    """GB/s, one a round."""
    return [nbytes / each[kind] / 1e9 for each in rounds]


def note_floors(
    bench: Bench, rounds: Sequence[Mapping[str, float]], nbytes: int, where: str
) -> None:
    """Keep all floors of some rounds for the report."""
    for kind in (*floors.WARM, *floors.COLD):
        if kind in rounds[0]:
            bench.floors.append(Metric(kind, where, "GB/s", rates(rounds, kind, nbytes)))


def against_copies(
    metric: Metric, rounds: Sequence[Mapping[str, float]], nbytes: int, target: float | None
) -> None:
    """Compare a rate with the strictest floor and the plain one (tensor-sized pieces)."""
    plain, strict = fastest(rounds, floors.PIECES), fastest(rounds, floors.WARM)
    for kind in dict.fromkeys((strict, plain)):
        metric.against(kind, rates(rounds, kind, nbytes), target, at_most=False)


def _first_puts(bench: Bench, prefault: int, floor: str) -> tuple[list[dict[str, float]], int]:
    """Rounds of one put into a fresh store each; the reader fetches and checks every one."""
    publisher, reader = bench.workers.get("publisher"), bench.workers.get("reader")
    floor_nbytes = bench.make(publisher, reader)
    if floor == "cold":
        publisher.call("weights.make_cold_floor", bench.patience, nbytes=floor_nbytes)
    fresh = {"capacity": bench.capacity, "prefault": prefault}
    rounds: list[dict[str, float]] = []
    total = bench.repeat + 1
    for turn in range(total):
        bench.progress(turn, total, "fresh store, put, fetch, check")
        last = turn == total - 1
        put = publisher.call(
            "weights.put", bench.patience, stamp=turn, turn=turn, floor=floor, fresh=fresh
        )
        reader.call("store.connect", address=bench.workers.opened(put))
        got = reader.call("weights.get", bench.patience, stamp=turn, turn=0, full=last, floor=False)
        bench.check(got, f"first put {turn}")
        reader.call("store.close")
        publisher.call("store.close")
        if turn:  # the first round is the warm-up
            rounds.append(put["times"])
    publisher.call("weights.drop")
    reader.call("weights.drop")
    note_floors(
        bench, rounds, floor_nbytes, f"first puts, {'cold' if not prefault else 'prefaulted'} pool"
    )
    return rounds, floor_nbytes


def cold(bench: Bench) -> list[Metric]:
    """First put into a store that was never prefaulted."""
    rounds, floor_nbytes = _first_puts(bench, 0, "cold")
    put = Metric("put, cold pool", "cold", "GB/s", rates(rounds, "put", bench.nbytes))
    first = fastest(rounds, floors.COLD)
    for kind in sorted(floors.COLD, key=lambda kind: kind != first):
        put.against(kind, rates(rounds, kind, floor_nbytes), 0.85, at_most=False)
    return [put]


def prefaulted(bench: Bench) -> list[Metric]:
    """First put into a prefaulted pool."""
    aligned = bench.nbytes + 64 * len(bench.shapes)
    rounds, floor_nbytes = _first_puts(bench, aligned, "warm")
    put = Metric(
        "first put, prefaulted pool", "prefaulted", "GB/s", rates(rounds, "put", bench.nbytes)
    )
    against_copies(put, rounds, floor_nbytes, 0.80)
    return [put]


def warm(bench: Bench, omp: int | None = None) -> list[Metric]:
    """Repeated puts of the same keys; in-place and zero-copy gets of each version."""
    publisher, reader = (bench.workers.get(role, omp=omp) for role in ("publisher", "reader"))
    floor_nbytes = bench.make(publisher, reader)
    address = bench.workers.opened(publisher.call("store.open", capacity=bench.capacity))
    reader.call("store.connect", address=address)
    puts: list[dict[str, float]] = []
    gets: list[dict[str, float]] = []
    total = bench.warm_ups + bench.repeat
    for turn in range(total):
        measured = turn >= bench.warm_ups
        bench.progress(turn, total, "put, get in place, get zero-copy" if measured else "warm-up")
        if turn == bench.warm_ups:
            publisher.call("store.settle", 90)
            reader.call("store.settle", 90)
        last = turn == total - 1
        put = publisher.call("weights.put", bench.patience, stamp=turn, turn=turn, floor="warm")
        got = reader.call("weights.get", bench.patience, stamp=turn, turn=turn, full=last)
        bench.check(got, f"version {turn}")
        if measured:
            puts.append(put["times"])
            gets.append(got["times"])
    reader.call("store.close")
    publisher.call("store.close")
    publisher.call("weights.drop")
    reader.call("weights.drop")
    name, suffix = ("warm", "") if omp is None else (f"warm-omp{omp}", f" (OMP={omp})")
    note_floors(bench, puts, floor_nbytes, f"warm puts{suffix}")
    note_floors(bench, gets, floor_nbytes, f"gets{suffix}")
    n = bench.nbytes
    put_rate = Metric(f"put, warm{suffix}", name, "GB/s", rates(puts, "put", n))
    against_copies(put_rate, puts, floor_nbytes, 0.90)
    in_place = Metric(f"get in place{suffix}", name, "GB/s", rates(gets, "in_place", n))
    against_copies(in_place, gets, floor_nbytes, 0.90)
    zero_copy = Metric(
        f"get zero-copy, all tensors{suffix}", name, "ms", [g["zero_copy"] * 1e3 for g in gets], 5.0
    )
    reading = Metric(f"… then reading all of it{suffix}", name, "GB/s", rates(gets, "reading", n))
    plain = floors.PIECES[1]
    reading.against(plain, rates(gets, plain, floor_nbytes), None, at_most=False)
    return [put_rate, in_place, zero_copy, reading]


def warm_omp1(bench: Bench) -> list[Metric]:
    """The same with OMP_NUM_THREADS=1, as under torchrun."""
    return warm(bench, omp=1)


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
