"""From the path or URL of a snapshot to its storage, and what a snapshot's storage contains."""

from __future__ import annotations

import os
import re
from pathlib import PurePath
from urllib.parse import unquote_to_bytes

from torchstore_core.errors import ConfigurationError
from torchstore_snapshot.errors import SnapshotNotFoundError
from torchstore_snapshot.format import manifest as manifests
from torchstore_snapshot.format.manifest import Manifest
from torchstore_snapshot.format.paths import MANIFEST, take_of
from torchstore_snapshot.storage.base import Storage
from torchstore_snapshot.storage.local import LocalStorage
from torchstore_snapshot.storage.remote import RemoteStorage
from torchstore_snapshot.storage.settings import for_folders

__all__ = ["is_remote", "leavings", "open_storage", "path_text", "read_manifest"]


def open_storage(path: str | os.PathLike[str]) -> Storage:
    """Return the storage of the snapshot at a path or URL, whether or not there is a snapshot.

    Raises:
        ConfigurationError: the URL's scheme is unknown, the package for it is not installed, the
            path is no path, a URL names no folder, one of a local folder names another host or a
            relative path, or a folder is given ``storage_options``.
    """
    text = path_text(path)
    if is_remote(text):
        if not text.rpartition("://")[2].strip("/"):
            raise ConfigurationError(f"{text!r} names no folder", details={"path": text})
        if "?versionId=" in text:  # all that follows would be taken for the version
            raise ConfigurationError(
                f"{text!r} names a version of one object, and a snapshot is many objects; give the "
                "URL of its folder, without ?versionId=",
                details={"path": text},
            )
        return RemoteStorage.at(text)
    local = _LOCAL.match(text)
    if for_folders():
        raise ConfigurationError(
            f"{text!r} is a folder, which is opened without storage_options; they are for URLs",
            details={"path": text},
        )
    return LocalStorage.named(text if local is None else _path_of(text, text[local.end() :]))


def path_text(path: object) -> str:
    """Return a path or URL as text.

    Raises:
        ConfigurationError: it is neither a non-empty str nor such a path, no file can have that
            name, or it was a URL, of which a ``pathlib.Path`` keeps only one slash.
    """
    text: object = os.fspath(path) if isinstance(path, os.PathLike) else path
    if not isinstance(text, str) or not text or "\0" in text:
        raise ConfigurationError(f"the path of a snapshot is a non-empty str, not {text!r}")
    if isinstance(path, PurePath) and _WAS_URL.match(text) and not os.path.isdir(path.parts[0]):
        raise ConfigurationError(
            f"{text!r} was a URL before it was made a {type(path).__name__}, "
            "which keeps one of its slashes; give it as a str"
        )
    try:
        os.fsencode(text)
    except UnicodeEncodeError as error:
        raise ConfigurationError(f"the path {text!r} of a snapshot has half a character") from error
    return str(text)


def is_remote(path: str) -> bool:
    """Whether a path is the URL of something else than a local folder.

    >>> is_remote("s3://bucket/step-1"), is_remote("file:///run/step-1"), is_remote("step-1")
    (True, False, False)
    """
    return _LOCAL.match(path) is None and "://" in path


# What the URLs of local files begin with; RFC 8089 has file:/path, too.
_LOCAL = re.compile(r"file:|local:(?=//)", re.IGNORECASE)
_WAS_URL = re.compile(r"(?!file:)[a-z][a-z0-9+.-]+:/", re.IGNORECASE)


def _path_of(url: str, rest: str) -> str:
    """Return the path that a URL of a local file means."""
    path = rest
    if rest.startswith("//"):
        host, slash, path = rest[2:].partition("/")
        path = slash + path
        if host and host.lower() != "localhost":
            raise ConfigurationError(
                f"{url!r} names the host {host!r}; the URL of a local folder is file:// and an "
                "absolute path, which begins with a slash"
            )
    if not path.startswith("/"):
        raise ConfigurationError(
            f"{url!r} has no absolute path; the URL of a local folder is file:// and an absolute "
            "path, which begins with a slash; write a relative path without file:"
        )
    decoded = unquote_to_bytes(path)
    if b"\0" in decoded:
        raise ConfigurationError(f"the path of {url!r} contains a null byte")
    return os.fsdecode(decoded)


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
