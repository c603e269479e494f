"""Which rank writes which pieces into which files.

Pure: every rank plans alone, from what all ranks have told each other, with the same result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from torchstore_core import boxes
from torchstore_core.errors import LayoutMismatchError
from torchstore_core.machine.copying import copy_threads
from torchstore_snapshot.committing.merging import check_complete
from torchstore_snapshot.format.paths import data_file
from torchstore_snapshot.format.safetensors_files import (
    RESERVED,
    Layout,
    Stored,
    group,
    lay_out,
)
from torchstore_snapshot.taking.collecting import Item, LocalPiece

__all__ = ["INLINE_MAX", "Holding", "PlannedFile", "Unit", "holdings"]
__all__ += ["plan_files", "split_work"]

#: Values that are not tensors and take up to this many bytes are part of the manifest.
INLINE_MAX = 64 << 10
# Files of this size and more are worth writing at the same time as others: the kernel lets only one
# thread at a time write to a file.
_SPREAD_MIN = 64 << 20


class Holding(msgspec.Struct, array_like=True, frozen=True):
    """A box of a tensor that a rank has and that other ranks may have, too: what the ranks tell
    each other.
    """

    path: str
    dtype: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    extent: tuple[int, ...]
    nbytes: int
    mesh: str = ""


class Unit(NamedTuple):
    """Something that this rank writes: the piece of an item, or the bytes of a value.

    Args:
        item: the index of the item.
        piece: which of the item's pieces it is; the only one if the item is not a tensor.
    """

    item: int
    piece: int


class PlannedFile(NamedTuple):
    """A file that this rank writes.

    Args:
        units: what it contains, in the order of ``layout.starts``.
    """

    name: str
    layout: Layout
    units: list[Unit]


def holdings(items: Sequence[Item]) -> tuple[list[Holding], int]:
    """Return what this rank could write in place of other ranks, and the number of bytes that only
    this rank can write.
    """
    found: list[Holding] = []
    alone = 0
    for item in items:
        if item.tied is not None:
            continue
        path = f"{item.key}/{item.name}"
        for piece in item.pieces:
            if not item.common:
                alone += piece.tensor.nbytes
                continue
            box = piece.box
            nbytes = piece.tensor.nbytes
            found.append(
                Holding(path, item.dtype, item.shape, box.offset, box.shape, nbytes, item.mesh)
            )
    return found, alone


def split_work(
    items: Sequence[Item], rank: int, everyone: Sequence[tuple[list[Holding], int]]
) -> list[Unit]:
    """Return what this rank writes. A box that several ranks have is written by one of them; the
    bytes are balanced over the ranks.

    Args:
        everyone: the :func:`holdings` of all ranks, by rank.

    Raises:
        LayoutMismatchError: ranks of one mesh have one tensor with different dtypes or global
            shapes, or none of them has some part of it. All ranks raise this.
    """
    load = [alone for _, alone in everyone]
    holders: dict[Holding, list[int]] = {}
    seen: dict[tuple[str, str], tuple[str, tuple[int, ...]]] = {}
    held: dict[tuple[str, str], set[boxes.Box]] = {}
    for other, (theirs, _) in enumerate(everyone):
        for holding in theirs:
            is_a, which = (holding.dtype, holding.shape), (holding.path, holding.mesh)
            before = seen.setdefault(which, is_a)
            if before != is_a:
                raise LayoutMismatchError(
                    f"{holding.path!r} is {is_a[0]} {list(is_a[1])} on rank {other}, and "
                    f"{before[0]} {list(before[1])} on a rank before it",
                    key=holding.path,
                )
            held.setdefault(which, set()).add(boxes.Box(holding.offset, holding.extent))
            holders.setdefault(holding, []).append(other)
    for (path, mesh), found in held.items():
        check_complete(path, seen[path, mesh][1], found)
    mine: set[tuple[str, str, tuple[int, ...], tuple[int, ...]]] = set()
    for holding, ranks in sorted(
        holders.items(), key=lambda h: (-h[0].nbytes, h[0].path, h[0].offset)
    ):
        chosen = min(ranks, key=lambda r: (load[r], r))
        load[chosen] += holding.nbytes
        if chosen == rank:
            mine.add((holding.path, holding.mesh, holding.offset, holding.extent))
    units: list[Unit] = []
    for index, item in enumerate(items):
        if item.tied is not None:
            continue
        if not item.is_tensor:
            if len(item.data) > INLINE_MAX:
                units.append(Unit(index, 0))
            continue
        if not item.common:
            units += [Unit(index, number) for number in range(len(item.pieces))]
            continue
        path = f"{item.key}/{item.name}"
        for number, piece in enumerate(item.pieces):
            box = piece.box
            key = path, item.mesh, box.offset, box.shape
            if key in mine:
                mine.discard(key)
                units.append(Unit(index, number))
    return units


def plan_files(
    items: Sequence[Item], units: Sequence[Unit], take: str, rank: int, file_max: int
) -> list[PlannedFile]:
    """Distribute what this rank writes over files, each with entries of one state dict.

    Whole tensors keep their names in the file, unless safetensors does not allow it. Parts have
    their position appended.
    """
    by_key: dict[str, list[tuple[Unit, Stored]]] = {}
    used: dict[str, set[str]] = {}
    for unit in units:
        item = items[unit.item]
        stored = _stored(item, unit)
        names = used.setdefault(item.key, {RESERVED})
        while stored.name in names:
            stored = stored._replace(name=stored.name + "'")
        names.add(stored.name)
        by_key.setdefault(item.key, []).append((unit, stored))
    files: list[PlannedFile] = []
    for key, members in by_key.items():
        sizes = [stored.nbytes for _, stored in members]
        for chosen in group(sizes, min(file_max, _spread(sizes))):
            name = data_file(key, take, rank, len(files))
            layout = lay_out([members[i][1] for i in chosen])
            files.append(PlannedFile(name, layout, [members[i][0] for i in chosen]))
    return files


def _spread(sizes: Sequence[int]) -> int:
    """Return how large files may be so that as many threads as there are have one each to write."""
    total = sum(sizes)
    files = min(copy_threads(), total // _SPREAD_MIN)
    return total // files + max(sizes) // 2 if files > 1 else total


def _stored(item: Item, unit: Unit) -> Stored:
    if not item.is_tensor:
        return Stored(f"{item.name}[object]", "uint8", (len(item.data),), len(item.data))
    piece: LocalPiece = item.pieces[unit.piece]
    name = item.name
    if piece.slice is not None:
        spans = zip(piece.slice.offsets, piece.slice.local_shape, strict=True)
        name += "[" + ",".join(f"{start}:{start + extent}" for start, extent in spans) + "]"
    shape = tuple(piece.tensor.shape)
    return Stored(name, item.dtype, shape, piece.tensor.nbytes)
