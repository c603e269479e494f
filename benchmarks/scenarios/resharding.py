"""Scenarios: a state dict from ranks of one layout to ranks of another, beside copies in memory."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from inputs.layouts import COLUMNS, ROWS, WHOLE
from output.results import Metric
from scenarios.run import Bench
from scenarios.transfers import against_copies, note_floors, rates

from torchstore_cli.bench import floors
from torchstore_cli.bench.floors import FLOOR_MAX
from torchstore_cli.bench.workers import Worker

_CHECKPOINT_ROUNDS = 3


@dataclass(frozen=True)
class Side:
    """The ranks of a state dict's source or target: by process, those whose parts it holds."""

    layout: str
    ranks: tuple[tuple[int, ...], ...]

    @property
    def world(self) -> int:
        """Number of ranks."""
        return sum(len(here) for here in self.ranks)


def ranks(layout: str, count: int, *, processes: int | None = None) -> Side:
    """``count`` ranks, as many in each process (by default: one)."""
    each = count // (processes or count)
    return Side(layout, tuple(tuple(range(i, i + each)) for i in range(0, count, each)))


@dataclass(frozen=True)
class Case:
    """Where a state dict comes from and where it goes."""

    name: str
    source: Side
    target: Side


CASES = (
    Case("2 rows → 2 columns", ranks(ROWS, 2), ranks(COLUMNS, 2, processes=1)),
    Case("2 columns → 2 rows", ranks(COLUMNS, 2), ranks(ROWS, 2, processes=1)),
    Case("2 rows → 4 columns", ranks(ROWS, 2), ranks(COLUMNS, 4, processes=1)),
    Case("4 rows → 2 columns", ranks(ROWS, 4, processes=2), ranks(COLUMNS, 2, processes=1)),
    Case("whole → 2 columns", ranks(WHOLE, 1), ranks(COLUMNS, 2, processes=1)),
    Case("2 rows → 2 columns, 2 readers", ranks(ROWS, 2), ranks(COLUMNS, 2)),
    Case("2 rows → 4 columns, 4 readers", ranks(ROWS, 2), ranks(COLUMNS, 4)),
)


class Route:
    """The processes of one case, which hold their parts and have joined one store.

    Args:
        floor: bytes that the floors copy at most; 0: no floors.
    """

    def __init__(self, bench: Bench, case: Case, floor: int = FLOOR_MAX) -> None:
        self._bench = bench
        self._name = case.name
        self._floor = floor
        self.sources = self._make("publisher", case.source, filled=True)
        self.targets = self._make("reader", case.target, filled=False)
        self.put_nbytes = self._made(self.sources)
        self.nbytes = self._made(self.targets)
        first = self.sources[0]
        address = bench.workers.opened(first.call("store.open", capacity=bench.capacity))
        others = [*self.sources[1:], *self.targets]
        call_all(bench, others, "store.connect", address=address)
        self._kinds = first.call("dicts.kinds")

    def _make(self, role: str, side: Side, *, filled: bool) -> list[Worker]:
        names = [role if not at else f"{role}-{at}" for at in range(len(side.ranks))]
        workers = [self._bench.workers.get(name) for name in names]
        for at, (worker, here) in enumerate(zip(workers, side.ranks, strict=True)):
            worker.start(
                "dicts.make",
                shapes=self._bench.shapes,
                seed=self._bench.seed,
                layout=side.layout,
                ranks=here,
                world=side.world,
                filled=filled,
                limit=0 if at else self._floor,
            )
        return workers

    def _made(self, workers: Sequence[Worker]) -> int:
        """Bytes of the parts that the workers have made."""
        made = [worker.result(self._bench.patience) for worker in workers]
        self.floor_nbytes = int(made[0]["floor_nbytes"])
        return sum(each["nbytes"] for each in made)

    def put(self, number: int, turn: int) -> dict[str, float]:
        """One round: every publisher's put of a new version, and each floor once."""
        for worker in self.sources:
            worker.call("dicts.mark", self._bench.patience, number=number)

        def put() -> float:
            return span(call_all(self._bench, self.sources, "dicts.put", number=number))

        return self._beside_floors(self.sources[0], "put", put, turn)

    def get(self, number: int, turn: int, *, full: bool) -> dict[str, float]:
        """One round: every reader's get, and each floor once; and how many bytes were moved."""
        moved = 0

        def get() -> float:
            nonlocal moved
            got = call_all(self._bench, self.targets, "dicts.get", number=number)
            moved = sum(each["moved"] for each in got)
            self.check(number, full=full)
            return span(got)

        times = self._beside_floors(self.targets[0], "get", get, turn)
        if moved != self.nbytes:
            where = f"{self._name}, version {number}"
            self._bench.wrong.append(f"{where}: {moved} bytes moved for {self.nbytes}")
        return {**times, "moved": moved}

    def check(self, number: int, *, full: bool) -> None:
        """Compare what the readers have with the set."""
        for wrong in call_all(self._bench, self.targets, "dicts.wrong", number=number, full=full):
            self._bench.check({"wrong": wrong}, f"{self._name}, version {number}")

    def _beside_floors(
        self, worker: Worker, name: str, what: Callable[[], float], turn: int
    ) -> dict[str, float]:
        def floor(kind: str) -> float:
            seconds: float = worker.call("dicts.floor", self._bench.patience, kind=kind)
            return seconds

        kinds = {kind: partial(floor, kind) for kind in self._kinds}
        return floors.interleave({**kinds, name: what}, turn)

    def settle(self) -> None:
        """Wait until no background warming goes on."""
        call_all(self._bench, [*self.sources, *self.targets], "store.settle")

    def close(self) -> None:
        """Leave and end the store, forget the parts."""
        owner, *others = self.sources
        call_all(self._bench, [*others, *self.targets], "store.close")
        owner.call("store.close")
        call_all(self._bench, [*self.sources, *self.targets], "dicts.drop")


