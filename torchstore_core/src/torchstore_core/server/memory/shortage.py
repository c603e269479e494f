"""Functions that explain why a put does not fit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torchstore_core.contracts.strategy import Strategy
from torchstore_core.errors import StoreFullError
from torchstore_core.server.index.records import SessionRecord, Stored
from torchstore_core.server.memory import strategy_calls
from torchstore_core.server.memory.allocator import rounded
from torchstore_core.server.memory.volume_record import VolumeRecord
from torchstore_core.wire import messages as m

# How many processes a message names.
_MOST_NAMED = 8


def session_bytes(session: SessionRecord) -> tuple[int, int]:
    """Return the bytes that a session leases, however often, and those of its unfinished puts."""
    held = {v for some in session.leases.values() for v in some if v is not None}
    leased = sum(v.nbytes * len(v.places) for v in held)
    return leased, sum(txn.nbytes for txn in session.txns.values())


def all_lost_error(
    strategy: Strategy, volumes: Sequence[VolumeRecord], order: Iterable[int]
) -> StoreFullError:
    """Return the error for a put of which all possible volumes are lost."""
    named = [volumes[at] for at in order]
    why = "; ".join(f"{v.info.id}: {v.closed}" for v in named)
    all_of = (
        "all volumes are" if len(named) == len(volumes) else "every volume that it may go to is"
    )
    drained = [v.info.id for v in named if v.draining and not v.lost]
    advice = "Initialize the store again, or with a strategy that uses the other volumes"
    if drained:
        advice = f"Put {drained[0]} back in service (`torchstore drain --undo {drained[0]}`)"
    return StoreFullError(
        f"there is no memory for this put: {all_of} lost{' or drained' if drained else ''} "
        f"({why}), says strategy {type(strategy).__name__}. {advice}",
        details={"lost": {v.info.id: v.closed for v in named}},
    )


def most_bytes(strategy: Strategy, volumes: Sequence[VolumeRecord]) -> int:
    """Return the bytes of the largest put that would fit if everything else were deleted."""
    capacities = [v.info.capacity_bytes for v in volumes if not v.closed]
    return sum(capacities) if strategy_calls.by_key(strategy) else max(capacities, default=0)


def _fits_spread(
    requested: int, volumes: Sequence[VolumeRecord], items: Sequence[m.PutItem]
) -> bool:
    """Return whether a put fits no single volume, but would fit if its keys were placed apart."""
    rooms = [v.info.capacity_bytes - v.used for v in volumes]
    keys: dict[str, int] = {}
    for item in items:
        keys[item.key] = keys.get(item.key, 0) + item.nbytes
    largest = max(keys.values(), default=0)
    return len(keys) > 1 and largest <= max(rooms, default=0) < requested <= sum(rooms)


def _needs_one_volume(requested: int, strategy: Strategy | None, items: Sequence[m.PutItem]) -> int:
    """Return the bytes of a put that must go to one volume: all of them, or those of its largest
    key if keys are placed separately.
    """
    if strategy is None or not strategy_calls.by_key(strategy):
        return requested
    keys: dict[str, int] = {}
    for item in items:
        nbytes = item.nbytes if item.data is not None else rounded(item.nbytes)
        keys[item.key] = keys.get(item.key, 0) + nbytes
    return max(keys.values(), default=0)


def _in_pieces(requested: int, volumes: Sequence[VolumeRecord], sizes: Sequence[int]) -> bool:
    """Return whether a put does not fit only because free memory is fragmented."""
    if not sizes:
        return False
    if requested <= sum(v.free for v in volumes):
        largest = max(sizes)
        roomy = [v for v in volumes if v.free >= largest]
        if roomy and all(v.allocator.largest_free < largest for v in roomy):
            return True
    for volume in volumes:
        if requested <= volume.free:
            found = volume.allocator.allocate_all(sum(map(rounded, sizes)), sizes)
            if found is None:
                return True
            volume.allocator.free(zip(found, sizes, strict=True))
    return False


def _by_pid(holders: Sequence[Mapping[str, int]], what: str) -> str:
    """Return the processes that have most of something, and how much; empty if none has any."""
    having = sorted((h for h in holders if h[what]), key=lambda h: -h[what])
    named = [f"pid {h['pid']}: {h[what]:,}" for h in having[:_MOST_NAMED]]
    if len(having) > _MOST_NAMED:
        named.append(f"and {len(having) - _MOST_NAMED:,} more")
    return f" ({', '.join(named)})" if named else ""


def full_error(
    requested: int,
    volumes: Sequence[VolumeRecord],
    sessions: Iterable[SessionRecord],
    values: Iterable[Stored],
    waiting: Mapping[str, int],
    strategy: Strategy | None = None,
    items: Sequence[m.PutItem] = (),
    *,
    held: int = 0,
) -> StoreFullError:
    """Return the error for a put that does not fit; it lists the holders of the memory.

    Args:
        requested: the bytes of the put (of one copy).
        waiting: the bytes held by unfinished versions, by key.
        strategy, items: the store's strategy and the items of the put, to report if the put would
            fit with another strategy.
        held: the bytes that are there only because references hold them.
    """
    volumes = [v for v in volumes if not v.closed]
    # The memory that the hosts have, if that is what is lacking.
    lacking = [v.memory.left for v in volumes if v.allocator.refused and requested <= v.free]
    left = max([nbytes for nbytes in lacking if nbytes is not None], default=None)
    capacity = sum(v.info.capacity_bytes for v in volumes)
    used = sum(v.used for v in volumes)
    holders: list[dict[str, int]] = []
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
    in_pieces = left is None and _in_pieces(requested, volumes, sizes)
    top = ", ".join(f"{v.key!r} {v.nbytes:,}" for v in largest) or "none"
    details: dict[str, object] = {}
    advice = "Delete keys, drop tensors that zero-copy gets returned"
    larger = "initialize with a larger capacity"
    if left is not None:
        details["host_left_bytes"] = left
        pieces = (
            f"; {free:,} are free, but the host, or a cgroup, has only {left:,} bytes of memory "
            "left, a part of them in reserve"
        )
        larger = "end what else uses memory there"
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
    if held:
        details["held_bytes"] = held
        top += f"; {held:,} only for references"
        advice += ", drop references (`torchstore status --refs` shows who has them)"
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
        f"used ({leased:,} leased by readers{_by_pid(holders, 'leased')}, {unfinished:,} in "
        f"unfinished puts{_by_pid(holders, 'unfinished')}) over {len(volumes)} volume(s)"
        f"{pieces}; largest keys: {top}. {advice}, or {larger}{hint}",
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
