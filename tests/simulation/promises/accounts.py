"""The accounts of a store, counted again from nothing."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import chain, pairwise
from operator import add
from typing import Any

from msgspec.structs import astuple
from tests.simulation.machine.disks import PAGE
from tests.simulation.promises.violations import Violation

from torchstore_core.server.controller import Controller
from torchstore_core.server.index.catalog import Catalog
from torchstore_core.server.index.collective.generations import Generation
from torchstore_core.server.index.records import SessionRecord, Stored, Value, all_values
from torchstore_core.server.memory.allocator import ALIGNMENT
from torchstore_core.server.memory.volume_record import VolumeRecord
from torchstore_core.server.repairing.leavings import Left
from torchstore_core.server.spilling.policy import State, Tracked
from torchstore_core.server.spilling.spilling import Spilling

__all__ = ["Accounts"]

# What may change of a value: all of its fields.
_Facts = tuple[Any, ...]
_PLAIN = frozenset((Value,))

# This runs so often that it is written for speed: without comprehensions, which are calls, and all
# fields of a struct are found four times as fast as six of them.


class Accounts:
    """Those of one store. They follow from the values, the leases, what is free, and what the store
    says of them: while all of these are just what they were, they are not added up again.
    """

    def __init__(self) -> None:
        self._right: Any = None  # what was right the last time

    def check(self, controller: Controller) -> None:
        """Every byte of every volume is held by exactly one value or is free, and the volumes,
        leases and unfinished puts add up.

        Raises:
            Violation: of the kind ``accounts``.
        """
        catalog, volumes = controller.catalog, controller.volumes
        sessions: Collection[SessionRecord] = controller.sessions.values()
        if controller.detached.sessions:
            sessions = [*sessions, *controller.detached.sessions.values()]
        there = _in_catalog(catalog)
        leases: list[list[Value | None]] = []
        unfinished = [0] * len(volumes)
        for session in sessions:
            if session.txns:
                for txn in session.txns.values():
                    there += txn.values
                    for index, nbytes in txn.granted.items():
                        unfinished[index] += nbytes
            if session.leases:
                leases += session.leases.values()
        count = len(there)
        if leases:
            there += filter(None, chain.from_iterable(leases))
        spilling = controller.spilling
        spilled = _said_of_spilling(spilling) if spilling.active else None
        if catalog.held:
            _check_holds(controller, sessions)
        said: list[int | str] = []
        free: list[dict[int, int]] = []
        for volume in volumes:
            allocator = volume.allocator
            said += volume.inline, volume.leased, volume.unfinished, volume.lost, allocator.used
            free.append(allocator._by_start.copy())
        facts = [*map(astuple, there)]
        leavings = controller.repairs.leavings
        left = leavings.all if leavings._left else ()
        now = count, there, facts, unfinished, said, free, spilled, left
        if now != self._right:
            values = dict(zip(there, facts, strict=True))  # each once
            pins: dict[Value, int] = {}
            if leases:
                for leased in there[count:]:
                    pins[leased] = pins.get(leased, 0) + 1
            tracked: list[Tracked] = []
            if spilling.active:
                tracked = _tracked(spilling)
                _check_tracked(spilling, values)
                _check_disk(spilling, tracked)
            _check_volumes(volumes, values, pins, unfinished, tracked, left)
            self._right = now


def _in_catalog(catalog: Catalog) -> list[Value]:
    """What keys and references hold; maybe more than once."""
    whole: list[Stored] = list(catalog.newest.values())
    values: list[Value] = []
    if catalog.histories:
        for history in catalog.histories.values():
            if history.kept:
                whole += history.kept.values()
            generations: Iterable[Generation] = history.pending.values()
            if history.branches:
                whole += [one.base for one in history.branches.values() if one.base is not None]
                generations = history.generations()
            for generation in generations:
                for contribution in generation.contributions.values():
                    values += contribution.values
    if catalog.held:
        whole += [held.stored for held in catalog.held.values()]
    if set(map(type, whole)) <= _PLAIN:
        return [*whole, *values]  # type: ignore[list-item]
    for stored in whole:
        if type(stored) is Value:
            values.append(stored)
        else:
            values += all_values(stored)
    return values


def _check_holds(controller: Controller, sessions: Collection[SessionRecord]) -> None:
    """Each version that is held is, by as many sessions and tickets as it says."""
    counts = dict.fromkeys(controller.catalog.held.values(), 0)
    holders = [session.holds for session in sessions if session.holds]
    holders += [ticket.holds for ticket in controller.holds._tickets.values()]
    for holder in holders:
        for hold in holder.values():
            held = hold.version
            if not held.freed:
                counts[held] = counts.get(held, 0) + 1
    if len(counts) > len(controller.catalog.held):
        raise Violation("accounts", "a version has holds, and is not held")
    for held, count in counts.items():
        if held.count != count or not count:
            what = f"version {held.version} of {held.key!r}"
            raise Violation("accounts", f"{what} has {count} holds, not {held.count}")


def _said_of_spilling(spilling: Spilling) -> Any:
    """All that the checks below look at."""
    residency, mover = spilling.values, spilling.mover
    there, orders = residency._tracked.copy(), residency._by_use.values()
    facts = [*map(astuple, there.values())]
    said = [*map(len, orders), *residency.bytes_of.values()]
    if mover is not None:
        said.append(mover.used)
        facts += map(astuple, mover.reading)
    return there, facts, said


def _tracked(spilling: Spilling) -> list[Tracked]:
    """All that has a place on the disk, or in memory, because it may leave memory."""
    mover = spilling.mover
    reading = [] if mover is None else [one for one in mover.reading if one.gone]
    return [*spilling.values.all(), *reading]


def _check_tracked(spilling: Spilling, values: Collection[Value]) -> None:
    """What may leave memory is there, and adds up."""
    residency = spilling.values
    there = residency.tracked(values)
    nbytes = sum([one.value.nbytes for one in there])
    if len(there) != len(residency) or nbytes > sum(residency.bytes_of.values()):
        raise Violation("accounts", f"{len(residency)} values may leave memory, not {len(there)}")


def _check_disk(spilling: Spilling, tracked: list[Tracked]) -> None:
    """What is on disk lies there alone. (Nobody knows what is written for nothing.)"""
    mover = spilling.mover
    if mover is None:
        return
    pages: set[int] = set()
    parts: list[tuple[int, int]] = []
    for one in tracked:
        extent = one.extent
        if extent is None:
            continue
        for start, size in extent.runs:
            pages.update(range(start, start + size, PAGE))
        if len(extent.runs) == 1:
            begin = extent.runs[0][0] + extent.head
            parts.append((begin, begin + extent.nbytes))
    parts.sort()
    if any(end > start for (_, end), (start, _) in pairwise(parts)):
        raise Violation("accounts", f"two values lie in the same part of the disk: {parts}")
    if len(pages) * PAGE > mover.used:
        raise Violation("accounts", f"{mover.used} bytes of the disk are in use, not {pages}")


def _check_volumes(
    volumes: list[VolumeRecord],
    values: dict[Value, _Facts],
    pins: dict[Value, int],
    unfinished: list[int],
    tracked: list[Tracked],
    left: Iterable[Left],
) -> None:
    """Values have as many leases as they say, and all memory is of one of them, or free."""
    # Where ranges begin, and where they end; the end of a volume counts among those that begin, and
    # its beginning among those that end.
    starts: list[list[int]] = []
    ends: list[list[int]] = []
    for volume in volumes:
        free = volume.allocator._by_start
        starts.append([volume.allocator.capacity, *free])
        ends.append([0, *map(add, free, free.values())])
    inline, leased = [0] * len(volumes), [0] * len(volumes)
    away: set[Value] = set()
    for one in tracked:
        if one.state is State.READING:
            away.add(one.value)
            at, offset = one.place
            if one.is_inline:
                inline[at] += one.nbytes
            else:
                starts[at].append(offset)
                ends[at].append(offset + one.nbytes)
        elif one.state is State.ON_DISK:
            away.add(one.value)
    for value, facts in values.items():
        _, _, nbytes, volume_at, data, offset, _, _, _, pinned, _, _, more = facts
        count = pins.get(value, 0) if pins else 0
        if pinned != count:
            raise Violation("accounts", f"{value} has {count} leases")
        if away and value in away:
            continue
        if data is not None:
            inline[volume_at] += nbytes
            continue
        size = (nbytes + ALIGNMENT - 1) & -ALIGNMENT
        starts[volume_at].append(offset)
        ends[volume_at].append(offset + size)
        if count:
            leased[volume_at] += size
        for at, start in more:
            starts[at].append(start)
            ends[at].append(start + size)
            if count:
                leased[at] += size
    for gone in left:  # copies that were dropped while somebody read them
        size = (gone.value.nbytes + ALIGNMENT - 1) & -ALIGNMENT
        starts[gone.volume].append(gone.offset)
        ends[gone.volume].append(gone.offset + size)
        leased[gone.volume] += size
    for volume in volumes:
        if volume.lost:
            continue
        at, allocator = volume.index, volume.allocator
        _check_ranges(starts[at], ends[at])
        used = allocator.capacity - sum(allocator._by_start.values())
        said = (volume.inline, volume.leased, volume.unfinished, allocator.used)
        counted = (inline[at], leased[at], unfinished[at], used)
        if said != counted:
            raise Violation(
                "accounts",
                f"volume {at} says inline, leased, unfinished, used = {said}, but they are "
                f"{counted}",
            )


def _check_ranges(starts: list[int], ends: list[int]) -> None:
    """Ranges are all of a volume, and no part of it is of two: each begins where one ends."""
    starts.sort()
    ends.sort()
    if starts == ends:
        return
    start, end = next(pair for pair in zip(starts, ends, strict=True) if pair[0] != pair[1])
    text = "nobody has" if start > end else "two have"
    raise Violation("accounts", f"{text} what lies from {min(start, end)} to {max(start, end)}")
