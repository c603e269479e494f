"""Pure functions that place the items of a put, and that explain why a put does not fit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate

import msgspec

from torchstore_core.contracts.strategy import ClientFacts, Strategy, VolumeFacts
from torchstore_core.errors import ProtocolError, StoreFullError
from torchstore_core.server.index.items import MOST_BYTES, check_item
from torchstore_core.server.index.records import SessionRecord, Stored, Value
from torchstore_core.server.memory import strategy_calls
from torchstore_core.server.memory.allocator import ALIGNMENT, Allocator, rounded
from torchstore_core.server.memory.volume_record import VolumeRecord
from torchstore_core.values import TensorMeta
from torchstore_core.wire import messages as m

__all__ = ["Run", "checked_items", "find_place", "full_error", "most_bytes", "session_bytes"]
__all__ += ["sizes_of", "values_in_runs"]


def session_bytes(session: SessionRecord) -> tuple[int, int]:
    """The bytes that a session leases, and the bytes of its unfinished puts."""
    held = (v for some in session.leases.values() for v in some if v is not None)
    leased = sum(v.nbytes * len(v.places) for v in held)
    return leased, sum(txn.nbytes for txn in session.txns.values())


def checked_items(items: Sequence[m.PutItem]) -> tuple[int, int, list[int]]:
    """:func:`sizes_of` the items, after each has passed :func:`check_item`."""
    placed = inline = 0
    sizes: list[int] = []
    for item in items:
        nbytes = item.nbytes
        if item.data is not None:
            check_item(item)
            inline += nbytes
            continue
        usual = 0 < nbytes < MOST_BYTES and 0 < len(item.key) <= m.MAX_KEY
        if not usual or type(item.meta) is not TensorMeta:
            check_item(item)
        sizes.append(nbytes)
        placed += (nbytes + ALIGNMENT - 1) & -ALIGNMENT
    _check_total(placed)
    return placed, inline, sizes


def sizes_of(items: Sequence[m.PutItem]) -> tuple[int, int, list[int]]:
    """Bytes to place (rounded), inline bytes, and the sizes of the values to place, in order."""
    sizes = [item.nbytes for item in items if item.data is None]
    inline = 0
    if len(sizes) < len(items):
        inline = sum([item.nbytes for item in items if item.data is not None])
    placed = sum([(size + ALIGNMENT - 1) & -ALIGNMENT for size in sizes])
    _check_total(placed)
    return placed, inline, sizes


def _check_total(placed: int) -> None:
    if placed >= MOST_BYTES:
        raise ProtocolError(f"cannot place {placed} bytes")


def allocate(volume: VolumeRecord, placed: int, sizes: list[int]) -> list[int] | None:
    """Allocate one contiguous run for all sizes if there is room for it, else a piece for each. The
    pieces are allocated in order, so that they lie together as far as possible; if some do not
    fit, the largest are allocated first. Returns None if that fails, too.
    """
    if not sizes:
        return []
    allocator = volume.allocator
    start = allocator.allocate(placed)
    if start is not None:
        steps = [(size + ALIGNMENT - 1) & -ALIGNMENT for size in sizes]
        *offsets, _ = accumulate(steps, initial=start)
        return offsets
    pieces = _allocate_each(allocator, sizes)
    if pieces is None and len(sizes) > 1 and max(sizes) <= allocator.largest_free:
        largest_first = sorted(range(len(sizes)), key=lambda at: -sizes[at])
        found = _allocate_each(allocator, [sizes[at] for at in largest_first])
        if found is not None:
            pieces = [offset for _, offset in sorted(zip(largest_first, found, strict=True))]
    return pieces


def _allocate_each(allocator: Allocator, sizes: Sequence[int]) -> list[int] | None:
    """Allocate a range for each size. Returns None and changes nothing if one does not fit."""
    pieces: list[int] = []
    for at, size in enumerate(sizes):
        offset = allocator.allocate(size)
        if offset is None:
            allocator.free(zip(pieces, sizes[:at], strict=True))
            return None
        pieces.append(offset)
    return pieces


class Run(msgspec.Struct, frozen=True, gc=False):
    """Values that are placed together, with one copy in each of one or more volumes.

    Args:
        members: positions of the items.
        copies: the volumes, each with an offset for every size. Inline values are in the first.
        placed, inline: bytes (of one copy).
    """

    members: Sequence[int]
    copies: list[tuple[VolumeRecord, list[int]]]
    placed: int
    inline: int


class _Group:
    """Items that must be placed together, and the volumes for them, best first."""

    __slots__ = ("inline", "members", "order", "placed", "sizes")

    def __init__(self, order: Sequence[int]) -> None:
        self.order = order
        self.members: Sequence[int] = []
        self.placed = self.inline = 0
        self.sizes: list[int] = []


def find_place(
    strategy: Strategy,
    volumes: Sequence[VolumeRecord],
    facts: ClientFacts,
    items: Sequence[m.PutItem],
    prefix: str,
    placed: int,
    inline: int,
    sizes: list[int],
) -> list[Run] | None:
    """Find live volumes with room, in the strategy's order, as many as there should be copies, and
    an offset for each size; None if there is not enough room.

    Args:
        prefix: prepended to the keys of the items that are passed to the strategy.

    Raises:
        PluginError: the strategy fails, or names no volume or one that does not exist.
        StoreFullError: all volumes that it names are lost.
    """
    if len(volumes) == 1:
        volume = volumes[0]
        if volume.lost:
            raise _all_lost(strategy, volumes, [0])
        if volume.used + placed + inline <= volume.info.capacity_bytes:
            offsets = allocate(volume, placed, sizes)
            if offsets is not None:
                return [Run(range(len(items)), [(volume, offsets)], placed, inline)]
        return None
    known = tuple([v.facts() for v in volumes])
    keys = [prefix + item.key for item in items]
    if strategy_calls.by_key(strategy):
        groups = _groups(strategy, known, facts, items, keys)
    else:
        group = _Group(strategy_calls.order(strategy, facts, known, placed + inline, keys))
        group.members, group.sizes = range(len(items)), sizes
        group.placed, group.inline = placed, inline
        groups = [group]
    for group in groups:
        if not any(not known[at].lost for at in group.order):
            raise _all_lost(strategy, volumes, group.order)
    copies = strategy_calls.copies(strategy)
    limits: dict[int, int] = {}  # fragmented volumes: sizes for which they have no room
    while True:
        assigned = _assign(groups, known, copies, limits)
        if assigned is None:
            return None
        runs = _allocated(assigned, volumes, limits)
        if runs is not None:
            return runs


def _groups(
    strategy: Strategy,
    known: Sequence[VolumeFacts],
    facts: ClientFacts,
    items: Sequence[m.PutItem],
    keys: Sequence[str],
) -> list[_Group]:
    """One group for each key, with the memory that its items need."""
    by_key: dict[str, list[int]] = {}
    for at, key in enumerate(keys):
        by_key.setdefault(key, []).append(at)
    groups: list[_Group] = []
    for key, members in by_key.items():
        group = _Group(())
        group.members = members
        for at in members:
            item = items[at]
            if item.data is not None:
                group.inline += item.nbytes
            else:
                group.sizes.append(item.nbytes)
                group.placed += rounded(item.nbytes)
        group.order = strategy_calls.order(
            strategy, facts, known, group.placed + group.inline, (key,)
        )
        groups.append(group)
    return groups


def _assign(
    groups: Sequence[_Group], known: Sequence[VolumeFacts], copies: int, limits: Mapping[int, int]
) -> dict[tuple[int, ...], list[_Group]] | None:
    """Assign the groups to volumes; None if there is not enough room for all of them."""
    room = {v.index: v.free_bytes for v in known if not v.lost}
    found: dict[tuple[int, ...], list[_Group]] = {}
    for group in groups:
        order = [at for at in group.order if at in room]
        wanted = min(copies, len(order)) if group.placed else 1
        largest = max(group.sizes, default=0)
        chosen: list[int] = []
        for at in order:
            need = group.placed if chosen else group.placed + group.inline
            if need <= room[at] and not (largest and largest >= limits.get(at, largest + 1)):
                room[at] -= need
                chosen.append(at)
                if len(chosen) == wanted:
                    break
        else:
            return None
        found.setdefault(tuple(chosen), []).append(group)
    return found


def _allocated(
    assigned: Mapping[tuple[int, ...], Sequence[_Group]],
    volumes: Sequence[VolumeRecord],
    limits: dict[int, int],
) -> list[Run] | None:
    """Allocate memory for all groups. Returns None if a volume has no range that is large enough;
    that volume is added to ``limits``.
    """
    runs: list[Run] = []
    taken: list[tuple[VolumeRecord, list[int], list[int]]] = []
    for chosen, groups in assigned.items():
        if len(groups) == 1:
            members, sizes = groups[0].members, groups[0].sizes
        else:
            members = [at for group in groups for at in group.members]
            sizes = [size for group in groups for size in group.sizes]
        placed = sum([group.placed for group in groups])
        copies: list[tuple[VolumeRecord, list[int]]] = []
        for index in chosen:
            offsets = allocate(volumes[index], placed, sizes)
            if offsets is None:
                limits[index] = max(sizes)
                for volume, pieces, nbytes in taken:
                    volume.allocator.free(zip(pieces, nbytes, strict=True))
                return None
            taken.append((volumes[index], offsets, sizes))
            copies.append((volumes[index], offsets))
        runs.append(Run(members, copies, placed, sum([group.inline for group in groups])))
    return runs


def values_in_runs(
    items: Sequence[m.PutItem], facts: ClientFacts, runs: Sequence[Run]
) -> tuple[list[Value], dict[int, int]]:
    """A value for each item, held by the put that creates it, and the bytes granted per volume."""
    granted: dict[int, int] = {}
    for run in runs:
        run.copies[0][0].inline += run.inline
        if run.placed:
            for volume, _ in run.copies:
                granted[volume.index] = granted.get(volume.index, 0) + run.placed
    if len(runs) == 1:
        return _values(items, facts, runs[0]), granted
    made: dict[int, Value] = {}
    for run in runs:
        members = [items[at] for at in run.members]
        made.update(zip(run.members, _values(members, facts, run), strict=True))
    return [made[at] for at in range(len(items))], granted


def _values(items: Sequence[m.PutItem], facts: ClientFacts, run: Run) -> list[Value]:
    """The values of a run whose members are ``items``."""
    volume, offsets = run.copies[0]
    others = run.copies[1:]
    index = volume.index
    if not others and len(offsets) == len(items):  # the usual case, with many items
        return [
            Value(item.key, item.meta, item.nbytes, index, None, offset, facts, uses=1)
            for item, offset in zip(items, offsets, strict=True)
        ]
    values: list[Value] = []
    at = 0
    for item in items:
        offset = -1
        if item.data is None:
            offset = offsets[at]
            at += 1
        value = Value(item.key, item.meta, item.nbytes, index, item.data, offset, facts)
        value.uses = 1
        if others and item.data is None:
            value.more = tuple([(other.index, places[at - 1]) for other, places in others])
        values.append(value)
    return values


def _all_lost(
    strategy: Strategy, volumes: Sequence[VolumeRecord], order: Iterable[int]
) -> StoreFullError:
    named = [volumes[at] for at in order]
    why = "; ".join(f"{v.info.id}: {v.lost}" for v in named)
    all_of = (
        "all volumes are" if len(named) == len(volumes) else "every volume that it may go to is"
    )
    return StoreFullError(
        f"there is no memory for this put: {all_of} lost ({why}), says strategy "
        f"{type(strategy).__name__}. Initialize the store again, or with a strategy that uses the "
        "other volumes",
        details={"lost": {v.info.id: v.lost for v in named}},
    )


def most_bytes(strategy: Strategy, volumes: Sequence[VolumeRecord]) -> int:
    """The largest put that could ever fit, in bytes, however much is deleted."""
    capacities = [v.info.capacity_bytes for v in volumes if not v.lost]
    return sum(capacities) if strategy_calls.by_key(strategy) else max(capacities, default=0)


def _fits_spread(
    requested: int, volumes: Sequence[VolumeRecord], items: Sequence[m.PutItem]
) -> bool:
    """Whether a put exceeds every volume, but would fit if its keys were placed separately."""
    rooms = [v.info.capacity_bytes - v.used for v in volumes]
    keys: dict[str, int] = {}
    for item in items:
        keys[item.key] = keys.get(item.key, 0) + item.nbytes
    largest = max(keys.values(), default=0)
    return len(keys) > 1 and largest <= max(rooms, default=0) < requested <= sum(rooms)


def _needs_one_volume(requested: int, strategy: Strategy | None, items: Sequence[m.PutItem]) -> int:
    """The bytes of a put that need one volume: those of one key if keys are placed separately."""
    if strategy is None or not strategy_calls.by_key(strategy):
        return requested
    keys: dict[str, int] = {}
    for item in items:
        nbytes = item.nbytes if item.data is not None else rounded(item.nbytes)
        keys[item.key] = keys.get(item.key, 0) + nbytes
    return max(keys.values(), default=0)


def _in_pieces(requested: int, volumes: Sequence[VolumeRecord], sizes: Sequence[int]) -> bool:
    """Whether there would be room if the free memory of a volume were not fragmented."""
    if not sizes:
        return False
    if requested <= sum(v.free for v in volumes):
        largest = max(sizes)
        roomy = [v for v in volumes if v.free >= largest]
        if roomy and all(v.allocator.largest_free < largest for v in roomy):
            return True
    for volume in volumes:
        if requested <= volume.free:
            found = allocate(volume, sum(map(rounded, sizes)), list(sizes))
            if found is None:
                return True
            volume.allocator.free(zip(found, sizes, strict=True))
    return False


def full_error(
    requested: int,
    volumes: Sequence[VolumeRecord],
    sessions: Iterable[SessionRecord],
    values: Iterable[Stored],
    waiting: Mapping[str, int],
    strategy: Strategy | None = None,
    items: Sequence[m.PutItem] = (),
) -> StoreFullError:
    """The error of a put that does not fit, with the holders of the memory.

    Args:
        requested: bytes (of one copy).
        waiting: bytes in versions that are not complete yet, by key.
        strategy, items: those of the put, to report when the strategy is what prevents it.
    """
    volumes = [v for v in volumes if not v.lost]
    capacity = sum(v.info.capacity_bytes for v in volumes)
    used = sum(v.used for v in volumes)
    holders: list[dict[str, object]] = []
    for session in sessions:
        leased, unfinished = session_bytes(session)
        if leased or unfinished:
            holders.append({"pid": session.facts.pid, "leased": leased, "unfinished": unfinished})
    largest = sorted(values, key=lambda v: -v.nbytes)[:5]
    leased = sum(v.leased for v in volumes)
    unfinished = sum(v.unfinished for v in volumes)
    free = max(0, capacity - used)
    # Inline values use no memory of the segment, but count towards the capacity.
    largest_free = max((min(v.free, v.allocator.largest_free) for v in volumes), default=0)
    largest_volume = max((v.info.capacity_bytes for v in volumes), default=0)
    copies = 1
    if strategy is not None and len(volumes) > 1:
        copies = min(strategy_calls.copies(strategy), len(volumes))
    inline = sum(item.nbytes for item in items if item.data is not None)
    in_all = (requested - inline) * copies + inline
    pieces = f"; {free:,} are free, {largest_free:,} of them in one piece" if free else ""
    sizes = [item.nbytes for item in items if item.data is None]
    in_pieces = _in_pieces(requested, volumes, sizes)
    top = ", ".join(f"{v.key!r} {v.nbytes:,}" for v in largest) or "none"
    by_pid = ", ".join(f"pid {h['pid']}: {h['leased']:,}" for h in holders if h["leased"])
    details: dict[str, object] = {}
    advice = "Delete keys, drop tensors that zero-copy gets returned"
    if in_pieces:
        count = sum(v.allocator.pieces for v in volumes)
        details["pieces"], details["largest_value_bytes"] = count, max(sizes)
        pieces = (
            f"; {free:,} are free, but in {count:,} piece(s), the largest of {largest_free:,}, and "
            "a value lies in one piece: "
        )
        if max(sizes) > largest_free:
            pieces += f"the largest of this put has {max(sizes):,}"
            advice = "Put it in several smaller values (shards, say), delete keys"
        else:
            pieces += f"the {len(sizes):,} of this put do not go into them together"
            advice = "Put fewer values at once, delete keys"
        advice += ", drop tensors that zero-copy gets returned, which lie in between"
    if waiting:
        details["waiting"] = dict(waiting)
        most = max(waiting, key=lambda key: waiting[key])
        top += (
            f"; {sum(waiting.values()):,} in versions that wait for other participants ({most!r})"
        )
        advice += ", see who is missing with `torchstore stat`"
    together = _needs_one_volume(requested, strategy, items)
    if together > largest_volume:
        one = max((item.nbytes for item in items), default=0) > largest_volume
        advice = (
            f"No volume can ever take {'a value of so many' if one else f'{together:,} together'}: "
            f"the largest has {largest_volume:,}. Put "
            + ("the value in shards, one after the other" if one else "fewer values at once")
        )
        if together <= capacity:
            advice += ", use fewer volumes"
    hint = ""
    if (
        strategy is not None
        and _fits_spread(requested, volumes, items)
        and not strategy_calls.by_key(strategy)
    ):
        hint = (
            f". Strategy {type(strategy).__name__} puts all of a batch, or state dict, on one "
            "volume, and none has room for all of this one; with strategy 'hash' it is spread over "
            "all volumes, key by key"
        )
    in_copies = f", in {copies} copies ({in_all:,} in all)," if copies > 1 else ""
    return StoreFullError(
        f"a put of {requested:,} bytes{in_copies} does not fit: {used:,} of {capacity:,} bytes are "
        f"used ({leased:,} leased by readers{f' ({by_pid})' if by_pid else ''}, {unfinished:,} in "
        f"unfinished puts) over {len(volumes)} volume(s){pieces}; largest keys: {top}. "
        f"{advice}, or initialize with a larger capacity{hint}",
        details={
            "capacity_bytes": capacity,
            "used_bytes": used,
            "requested_bytes": in_all,
            "copies": copies,
            "free_bytes": free,
            "largest_free_bytes": largest_free,
            "largest_volume_bytes": largest_volume,
            "leased_bytes": leased,
            "unfinished_bytes": unfinished,
            "holders": holders,
            "largest": [[v.key, v.nbytes] for v in largest],
            **details,
        },
    )
