"""The accounts of a store, counted again from nothing."""

from __future__ import annotations

from collections.abc import Collection
from itertools import pairwise

from tests.simulation.machine.disks import PAGE
from tests.simulation.promises.violations import Violation

from torchstore_core.server.controller import Controller
from torchstore_core.server.index.records import SessionRecord, Stored, Value, all_values
from torchstore_core.server.memory.allocator import ALIGNMENT
from torchstore_core.server.memory.volume_record import VolumeRecord
from torchstore_core.server.spilling.policy import State, Tracked

__all__ = ["check_accounts"]


def check_accounts(controller: Controller) -> None:
    """Every byte of every volume is held by exactly one value or is free, and the volumes, leases
    and unfinished puts add up.

    Raises:
        Violation: of the kind ``accounts``.
    """
    volumes, catalog = controller.volumes, controller.catalog
    sessions = list(controller.sessions.values())
    if controller.detached.sessions:
        sessions += controller.detached.sessions.values()
    there = _in_catalog(controller)
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
    values = dict.fromkeys(there)  # each once
    tracked: list[Tracked] = []
    if controller.spilling.active:
        tracked = _tracked(controller)
        _check_tracked(controller, values)
        _check_disk(controller, tracked)
    if catalog.held:
        _check_holds(controller, sessions)
    _check_volumes(volumes, values, pins, unfinished, tracked)


def _in_catalog(controller: Controller) -> list[Value]:
    """What keys and references hold; maybe more than once."""
    catalog = controller.catalog
    values: list[Value] = []
    whole: list[Stored] = list(catalog.newest.values())
    for history in catalog.histories.values():
        whole += history.kept.values()
        if history.branches:
            whole += [one.base for one in history.branches.values() if one.base is not None]
        for generation in history.generations():
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
    pins: dict[Value, int],
    unfinished: list[int],
    tracked: list[Tracked],
) -> None:
    ranges = [volume.allocator.free_ranges() for volume in volumes]
    inline, leased, used = [0] * len(volumes), [0] * len(volumes), [0] * len(volumes)
    away: set[Value] = set()
    for one in tracked:
        if one.state is State.READING:
            away.add(one.value)
            at, offset = one.place
            if one.is_inline:
                inline[at] += one.nbytes
            else:
                ranges[at].append((offset, one.nbytes))
                used[at] += one.nbytes
        elif one.state is State.ON_DISK:
            away.add(one.value)
    for value in values:
        if value.pins != pins.get(value, 0):
            raise Violation("accounts", f"{value} has {pins.get(value, 0)} leases")
        if away and value in away:
            continue
        if value.data is not None:
            inline[value.volume] += value.nbytes
            continue
        size = (value.nbytes + ALIGNMENT - 1) & -ALIGNMENT
        for at, offset in value.places:
            ranges[at].append((offset, size))
            used[at] += size
            if value.pins:
                leased[at] += size
    for volume in volumes:
        if not volume.lost:
            at = volume.index
            _check_ranges(volume.allocator.capacity, ranges[at])
            said = (volume.inline, volume.leased, volume.unfinished, volume.allocator.used)
            counted = (inline[at], leased[at], unfinished[at], used[at])
            if said != counted:
                raise Violation(
                    "accounts",
                    f"volume {at} says inline, leased, unfinished, used = {said}, but they are "
                    f"{counted}",
                )


def _check_ranges(capacity: int, ranges: list[tuple[int, int]]) -> None:
    """The ranges, as (offset, bytes), are all of a volume, and no part of it is of two."""
    end = 0
    ranges.sort()
    for start, size in ranges:
        if start != end:
            text = "nobody has" if start > end else "two have"
            raise Violation(
                "accounts", f"{text} what lies from {min(start, end)} to {max(start, end)}"
            )
        end += size
    if end != capacity:
        raise Violation("accounts", f"{end} bytes of a volume of {capacity} are accounted for")
