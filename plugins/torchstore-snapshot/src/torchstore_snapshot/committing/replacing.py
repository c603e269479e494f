"""What a take finds at its path, and whether it may replace it: decided before anything is written.

A snapshot may be replaced if that was asked for, also one whose manifest is damaged: whoever takes
another one at exactly its path wants to be rid of it. One of a newer version is never replaced, and
neither is a file that no take has written, or a folder.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import msgspec

from torchstore_snapshot.committing.options import TakeOptions
from torchstore_snapshot.errors import (
    ForeignFileError,
    NotAtomicError,
    SnapshotCorruptError,
    SnapshotError,
    SnapshotExistsError,
    SnapshotFormatError,
    SnapshotVersionError,
    TakeLostError,
)
from torchstore_snapshot.format import manifest as manifests
from torchstore_snapshot.format.manifest import FORMAT, Manifest
from torchstore_snapshot.format.paths import MANIFEST
from torchstore_snapshot.format.weight_maps import is_damaged, written_by_a_take
from torchstore_snapshot.series.claims import Claim
from torchstore_snapshot.storage.base import Storage

__all__ = ["never_visible", "refuse_existing", "refuse_foreign_maps", "replaced"]


def refuse_existing(storage: Storage, *, overwrite: bool) -> None:
    """Raise if there is something at a path that a take must not, or cannot, replace.

    Raises:
        SnapshotExistsError: there is a snapshot, and ``overwrite`` is False.
        SnapshotVersionError: it is of a newer version.
        ForeignFileError: there is a file of somebody else that has the name of a manifest, or a
            folder.
        NotAtomicError: the storage cannot replace a snapshot in one step.
    """
    if not overwrite:
        found = _read(storage)
        if found is not None:
            _refuse_foreign(storage, found)
            raise SnapshotExistsError(
                f"there already is a snapshot at {storage.url!r}{_take(found, storage.url)}; give "
                "overwrite=True to replace it",
                details={"path": storage.url},
            )
        return
    replaced(storage)


def never_visible(
    storage: Storage,
    take: str,
    options: TakeOptions,
    error: BaseException | None,
    claim: Claim | None = None,
) -> bool:
    """Whether a take that failed to commit will certainly never be visible: it was given up before
    that, or failed or was interrupted before it put its manifest anywhere, or there is a snapshot
    of another take, which it may not replace.

    Args:
        claim: its claim, on the rank that commits.
    """
    if isinstance(error, TakeLostError) or (claim is not None and not claim.may_be_visible):
        return True
    if options.overwrite:
        return False
    try:
        data = _read(storage)
        return data is not None and manifests.decode(data, storage.url).take != take
    except (SnapshotError, OSError):
        return False


def replaced(storage: Storage) -> Manifest | None:
    """Return the manifest of the snapshot that a take with ``overwrite`` replaces; None if there is
    none, or if it is damaged.

    Raises:
        SnapshotVersionError, ForeignFileError, NotAtomicError: see :func:`refuse_existing`.
    """
    data = _read(storage)
    if data is None:
        return None
    _refuse_foreign(storage, data)
    if not storage.replaces:
        raise NotAtomicError(
            f"the storage of {storage.url!r} cannot replace a snapshot in one step: a crash could "
            "leave none; take the snapshot at another path, and remove this one afterwards",
            details={"path": storage.url},
        )
    try:
        return manifests.decode(data, storage.url)
    except SnapshotVersionError as error:
        version = error.details["version"]
        raise SnapshotVersionError(
            f"the snapshot at {storage.url!r} has format version {version}, which a newer "
            "torchstore-snapshot wrote, so that nobody here knows what it refers to; install that "
            "version, take the snapshot at another path, or remove this one first",
            details={"path": storage.url, "file": MANIFEST, "version": version},
        ) from error
    except (SnapshotFormatError, SnapshotCorruptError):
        return None


def refuse_foreign_maps(storage: Storage, names: Sequence[str]) -> None:
    """Raise ForeignFileError if a weight map would replace a file that no take has written, such as
    the map of a model that somebody has saved in the same folder; or if there is a folder instead.
    A damaged one, beside a manifest, is that of the snapshot.
    """
    if not names:
        return
    there = {info.name for info in storage.list()}
    for name in names:
        data: bytes | None = None
        if name in there:
            with contextlib.suppress(FileNotFoundError):  # another take has just removed it
                data = storage.read(name)
        if data is None:
            _refuse_folder(storage, name)
        if data is None or written_by_a_take(data) or (MANIFEST in there and is_damaged(data)):
            continue
        raise _foreign(storage, name)


def _read(storage: Storage) -> bytes | None:
    data: bytes | None = None
    with contextlib.suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError):
        data = storage.read(MANIFEST)
    if not data:
        _refuse_folder(storage, MANIFEST)
    return data


def _refuse_folder(storage: Storage, name: str) -> None:
    if storage.is_folder(name):
        raise _foreign(storage, name, "folder")


def _refuse_foreign(storage: Storage, data: bytes) -> None:
    """Tell a damaged manifest, which is no JSON any more, from a document of somebody else."""
    if is_damaged(data):
        return
    found: Any = msgspec.json.decode(data)
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise _foreign(storage, MANIFEST)


def _foreign(storage: Storage, name: str, kind: str = "file") -> ForeignFileError:
    return ForeignFileError(
        f"the {kind} {name!r} in {storage.url!r} was not written by a take, and a snapshot there "
        "would replace it; move it away, or take the snapshot at another path",
        details={"path": storage.url, "file": name},
    )


def _take(data: bytes, path: str) -> str:
    try:
        return f" (take {manifests.decode(data, path).take})"
    except (SnapshotFormatError, SnapshotCorruptError):
        return ", although it cannot be read"
