"""Snapshots at any URL that fsspec knows: object stores, servers of files, memory."""

from __future__ import annotations

import contextlib
import inspect
import os
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any

from torchstore_core.errors import ConfigurationError
from torchstore_snapshot.errors import SnapshotStorageError, SnapshotUnavailableError
from torchstore_snapshot.format.paths import temporary
from torchstore_snapshot.storage.asking import ask
from torchstore_snapshot.storage.base import FileInfo, First, Writer
from torchstore_snapshot.storage.multipart import PART, MultipartWriter
from torchstore_snapshot.storage.naming import naming
from torchstore_snapshot.storage.settings import configured, current

__all__ = ["RemoteReader", "RemoteStorage", "environment", "set_environment"]

# Where folders are only beginnings of names. To "make" one may create a bucket, which nobody wants.
_WITHOUT_FOLDERS = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oci", "oss", "obs", "memory"}
_S3 = {"s3", "s3a"}
# Servers of files whose renames replace a file in one step, as those of POSIX do.
_RENAMES_OVER = {"sftp", "ssh", "file", "local"}
# A server that has gone is noticed sooner than by the library's own limits (60 s).
_S3_CONFIG = {"connect_timeout": 10, "read_timeout": 60, "retries": {"mode": "standard"}}
_S3_OPTIONS: dict[str, object] = {
    "config_kwargs": _S3_CONFIG,
    # A document is read by one request; otherwise another one asks for its size before. Replies to
    # those say in no text that a store is only busy, so that the library soon gives them up.
    "max_concurrency": 1,
}

# Bytes that a file which is read as a whole may have before more time is a reason to give up.
_DOCUMENT = 16 << 20
# What object stores answer to a conditional write of an object that is there.
_EXISTS = {"PreconditionFailed", "ConditionalRequestConflict"}

# Statuses of a server that may answer later, and seconds before it is asked again.
_BUSY = {"500", "502", "503", "504"}
_PAUSES_S = (0.1, 0.3, 1.0, 3.0)

# Beginnings of the names of variables that configure object stores.
_VARIABLES = ("AWS_", "AZURE_", "FSSPEC_", "GCSFS_", "GOOGLE_", "STORAGE_EMULATOR_")

_lock = threading.Lock()
_known: dict[tuple[object, ...], Any] = {}
_KNOWN_MAX = 64


class SequentialWriter:
    """A new file of a file system of which no more is known than that it can write files in order.
    How it sends them is its own matter; most object stores do so in parts of the size given.
    """

    random_access = False

    def __init__(self, fs: Any, path: str, url: str) -> None:
        self._url = url
        self._fs = fs
        self._path = path
        self._position = 0
        with naming(url):
            self._file = fs.open(path, "wb", block_size=PART)

    def write(self, offset: int, data: Any) -> None:
        if offset != self._position:
            raise ValueError(f"written at {offset}, though {self._position} bytes are written")
        with naming(self._url):
            self._file.write(data)
        self._position += memoryview(data).nbytes

    def close(self, *, durable: bool) -> None:
        del durable  # the file system decides when it acknowledges
        file, self._file = self._file, None
        with naming(self._url):
            file.close()

    def abort(self) -> None:
        file, self._file = self._file, None
        if file is None:
            return
        with contextlib.suppress(Exception):  # what is left is invisible, and gc collects it
            file.discard()
        with contextlib.suppress(Exception):
            self._fs.rm_file(self._path)


class RemoteReader:
    """A file, read by requests for ranges of it."""

    def __init__(self, fs: Any, path: str, nbytes: int, url: str) -> None:
        self._fs = fs
        self._path = path
        self._nbytes = nbytes
        self._url = url

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def read_into(self, offset: int, buffer: Any) -> None:
        rest = memoryview(buffer)
        while rest.nbytes:
            part = rest[:PART]
            with naming(self._url):
                data = ask(
                    self._fs,
                    self._url,
                    "cat_file",
                    self._path,
                    start=offset,
                    end=offset + part.nbytes,
                    nbytes=part.nbytes,
                )
            if len(data) > part.nbytes:
                raise SnapshotStorageError(
                    f"the server of {self._url!r} does not know requests for a part of a file: it "
                    f"sent {len(data)} bytes instead of {part.nbytes}; copy the snapshot elsewhere",
                    details={"path": self._url},
                )
            if len(data) != part.nbytes:
                raise EOFError(f"the file ends {part.nbytes - len(data)} bytes too early")
            part[:] = data
            offset += part.nbytes
            rest = rest[part.nbytes :]

    def close(self) -> None:
        """Nothing is open between requests."""


