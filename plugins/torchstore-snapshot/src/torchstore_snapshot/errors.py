"""Errors of snapshots. All of them are :class:`~torchstore_core.TorchStoreError`."""

from __future__ import annotations

from typing import Any

from torchstore_core.errors import TorchStoreError

__all__ = [
    "AppStateError",
    "BucketNotFoundError",
    "ForeignFileError",
    "NotAtomicError",
    "NotWrittenError",
    "RankFailedError",
    "SnapshotAccessError",
    "SnapshotCorruptError",
    "SnapshotError",
    "SnapshotExistsError",
    "SnapshotFormatError",
    "SnapshotNotFoundError",
    "SnapshotReplacedError",
    "SnapshotStorageError",
    "SnapshotUnavailableError",
    "SnapshotUndecidedError",
    "SnapshotVersionError",
    "SnapshotWriterError",
    "TakeLostError",
]


class SnapshotError(TorchStoreError):
    """Base class of the errors that only snapshots raise. ``details["path"]`` is the snapshot's
    path.
    """

    code = "snapshot"


class AppStateError(SnapshotError, TypeError):
    """An application state is no mapping of names to objects with a state dict."""

    code = "snapshot-app-state"


class SnapshotNotFoundError(SnapshotError, FileNotFoundError):
    """There is no snapshot at a path, or the snapshot has no object of a given path."""

    code = "snapshot-not-found"


class SnapshotExistsError(SnapshotError, FileExistsError):
    """A snapshot was to be taken where there already is one. Nothing was changed."""

    code = "snapshot-exists"


class SnapshotFormatError(SnapshotError):
    """A manifest is not one of a snapshot, was written by a newer version of this package (then the
    error is a SnapshotVersionError), or names files outside of the snapshot.
    """

    code = "snapshot-format"


class SnapshotVersionError(SnapshotFormatError):
    """A snapshot was written by a newer version of this package. It is neither read nor replaced.

    ``details["version"]`` is the version of its format.
    """

    code = "snapshot-version"


class ForeignFileError(SnapshotError, FileExistsError):
    """A take would replace a file that no take has written, or a folder; or there is a file where
    a folder of snapshots would be. Nothing was changed.

    ``details``: ``path``, and ``file`` with the name of the file.
    """

    code = "snapshot-foreign-file"


class SnapshotCorruptError(SnapshotError):
    """A file of a snapshot is missing or too short, or its bytes are not those that were written.

    ``details``: ``path``, and ``file`` with the name of the file inside the snapshot.
    """

    code = "snapshot-corrupt"


class SnapshotReplacedError(SnapshotCorruptError):
    """A snapshot was replaced or removed after its manifest was read, and with it a file that is
    needed. What is at its path now, if anything is, has to be opened anew.
    """

    code = "snapshot-replaced"


class SnapshotWriterError(SnapshotError):
    """The process that writes a snapshot in the background has ended, or the store that it was
    staged in. The take is not committed; unless that was done just before the process was killed,
    by it or by that of rank 0.
    """

    code = "snapshot-writer"


class RankFailedError(SnapshotError):
    """Another rank failed, so that this rank's part of a take or a restore was given up, too.

    ``details["ranks"]`` maps the numbers of the ranks that failed to their errors, as text.
    """

    code = "snapshot-rank"


class SnapshotStorageError(SnapshotError, OSError):
    """What stores snapshots has failed. ``details["path"]`` is the URL. If a file system has given
    an ``errno``, it is in ``details``, too.
    """

    code = "snapshot-storage"

    def __init__(
        self, message: str, *, key: str | None = None, details: dict[str, Any] | None = None
    ) -> None:
        super().__init__(message, key=key, details=details)
        self.errno = self.details.get("errno")


class NotAtomicError(SnapshotStorageError):
    """A storage cannot do in one step what a take asks of it: to replace a snapshot, or to create a
    file only if there is none. Nothing was written.
    """

    code = "snapshot-not-atomic"


class NotWrittenError(SnapshotStorageError):
    """A file system had no room for a file, or failed while it was written: the disk is full
    (``errno`` is ENOSPC), a quota is used up (EDQUOT), the file would be larger than one may be
    (EFBIG), or the disk is broken (EIO). What a take has written is removed then, by ``gc`` at the
    latest.

    ``details``: ``path``; ``file`` with the name of the file, or folder; and ``nbytes``, the size
    that the file was to have, if that is known.
    """

    code = "snapshot-not-written"


class SnapshotAccessError(SnapshotStorageError, PermissionError):
    """There are no credentials for an object store, or it refused them; or a folder may not be
    read, or written to.
    """

    code = "snapshot-access"


class BucketNotFoundError(SnapshotStorageError):
    """The bucket, or container, of a URL does not exist. Snapshots never create one."""

    code = "snapshot-bucket"


class SnapshotUnavailableError(SnapshotStorageError, ConnectionError):
    """An object store cannot be reached, went away, or kept failing when requests were repeated."""

    code = "snapshot-unavailable"


class SnapshotUndecidedError(SnapshotUnavailableError):
    """An object store went away when a snapshot was to become visible, and does not say whether it
    is. What the take has written, and what it refers to, stays for a quarter of an hour; then a
    garbage collection removes it if there is no such snapshot. ``details["take"]`` is the id that
    the manifest of the snapshot would have.
    """

    code = "snapshot-undecided"


class TakeLostError(SnapshotError):
    """A take showed no sign of life for so long that its files were collected. It is not
    committed.
    """

    code = "snapshot-take-lost"
