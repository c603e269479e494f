"""Scenarios inside a Monarch job: what the store costs there, beside what Monarch itself costs."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field, replace
from typing import Any, cast

from output.results import Metric
from scenarios import resharding
from scenarios.overheads import small_metrics
from scenarios.run import MIB, Bench

from torchstore_cli.bench import echo
from torchstore_cli.bench.workers import Worker, Workers

_BULK = 64 * MIB
#: Of a batch: small enough to ride in the message, or not.
_SIZES = {"16 KB": 16 << 10, "4 MB": 4 << 20}
_KEYS = 8
_OPERATIONS = ("put_batch", "get_batch", "put_state_dict", "get_state_dict")


@dataclass
class Actor:
    """An actor of a job, commanded as a :class:`Worker` is."""

    root: Worker
    at: int
    name: str

    def call(self, op: str, timeout: float = 60.0, **fields: Any) -> Any:
        """See :meth:`Worker.call`."""
        self.start(op, **fields)
        return self.result(timeout)

    def start(self, op: str, **fields: Any) -> None:
        """See :meth:`Worker.start`."""
        self.root.call("job.start", actor=self.at, what=op, fields=fields)

    def result(self, timeout: float = 60.0) -> Any:
        """See :meth:`Worker.result`."""
        return self.root.call("job.result", timeout, actor=self.at)


@dataclass
class Actors:
    """The actors of a job, as a :class:`Workers` for the scenarios without Monarch."""

    root: Worker
    servers: list[int] = field(default_factory=list)
    _roles: dict[str, Actor] = field(default_factory=dict)

    def get(self, role: str, *, loop: str = "", omp: int | None = None) -> Actor:
        """The actor of that role."""
        actor = Actor(self.root, len(self._roles), role)
        return self._roles.setdefault(role, actor)

    def opened(self, reply: dict[str, Any]) -> str:
        """The store's address."""
        return str(reply["address"])


def in_actors(bench: Bench) -> list[Metric]:
    """1 KB values and a state dict inside Monarch actors of one host, beside the usual floors."""
    root = bench.workers.get("job")
    root.call("job.begin", actors=2)
    for pid in root.call("job.pids"):
        bench.workers.started[pid] = "actor"
    metrics = [*_small(bench, root), *_state_dict(bench, root)]
    bench.workers.drop("job")
    return metrics


def _small(bench: Bench, root: Worker) -> list[Metric]:
    opened = root.call("job.open", capacity=256 * MIB)
    actor = Actor(root, 1, "actor")
    kinds = actor.call("small.start_echo")
    count, rounds = (100, bench.repeat) if bench.repeat < 5 else (200, 2 * bench.repeat)
    placements = {"two CPUs": True, "one CPU": False}
    metrics: list[Metric] = []
    for step, (placement, apart) in enumerate(placements.items()):
        samples: list[dict[str, list[float]]] = []
        for turn in range(rounds + 1):
            done, total = step * (rounds + 1) + turn, 2 * (rounds + 1)
            bench.progress(done, total, f"1 KB put and get in an actor, {placement}")
            reply = actor.call(
                "small.placed",
                count=count,
                nbytes=1024,
                turn=turn,
                server_pid=opened["server_pid"],
                apart=apart,
            )
            bench.check(reply, f"1 KB in an actor, {placement}")
            if turn:  # the first round is the warm-up
                samples.append(reply["samples"])
        for name in ("put", "get"):
            title = f"{name} 1 KB in an actor, {placement}"
            target = 2.5 if apart else None
            metrics.extend(small_metrics("actors", title, name, kinds, samples, target))
    actor.call("small.end_echo")
    actor.call("store.close")
    root.call("job.close")
    return metrics


def _state_dict(bench: Bench, root: Worker) -> list[Metric]:
    """The scenario ``state-dict``, with actors as its processes; and as it is, for comparison."""
    outside = resharding.state_dict(bench)
    before = len(bench.floors)
    inside = resharding.state_dict(replace(bench, workers=cast(Workers, Actors(root))))
    for floor in bench.floors[before:]:
        floor.scenario += ", in actors"
    for metric, same in zip(inside, outside, strict=True):
        metric.name += ", in actors"
        metric.scenario = "actors"
        metric.against("the same without Monarch", same.values, None, at_most=False)
    return inside


def across_hosts(bench: Bench) -> list[Metric]:
    """Batches and 64 MB between two emulated hosts, beside bare calls of Monarch endpoints."""
    root = bench.workers.get("job-hosts")
    root.call("job.begin", actors=1, hosts=2)
    for pid in root.call("job.pids"):
        bench.workers.started[pid] = "actor"
    on_first, on_second = (Actor(root, at, f"host {at}") for at in range(2))
    metrics = _calls(bench, root, on_second)
    root.call("job.introduce", one=1, other=2)  # the third is where the controller is
    metrics += _latencies(bench, root, on_second)
    root.call("job.introduce", one=1, other=0)
    metrics += _bulk(bench, root, on_first, on_second)
    bench.workers.drop("job-hosts")
    return metrics


