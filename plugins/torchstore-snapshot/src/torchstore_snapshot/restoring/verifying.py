"""Checks whether a snapshot is whole. Loads nothing, and is torch-free."""

from __future__ import annotations

from collections.abc import Iterator

from torchstore_snapshot.errors import SnapshotCorruptError, SnapshotReplacedError
from torchstore_snapshot.format.manifest import Manifest, ObjectEntry, Piece
from torchstore_snapshot.progress import Progress, metered
from torchstore_snapshot.restoring.checking import check_ranges, whole_piece
from torchstore_snapshot.restoring.files import Files
from torchstore_snapshot.restoring.outsides import check_outsides
from torchstore_snapshot.storage.base import Storage

__all__ = ["all_pieces", "verify_all"]


def all_pieces(manifest: Manifest) -> Iterator[tuple[str, Piece]]:
    """Return every piece of a snapshot, with the path of its object: ``"key/name"``, and
    ``"rank/key/name"`` if only that rank has it.
    """
    for rank, entries in enumerate((manifest.shared, *manifest.own), start=-1):
        for key, named in entries.items():
            for name, entry in named.items():
                path = f"{key}/{name}" if rank < 0 else f"{rank}/{key}/{name}"
                if not isinstance(entry, ObjectEntry):
                    yield from ((path, piece) for piece in entry.pieces)
                elif entry.piece is not None:
                    yield path, entry.piece


def verify_all(
    storage: Storage, manifest: Manifest, progress: Progress
) -> dict[str, SnapshotCorruptError]:
    """Compare the hashes of all pieces and headers, and the maps. See ``Snapshot.verify``."""
    damaged: dict[str, SnapshotCorruptError] = {}
    by_file: dict[int, list[tuple[str, Piece]]] = {}
    for path, piece in all_pieces(manifest):
        by_file.setdefault(piece.file, []).append((path, piece))
    distinct = {(piece.file, piece.start): piece.nbytes for _, piece in all_pieces(manifest)}
    with (
        Files(storage, manifest) as files,
        metered(progress, "verifying", sum(distinct.values())) as advance,
    ):
        for index, mine in by_file.items():
            try:
                files.reader(index)
                files.map(index)
                check_ranges(files, [whole_piece(*each) for each in mine], advance)
            except SnapshotReplacedError:
                raise  # nothing is damaged
            except SnapshotCorruptError as error:
                if error.key is None:  # the file as a whole
                    damaged |= dict.fromkeys((path for path, _ in mine), error)
                    continue
                for path, piece in mine:
                    try:
                        check_ranges(files, [whole_piece(path, piece)])
                    except SnapshotCorruptError as own:
                        damaged[path] = own
        known = {error.details["file"] for error in damaged.values() if error.key is None}
        outside = check_outsides(storage, manifest, files)
    return damaged | {name: error for name, error in outside.items() if name not in known}
