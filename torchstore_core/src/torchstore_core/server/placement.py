"""Checking and placing the items of a put, and the errors that say why not. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torchstore_core import boxes
from torchstore_core.boxes import Box
from torchstore_core.contracts.strategy import ClientFacts, Strategy
from torchstore_core.errors import PluginError, ProtocolError, StoreFullError
from torchstore_core.server.allocator import rounded
from torchstore_core.server.records import SessionRecord, Stored, VolumeRecord
from torchstore_core.values import StateDictMeta, TensorMeta
from torchstore_core.wire import messages as m

__all__ = ["check_item", "check_key", "checked_box", "checked_items", "find_place", "full_error"]
__all__ += ["session_bytes"]

# Of a tensor, or of a mesh: more than torch has.
_MAX_DIMS = 64


def session_bytes(session: SessionRecord) -> tuple[int, int]:
    """Bytes a session leases, and bytes of its unfinished puts."""
    leased = sum(v.nbytes for held in session.leases.values() for v in held if v is not None)
    return leased, sum(txn.nbytes for txn in session.txns.values())


def check_key(item: m.PutItem) -> None:
    """It has one, not too long; ``ProtocolError`` if not."""
    if not 0 < len(item.key) <= m.MAX_KEY:
        raise ProtocolError(f"a key has 1 to {m.MAX_KEY} characters, not {len(item.key)}")


def check_item(item: m.PutItem) -> None:
    """An item to store makes sense by itself.

    Raises:
        ProtocolError: it does not.
    """
    check_key(item)
    if type(item.meta) is StateDictMeta:
        raise ProtocolError(f"{item.key!r}: a state dict is put by its entries", key=item.key)
    if item.data is not None:
        if len(item.data) != item.nbytes:
            raise ProtocolError(
                f"{item.key!r}: {len(item.data)} bytes came, {item.nbytes} were announced"
            )
    elif not 0 < item.nbytes < 1 << 60:
        raise ProtocolError(f"{item.key!r}: cannot place {item.nbytes} bytes", key=item.key)


def checked_items(items: Sequence[m.PutItem]) -> tuple[int, int, list[int]]:
    """Bytes to place (rounded), bytes inline, and the sizes to place, in order."""
    placed = inline = 0
    sizes: list[int] = []
    for item in items:
        check_item(item)
        if item.data is not None:
            inline += item.nbytes
        else:
            sizes.append(item.nbytes)
            placed += rounded(item.nbytes)
    if placed >= 1 << 60:
        raise ProtocolError(f"cannot place {placed} bytes")
    return placed, inline, sizes


def checked_box(item: m.PutItem) -> Box | None:
    """The shard that an item is; None if it is the whole value.

    Raises:
        ProtocolError: it is not inside the tensor, or no tensor.
    """
    part = item.part
    if part is None:
        return None
    meta = item.meta
    if not isinstance(meta, TensorMeta):
        raise ProtocolError(f"{item.key!r}: only a tensor has shards", key=item.key)
    mesh = len(part.mesh_shape)
    if len(part.coordinates) != mesh or max(mesh, len(meta.shape)) > _MAX_DIMS:
        raise ProtocolError(
            f"{item.key!r}: a shard has at most {_MAX_DIMS} dimensions, and as many coordinates as "
            "its mesh",
            key=item.key,
        )
    try:
        box = Box(part.offsets, part.local_shape)
        target = boxes.whole(meta.shape)
        inside = part.global_shape == meta.shape and target.contains(box)
    except ValueError as error:
        raise ProtocolError(f"{item.key!r}: {error}", key=item.key) from error
    if not inside or bool(box.numel) != bool(item.nbytes) or item.nbytes % max(box.numel, 1):
        raise ProtocolError(
            f"{item.key!r}: a shard of {item.nbytes} bytes, {list(box.shape)} at "
            f"{list(box.offset)}, is not one of {list(meta.shape)}",
            key=item.key,
        )
    return None if box == target else box


def allocate(volume: VolumeRecord, placed: int, sizes: list[int]) -> list[int] | None:
    """One run for all sizes if there is room for it, else as few pieces as it takes."""
    if not sizes:
        return []
    allocator = volume.allocator
    start = allocator.allocate(placed)
    if start is not None:
        offsets: list[int] = []
        for size in sizes:
            offsets.append(start)
            start += rounded(size)
        return offsets
    pieces: list[int] = []
    for at, size in enumerate(sizes):
        offset = allocator.allocate(size)
        if offset is None:
            allocator.free(zip(pieces, sizes[:at], strict=True))
            return None
        pieces.append(offset)
    return pieces


def find_place(
    strategy: Strategy,
    volumes: Sequence[VolumeRecord],
    facts: ClientFacts,
    placed: int,
    inline: int,
    sizes: list[int],
) -> tuple[VolumeRecord, list[int]] | None:
    """The first volume of the strategy's order with room, and an offset for each size; None if
    there is none.

    Raises:
        PluginError: the strategy names no volume, or one that is not there.
    """
    name = type(strategy).__name__
    order: Sequence[int] = (0,)
    if len(volumes) > 1:
        order = strategy.place(facts, [v.facts() for v in volumes], placed + inline)
    if not order:
        raise PluginError(f"strategy {name} named no volume")
    for index in order:
        if not 0 <= index < len(volumes):
            raise PluginError(f"strategy {name} named volume {index} of {len(volumes)}")
        volume = volumes[index]
        if volume.used + placed + inline <= volume.info.capacity_bytes:
            offsets = allocate(volume, placed, sizes)
            if offsets is not None:
                return volume, offsets
    return None


def full_error(
    requested: int,
    volumes: Sequence[VolumeRecord],
    sessions: Iterable[SessionRecord],
    values: Iterable[Stored],
    waiting: Mapping[str, int],
) -> StoreFullError:
    """The error of a put that does not fit: who holds what.

    ``waiting``: bytes in versions that are not whole yet, by key.
    """
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
    largest_free = max((v.allocator.largest_free for v in volumes), default=0)
    pieces = f"; {free:,} are free, {largest_free:,} of them in one piece" if free else ""
    top = ", ".join(f"{v.key!r} {v.nbytes:,}" for v in largest) or "none"
    by_pid = ", ".join(f"pid {h['pid']}: {h['leased']:,}" for h in holders if h["leased"])
    details: dict[str, object] = {}
    advice = "Delete keys, drop tensors that zero-copy gets returned"
    if waiting:
        details["waiting"] = dict(waiting)
        most = max(waiting, key=lambda key: waiting[key])
        top += (
            f"; {sum(waiting.values()):,} in versions that wait for other participants ({most!r})"
        )
        advice += ", see who is missing with `torchstore stat`"
    return StoreFullError(
        f"a put of {requested:,} bytes does not fit: {used:,} of {capacity:,} bytes are used "
        f"({leased:,} leased by readers{f' ({by_pid})' if by_pid else ''}, {unfinished:,} in "
        f"unfinished puts) over {len(volumes)} volume(s){pieces}; largest keys: {top}. "
        f"{advice}, or initialize with a larger capacity",
        details={
            "capacity_bytes": capacity,
            "used_bytes": used,
            "requested_bytes": requested,
            "free_bytes": free,
            "largest_free_bytes": largest_free,
            "leased_bytes": leased,
            "unfinished_bytes": unfinished,
            "holders": holders,
            "largest": [[v.key, v.nbytes] for v in largest],
            **details,
        },
    )
