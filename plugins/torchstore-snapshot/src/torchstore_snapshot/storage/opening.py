"""From the path or URL of a snapshot to its storage, and what a snapshot's storage contains."""

from __future__ import annotations

import os

from torchstore_core.errors import ConfigurationError
from torchstore_snapshot.errors import SnapshotNotFoundError
from torchstore_snapshot.format import manifest as manifests
from torchstore_snapshot.format.manifest import Manifest
from torchstore_snapshot.format.paths import MANIFEST, take_of
from torchstore_snapshot.storage.base import Storage
from torchstore_snapshot.storage.local import LocalStorage
from torchstore_snapshot.storage.remote import RemoteStorage

__all__ = ["leavings", "open_storage", "read_manifest"]


def open_storage(path: str | os.PathLike[str]) -> Storage:
    """Return the storage of the snapshot at a path or URL, whether or not there is a snapshot.

    Raises:
        ConfigurationError: the URL's scheme is unknown, the package for it is not installed, or the
            path is no path.
    """
    text: object = os.fspath(path)
    if not isinstance(text, str) or not text or "\0" in text:
        raise ConfigurationError(f"the path of a snapshot is a str, not {text!r}")
    scheme, separator, rest = text.partition("://")
    if not separator:
        return LocalStorage(text)
    if scheme in ("file", "local"):
        return LocalStorage(rest)
    return RemoteStorage.at(text)


def read_manifest(storage: Storage) -> Manifest:
    """Return the manifest of a snapshot.

    Raises:
        SnapshotNotFoundError: there is no snapshot.
        SnapshotFormatError, SnapshotCorruptError: its manifest cannot be used.
    """
    try:
        data = storage.read(MANIFEST)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise SnapshotNotFoundError(
            f"there is no snapshot at {storage.url!r}: it has no {MANIFEST}",
            details={"path": storage.url},
        ) from error
    return manifests.decode(data, storage.url)


def leavings(storage: Storage, manifest: Manifest | None) -> list[str]:
    """Return the files in a snapshot's folder that takes wrote and the snapshot does not contain:
    those of takes that died, and those of takes that are still running.
    """
    used = set() if manifest is None else {f.name for f in manifest.files if not f.snapshot}
    names = [info.name for info in storage.list()]
    return sorted(name for name in names if take_of(name) is not None and name not in used)
