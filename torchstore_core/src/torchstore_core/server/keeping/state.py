"""What the state of a controller consists of: written into a log, and set from one.

With this at its beginning a log needs nothing of what led to it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torchstore_core.server.controller import Controller
from torchstore_core.server.index.records import SessionRecord, Stored, Value
from torchstore_core.server.keeping.graph import Reader, Writer
from torchstore_core.server.keeping.recorded_holds import HOLDS
from torchstore_core.server.memory.allocator import Allocator
from torchstore_core.server.memory.volume_record import VolumeRecord

#: The attributes of a catalog that are state, besides the newest versions and the timelines.
CATALOG = ("histories", "held", "keys_to_settle", "_deleted", "_version_floor")


def written(controller: Controller, more: dict[str, Any]) -> Iterator[tuple[bool, bytes]]:
    """The state in pieces, see ``Writer.write``; and whatever ``more`` there is."""
    catalog = controller.catalog
    writer = Writer()
    plain: list[Value] = []
    others: list[Stored] = []
    for stored in catalog.newest.values():
        if type(stored) is Value:
            plain.append(stored)
        else:
            others.append(stored)
    writer.number(plain)
    state = {
        "plain": len(plain),
        "others": others,
        "catalog": {name: getattr(catalog, name) for name in CATALOG},
        "timelines": dict(vars(catalog.timelines)),
        "evictions": catalog.evictions.remembered,
        "holds": {name: getattr(controller.holds, name) for name in HOLDS},
        "sessions": list(controller.sessions.values()),
        "volumes": [_volume_state(volume) for volume in controller.volumes],
        "more": more,
    }
    return writer.write(state)


class StateReader:
    """Sets the state of a controller that has none yet."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self._reader = Reader()
        self.add_values = self._reader.add_values

    def finish(self, body: bytes) -> tuple[list[SessionRecord], dict[str, Any]]:
        """Set it, when all values are added; the sessions, in order, and what else was written."""
        controller, catalog = self._controller, self._controller.catalog
        state = self._reader.read(body)
        plain = self._reader.values[: state["plain"]]
        catalog.newest.update(zip([value.key for value in plain], plain, strict=True))
        catalog.newest.update([(stored.key, stored) for stored in state["others"]])
        catalog.names.add(list(catalog.newest))
        for name, value in state["catalog"].items():
            if name == "held":  # which the holds have, too
                catalog.held.update(value)
            else:
                setattr(catalog, name, value)
        catalog.evictions.remembered.update(state["evictions"])
        for name, value in state["holds"].items():
            setattr(controller.holds, name, value)
        vars(catalog.timelines).update(state["timelines"])
        sessions: list[SessionRecord] = state["sessions"]
        controller.sessions.update([(session.token, session) for session in sessions])
        for volume, kept in zip(controller.volumes, state["volumes"], strict=True):
            _set_volume_state(volume, *kept)
            controller.lost_volumes.any |= bool(volume.lost)
        more: dict[str, Any] = state["more"]
        return sessions, more


def _volume_state(volume: VolumeRecord) -> tuple[Any, ...]:
    allocator = volume.allocator
    ranges = allocator.free_ranges()
    accounts = volume.draining, volume.inline, volume.leased, volume.unfinished
    what_else = volume.reserved, volume.lost, volume.lost_at
    return (
        *accounts,
        *(ranges, allocator.high_water, volume.memory.warm, allocator.assured),
        *what_else,
    )


def _set_volume_state(
    volume: VolumeRecord,
    draining: bool,
    inline: int,
    leased: int,
    unfinished: int,
    free: list[tuple[int, int]],
    high_water: int,
    warm: int,
    assured: int,
    reserved: tuple[int, int] | None,
    lost: str,
    lost_at: float,
) -> None:
    grow = volume.allocator.grow
    if lost:
        volume.lose(lost)
    volume.lost_at, volume.reserved = lost_at, reserved
    volume.draining = draining
    volume.inline, volume.leased, volume.unfinished = inline, leased, unfinished
    volume.allocator = Allocator.with_free(volume.info.capacity_bytes, free, high_water)
    volume.allocator.ask(grow, assured)
    volume.memory.touched(warm)
