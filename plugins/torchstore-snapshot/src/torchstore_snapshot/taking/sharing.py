"""Which files the contents of a store go into: many small keys share them. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from torchstore_snapshot.taking.collecting import Item
from torchstore_snapshot.taking.planning import PlannedFile, Unit, plan_files

__all__ = ["plan_store_files"]

# So many state dicts have files of their own, the largest ones.
_APART_MAX = 64
# What the names of files that keys share begin with.
_SHARED = "store"


def plan_store_files(
    items: Sequence[Item],
    units: Sequence[Unit],
    take: str,
    state_dicts: Collection[str],
    file_max: int,
) -> tuple[list[PlannedFile], set[str]]:
    """Distribute the contents of a store over files, whose number depends on the bytes, not on the
    number of keys.

    Large state dicts have files of their own, which plain safetensors loads as what they are. All
    other keys share files: a value has the name of its key there, and an entry of a small state
    dict that of its state dict before its own.

    Args:
        state_dicts: the keys that are state dicts.

    Returns:
        The files, and the keys that share files.
    """
    sizes: Counter[str] = Counter()
    for unit in units:
        item = items[unit.item]
        if item.key in state_dicts:
            sizes[item.key] += (
                item.pieces[unit.piece].tensor.nbytes if item.is_tensor else len(item.data)
            )
    apart = {key for key, _ in sizes.most_common(_APART_MAX)}
    home = _SHARED
    while home in apart:
        home += "_"
    named: list[Item] = []
    for item in items:
        if item.key in apart:
            named.append(item)
        else:
            path = f"{item.key}/{item.name}" if item.key in state_dicts else item.key
            named.append(item._replace(key=home, name=path))
    sharing = {item.key for item in items if item.key not in apart}
    return plan_files(named, units, take, 0, file_max), sharing
