"""Functions that find places in the volumes for the items of a put."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import repeat
from typing import NamedTuple

import msgspec

from torchstore_core.boxes import Box
from torchstore_core.contracts.strategy import ClientFacts, Strategy, VolumeFacts
from torchstore_core.errors import ProtocolError
from torchstore_core.server.index.items import MOST_BYTES, PutItems, check_item
from torchstore_core.server.index.records import Value
from torchstore_core.server.memory import strategy_calls
from torchstore_core.server.memory.allocator import ALIGNMENT, rounded
from torchstore_core.server.memory.shortage import all_lost_error
from torchstore_core.server.memory.volume_record import VolumeRecord
from torchstore_core.values import TensorMeta
from torchstore_core.wire import messages as m
from torchstore_core.wire.columns import rounded_sum


def checked_items(items: Sequence[m.PutItem]) -> tuple[int, int, list[int]]:
    """Return :func:`sizes_of` the items, after checking each as :func:`check_item` does."""
    if type(items) is PutItems:  # they have been checked
        return sizes_of(items)
    placed = inline = 0
    sizes: list[int] = []
    for item in items:
        nbytes, data = item.nbytes, item.data
        usual = 0 < nbytes < MOST_BYTES if data is None else len(data) == nbytes
        if not (usual and 0 < len(item.key) <= m.MAX_KEY and type(item.meta) is TensorMeta):
            check_item(item)
        if data is None:
            sizes.append(nbytes)
            placed += (nbytes + ALIGNMENT - 1) & -ALIGNMENT
        else:
            inline += nbytes
    if placed:
        _check_total(placed)
    return placed, inline, sizes


def sizes_of(items: Sequence[m.PutItem]) -> tuple[int, int, list[int]]:
    """Return the bytes to place (rounded), the inline bytes, and the sizes of the values to place,
    in order.
    """
    inline = 0
    if type(items) is PutItems:
        sizes = items.sizes
    else:
        sizes = [item.nbytes for item in items if item.data is None]
    if len(sizes) < len(items):
        inline = sum([item.nbytes for item in items if item.data is not None])
    placed = rounded_sum(sizes)
    _check_total(placed)
    return placed, inline, sizes


def _check_total(placed: int) -> None:
    if placed >= MOST_BYTES:
        raise ProtocolError(f"cannot place {placed} bytes")


class Placement(msgspec.Struct, frozen=True, gc=False):
    """Values that are placed together, with one copy in each of one or more volumes.

    Args:
        members: the positions of the items in the put.
        copies: the volumes, each with an offset for every value to place. Inline values count
            towards the first volume.
        placed, inline: the bytes to place and the inline bytes (of one copy).
    """

    members: Sequence[int]
    copies: list[tuple[VolumeRecord, list[int]]]
    placed: int
    inline: int


class _Fragmented(NamedTuple):
    """A volume that has enough free bytes, but no range for a value of so many."""

    volume: int
    nbytes: int


class _Group:
    """Items that must be placed together, with their keys and the volumes for them, best first."""

    __slots__ = ("inline", "keys", "members", "order", "placed", "sizes")

    def __init__(self, keys: Sequence[str]) -> None:
        self.keys = keys
        self.order: Sequence[int] = ()
        self.members: Sequence[int] = []
        self.placed = self.inline = 0
        self.sizes: list[int] = []


class Assigned(msgspec.Struct, frozen=True, array_like=True, tag="assigned"):
    """What has become of the strategy's answers: the volumes of each group of items.

    Args:
        by_key: whether there is a group for each key, or one for all items.
        volumes: those of each group, in order; None: there was not enough room.
    """

    by_key: bool
    volumes: list[tuple[int, ...]] | None


def _now(assign: Callable[[], Assigned]) -> Assigned:
    return assign()


def find_place(
    strategy: Strategy,
    volumes: Sequence[VolumeRecord],
    facts: ClientFacts,
    items: Sequence[m.PutItem],
    prefix: str,
    placed: int,
    inline: int,
    sizes: list[int],
    reserved: Collection[int] = (),
    noted: Callable[[Callable[[], Assigned]], Assigned] = _now,
) -> list[Placement] | None:
    """Allocate memory for the items on live volumes with room, in the strategy's order, on as many
    volumes as it wants copies. Returns None if there is not enough room.

    Args:
        prefix: prepended to the items' keys before they are passed to the strategy.
        reserved: volumes that get nothing of it; not the only one.
        noted: called with a function that asks the strategy; returns what that returns, or what it
            returned when the same was done before.

    Raises:
        PluginError: the strategy fails, or names no volume or one that does not exist.
        StoreFullError: all volumes that it names are lost.
        Delayed: a volume is being asked whether its host has the memory; nothing is allocated.
    """
    if len(volumes) == 1:
        volume = volumes[0]
        if volume.lost or volume.draining:
            raise all_lost_error(strategy, volumes, [0])
        used = volume.allocator.used + volume.inline
        if used + placed + inline <= volume.info.capacity_bytes:
            offsets = volume.allocator.allocate_all(placed, sizes)
            if offsets is not None:
                return [Placement(range(len(items)), [(volume, offsets)], placed, inline)]
        return None
    known = tuple([v.facts() for v in volumes])
    keys = [prefix + item.key for item in items]
    asked: tuple[bool, Sequence[_Group], int] | None = None
    too_large: dict[int, int] = {}  # by fragmented volume: the value size from which it has no room

    def grouped(by_key: bool) -> Sequence[_Group]:
        if by_key:
            return _groups(items, keys)
        group = _Group(keys)
        group.members, group.sizes = range(len(items)), sizes
        group.placed, group.inline = placed, inline
        return [group]

    def assign() -> Assigned:
        nonlocal asked
        if asked is None:
            by_key = strategy_calls.by_key(strategy)
            groups = grouped(by_key)
            asked = by_key, groups, _ask(strategy, known, facts, groups, volumes)
        by_key, groups, copies = asked
        return Assigned(by_key, _assign(groups, known, copies, too_large, reserved))

    while True:
        assigned = noted(assign)
        if assigned.volumes is None:
            return None
        groups = grouped(assigned.by_key) if asked is None else asked[1]
        together: dict[tuple[int, ...], list[_Group]] = {}
        for group, chosen in zip(groups, assigned.volumes, strict=True):
            together.setdefault(chosen, []).append(group)
        placements = _allocated(together, volumes)
        if not isinstance(placements, _Fragmented):
            return placements
        too_large[placements.volume] = placements.nbytes


def _ask(
    strategy: Strategy,
    known: Sequence[VolumeFacts],
    facts: ClientFacts,
    groups: Sequence[_Group],
    volumes: Sequence[VolumeRecord],
) -> int:
    """Ask the strategy for the order of volumes of each group; returns how many copies it wants."""
    for group in groups:
        nbytes = group.placed + group.inline
        group.order = strategy_calls.order(strategy, facts, known, nbytes, group.keys)
    for group in groups:
        if not any(not known[at].lost for at in group.order):
            raise all_lost_error(strategy, volumes, group.order)
    return strategy_calls.copies(strategy)


def _groups(items: Sequence[m.PutItem], keys: Sequence[str]) -> list[_Group]:
    """Return one group for each key, with the memory that its items need."""
    by_key: dict[str, list[int]] = {}
    for at, key in enumerate(keys):
        by_key.setdefault(key, []).append(at)
    groups: list[_Group] = []
    for key, members in by_key.items():
        group = _Group((key,))
        group.members = members
        for at in members:
            item = items[at]
            if item.data is not None:
                group.inline += item.nbytes
            else:
                group.sizes.append(item.nbytes)
                group.placed += rounded(item.nbytes)
        groups.append(group)
    return groups


def _assign(
    groups: Sequence[_Group],
    known: Sequence[VolumeFacts],
    copies: int,
    too_large: Mapping[int, int],
    reserved: Collection[int],
) -> list[tuple[int, ...]] | None:
    """Return the volumes of each group; None if there is not enough room for all of them."""
    room = {v.index: v.free_bytes for v in known if not v.lost and v.index not in reserved}
    found: list[tuple[int, ...]] = []
    for group in groups:
        order = [at for at in group.order if at in room]
        wanted = min(copies, len(order)) if group.placed else 1
        largest = max(group.sizes, default=0)
        chosen: list[int] = []
        for at in order:
            need = group.placed if chosen else group.placed + group.inline
            if need <= room[at] and not (largest and largest >= too_large.get(at, largest + 1)):
                room[at] -= need
                chosen.append(at)
                if len(chosen) == wanted:
                    break
        else:
            return None
        found.append(tuple(chosen))
    return found


def _allocated(
    assigned: Mapping[tuple[int, ...], Sequence[_Group]],
    volumes: Sequence[VolumeRecord],
) -> list[Placement] | _Fragmented:
    """Allocate memory for all groups, or for none if a volume has no range that is large enough."""
    placements: list[Placement] = []
    taken: list[tuple[VolumeRecord, list[int], list[int]]] = []

    def undo() -> None:
        for volume, pieces, nbytes in taken:
            volume.allocator.free(zip(pieces, nbytes, strict=True))

    for chosen, groups in assigned.items():
        if len(groups) == 1:
            members, sizes = groups[0].members, groups[0].sizes
        else:
            members = [at for group in groups for at in group.members]
            sizes = [size for group in groups for size in group.sizes]
        placed = sum([group.placed for group in groups])
        copies: list[tuple[VolumeRecord, list[int]]] = []
        for index in chosen:
            try:
                offsets = volumes[index].allocator.allocate_all(placed, sizes)
            except BaseException:
                undo()
                raise
            if offsets is None:
                undo()
                return _Fragmented(index, max(sizes))
            taken.append((volumes[index], offsets, sizes))
            copies.append((volumes[index], offsets))
        placements.append(
            Placement(members, copies, placed, sum([group.inline for group in groups]))
        )
    return placements


def placed_values(
    items: Sequence[m.PutItem],
    facts: ClientFacts,
    placements: Sequence[Placement],
    boxes: Sequence[Box | None],
) -> tuple[list[Value], dict[int, int]]:
    """Return a value for each item, held by the put that creates it, and the bytes granted on each
    volume.

    ``boxes``: of the items, see ``Value``; none if all of them are whole.
    """
    granted: dict[int, int] = {}
    values: list[Value] = []
    for placement in placements:
        volume, offsets = placement.copies[0]
        volume.inline += placement.inline
        index, first = volume.index, len(values)
        if type(items) is PutItems and len(placements) == 1:
            nowhere, none, one = repeat(None), repeat(0), repeat(1)
            columns = items.keys, items.metas, items.sizes, repeat(index), nowhere, offsets
            values = list(map(Value, *columns, repeat(facts), none, repeat(0.0), none, one))
        else:
            each = iter(offsets)
            for at in placement.members:
                item = items[at]
                key, meta, nbytes, data = item.key, item.meta, item.nbytes, item.data
                offset = next(each) if data is None else -1
                values.append(Value(key, meta, nbytes, index, data, offset, facts, uses=1))
        if placement.placed:
            for other, offsets in placement.copies:
                granted[other.index] = granted.get(other.index, 0) + placement.placed
                if other is not volume:
                    placed = [value for value in values[first:] if value.data is None]
                    for value, offset in zip(placed, offsets, strict=True):
                        value.more = (*value.more, (other.index, offset))
    if len(placements) > 1:
        order = [at for placement in placements for at in placement.members]
        values = [values[n] for n in sorted(range(len(order)), key=order.__getitem__)]
    if boxes:
        for value, box in zip(values, boxes, strict=True):
            value.box = box
    return values, granted
