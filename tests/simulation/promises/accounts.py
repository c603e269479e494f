"""The accounts of a store, counted again from nothing."""

from __future__ import annotations

from itertools import pairwise

from tests.simulation.machine.disks import PAGE
from tests.simulation.promises.violations import Violation

from torchstore_core.server.controller import Controller
from torchstore_core.server.index.records import SessionRecord, Value, all_values
from torchstore_core.server.memory.allocator import ALIGNMENT
from torchstore_core.server.spilling.policy import State, Tracked

__all__ = ["check_accounts"]


def check_accounts(controller: Controller) -> None:
    """Every byte of every volume is held by exactly one value or is free, and the volumes, leases
    and unfinished puts add up.

    Raises:
        Violation: of the kind ``accounts``.
    """
    values: dict[int, Value] = {}
    pins: dict[int, int] = {}
    unfinished = [0] * len(controller.volumes)
    catalog = controller.catalog
    for stored in catalog.newest.values():
        if type(stored) is Value:
            values[id(stored)] = stored
        else:
            for value in all_values(stored):
                values[id(value)] = value
    for history in catalog.histories.values():
        for stored in history.kept.values():
            for value in all_values(stored):
                values[id(value)] = value
        for branch in history.branches.values():
            if branch.base is not None:
                for value in all_values(branch.base):
                    values[id(value)] = value
        for generation in history.generations():
            for contribution in generation.contributions.values():
                for value in contribution.values:
                    values[id(value)] = value
    for held in catalog.held.values():
        for value in all_values(held.stored):
            values[id(value)] = value
    sessions: list[SessionRecord] = list(controller.sessions.values())
    if controller.detached.sessions:
        sessions += controller.detached.sessions.values()
    for session in sessions:
        for txn in session.txns.values():
            for value in txn.values:
                values[id(value)] = value
            for index, nbytes in txn.granted.items():
                unfinished[index] += nbytes
        for held in session.leases.values():
            for leased in held:
                if leased is not None:
                    values[id(leased)] = leased
                    pins[id(leased)] = pins.get(id(leased), 0) + 1
    if controller.spilling.active:
        _check_tracked(controller, values)
        _check_disk(controller)
    if catalog.held:
        _check_holds(controller, sessions)
    for volume in controller.volumes:
        if not volume.lost:
            _check_volume(controller, volume.index, values, pins, unfinished[volume.index])


def _check_holds(controller: Controller, sessions: list[SessionRecord]) -> None:
    """Each version that is held is, by as many sessions and tickets as it says."""
    counts = dict.fromkeys(map(id, controller.catalog.held.values()), 0)
    holders = [session.holds for session in sessions]
    holders += [ticket.holds for ticket in controller.holds._tickets.values()]
    for holder in holders:
        for hold in holder.values():
            held = hold.version
            if not held.freed:
                counts[id(held)] = counts.get(id(held), 0) + 1
    if len(counts) > len(controller.catalog.held):
        raise Violation("accounts", "a version has holds, and is not held")
    for held in controller.catalog.held.values():
        if held.count != counts[id(held)] or not held.count:
            what = f"version {held.version} of {held.key!r}"
            raise Violation("accounts", f"{what} has {counts[id(held)]} holds, not {held.count}")


def _check_tracked(controller: Controller, values: dict[int, Value]) -> None:
    """What may leave memory is there, and adds up."""
    residency = controller.spilling.values
    there = [one for one in values.values() if residency.find(one) is not None]
    nbytes = sum([one.nbytes for one in there])
    if len(there) != len(residency) or nbytes > sum(residency.bytes_of.values()):
        raise Violation("accounts", f"{len(residency)} values may leave memory, not {len(there)}")


def _tracked(controller: Controller) -> list[Tracked]:
    """All that has a place on the disk, or in memory, because it may leave memory."""
    mover = controller.spilling._mover
    reading = [] if mover is None else [one for one in mover.reading if one.gone]
    return [*controller.spilling.values.all(), *reading]


def _check_disk(controller: Controller) -> None:
    """What is on disk lies there alone. (Nobody knows what is written for nothing.)"""
    mover = controller.spilling._mover
    if mover is None:
        return
    pages: set[int] = set()
    parts: list[tuple[int, int]] = []
    for one in _tracked(controller):
        if one.extent is None:
            continue
        for start, size in one.extent.runs:
            pages.update(range(start, start + size, PAGE))
        if len(one.extent.runs) == 1:
            begin = one.extent.runs[0][0] + one.extent.head
            parts.append((begin, begin + one.extent.nbytes))
    parts.sort()
    if any(end > start for (_, end), (start, _) in pairwise(parts)):
        raise Violation("accounts", f"two values lie in the same part of the disk: {parts}")
    if len(pages) * PAGE > mover.file.used:
        raise Violation("accounts", f"{mover.file.used} bytes of the disk are in use, not {pages}")


def _check_volume(
    controller: Controller,
    index: int,
    values: dict[int, Value],
    pins: dict[int, int],
    unfinished: int,
) -> None:
    volume = controller.volumes[index]
    allocator = volume.allocator
    inline = leased = used = 0
    ranges = allocator.free_ranges()
    away: set[int] = set()
    if controller.spilling.active:
        for one in _tracked(controller):
            if one.state in (State.ON_DISK, State.READING):
                away.add(id(one.value))
            if one.state is State.READING and one.place[0] == index:
                if one.is_inline:
                    inline += one.nbytes
                else:
                    ranges.append((one.place[1], one.nbytes))
                    used += one.nbytes
    for number, value in values.items():
        if value.pins != pins.get(number, 0):
            raise Violation("accounts", f"{value} has {pins.get(number, 0)} leases")
        if number in away:
            continue
        if value.data is not None:
            if value.volume == index:
                inline += value.nbytes
            continue
        size = (value.nbytes + ALIGNMENT - 1) & -ALIGNMENT
        if value.volume == index:
            ranges.append((value.offset, size))
        elif not value.more:
            continue
        else:
            at = [offset for at, offset in value.more if at == index]
            if not at:
                continue
            ranges.append((at[0], size))
        used += size
        if value.pins:
            leased += size
    end = 0
    ranges.sort()
    for start, size in ranges:
        if start != end:
            text = "nobody has" if start > end else "two have"
            raise Violation(
                "accounts", f"{text} what lies from {min(start, end)} to {max(start, end)}"
            )
        end += size
    said = (volume.inline, volume.leased, volume.unfinished, allocator.used)
    if end != allocator.capacity or said != (inline, leased, unfinished, used):
        raise Violation(
            "accounts",
            f"volume {index} says inline, leased, unfinished, used = {said}, but they are "
            f"{(inline, leased, unfinished, used)}",
        )
