"""Errors of storage libraries, by the names that this package gives them.

Libraries are recognised by their types and codes, without being imported: what was never imported
has not raised anything.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Iterator

from torchstore_core.errors import TorchStoreError
from torchstore_core.server.spilling.objects.answers import NO_BUCKET, REFUSED, error_code
from torchstore_snapshot.errors import (
    BucketNotFoundError,
    NotWrittenError,
    SnapshotAccessError,
    SnapshotStorageError,
    SnapshotUnavailableError,
)

__all__ = ["naming", "naming_local", "naming_written", "no_folder", "not_written"]

_BUSY = {
    "InternalError",
    "OperationAborted",
    "RequestTimeout",
    "ServiceUnavailable",
    "SlowDown",
    "500",
    "502",
    "503",
    "504",
}
_NO_CREDENTIALS = [
    ("botocore.exceptions", "NoCredentialsError"),
    ("botocore.exceptions", "PartialCredentialsError"),
    ("botocore.exceptions", "CredentialRetrievalError"),
    ("botocore.exceptions", "TokenRetrievalError"),
    ("google.auth.exceptions", "DefaultCredentialsError"),
    ("azure.core.exceptions", "ClientAuthenticationError"),
]
_UNREACHABLE = [
    ("botocore.exceptions", "ConnectionError"),
    ("botocore.exceptions", "HTTPClientError"),
    ("botocore.exceptions", "IncompleteReadError"),
    ("aiohttp", "ClientConnectionError"),
    ("aiohttp", "ClientPayloadError"),
    ("fsspec.exceptions", "FSTimeoutError"),
    ("requests.exceptions", "ConnectionError"),
    ("google.auth.exceptions", "TransportError"),
    ("azure.core.exceptions", "ServiceRequestError"),
    ("azure.core.exceptions", "ServiceResponseError"),
]
# What a file system answers that does not let this process do something, or has no such names.
_NOT_PERMITTED = {errno.EACCES, errno.EPERM, errno.EROFS}
_NO_NAME = {errno.ENAMETOOLONG, errno.ELOOP}
# What one answers that has no room for something, and what to do about it.
_NO_ROOM = {
    errno.ENOSPC: "free some space there, or give another path",
    errno.EDQUOT: "free some space there, have the quota raised, or give another path",
    errno.EFBIG: "write smaller files (file_max=), or raise the limit of this process (ulimit -f)",
}
# What says so when something is written, and only then.
_NOT_WRITTEN = {**_NO_ROOM, errno.EIO: "the disk may be broken; give another path"}
# What is not a failure of the storage: its callers handle these.
_PLAIN = (FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError, EOFError)


@contextlib.contextmanager
def naming(url: str) -> Iterator[None]:
    """Raise errors of a storage library as those of this package; ``url`` is for their text.

    FileNotFoundError, FileExistsError and EOFError remain what they are.
    """
    try:
        yield
    except TorchStoreError:
        raise
    except Exception as error:
        found = _named(error, url)
        if found is error:
            raise
        raise found from error


@contextlib.contextmanager
def naming_local(path: str) -> Iterator[None]:
    """Raise errors that say that a local folder cannot be used, or has no room, as those of this
    package, with the same ``errno``. All others remain what they are.
    """
    try:
        yield
    except (TorchStoreError, *_PLAIN):
        raise
    except OSError as error:
        found: SnapshotStorageError
        details = {"path": path, "errno": error.errno}
        if error.errno in _NOT_PERMITTED:
            found = SnapshotAccessError(
                f"no access to {path!r} ({error}); give another path, or change who may use this "
                "one, or how its file system is mounted",
                details=details,
            )
        elif error.errno in _NO_NAME:
            found = SnapshotStorageError(
                f"{path!r} cannot be a folder here ({error}); give another path", details=details
            )
        elif error.errno in _NO_ROOM:
            file = error.filename if isinstance(error.filename, str) else path
            found = not_written(*os.path.split(file), None, error.errno)
        else:
            raise
        raise found from error


@contextlib.contextmanager
def naming_written(path: str, nbytes: int | None = None) -> Iterator[None]:
    """Raise errors that say that a local file, or folder, could not be written as those of this
    package, with the same ``errno``. All others remain what they are.

    Args:
        nbytes: the size that it was to have, if that is known.
    """
    try:
        yield
    except TorchStoreError:
        raise
    except OSError as error:
        if error.errno not in _NOT_WRITTEN:
            raise
        folder, name = os.path.split(path)
        raise not_written(folder, name, nbytes, error.errno) from error


def not_written(path: str, file: str, nbytes: int | None, code: int) -> NotWrittenError:
    """Return the error of a file that could not be written.

    Args:
        path: the folder.
        nbytes: the size that it was to have, if that is known.
        code: the ``errno`` that says why.
    """
    of = "" if nbytes is None else f" of {nbytes:,} bytes"
    return NotWrittenError(
        f"{file!r}{of} could not be written in {path!r} ({os.strerror(code)}); "
        f"{_NOT_WRITTEN[code]}, and try again: what was written is removed, by gc at the latest",
        details={"path": path, "file": file, "nbytes": nbytes, "errno": code},
    )


def no_folder(path: str, error: OSError) -> SnapshotStorageError:
    """Return the error of a folder that cannot be made, though there is one above it."""
    return SnapshotStorageError(
        f"no folder can be made at {path!r} ({error}); give another path",
        details={"path": path, "errno": error.errno},
    )


def _named(error: Exception, url: str) -> Exception:
    code = error_code(error)
    details = {"path": url, "code": code}
    if code in NO_BUCKET:
        return BucketNotFoundError(
            f"the bucket of {url!r} does not exist; create it, or correct the URL", details=details
        )
    if code in REFUSED or isinstance(error, (PermissionError, *_types(_NO_CREDENTIALS))):
        return SnapshotAccessError(
            f"no access to {url!r} ({error}); check the credentials that this process has for it, "
            "and what they permit",
            details=details,
        )
    if isinstance(error, _PLAIN):
        return error
    if code in _BUSY or isinstance(error, (ConnectionError, TimeoutError, *_types(_UNREACHABLE))):
        return SnapshotUnavailableError(
            f"{url!r} cannot be reached, or went away ({type(error).__name__}: {error}); requests "
            "were repeated in vain",
            details=details,
        )
    return SnapshotStorageError(
        f"the storage of {url!r} has failed ({type(error).__name__}: {error})", details=details
    )


def _types(names: list[tuple[str, str]]) -> list[type[BaseException]]:
    found = [getattr(sys.modules.get(module), name, None) for module, name in names]
    return [kind for kind in found if isinstance(kind, type)]
