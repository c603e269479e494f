"""The accounts of a store, counted again from nothing."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import accumulate, pairwise
from operator import attrgetter
from typing import Any

from tests.simulation.machine.disks import PAGE
from tests.simulation.promises.violations import Violation

from torchstore_core.server.controller import Controller
from torchstore_core.server.index.catalog import Catalog
from torchstore_core.server.index.collective.generations import Generation
from torchstore_core.server.index.records import SessionRecord, Stored, Value, all_values
from torchstore_core.server.memory.allocator import ALIGNMENT
from torchstore_core.server.memory.volume_record import VolumeRecord
from torchstore_core.server.spilling.policy import State, Tracked

__all__ = ["Accounts"]

# This runs so often that it is written for speed: without comprehensions, which are calls.
_pins = attrgetter("pins")
_of_value = attrgetter("volume", "offset", "nbytes", "pins", "data", "more")
_of_volume = attrgetter("inline", "leased", "unfinished", "lost", "allocator.used")


class Accounts:
    """Those of one store. What they say of memory follows from the values, the leases and what is
    free: while all of these are just what they were, they are not added up again.
    """

    def __init__(self) -> None:
        self._right: Any = None  # what was right the last time

    def check(self, controller: Controller) -> None:
        """Every byte of every volume is held by exactly one value or is free, and the volumes,
        leases and unfinished puts add up.

        Raises:
            Violation: of the kind ``accounts``.
        """
        volumes = controller.volumes
        sessions = list(controller.sessions.values())
        if controller.detached.sessions:
            sessions += controller.detached.sessions.values()
        there = _in_catalog(controller.catalog)
        pins: dict[Value, int] = {}
        unfinished = [0] * len(volumes)
        for session in sessions:
            if session.txns:
                for txn in session.txns.values():
                    there += txn.values
                    for index, nbytes in txn.granted.items():
                        unfinished[index] += nbytes
            if session.leases:
                for held in session.leases.values():
                    for leased in held:
                        if leased is not None:
                            there.append(leased)
                            pins[leased] = pins.get(leased, 0) + 1
        values = list(dict.fromkeys(there))  # each once
        tracked: list[Tracked] = []
        if controller.spilling.active:
            tracked = _tracked(controller)
            _check_tracked(controller, values)
            _check_disk(controller, tracked)
        if controller.catalog.held:
            _check_holds(controller, sessions)
        free = [volume.allocator.free_ranges() for volume in volumes]
        said = [*map(_of_volume, volumes)]
        now = values, [*map(_of_value, values)], pins, unfinished, free, said
        if tracked or now != self._right:
            _check_pins(values, pins)
            _check_volumes(volumes, values, pins, unfinished, tracked, free)
            self._right = now


def _in_catalog(catalog: Catalog) -> list[Value]:
    """What keys and references hold; maybe more than once."""
    whole: list[Stored] = list(catalog.newest.values())
    values: list[Value] = []
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
    for stored in whole:
        if type(stored) is Value:
            values.append(stored)
        else:
            values += all_values(stored)
    return values


def _check_pins(values: Collection[Value], pins: dict[Value, int]) -> None:
    """Each value has as many leases as it says."""
    # None of the others says that it has any, if as many say so as there are.
    said = sum(map(bool, map(_pins, values)))
    if said != len(pins) or [*map(_pins, pins)] != [*pins.values()]:
        wrong = next(value for value in values if value.pins != pins.get(value, 0))
        raise Violation("accounts", f"{wrong} has {pins.get(wrong, 0)} leases")


def _check_holds(controller: Controller, sessions: list[SessionRecord]) -> None:
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


def _check_tracked(controller: Controller, values: Collection[Value]) -> None:
    """What may leave memory is there, and adds up."""
    residency = controller.spilling.values
    there = residency.tracked(values)
    nbytes = sum([one.value.nbytes for one in there])
    if len(there) != len(residency) or nbytes > sum(residency.bytes_of.values()):
        raise Violation("accounts", f"{len(residency)} values may leave memory, not {len(there)}")


def _tracked(controller: Controller) -> list[Tracked]:
    """All that has a place on the disk, or in memory, because it may leave memory."""
    mover = controller.spilling._mover
    reading = [] if mover is None else [one for one in mover.reading if one.gone]
    return [*controller.spilling.values.all(), *reading]


def _check_disk(controller: Controller, tracked: list[Tracked]) -> None:
    """What is on disk lies there alone. (Nobody knows what is written for nothing.)"""
    mover = controller.spilling._mover
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
    if len(pages) * PAGE > mover.file.used:
        raise Violation("accounts", f"{mover.file.used} bytes of the disk are in use, not {pages}")


def _check_volumes(
    volumes: list[VolumeRecord],
    values: Collection[Value],
    pins: Iterable[Value],
    unfinished: list[int],
    tracked: list[Tracked],
    free: list[list[tuple[int, int]]],
) -> None:
    ranges = [*map(list, free)]
    inline, leased = [0] * len(volumes), [0] * len(volumes)
    if tracked:
        away: set[Value] = set()
        for one in tracked:
            if one.state is State.READING:
                away.add(one.value)
                at, offset = one.place
                if one.is_inline:
                    inline[at] += one.nbytes
                else:
                    ranges[at].append((offset, one.nbytes))
            elif one.state is State.ON_DISK:
                away.add(one.value)
        values = [value for value in values if value not in away]
        pins = [value for value in pins if value not in away]
    for value in values:
        if value.data is not None:
            inline[value.volume] += value.nbytes
            continue
        size = (value.nbytes + ALIGNMENT - 1) & -ALIGNMENT
        ranges[value.volume].append((value.offset, size))
        if value.more:
            for at, offset in value.more:
                ranges[at].append((offset, size))
    for value in pins:
        size = (value.nbytes + ALIGNMENT - 1) & -ALIGNMENT
        for at, _ in value.places:
            leased[at] += size
    for volume in volumes:
        if volume.lost:
            continue
        at, allocator = volume.index, volume.allocator
        _check_ranges(allocator.capacity, ranges[at])
        # As whatever is not free is held by a value.
        used = allocator.capacity - sum(dict(free[at]).values())
        said = (volume.inline, volume.leased, volume.unfinished, allocator.used)
        counted = (inline[at], leased[at], unfinished[at], used)
        if said != counted:
            raise Violation(
                "accounts",
                f"volume {at} says inline, leased, unfinished, used = {said}, but they are "
                f"{counted}",
            )


def _check_ranges(capacity: int, ranges: list[tuple[int, int]]) -> None:
    """The ranges, as (offset, bytes), are all of a volume, and no part of it is of two."""
    ranges.sort()
    starts, sizes = zip(*ranges, strict=True)
    starts, ends = (*starts, capacity), tuple(accumulate(sizes, initial=0))
    if starts == ends:
        return
    start, end = next(pair for pair in zip(starts, ends, strict=True) if pair[0] != pair[1])
    text = "nobody has" if start > end else "two have"
    raise Violation("accounts", f"{text} what lies from {min(start, end)} to {max(start, end)}")
