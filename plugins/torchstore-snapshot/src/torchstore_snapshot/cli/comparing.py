"""Checks a snapshot, and compares two. Torch is imported only to compare tensors that are cut
differently.
"""

from __future__ import annotations

import time

from torchstore_snapshot.cli import reports
from torchstore_snapshot.cli.looking import describe, entries_of
from torchstore_snapshot.format.manifest import Entry, ObjectEntry, Piece, TensorEntry
from torchstore_snapshot.progress import Progress
from torchstore_snapshot.restoring.verifying import all_pieces, verify_all
from torchstore_snapshot.storage.opening import is_remote, open_storage, read_manifest
from torchstore_snapshot.storage.settings import current

__all__ = ["compare", "verify"]


def verify(path: str, progress: Progress) -> reports.Verified:
    """Read everything in a snapshot and compare all hashes.

    Raises:
        SnapshotNotFoundError, SnapshotFormatError, SnapshotCorruptError: it has no manifest that
            can be used.
    """
    storage = open_storage(path)
    manifest = read_manifest(storage)
    start = time.perf_counter()
    found = verify_all(storage, manifest, progress)
    distinct = {(piece.file, piece.start): piece.nbytes for _, piece in all_pieces(manifest)}
    damaged = [
        reports.Damage(where, str(error.details.get("file", "")), error.message)
        for where, error in sorted(found.items())
    ]
    seconds = time.perf_counter() - start
    return reports.Verified(storage.url, not damaged, sum(distinct.values()), seconds, damaged)


def compare(before: str, after: str) -> reports.DifferenceReport:
    """Compare two snapshots: by the hashes of their pieces, so without reading tensors, except for
    those that are cut differently.

    Raises:
        SnapshotNotFoundError, SnapshotFormatError, SnapshotCorruptError: one of them has no
            manifest that can be used, or a tensor that has to be read is damaged.
    """
    old, new = open_storage(before), open_storage(after)
    there = dict(entries_of(read_manifest(old)))
    here = dict(entries_of(read_manifest(new)))
    found: list[reports.Difference] = []
    for path in sorted({*there, *here}):
        a, b = there.get(path), here.get(path)
        change = _change(old.url, new.url, path, a, b)
        if change:
            texts = ("" if entry is None else describe(entry) for entry in (a, b))
            found.append(reports.Difference(path, change, *texts))
    same = len({*there, *here}) - len(found)
    return reports.DifferenceReport(old.url, new.url, same, found)


def _change(old: str, new: str, path: str, a: Entry | None, b: Entry | None) -> str:
    if a is None or b is None:
        return "added" if a is None else "removed"
    if isinstance(a, ObjectEntry) or isinstance(b, ObjectEntry):
        if type(a) is not type(b) or describe(a) != describe(b):
            return "kind"
        return "" if _value(a) == _value(b) else "contents"
    if a.shape != b.shape:
        return "shape"
    if a.dtype != b.dtype:
        return "dtype"
    if [_place(p) for p in a.pieces] == [_place(p) for p in b.pieces]:
        same = [p.digest for p in a.pieces] == [p.digest for p in b.pieces]
    else:
        same = _equal(old, new, path)
    return "" if same else "contents"


def _place(piece: Piece) -> object:
    return None if piece.slice is None else (piece.slice.offsets, piece.slice.local_shape)


def _value(entry: TensorEntry | ObjectEntry) -> object:
    if isinstance(entry, TensorEntry):
        return None
    return entry.data if entry.piece is None else entry.piece.digest


def _equal(old: str, new: str, path: str) -> bool:
    """Whether a tensor has the same bits in both snapshots."""
    import torch

    from torchstore_core.clients.values.tensors import byte_like
    from torchstore_snapshot.api.snapshot import Snapshot

    options = current()
    a, b = (
        Snapshot(where, storage_options=options if is_remote(where) else None).read_object(path)
        for where in (old, new)
    )
    a, b = byte_like(a), byte_like(b)
    return torch.equal(a, b)
