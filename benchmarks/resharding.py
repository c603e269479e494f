"""Scenarios: a state dict from ranks of one layout to ranks of another, beside copies in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import floors
from crew import Peer
from layouts import COLUMNS, ROWS, WHOLE
from plan import FLOOR_MAX, WARM_UPS, Bench
from results import Metric
from transfers import against_copies, note_floors, rates


@dataclass(frozen=True)
class Side:
    """Who holds what: each process the parts of some ranks."""

    layout: str
    ranks: tuple[tuple[int, ...], ...]

    @property
    def world(self) -> int:
        """Number of ranks."""
        return sum(len(here) for here in self.ranks)


def ranks(layout: str, count: int, *, processes: int | None = None) -> Side:
    """``count`` ranks, of which each process has the same number."""
    each = count // (processes or count)
    return Side(layout, tuple(tuple(range(i, i + each)) for i in range(0, count, each)))


@dataclass(frozen=True)
class Case:
    """One way of a state dict."""

    name: str
    source: Side
    target: Side


CASES = (
    Case("2 rows → 2 columns", ranks(ROWS, 2), ranks(COLUMNS, 2, processes=1)),
    Case("2 columns → 2 rows", ranks(COLUMNS, 2), ranks(ROWS, 2, processes=1)),
    Case("2 rows → 4 columns", ranks(ROWS, 2), ranks(COLUMNS, 4, processes=1)),
    Case("4 rows → 2 columns", ranks(ROWS, 4), ranks(COLUMNS, 2, processes=1)),
    Case("whole → 2 columns", ranks(WHOLE, 1), ranks(COLUMNS, 2, processes=1)),
    Case("2 rows → 2 columns, 2 readers", ranks(ROWS, 2), ranks(COLUMNS, 2)),
    Case("2 rows → 4 columns, 4 readers", ranks(ROWS, 2), ranks(COLUMNS, 4)),
)


class Way:
    """The processes of one case, with their parts, at one store."""

    def __init__(self, bench: Bench, case: Case) -> None:
        self._bench = bench
        self._sources = self._make("publisher", case.source, filled=True)
        self._targets = self._make("reader", case.target, filled=False)
        first = self._sources[0]
        self.nbytes = sum(made["nbytes"] for made in self._made(self._targets))
        self.put_nbytes = sum(made["nbytes"] for made in self._made(self._sources))
        address = bench.crew.opened(first.call("store.open", capacity=bench.capacity))
        for peer in (*self._sources[1:], *self._targets):
            peer.call("store.connect", address=address)
        self._kinds = first.call("dicts.kinds")

    def _make(self, role: str, side: Side, *, filled: bool) -> list[Peer]:
        peers: list[Peer] = []
        for at, here in enumerate(side.ranks):
            peer = self._bench.crew.get(role if not at else f"{role}-{at}")
            peers.append(peer)
            peer.start(
                "dicts.make",
                shapes=self._bench.shapes,
                seed=self._bench.seed,
                layout=side.layout,
                ranks=here,
                world=side.world,
                filled=filled,
                limit=0 if at else FLOOR_MAX,
            )
        return peers

    def _made(self, peers: Sequence[Peer]) -> list[dict[str, int]]:
        made = [peer.result(self._bench.patience) for peer in peers]
        self.floor_nbytes = int(made[0]["floor_nbytes"])
        return made

    def put(self, number: int, turn: int) -> dict[str, float]:
        """One round: every publisher's put of a new version, and each floor once."""
        patience = self._bench.patience
        for peer in self._sources:
            peer.call("dicts.mark", patience, number=number)

        def put() -> float:
            for at, peer in enumerate(self._sources):
                peer.start("dicts.put", participants=len(self._sources), participant=at)
            return _span([peer.result(patience) for peer in self._sources])

        return self._beside_floors(self._sources[0], "put", put, turn)

    def get(self, number: int, turn: int, *, full: bool) -> tuple[dict[str, float], list[Any]]:
        """One round: every reader's get, and each floor once; and what the readers say."""
        replies: list[Any] = []

        def get() -> float:
            for peer in self._targets:
                peer.start("dicts.get", number=number, full=full)
            replies.extend(peer.result(2 * self._bench.patience) for peer in self._targets)
            return _span(replies)

        return self._beside_floors(self._targets[0], "get", get, turn), replies

    def _beside_floors(self, peer: Peer, name: str, what: Any, turn: int) -> dict[str, float]:
        def floor(kind: str) -> float:
            seconds: float = peer.call("dicts.floor", self._bench.patience, kind=kind)
            return seconds

        kinds = {kind: lambda kind=kind: floor(kind) for kind in self._kinds}
        return floors.interleave({**kinds, name: what}, turn)

    def settle(self) -> None:
        """Wait until no background warming goes on."""
        self._sources[0].call("store.settle", 90)

    def close(self) -> None:
        """Leave and end the store, forget the parts."""
        for peer in (*self._targets, *reversed(self._sources)):
            peer.call("store.close")
            peer.call("dicts.drop")