def call_all(bench: Bench, workers: Sequence[Worker], op: str, **fields: Any) -> list[Any]:
    """Send one command to all workers, which obey it at the same time; their results."""
    for worker in workers:
        worker.start(op, **fields)
    return [worker.result(bench.patience) for worker in workers]


def span(replies: Sequence[Mapping[str, float]]) -> float:
    """Seconds from the first start to the last end. The clock is the same in all processes."""
    return max(r["end"] for r in replies) - min(r["start"] for r in replies)


Rounds = list[dict[str, float]]


def _rounds(bench: Bench, case: Case, done: int, cases: int) -> tuple[Route, Rounds, Rounds]:
    """The measured rounds of a case, puts and gets, after the unmeasured ones."""
    route = Route(bench, case)
    puts: Rounds = []
    gets: Rounds = []
    total = bench.warm_ups + bench.repeat
    for turn in range(total):
        bench.progress(done * total + turn, cases * total, case.name)
        if turn == bench.warm_ups:
            route.settle()
        put = route.put(turn + 1, turn)
        got = route.get(turn + 1, turn, full=turn == total - 1)
        if turn >= bench.warm_ups:
            puts.append(put)
            gets.append(got)
    route.close()
    return route, puts, gets


def state_dict(bench: Bench) -> list[Metric]:
    """put_state_dict and in-place get_state_dict of whole tensors, one publisher, one reader."""
    case = Case("put, get in place", ranks(WHOLE, 1), ranks(WHOLE, 1))
    route, puts, gets = _rounds(bench, case, 0, 1)
    note_floors(bench, puts, route.floor_nbytes, "state dict puts")
    note_floors(bench, gets, route.floor_nbytes, "state dict gets")
    put = Metric("put_state_dict", "state-dict", "GB/s", rates(puts, "put", route.put_nbytes))
    against_copies(put, puts, route.floor_nbytes, 0.90)
    get = Metric("get_state_dict in place", "state-dict", "GB/s", rates(gets, "get", route.nbytes))
    against_copies(get, gets, route.floor_nbytes, 0.90)
    return [put, get]


def layouts(bench: Bench) -> list[Metric]:
    """State dicts into other layouts: the readers' ranks in one process, or in one each."""
    metrics: list[Metric] = []
    cases = [case for case in CASES if len(case.target.ranks) <= 2 or not bench.quick]
    for at, case in enumerate(cases):
        route, puts, gets = _rounds(bench, case, at, len(cases))
        note_floors(bench, gets, route.floor_nbytes, f"gets, {case.name}")
        put = Metric(f"put, {case.name}", "layouts", "GB/s", rates(puts, "put", route.put_nbytes))
        against_copies(put, puts, route.floor_nbytes, None)
        get = Metric(f"get, {case.name}", "layouts", "GB/s", rates(gets, "get", route.nbytes))
        against_copies(get, gets, route.floor_nbytes, 0.60)
        moved = Metric(
            f"bytes moved, {case.name}", "layouts", "MB", [g["moved"] / 1e6 for g in gets]
        )
        exact = [route.nbytes / 1e6] * len(gets)
        moved.against("bytes of the destination", exact, 1.0, at_most=True)
        metrics += [put, get, moved]
    return metrics


def checkpoint(bench: Bench) -> list[Metric]:
    """2 rows → 2 columns, beside torch.distributed.checkpoint doing it through local files."""
    source, target = ranks(ROWS, 2), ranks(COLUMNS, 2)
    route = Route(bench, Case("2 rows → 2 columns", source, target), floor=0)
    times: Rounds = []
    total = 1 + min(bench.repeat, _CHECKPOINT_ROUNDS)
    with tempfile.TemporaryDirectory(prefix="torchstore-bench-") as folder:
        _join(bench, route.sources, source.layout, folder)
        _join(bench, route.targets, target.layout, folder)
        for turn in range(total):
            bench.progress(turn, total, "store, then files")
            put = route.put(2 * turn + 1, 0)
            got = route.get(2 * turn + 1, 0, full=turn == total - 1)
            number, files = 2 * turn + 2, f"{folder}/{turn}"
            call_all(bench, route.sources, "dicts.mark", number=number)
            saved = call_all(bench, route.sources, "checkpoints.save", folder=files)
            loaded = call_all(bench, route.targets, "checkpoints.load", folder=files)
            route.check(number, full=turn == total - 1)
            shutil.rmtree(files)
            if turn:  # the first round is the warm-up
                times.append({**put, **got, "save": span(saved), "load": span(loaded)})
        call_all(bench, (*route.sources, *route.targets), "checkpoints.leave")
    route.close()
    metrics: list[Metric] = []
    for name, other, nbytes in (("put", "save", route.put_nbytes), ("get", "load", route.nbytes)):
        values = rates(times, name, nbytes)
        metric = Metric(f"{name}, 2 ranks: rows → columns", "checkpoint", "GB/s", values)
        metric.against(f"dcp.{other}", rates(times, other, nbytes), None, at_most=False)
        metrics.append(metric)
    return metrics


def _join(bench: Bench, workers: Sequence[Worker], layout: str, folder: str) -> None:
    """Make them the ranks of one gloo group."""
    for rank, worker in enumerate(workers):
        worker.start(
            "checkpoints.join",
            meeting=f"{folder}/{layout}",
            rank=rank,
            world=len(workers),
            layout=layout,
        )
    for worker in workers:
        worker.result(bench.patience)
