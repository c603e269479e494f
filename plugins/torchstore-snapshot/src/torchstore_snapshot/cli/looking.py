"""What is in a snapshot, or in a folder of snapshots, from manifests alone. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator

from torchstore_core import boxes
from torchstore_core.errors import TorchStoreError
from torchstore_snapshot.cli import reports
from torchstore_snapshot.errors import SnapshotNotFoundError
from torchstore_snapshot.format.manifest import Entry, Manifest, ObjectEntry, TensorEntry
from torchstore_snapshot.format.paths import MANIFEST
from torchstore_snapshot.format.weight_maps import weight_maps
from torchstore_snapshot.series.counting import read_head
from torchstore_snapshot.series.survey import Place
from torchstore_snapshot.storage.base import Storage
from torchstore_snapshot.storage.opening import leavings, open_storage, read_manifest

__all__ = ["describe", "entries_of", "list_path", "show_object", "show_snapshot"]


def entries_of(manifest: Manifest) -> Iterator[tuple[str, Entry]]:
    """Return every object by ``key/name``, or by ``rank/key/name`` if only that rank has it."""
    for rank, entries in enumerate((manifest.shared, *manifest.own), start=-1):
        for key, named in entries.items():
            for name, entry in named.items():
                yield (f"{key}/{name}" if rank < 0 else f"{rank}/{key}/{name}"), entry


def list_path(path: str, prefix: str) -> reports.ListReport:
    """List the objects of a snapshot; if ``path`` is a folder of snapshots, list those.

    Raises:
        SnapshotNotFoundError: it is neither.
    """
    storage = open_storage(path)
    try:
        manifest = read_manifest(storage)
    except SnapshotNotFoundError:
        found = [_line(name, child) for name, child in _children(storage) if name >= prefix]
        found = [line for line in found if line.name.startswith(prefix)]
        if not found:
            raise
        return reports.ListReport(storage.url, [], sorted(found, key=_age))
    lines = [
        _object(where, entry) for where, entry in entries_of(manifest) if where.startswith(prefix)
    ]
    return reports.ListReport(storage.url, sorted(lines, key=lambda line: line.path), [])


def _children(storage: Storage) -> Iterator[tuple[str, Storage]]:
    """The snapshots directly inside a folder."""
    member = Place.at(storage.url).member
    for name in sorted(member.siblings()):
        child = member.sibling(name)
        if any(info.name == MANIFEST for info in child.list()):
            yield name, child


def _age(line: reports.SnapshotLine) -> tuple[int, float, str]:
    """As :attr:`~torchstore_snapshot.format.manifest.Manifest.age`."""
    return line.sequence, line.created, line.take


def _line(name: str, storage: Storage) -> reports.SnapshotLine:
    try:
        manifest = read_manifest(storage)
    except TorchStoreError as error:
        head = read_head(storage)
        sequence = 0 if head is None else head.sequence
        return reports.SnapshotLine(name, "", 0.0, 0, 0, 0, error.message, sequence)
    return reports.SnapshotLine(
        name,
        manifest.take,
        manifest.created,
        manifest.world_size,
        sum(1 for _ in entries_of(manifest)),
        _nbytes(manifest),
        sequence=manifest.sequence,
    )


def _nbytes(manifest: Manifest) -> int:
    return sum(_object(path, entry).nbytes for path, entry in entries_of(manifest))


def _object(path: str, entry: Entry) -> reports.ObjectLine:
    if isinstance(entry, TensorEntry):
        return reports.ObjectLine(
            path, "tensor", entry.dtype, entry.shape, len(entry.pieces), entry.nbytes
        )
    nbytes = len(entry.data) if entry.piece is None else entry.piece.nbytes
    return reports.ObjectLine(path, entry.codec, "", None, int(entry.piece is not None), nbytes)


def describe(entry: Entry) -> str:
    """Return what an object is, in a few words.

    >>> describe(TensorEntry("float32", (2, 3), ()))
    'float32 [2, 3]'
    """
    if isinstance(entry, ObjectEntry):
        return entry.codec
    return f"{entry.dtype} {list(entry.shape)}"


def show_snapshot(path: str) -> reports.SnapshotReport:
    """Return everything about a snapshot as a whole.

    Raises:
        SnapshotNotFoundError, SnapshotFormatError, SnapshotCorruptError: it has no manifest that
            can be used.
    """
    storage = open_storage(path)
    manifest = read_manifest(storage)
    keys: dict[str, int] = {}
    for entries in (manifest.shared, *manifest.own):
        for key, named in entries.items():
            keys[key] = keys.get(key, 0) + len(named)
    own = [file for file in manifest.files if not file.snapshot]
    others = [file for file in manifest.files if file.snapshot]
    return reports.SnapshotReport(
        path=storage.url,
        take=manifest.take,
        created=manifest.created,
        world_size=manifest.world_size,
        keys=dict(sorted(keys.items())),
        objects=sum(keys.values()),
        nbytes=_nbytes(manifest),
        files=len(own),
        file_bytes=sum(file.nbytes for file in own),
        referred=sorted({file.snapshot for file in others}),
        referred_bytes=sum(file.nbytes for file in others),
        store=bool(manifest.store),
        leavings=leavings(storage, manifest),
        weight_maps=sorted(weight_maps(manifest)),
    )


def show_object(path: str, name: str) -> reports.ObjectReport:
    """Return everything about one object of a snapshot.

    Raises:
        SnapshotNotFoundError: there is no such object, or no snapshot.
    """
    storage = open_storage(path)
    manifest = read_manifest(storage)
    known = dict(entries_of(manifest))
    rank, _, rest = name.partition("/")
    if name not in known and rank.isdecimal():
        name = rest  # what ranks have in common, as get_manifest() names it
    entry = known.get(name)
    if entry is None:
        raise SnapshotNotFoundError(
            f"the snapshot {storage.url!r} has no {name!r}; `torchstore snapshot ls` lists what it "
            "has",
            key=name,
            details={"path": storage.url},
        )
    line = _object(name, entry)
    if isinstance(entry, TensorEntry):
        found = list(zip(entry.boxes(), entry.pieces, strict=True))
    else:
        found = [(boxes.whole((p.nbytes,)), p) for p in (entry.piece,) if p is not None]
    pieces = [
        reports.PieceLine(
            box.offset, box.shape, manifest.files[p.file].name, p.start, p.nbytes, p.digest
        )
        for box, p in found
    ]
    return reports.ObjectReport(
        storage.url, name, line.kind, line.dtype, line.shape, line.nbytes, pieces
    )