def _span(replies: Sequence[Mapping[str, float]]) -> float:
    """Seconds from the first start to the last end. The clock is the same in all processes."""
    return max(r["end"] for r in replies) - min(r["start"] for r in replies)


def rounds(bench: Bench, case: Case) -> tuple[Way, list[dict[str, float]], list[dict[str, float]]]:
    """The measured rounds of a case, puts and gets, after the unmeasured ones."""
    way = Way(bench, case)
    puts: list[dict[str, float]] = []
    gets: list[dict[str, float]] = []
    total = WARM_UPS + bench.repeat
    for turn in range(total):
        if turn == WARM_UPS:
            way.settle()
        number = turn + 1
        put = way.put(number, turn)
        got, replies = way.get(number, turn, full=turn == total - 1)
        moved = sum(reply["moved"] for reply in replies)
        if moved != way.nbytes:
            bench.wrong.append(f"{case.name}: {moved} bytes moved for {way.nbytes}")
        for reply in replies:
            bench.check(reply, f"{case.name}, version {number}")
        if turn >= WARM_UPS:
            puts.append(put)
            gets.append({**got, "moved": moved})
    way.close()
    return way, puts, gets


def state_dict(bench: Bench) -> list[Metric]:
    """put_state_dict and in-place get_state_dict of whole tensors, one publisher, one reader."""
    case = Case("whole", ranks(WHOLE, 1), ranks(WHOLE, 1))
    way, puts, gets = rounds(bench, case)
    note_floors(bench, puts, way.floor_nbytes, "state dict puts")
    note_floors(bench, gets, way.floor_nbytes, "state dict gets")
    put = Metric("put_state_dict", "state-dict", "GB/s", rates(puts, "put", way.put_nbytes))
    against_copies(put, puts, way.floor_nbytes, 0.90)
    get = Metric("get_state_dict in place", "state-dict", "GB/s", rates(gets, "get", way.nbytes))
    against_copies(get, gets, way.floor_nbytes, 0.90)
    return [put, get]


def layouts(bench: Bench) -> list[Metric]:
    """State dicts into other layouts, of one process and of several."""
    metrics: list[Metric] = []
    for at, case in enumerate(CASES):
        bench.progress(at, len(CASES), case.name)
        way, puts, gets = rounds(bench, case)
        note_floors(bench, gets, way.floor_nbytes, f"gets, {case.name}")
        put = Metric(f"put, {case.name}", "layouts", "GB/s", rates(puts, "put", way.put_nbytes))
        against_copies(put, puts, way.floor_nbytes, None)
        get = Metric(f"get, {case.name}", "layouts", "GB/s", rates(gets, "get", way.nbytes))
        against_copies(get, gets, way.floor_nbytes, 0.60)
        moved = Metric("… bytes moved", "layouts", "MB", [g["moved"] / 1e6 for g in gets])
        exact = [way.nbytes / 1e6] * len(gets)
        moved.against("bytes of the destination", exact, 1.0, at_most=True)
        metrics += [put, get, moved]
    return metrics
