"""Checks what other programs read of a snapshot: the headers of its data files, and the maps of
weights beside them. Restoring uses neither. Torch-free.
"""

from __future__ import annotations

import msgspec

from torchstore_snapshot.errors import SnapshotCorruptError, SnapshotReplacedError
from torchstore_snapshot.format.file_headers import (
    Expected,
    contradiction,
    expected_in,
    header_digest,
)
from torchstore_snapshot.format.manifest import Manifest
from torchstore_snapshot.format.safetensors_files import ALIGNMENT
from torchstore_snapshot.format.weight_maps import weight_maps
from torchstore_snapshot.restoring.files import Files
from torchstore_snapshot.storage.base import Storage

__all__ = ["check_outsides"]

# The length of a header, before it.
_LENGTH = 8


def check_outsides(
    storage: Storage, manifest: Manifest, files: Files
) -> dict[str, SnapshotCorruptError]:
    """Return what is damaged, by the name of the file. A map of weights that is missing is not: a
    garbage collection writes it again.

    Raises:
        SnapshotReplacedError: another snapshot is there by now, or none.
    """
    damaged: dict[str, SnapshotCorruptError] = {}
    expected = expected_in(manifest)
    for index, file in enumerate(manifest.files):
        try:
            what = _header_fault(files, index, file.header, expected.get(index, []))
        except SnapshotReplacedError:
            raise  # nothing is damaged
        except SnapshotCorruptError as error:
            damaged[file.name] = error
            continue
        if what is not None:
            damaged[file.name] = _error(
                storage,
                file.name,
                f"{what}: programs that read this file without the manifest would get wrong "
                "tensors from it; restore the snapshot, whose objects are checked on their own, "
                "and take it again",
            )
    for name, data in weight_maps(manifest).items():
        try:
            there = storage.read(name)
        except FileNotFoundError:
            continue
        if not _same_map(there, data):
            what = "does not say which file has which tensor of this snapshot"
            replaced = files.replaced(name, what)
            if replaced is not None:
                raise replaced
            damaged[name] = _error(storage, name, f"{what}; remove it, and gc writes it again")
    return damaged


def _header_fault(files: Files, index: int, digest: str, expected: list[Expected]) -> str | None:
    reader = files.reader(index)
    # The header ends where the first tensor begins, unless that is not in the snapshot.
    most = min((each.start for each in expected), default=reader.nbytes)
    header = bytearray(min(most, ALIGNMENT))  # the data begins at a multiple of it
    try:
        reader.read_into(0, header)
        nbytes = _LENGTH + int.from_bytes(header[:_LENGTH], "little")
        if not _LENGTH <= nbytes <= most or nbytes % ALIGNMENT:
            return "has a header of another length than was written"
        if nbytes > len(header):
            rest = bytearray(nbytes - len(header))
            reader.read_into(len(header), rest)
            header += rest
    except (EOFError, FileNotFoundError) as error:
        raise files.corrupt(index, "became shorter, or was removed") from error
    if digest:
        return None if header_digest(bytes(header)) == digest else "has another header than written"
    return contradiction(bytes(header), reader.nbytes, expected)


def _same_map(there: bytes, data: bytes) -> bool:
    if there == data:
        return True
    try:
        return bool(msgspec.json.decode(there) == msgspec.json.decode(data))
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False


def _error(storage: Storage, name: str, what: str) -> SnapshotCorruptError:
    return SnapshotCorruptError(
        f"the snapshot {storage.url!r} is damaged: {name!r} {what}",
        details={"path": storage.url, "file": name},
    )