def _calls(bench: Bench, root: Worker, actor: Actor) -> list[Metric]:
    """Calls of the controller that each operation makes; agents are in the actors' processes."""
    actor.call("other_hosts.count_calls")
    root.call("job.open", mesh="procs", num_storage_volumes=2, strategy="host", capacity=256 * MIB)
    metrics: list[Metric] = []
    for step, (size, nbytes) in enumerate(_SIZES.items()):
        bench.progress(step, len(_SIZES), f"calls of {_KEYS} tensors, {size}")
        fields = {"nbytes": nbytes, "keys": _KEYS, "turn": 0}
        actor.call("other_hosts.operations", count=1, **fields)  # connects
        reply = actor.call("other_hosts.operations", count=bench.repeat, **fields)
        bench.check(reply, f"calls, {size}")
        for name in _OPERATIONS:
            title = f"calls, {name}, {size}"
            later = reply["after"][name]
            more = f"; {max(later)} more, not waited for" if max(later) else ""
            note = f"to the controller; {_KEYS} tensors{more}"
            counts = [float(n) for n in reply["calls"][name]]
            metrics.append(Metric(title, "hosts", "", counts, 1.0, note=note))
    actor.call("store.close")
    root.call("job.close")
    return metrics


def _latencies(bench: Bench, root: Worker, actor: Actor) -> list[Metric]:
    """How long each operation takes, beside a bare call to where the controller is."""
    root.call("job.open", mesh="hosts", num_storage_volumes=2, strategy="host", capacity=256 * MIB)
    rounds: list[dict[str, float]] = []
    sizes = list(_SIZES.items())
    total = bench.warm_ups + 3 * bench.repeat
    for turn in range(total):
        bench.progress(turn, total, "batches from another host, bare calls")
        times: dict[str, float] = {}
        times["bare"] = statistics.median(
            actor.call("other_hosts.bare", count=10, nbytes=echo.FRAME)
        )
        for size, nbytes in sizes:
            reply = actor.call(
                "other_hosts.operations", count=5, nbytes=nbytes, keys=_KEYS, turn=turn
            )
            bench.check(reply, f"latencies, {size}")
            for name in _OPERATIONS:
                times[f"{name}, {size}"] = statistics.median(reply["seconds"][name])
        if turn >= bench.warm_ups:
            rounds.append(times)
    actor.call("store.close")
    root.call("job.close")
    metrics: list[Metric] = []
    bare = [r["bare"] * 1e6 for r in rounds]
    for title in rounds[0]:
        if title != "bare":
            metric = Metric(f"{title}, other host", "hosts", "µs", [r[title] * 1e6 for r in rounds])
            metric.against("bare endpoint call", bare, None, at_most=True)
            metrics.append(metric)
    return metrics


def _bulk(bench: Bench, root: Worker, first: Actor, second: Actor) -> list[Metric]:
    """64 MB to and from a volume of another host, by every transport that reaches it, beside calls
    that have them as an argument.
    """
    store = {"mesh": "hosts", "num_storage_volumes": 2, "capacity": 512 * MIB}
    root.call("job.open", **store)
    names = second.call(
        "other_hosts.transports", nbytes=_BULK
    )  # the first volume is on the first host
    metrics: list[Metric] = []
    for name in names:
        for worker in (first, second):
            worker.call("store.close")
        root.call("job.close")
        root.call("job.open", transport=name, **store)
        metrics += _by(bench, second, name)
    for worker in (first, second):
        worker.call("store.close")
    root.call("job.close")
    return metrics


def _by(bench: Bench, actor: Actor, transport: str) -> list[Metric]:
    rounds: list[dict[str, float]] = []
    total = 1 + bench.repeat
    for turn in range(total):
        bench.progress(turn, total, f"{_BULK >> 20} MB by {transport}, bare calls")
        bare = actor.call("other_hosts.bare_bytes", nbytes=_BULK, turn=turn)
        reply = actor.call("other_hosts.rates", nbytes=_BULK, turn=turn)
        bench.check(reply, f"64 MB by {transport}")
        if turn:  # the first round is the warm-up
            rounds.append({**bare, **reply["times"]})
    metrics: list[Metric] = []
    for name in ("put", "get"):
        title = f"{name} {_BULK >> 20} MB, {transport}, other host"
        metric = Metric(title, "hosts", "GB/s", [_BULK / r[name] / 1e9 for r in rounds])
        for kind in ("bytes", "tensor"):
            values = [_BULK / r[f"{name} {kind}"] / 1e9 for r in rounds]
            metric.against(f"bare call, {kind}", values, None, at_most=False)
        metrics.append(metric)
    return metrics


def start(bench: Bench) -> list[Metric]:
    """initialize and shutdown of a store on a running job, beside starting two bare processes."""
    first: list[float] = []
    again: list[float] = []
    ends: list[float] = []
    bare: list[float] = []
    for turn in range(bench.repeat):
        bench.progress(turn, bench.repeat, "a new job, initialize twice")
        root = bench.workers.get("job-start")
        root.call("job.begin", actors=1)
        for times in (first, again):
            times.append(root.call("job.open")["seconds"])
            ends.append(root.call("job.close"))
        bare.append(root.call("job.spawn"))
        bench.workers.drop("job-start")
    metrics: list[Metric] = []
    for title, times in (("first", first), ("again", again)):
        metric = Metric(
            f"initialize on a running job, {title}",
            "job-start",
            "ms",
            [t * 1e3 for t in times],
            1000.0,
        )
        metric.against("two bare processes", [t * 1e3 for t in bare], None, at_most=True)
        metrics.append(metric)
    metrics.append(Metric("shutdown of a store", "job-start", "ms", [t * 1e3 for t in ends]))
    return metrics