class RemoteStorage:
    """A folder of a file system of fsspec: keys with a common beginning.

    Publishing is atomic in object stores, where a file appears as a whole. On servers of files, a
    file is written under another name and renamed; not all of them can replace a file by that
    (:attr:`replaces`). With ``overwrite`` False, the store itself refuses to replace an object if
    fsspec has conditional writes for it (S3, Google Cloud Storage, Azure). Otherwise, this class
    looks before it writes: of two takes at the same path *at the same time*, the later one may then
    replace the manifest of the earlier one, which remains a whole snapshot until then, and whose
    files gc collects.

    Args:
        fs: the file system.
        root: the path of the folder in it.
        url: the folder's URL.
    """

    request_size = 1 << 20

    def __init__(self, fs: Any, root: str, url: str) -> None:
        self._fs = fs
        self._root = root.rstrip("/")
        self._url = url.rstrip("/")
        protocol = fs.protocol
        self._protocols = {protocol} if isinstance(protocol, str) else set(protocol)

    @classmethod
    def at(cls, url: str) -> RemoteStorage:
        """Return the folder at a URL. Nothing is requested.

        Credentials and addresses are those of the call's ``storage_options``, of fsspec's
        configuration, and of the environment: for example ``AWS_ACCESS_KEY_ID`` and
        ``AWS_ENDPOINT_URL``.

        Raises:
            ConfigurationError: no package for URLs like this one is installed.
        """
        scheme, _, rest = url.partition("://")
        import fsspec  # type: ignore[import-untyped]  # takes long; local files need none of it

        # Instances are kept here, because those that fsspec keeps do not see a changed environment.
        given, conf = current(), configured(url)
        options = {**given, "use_listings_cache": False, "skip_instance_cache": True}
        if scheme in _S3:
            known = {**(conf.get(scheme) or {}), **given}
            options |= {name: value for name, value in _S3_OPTIONS.items() if name not in known}
        host = url if "::" in url else rest.partition("/")[0]
        settings = repr((sorted(given.items()), sorted(conf.items())))
        identity = (os.getpid(), scheme, host, settings, *sorted(environment().items()))
        with _lock:
            fs = _known.get(identity)
            if fs is None:
                try:
                    with naming(url):
                        fs, _ = fsspec.core.url_to_fs(url, **options)
                except SnapshotStorageError as error:
                    cause = error.__cause__
                    if isinstance(cause, (ImportError, ValueError, TypeError)):
                        raise ConfigurationError(
                            f"snapshots cannot be stored at {url!r}: {cause}",
                            details={"path": url, "scheme": scheme},
                        ) from cause
                    raise
                if len(_known) > _KNOWN_MAX:
                    _known.clear()
                _known[identity] = fs
        root = fsspec.core.url_to_fs(url, **given)[1] if "::" in url else fs._strip_protocol(url)
        return cls(fs, root, url)

    @property
    def url(self) -> str:
        return self._url

    @property
    def shared(self) -> bool:
        """Whether other processes see the same folder."""
        return "memory" not in self._protocols

    def refuse_private(self, writes: str, instead: str) -> None:
        """Raise ConfigurationError if other processes do not see the folder.

        Args:
            writes, instead: who writes in another process, and what to use instead.
        """
        if not self.shared:
            raise ConfigurationError(
                f"{writes} in another process, which does not see {self._url!r}; use {instead}",
                details={"path": self._url},
            )

    @property
    def replaces(self) -> bool:
        return bool(self._protocols & (_WITHOUT_FOLDERS | _RENAMES_OVER))

    def _ask(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return ask(self._fs, self._url, method, *args, **kwargs)

    def prepare(self, *, durable: bool, first: First | None = None) -> int:
        del durable  # the file system decides when it acknowledges
        made = 0
        if not self._protocols & _WITHOUT_FOLDERS:
            with naming(self._url):
                made = int(not self._ask("isdir", self._root))
                self._ask("makedirs", self._root, exist_ok=True)
        if first is not None:
            first(self, made)
        return made

    def create(self, name: str, nbytes: int) -> Writer:
        if self._protocols & _S3:
            return MultipartWriter(self._fs, self._in(name), nbytes, self._url)
        return SequentialWriter(self._fs, self._in(name), self._url)

    def open(self, name: str) -> RemoteReader:
        return RemoteReader(self._fs, self._in(name), self._size(name), self._url)

    def _size(self, name: str) -> int:
        """Ask for the size of a file, again and again while the server is busy: libraries soon give
        up, because the reply to such a request has no text that says so.
        """
        pauses = list(_PAUSES_S)
        while True:
            try:
                with naming(self._url):
                    return int(self._ask("info", self._in(name))["size"])
            except SnapshotUnavailableError as error:
                if not pauses or error.details["code"] not in _BUSY:
                    raise
                time.sleep(pauses.pop(0))

    def read(self, name: str) -> bytes:
        with naming(self._url):
            try:
                return bytes(self._ask("cat_file", self._in(name), nbytes=_DOCUMENT))
            except FileNotFoundError:
                if self._protocols & _S3:  # the name, or the bucket?
                    self._ask("call_s3", "get_bucket_location", Bucket=self._bucket)
                raise

    def read_start(self, name: str, nbytes: int) -> bytes:
        with naming(self._url):
            return bytes(self._ask("cat_file", self._in(name), start=0, end=nbytes, nbytes=nbytes))

    def flush(self, names: Sequence[str]) -> None:
        """What was acknowledged is as durable as it will be."""

    def list(self) -> Sequence[FileInfo]:
        return [
            FileInfo(_last(entry["name"]), entry.get("size") or 0, _modified(entry))
            for entry in self._entries(self._root)
            if entry["type"] == "file" and _last(entry["name"])
        ]

    def is_folder(self, name: str) -> bool:
        if self._protocols & _WITHOUT_FOLDERS and self.shared:
            return False
        with naming(self._url):
            return bool(self._ask("isdir", self._in(name)))

    def publish(self, name: str, data: bytes, *, take: str, overwrite: bool, durable: bool) -> None:
        del durable
        path = self._in(name)
        whole = self._in(temporary(name, take))
        try:
            with naming(self._url):
                if not overwrite:
                    with _lock if not self.shared else contextlib.nullcontext():
                        self._create(path, data, whole)
                elif not self.replaces and self._ask("exists", path):
                    self._ask("pipe_file", path, data, nbytes=len(data))
                else:
                    self._put(path, data, whole)
        except (FileExistsError, SnapshotStorageError) as error:
            exists = isinstance(error, FileExistsError) or error.details["code"] in _EXISTS
            if not exists and not isinstance(error, SnapshotUnavailableError):
                raise
            # A reply may be lost of a request that was carried out. One that is repeated then finds
            # what the first has written.
            if self._has(path, data):
                return
            if exists:
                raise FileExistsError(f"{path} exists") from error
            raise

    def _has(self, path: str, data: bytes) -> bool:
        """Whether a file is there, with these contents."""
        try:
            with naming(self._url):
                return bool(self._ask("cat_file", path, nbytes=len(data)) == data)
        except FileNotFoundError:
            return False

    def delete(self, name: str) -> None:
        with naming(self._url), contextlib.suppress(FileNotFoundError):
            self._ask("rm_file", self._in(name))

    def sibling(self, name: str) -> RemoteStorage:
        return RemoteStorage(self._fs, _beside(self._root, name), _beside(self._url, name))

    def siblings(self) -> Sequence[str]:
        folders = self._entries(self._root.rpartition("/")[0])
        return [_last(entry["name"]) for entry in folders if entry["type"] == "directory"]

    @contextlib.contextmanager
    def emptying(self) -> Iterator[None]:
        yield
        self.remove_if_empty()

    def remove_if_empty(self, folders: int = 1) -> None:
        if folders and not self._protocols & _WITHOUT_FOLDERS:
            with contextlib.suppress(OSError, NotImplementedError):
                self._fs.rmdir(self._root)

    def unfinished(self) -> Sequence[FileInfo]:
        """Uploads in parts that were neither completed nor aborted: only S3 is asked for them."""
        return [
            FileInfo(_last(upload["Key"]), 0, _modified({"mtime": upload.get("Initiated")}))
            for upload in self._uploads()
        ]

    def discard_unfinished(self, name: str) -> None:
        for upload in self._uploads():
            if _last(upload["Key"]) == name:
                with naming(self._url), contextlib.suppress(FileNotFoundError):
                    self._ask(
                        "call_s3",
                        "abort_multipart_upload",
                        Bucket=self._bucket,
                        Key=upload["Key"],
                        UploadId=upload["UploadId"],
                    )

    def _uploads(self) -> Sequence[dict[str, Any]]:
        if not self._protocols & _S3:
            return []
        prefix = self._fs.split_path(self._root)[1]
        found: list[dict[str, Any]] = []
        after: dict[str, str] = {}
        while True:
            with naming(self._url):
                page = self._ask(
                    "call_s3",
                    "list_multipart_uploads",
                    Bucket=self._bucket,
                    Prefix=f"{prefix}/",
                    **after,
                )
            found += page.get("Uploads", [])
            if not page.get("IsTruncated"):
                return [u for u in found if "/" not in u["Key"][len(prefix) + 1 :]]
            after = {
                "KeyMarker": page["NextKeyMarker"],
                "UploadIdMarker": page["NextUploadIdMarker"],
            }

    def _renames(self) -> bool:
        """Whether this is a server of files, which writes them in place, and can rename them."""
        from fsspec.spec import AbstractFileSystem  # type: ignore[import-untyped]

        # What every file system has copies, and then removes.
        own = type(self._fs).mv is not AbstractFileSystem.mv
        return own and not self._protocols & _WITHOUT_FOLDERS

    def _put(self, path: str, data: bytes, whole: str) -> None:
        """Store a file so that it appears as a whole; ``whole`` is a name to write it under."""
        if not self._renames():
            self._ask("pipe_file", path, data, nbytes=len(data))
            return
        try:
            self._ask("pipe_file", whole, data, nbytes=len(data))
            self._fs.mv(whole, path)
        except BaseException:
            with contextlib.suppress(Exception):  # what is left is invisible, and gc collects it
                self._ask("rm_file", whole)
            raise

    def _create(self, path: str, data: bytes, whole: str) -> None:
        call = getattr(self._fs, "_pipe_file", None) or self._fs.pipe_file
        if not self._renames() and "mode" in inspect.signature(call).parameters:
            self._ask("pipe_file", path, data, mode="create", nbytes=len(data))
            return
        if self._ask("exists", path):
            raise FileExistsError(path)
        self._put(path, data, whole)

    def _entries(self, folder: str) -> Sequence[dict[str, Any]]:
        with naming(self._url):
            self._fs.invalidate_cache(folder)
            try:
                return list(self._ask("ls", folder, detail=True))
            except (FileNotFoundError, NotADirectoryError):
                return []

    @property
    def _bucket(self) -> str:
        return str(self._fs.split_path(self._root)[0])

    def _in(self, name: str) -> str:
        return f"{self._root}/{name}"


def environment() -> dict[str, str]:
    """Return the variables that decide which servers are asked, and as whom."""
    return {name: value for name, value in os.environ.items() if name.startswith(_VARIABLES)}


def set_environment(variables: dict[str, str]) -> None:
    """Make :func:`environment` that of another process, for storage that is opened from now on."""
    for name in environment().keys() - variables.keys():
        del os.environ[name]
    os.environ.update(variables)


def _beside(path: str, name: str) -> str:
    parent, slash, _ = path.rpartition("/")
    return f"{parent}{slash}{name}"


def _last(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]


def _modified(entry: dict[str, Any]) -> float:
    """When a file was changed; now if the file system does not say, so that nothing is too old."""
    for field in ("LastModified", "last_modified", "mtime", "modified", "updated", "created"):
        found = entry.get(field)
        if isinstance(found, datetime):
            return found.timestamp()
        if isinstance(found, str):
            with contextlib.suppress(ValueError):
                return datetime.fromisoformat(found).timestamp()
        if isinstance(found, (int, float)):
            return float(found)
    return time.time()
