"""Histories of real processes: who has asked what, when, and what it was answered.

Nobody knows in which order the server has done what it was asked; but versions are numbered. So an
order is looked for in which every call lies between its beginning and its end, every version comes
after the one before, and a read comes between the version that it sees and the next one. If there
is none, or if the model of the store cannot explain it, the store has broken its promise.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from tests.simulation.acting.operations import mark
from tests.simulation.plans import ROOMY, Operation, Plan
from tests.simulation.promises.checking import check
from tests.simulation.promises.histories import Call, History
from tests.simulation.promises.violations import Violation

__all__ = ["Record", "Seen", "explain"]


@dataclass(frozen=True)
class Seen:
    """What a read has found of a key.

    Args:
        number: the put that it is of, by its number; 0: there was no such key.
        version: as the reader was told; 0: it was told none.
    """

    number: int
    version: int = 0


@dataclass(frozen=True)
class Record:
    """One call of a real process.

    Args:
        number: of the call; no other one has it.
        kind: put or get, of one or several keys together.
        start, end: by a clock that all processes share; ``end`` is None if the process was killed
            before it was answered.
        versions: that a put has made, one for each key.
        seen: by a get, one for each key; only a get of one key may find nothing.
    """

    client: int
    number: int
    kind: str
    keys: tuple[str, ...]
    start: float
    end: float | None = None
    versions: tuple[int, ...] = ()
    seen: tuple[Seen, ...] = ()


def explain(records: Sequence[Record]) -> int:
    """Explain a history; returns of how many calls it is known what became of them.

    Raises:
        Violation: that is not possible.
    """
    versions = _versions(records)
    touched: list[tuple[Record, dict[str, int]]] = []
    for record in records:
        if record.kind == "put":
            there = {
                k: versions[record.number, k] for k in record.keys if (record.number, k) in versions
            }
        else:
            pairs = zip(record.keys, record.seen, strict=False)
            there = {k: _version(versions, k, seen) for k, seen in pairs}
            if -1 in there.values():
                continue  # it has seen what nobody can place
        if there:
            touched.append((record, there))
    order = _order(touched)
    history = History()
    entries = {(r.number, key): at for r, there in order for at, key in enumerate(there)}
    for at, (record, there) in enumerate(order, 1):
        history.calls.append(_call(record, there, at, entries))
    keys = tuple(sorted({key for _, there in touched for key in there}))
    check(history, Plan((ROOMY,), (), keys=keys))
    return len(order)


def _versions(records: Sequence[Record]) -> dict[tuple[int, str], int]:
    """The versions that puts have made, also those of processes that were killed then: if somebody
    has seen what they are.
    """
    found: dict[tuple[int, str], int] = {}
    for record in records:
        if record.kind == "put" and record.end is not None:
            found.update(
                {(record.number, k): v for k, v in zip(record.keys, record.versions, strict=True)}
            )
    for record in records:
        for key, seen in zip(record.keys, record.seen, strict=False):
            if seen.number and seen.version:
                known = found.setdefault((seen.number, key), seen.version)
                if known != seen.version:
                    what = f"call {seen.number} has made version {known} of {key!r}"
                    raise Violation("history", f"{what}, and is read as version {seen.version}")
    return found


def _version(versions: dict[tuple[int, str], int], key: str, seen: Seen) -> int:
    return versions.get((seen.number, key), -1) if seen.number else 0


def _order(touched: Sequence[tuple[Record, dict[str, int]]]) -> list[tuple[Record, dict[str, int]]]:
    """The calls in an order that explains them, by the earliest moment of each."""
    after: list[set[int]] = [set() for _ in touched]
    writers: dict[str, dict[int, int]] = {}
    readers: dict[str, dict[int, list[int]]] = {}
    for at, (record, there) in enumerate(touched):
        for key, version in there.items():
            if record.kind == "put":
                if version in writers.setdefault(key, {}):
                    raise Violation("history", f"version {version} of {key!r} was made twice")
                writers[key][version] = at
            else:
                readers.setdefault(key, {}).setdefault(version, []).append(at)
    for key, by_version in writers.items():
        before = readers.get(key, {}).get(0, [])
        for version, writer in sorted(by_version.items()):
            for one in before:
                after[one].add(writer)
            mine = readers.get(key, {}).get(version, [])
            after[writer].update(mine)
            before = [writer, *mine]
    count = [0] * len(touched)
    for later in after:
        for one in later:
            count[one] += 1
    moment = [record.start for record, _ in touched]
    ready = [(moment[at], at) for at, left in enumerate(count) if not left]
    heapq.heapify(ready)
    order: list[int] = []
    while ready:
        now, at = heapq.heappop(ready)
        record = touched[at][0]
        if record.end is not None and now > record.end:
            raise Violation("history", f"{record} must have happened after it had ended")
        order.append(at)
        for one in after[at]:
            moment[one] = max(moment[one], now)
            count[one] -= 1
            if not count[one]:
                heapq.heappush(ready, (moment[one], one))
    if len(order) < len(touched):
        left = next(record for (record, _), n in zip(touched, count, strict=True) if n)
        raise Violation("history", f"{left} is no cut: some of it is older than the rest")
    return [touched[at] for at in order]


def _call(
    record: Record, there: dict[str, int], at: int, entries: dict[tuple[int, str], int]
) -> Call:
    keys = tuple(there)
    call = Call(Operation(record.number, record.kind, keys), record.client, at)
    call.reached(at)
    if record.kind == "put":
        call.returned(list(there.values()), at)
    elif 0 in there.values():
        call.failed("key-not-found", at)
    else:
        numbers = {key: seen.number for key, seen in zip(record.keys, record.seen, strict=True)}
        pieces = [
            (key, version, mark(numbers[key], entries[numbers[key], key]))
            for key, version in there.items()
        ]
        call.returned((0, pieces), at)
    return call
