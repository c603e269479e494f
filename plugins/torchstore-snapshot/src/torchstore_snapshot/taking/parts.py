"""What a rank has, as the others need to know it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from torchstore_snapshot.committing.merging import Part
from torchstore_snapshot.format.file_headers import header_digest
from torchstore_snapshot.format.hashes import BLOCK, Digest
from torchstore_snapshot.format.manifest import DataFile, Entry, ObjectEntry, Piece, TensorEntry
from torchstore_snapshot.format.weight_maps import map_name
from torchstore_snapshot.garbage import no_collections
from torchstore_snapshot.taking.collecting import Item
from torchstore_snapshot.taking.planning import PlannedFile
from torchstore_snapshot.taking.reusing import Reused

__all__ = ["maps_of", "part_of"]


@no_collections()
def part_of(
    rank: int,
    keys: Sequence[str],
    items: Sequence[Item],
    files: Sequence[PlannedFile],
    digests: Sequence[Sequence[Digest]],
    reused: Sequence[Reused] = (),
) -> Part:
    """Describe what this rank has written, and what it refers to in files of earlier snapshots."""
    pieces: dict[int, list[Piece]] = {}
    described: list[DataFile] = []
    for index, (file, hashes) in enumerate(zip(files, digests, strict=True)):
        head = header_digest(file.layout.header)
        described.append(DataFile(file.name, file.layout.nbytes, rank, block=BLOCK, header=head))
        columns = zip(file.units, file.layout.starts, hashes, strict=True)
        for unit, start, digest in columns:
            item = items[unit.item]
            if item.is_tensor:
                source = item.pieces[unit.piece]
                nbytes, where = source.tensor.nbytes, source.slice
            else:
                nbytes, where = len(item.data), None
            piece = Piece(index, start, nbytes, digest.whole, where, digest.blocks)
            pieces.setdefault(unit.item, []).append(piece)
    index_of: dict[DataFile, int] = {}
    for unit, home, piece in reused:
        index = index_of.setdefault(home, len(described))
        if index == len(described):
            described.append(home)
        position = items[unit.item].pieces[unit.piece].slice
        moved = msgspec.structs.replace(piece, file=index, slice=position)
        pieces.setdefault(unit.item, []).append(moved)
    part = Part(rank, list(keys), described, {key: {} for key in keys}, [], [])
    for number, item in enumerate(items):
        own = pieces.get(number, [])
        entry: Entry
        if item.is_tensor:
            entry = TensorEntry(item.dtype, item.shape, tuple(own), item.steps)
        elif own:
            entry = ObjectEntry(item.codec, piece=own[0], steps=item.steps)
        else:
            entry = ObjectEntry(item.codec, item.data, steps=item.steps)
        part.entries[item.key][item.name] = entry
        if item.common:
            part.common.append((item.key, item.name, item.mesh))
        if item.tied is not None:
            first = items[item.tied]
            part.ties.append((item.key, item.name, first.key, first.name))
    return part


def maps_of(items: Iterable[Item]) -> list[str]:
    """Return the names of the weight maps that a snapshot of these entries may have."""
    keys: dict[str, bool] = {}
    for item in items:
        if item.is_tensor:
            whole = len(item.pieces) == 1 and item.pieces[0].slice is None
            keys[item.key] = keys.get(item.key, True) and whole
    return [map_name(key) for key, whole in keys.items() if whole]
