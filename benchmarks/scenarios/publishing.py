"""Scenarios: what publishing a state dict costs beyond its bytes: entries, parts, memory."""

from __future__ import annotations

from typing import Any

from output.results import Metric
from scenarios.run import MIB, Bench

from torchstore_cli.bench import workload
from torchstore_cli.bench.workers import Worker

ENTRY_NBYTES = 4096
#: A partial publish gives every hundredth entry.
EVERY = 100
_MESSAGES = 8.0  # control messages of a put or get, replies included
_CLONES = 2.0  # the time of a put or get, as a multiple of cloning the same tensors one by one


def _pair(
    bench: Bench, shapes: workload.Shapes, finite: bool = False, **store: Any
) -> tuple[Worker, Worker, int]:
    """Publisher and reader of a set, at a new store; its server."""
    publisher, reader = bench.workers.get("publisher"), bench.workers.get("reader")
    made = {"shapes": shapes, "seed": bench.seed, "finite": finite}
    publisher.start("dicts.make", filled=True, **made)
    reader.start("dicts.make", filled=False, **made)
    publisher.result(bench.patience)
    reader.result(bench.patience)
    opened = publisher.call("store.open", **store)
    reader.call("store.connect", address=bench.workers.opened(opened))
    return publisher, reader, int(opened["server_pid"])


def _leave(publisher: Worker, reader: Worker) -> None:
    for worker in (reader, publisher):
        worker.call("store.close")
        worker.call("dicts.drop")


def entries(bench: Bench) -> list[Metric]:
    """A state dict of 18,000 tensors of 4 KB: put, in-place get, control messages of each."""
    of = workload.experts(bench.entries, ENTRY_NBYTES)
    publisher, reader, _ = _pair(bench, of, capacity=512 * MIB)
    puts: list[dict[str, float]] = []
    gets: list[dict[str, float]] = []
    total = bench.warm_ups + bench.repeat
    for turn in range(total):
        bench.progress(turn, total, f"{bench.entries} × {ENTRY_NBYTES >> 10} KB")
        put = publisher.call("dicts.put_counted", number=turn + 1)
        got = reader.call("dicts.get_counted", number=turn + 1, full=turn == total - 1)
        bench.check(got, f"entries, version {turn + 1}")
        if turn >= bench.warm_ups:
            puts.append(put)
            gets.append(got)
    _leave(publisher, reader)
    metrics: list[Metric] = []
    for name, rounds, each_us in (("put", puts, 600 / 18), ("get in place", gets, 300 / 18)):
        title = f"{name} {bench.entries} × {ENTRY_NBYTES >> 10} KB"
        times = [each["seconds"] * 1e3 for each in rounds]
        messages = [each["messages"] for each in rounds]
        limit = round(each_us * bench.entries / 1e3, 2)
        metric = Metric(title, "entries", "ms", times, limit)
        clones = [each["clone"] * 1e3 for each in rounds]
        metric.against("cloning each", clones, _CLONES, at_most=True)
        metrics.append(metric)
        metrics.append(Metric(f"… messages of a {name}", "entries", "", messages, _MESSAGES))
    return metrics


def partial(bench: Bench) -> list[Metric]:
    """A publish of 1 % of the entries beside one of all, of weights and of small entries."""
    metrics: list[Metric] = []
    small = workload.experts(bench.entries, ENTRY_NBYTES)
    for title, shapes in (("of the weights", bench.shapes), ("of small ones", small)):
        capacity = 4 * workload.nbytes(shapes) + 256 * MIB
        publisher, reader, _ = _pair(bench, shapes, capacity=capacity)
        rounds: list[dict[str, float]] = []
        total = bench.warm_ups + bench.repeat
        for turn in range(total):
            bench.progress(turn, total, f"all entries, then 1 % {title}")
            number = 2 * turn + 1
            put = publisher.call("dicts.put_some", bench.patience, number=number, every=EVERY)
            full = turn == total - 1
            got = reader.call(
                "dicts.get_some", bench.patience, number=number, every=EVERY, full=full
            )
            bench.check(got, f"partial publish {title}, version {number}")
            if turn >= bench.warm_ups:
                rounds.append(put)
        _leave(publisher, reader)
        some = len(range(EVERY // 2, len(shapes), EVERY))
        name = f"partial publish, {some} of {len(shapes)} entries"
        metric = Metric(name, "partial", "ms", [r["partial"] * 1e3 for r in rounds])
        metric.against("whole publish", [r["whole"] * 1e3 for r in rounds], 0.03, at_most=True)
        metrics.append(metric)
    return metrics


def cast(bench: Bench) -> list[Metric]:
    """Publish float32 weights as bfloat16 into a fresh store: peak memory of all processes."""
    rounds: list[dict[str, float]] = []
    # No room for a second version: what the server warms ahead would count as memory here.
    capacity = bench.nbytes + 64 * len(bench.shapes) + MIB
    for turn in range(min(bench.repeat, 3)):
        bench.progress(turn, min(bench.repeat, 3), "fresh store, cast publish, fetch, check")
        publisher, reader, server = _pair(
            bench, bench.shapes, finite=True, capacity=capacity, prefault=0
        )
        publisher.call("dicts.mark", bench.patience, number=1)
        publisher.call("dicts.widen", bench.patience)
        rounds.append(publisher.call("dicts.put_cast", bench.patience, server_pid=server))
        got = reader.call("dicts.get_counted", bench.patience, number=1, full=True)
        bench.check(got, f"cast publish {turn}")
        _leave(publisher, reader)
    rates = [bench.nbytes / each["seconds"] / 1e9 for each in rounds]
    memory = Metric("peak memory, cast publish", "cast", "MB", [r["grown"] / 1e6 for r in rounds])
    memory.against("what the store holds", [r["held"] / 1e6 for r in rounds], 1.05, at_most=True)
    return [memory, Metric("… float32 → bfloat16, first put", "cast", "GB/s", rates)]
