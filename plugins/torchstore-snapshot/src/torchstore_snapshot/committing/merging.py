"""From what each rank has written to one manifest. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

from torchstore_core import boxes
from torchstore_core.errors import LayoutMismatchError
from torchstore_snapshot.format.manifest import (
    DataFile,
    Entries,
    Entry,
    Manifest,
    ObjectEntry,
    Piece,
    TensorEntry,
)
from torchstore_snapshot.garbage import no_collections

__all__ = ["Part", "check_complete", "merge"]


class Part(msgspec.Struct):
    """What one rank has, and what it has written of it. Pieces refer to its own files.

    Args:
        keys: of all its state dicts, also of empty ones.
        common: the entries that ranks have in common, as ``[key, name, mesh]``: all ranks if
            ``mesh`` is empty, otherwise those that name the same mesh.
        ties: entries with the same memory as others: ``[key, name, key of the other, its name]``.
    """

    rank: int
    keys: list[str]
    files: list[DataFile]
    entries: Entries
    common: list[tuple[str, str, str]]
    ties: list[tuple[str, str, str, str]]


@no_collections()
def merge(parts: Sequence[Part], take: str, created: float) -> Manifest:
    """Return the manifest of a snapshot whose ranks have written ``parts``, in the order of ranks.

    What all ranks have with equal values becomes one shared entry. (Values that nobody declared to
    be replicated are found to be equal by their hashes.) DTensors of one name on several meshes are
    as many tensors, unless their bytes are equal: each rank has that of its own mesh.

    Raises:
        LayoutMismatchError: no rank has some part of a sharded tensor.
    """
    files: list[DataFile] = []
    firsts: list[int] = []
    for part in parts:
        firsts.append(len(files))
        files += part.files
    shared: Entries = {}
    own: list[Entries] = [{} for _ in parts]
    common = [{(key, name): mesh for key, name, mesh in part.common} for part in parts]
    tied = [{(key, name) for key, name, *_ in part.ties} for part in parts]
    everything: dict[tuple[str, str], dict[int, Entry]] = {}
    for number, part in enumerate(parts):
        for key in part.keys:
            shared.setdefault(key, {})
        for key, named in part.entries.items():
            for name, entry in named.items():
                if (key, name) not in tied[number]:
                    moved = _moved(entry, firsts[number])
                    everything.setdefault((key, name), {})[number] = moved
    for (key, name), entries in everything.items():
        groups: dict[str, list[int]] = {}
        for number in entries:
            if (key, name) in common[number]:
                groups.setdefault(common[number][key, name], []).append(number)
        if groups:
            path = f"{key}/{name}"
            joined = {m: _joined(path, [entries[n] for n in g]) for m, g in groups.items()}
            if len({_content(entry) for entry in joined.values()}) == 1:
                shared[key][name] = next(iter(joined.values()))
                groups = {}
            for mesh, numbers in groups.items():
                for number in numbers:
                    own[number].setdefault(key, {})[name] = joined[mesh]
            for number, entry in entries.items():  # a rank that has something else of that name
                if (key, name) not in common[number]:
                    own[number].setdefault(key, {})[name] = entry
        elif len(entries) == len(parts) and len({_content(e) for e in entries.values()}) == 1:
            shared[key][name] = entries[0]
        else:
            for number, entry in entries.items():
                own[number].setdefault(key, {})[name] = entry
    for number, part in enumerate(parts):
        for key, name, key_of_first, first in part.ties:
            entry = part.entries[key][name]
            origin = shared.get(key_of_first, {}).get(first)
            home = shared if origin is not None else own[number]
            origin = origin or home[key_of_first][first]
            if isinstance(entry, TensorEntry) and isinstance(origin, TensorEntry):
                made = msgspec.structs.replace(entry, pieces=origin.pieces)
                home.setdefault(key, {}).setdefault(name, made)
    for key, named in shared.items():
        order = {name: at for part in parts for at, name in enumerate(part.entries.get(key, {}))}
        shared[key] = dict(sorted(named.items(), key=lambda entry: order[entry[0]]))
    has_own = any(own)
    return Manifest(take, created, len(parts), tuple(files), shared, tuple(own) if has_own else ())


def _moved(entry: Entry, by: int) -> Entry:
    """The same entry with other indices of files."""
    if not by:
        return entry
    if isinstance(entry, ObjectEntry):
        if entry.piece is None:
            return entry
        piece = msgspec.structs.replace(entry.piece, file=entry.piece.file + by)
        return msgspec.structs.replace(entry, piece=piece)
    pieces = tuple(msgspec.structs.replace(p, file=p.file + by) for p in entry.pieces)
    return msgspec.structs.replace(entry, pieces=pieces)


def _joined(path: str, entries: Sequence[Entry]) -> Entry:
    """The entry that consists of the pieces of all ranks."""
    first = entries[0]
    if not isinstance(first, TensorEntry):
        return first
    found: dict[object, Piece] = {}
    for entry in entries:
        if isinstance(entry, TensorEntry):
            for piece in entry.pieces:
                found.setdefault(piece.slice, piece)
    joined = msgspec.structs.replace(first, pieces=tuple(found.values()))
    check_complete(path, first.shape, joined.boxes())
    return joined


def _content(entry: Entry) -> object:
    """A hashable value that is equal for entries with equal values."""
    if isinstance(entry, ObjectEntry):
        digest = None if entry.piece is None else entry.piece.digest
        return entry.codec, entry.data, digest, entry.steps
    pieces = frozenset((p.digest, p.slice) for p in entry.pieces)
    return entry.dtype, entry.shape, pieces, entry.steps


def check_complete(path: str, shape: tuple[int, ...], found: Collection[boxes.Box]) -> None:
    """Raise LayoutMismatchError if boxes do not cover a tensor of this shape."""
    whole = boxes.whole(shape)
    gaps = [] if whole in found else boxes.missing(whole, list(found))
    if gaps:
        listed = ", ".join(f"{list(box.shape)} at {list(box.offset)}" for box in gaps[:3])
        raise LayoutMismatchError(
            f"{path!r}: no rank has {listed} of {list(shape)}; all ranks of a sharded tensor must "
            "take part in the snapshot",
            key=path,
            details={"missing": [[list(box.offset), list(box.shape)] for box in gaps]},
        )
