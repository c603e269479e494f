"""One call for all conversions."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeVar

import msgspec

from torchstore_core.clients.calls.arguments import check_bools
from torchstore_core.errors import ConfigurationError, LayoutMismatchError
from torchstore_snapshot.committing.options import TakeOptions
from torchstore_snapshot.converting.dcp_folders import from_dcp, to_dcp
from torchstore_snapshot.converting.kinds import KINDS, Kind, detect
from torchstore_snapshot.converting.safetensors_folders import from_safetensors, to_safetensors
from torchstore_snapshot.converting.torchsnapshots import from_torchsnapshot
from torchstore_snapshot.converting.torchsnapshots_out import to_torchsnapshot
from torchstore_snapshot.errors import (
    NotWrittenError,
    SnapshotExistsError,
    SnapshotNotFoundError,
)
from torchstore_snapshot.format.manifest import Manifest, TensorEntry
from torchstore_snapshot.format.paths import check_name, new_take_id
from torchstore_snapshot.format.safetensors_files import FILE_MAX
from torchstore_snapshot.restoring.files import Files
from torchstore_snapshot.storage.local import LocalStorage, make_folders
from torchstore_snapshot.storage.naming import naming_local, no_folder, not_written
from torchstore_snapshot.storage.opening import is_remote, open_storage, path_text, read_manifest
from torchstore_snapshot.storage.settings import using

__all__ = ["Converted", "convert"]

T = TypeVar("T")

# torch keeps all tensors of one file of a checkpoint in memory until the file is written.
_DCP_FILE_MAX = 256 << 20


class Converted(NamedTuple):
    """What was converted.

    Args:
        source, destination: the kinds.
        tensors, objects: how many there were; what several ranks have of their own counts for each.
        nbytes: of all tensors, in bytes.
    """

    source: Kind
    destination: Kind
    tensors: int
    objects: int
    nbytes: int


def convert(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    to: Kind | None = None,
    key: str | None = None,
    rank: int | None = None,
    overwrite: bool = False,
    fsync: bool = True,
    allow_pickle: bool = False,
    file_max: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Converted:
    """Convert a folder of another library to a snapshot, or a snapshot to such a folder.

    What ``source`` is, is detected. The pieces of tensors are converted one by one, so memory for
    at most three of them is needed, whatever the size of the whole. The destination is visible
    when it is complete.

    Args:
        source: a folder; a snapshot may also be a URL.
        destination: a folder; a snapshot may also be a URL.
        to: the kind of the destination; None: ``"snapshot"``. If the source is a snapshot, it has
            to be given.
        key: of a checkpoint (``"dcp"``) or safetensors: the key that everything gets in the
            snapshot; of a snapshot: the only key that is converted.
        rank: whose own values are converted, if ranks have some; the formats of ``"dcp"`` and
            ``"safetensors"`` have no place for those of several.
        overwrite: replace a snapshot that is there already. Other folders are never replaced.
        fsync: flush all files before the destination becomes visible.
        allow_pickle: load and store what needs pickle; this runs code from ``source``.
        file_max: bytes of tensors in one file; None: 2 GiB, and 256 MiB in a checkpoint.
        storage_options: as for ``Snapshot``; for whichever of the two is a URL.

    Raises:
        SnapshotNotFoundError: there is nothing to be converted.
        SnapshotExistsError: the destination is not empty.
        ConfigurationError: there is no such conversion.
        UnsafeObjectError: a value needs pickle, which is not allowed.
        SnapshotFormatError, SnapshotCorruptError: the source cannot be read.
        LayoutMismatchError, UnsupportedValueError: the format of the destination has no place for
            something. Nothing is left of the destination.
        OSError: the storage failed.
    """
    check_bools(overwrite=overwrite, fsync=fsync, allow_pickle=allow_pickle)
    check_name("key", key)
    for name, number, least in (("rank", rank, 0), ("file_max", file_max, 1)):
        if number is not None and (type(number) is not int or number < least):
            raise ConfigurationError(f"{name} is an int from {least}, or None, not {number!r}")
    urls = [is_remote(path_text(path)) for path in (source, destination)]
    with using(storage_options, with_folders=any(urls)):
        return _convert(
            source,
            destination,
            to=to,
            key=key,
            rank=rank,
            overwrite=overwrite,
            fsync=fsync,
            allow_pickle=allow_pickle,
            file_max=file_max,
        )


def _convert(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    to: Kind | None,
    key: str | None,
    rank: int | None,
    overwrite: bool,
    fsync: bool,
    allow_pickle: bool,
    file_max: int | None,
) -> Converted:
    kind = detect(source)
    target = to or "snapshot"
    if target not in KINDS:
        raise ConfigurationError(f"to= is one of {', '.join(KINDS)}, not {target!r}")
    if (kind == "snapshot") == (target == "snapshot"):
        raise ConfigurationError(
            f"{os.fspath(source)!r} is of the kind {kind!r}, which is not converted to {target!r}: "
            "one of the two is a snapshot (give to=, or convert twice)"
        )
    if target == "snapshot":
        options = TakeOptions(overwrite, fsync, allow_pickle, file_max or FILE_MAX)
        made = _to_snapshot(kind, _local(source), os.fspath(destination), options, key)
        return _counted(kind, target, made)
    storage = open_storage(source)
    manifest = read_manifest(storage)
    if key is not None:
        manifest = _only(manifest, key, storage.url)
    with Files(storage, manifest) as files:
        write: Callable[[str], None]
        if target == "torchsnapshot":
            write = partial(
                to_torchsnapshot, files, manifest, allow_pickle=allow_pickle, fsync=fsync
            )
        else:
            common: dict[str, Any] = {"rank": _one_rank(manifest, rank), "key": key, "fsync": fsync}
            if target == "dcp":
                limit = file_max or _DCP_FILE_MAX
                write = partial(
                    to_dcp, files, manifest, allow_pickle=allow_pickle, file_max=limit, **common
                )
            else:
                write = partial(
                    to_safetensors, files, manifest, file_max=file_max or FILE_MAX, **common
                )
        _at_once(_local(destination), write)
    return _counted(kind, target, manifest)


def _to_snapshot(
    kind: Kind, source: str, destination: str, options: TakeOptions, key: str | None
) -> Manifest:
    if kind == "dcp":
        return from_dcp(source, destination, options, key)
    if kind == "safetensors":
        return from_safetensors(source, destination, options, key)
    if key is not None:
        raise ConfigurationError("a snapshot of torchsnapshot has keys of its own: leave out key=")
    return from_torchsnapshot(source, destination, options)


def _local(path: str | os.PathLike[str]) -> str:
    """The path of a local folder."""
    storage = open_storage(path)
    if not isinstance(storage, LocalStorage):
        raise ConfigurationError(
            f"{storage.url!r} is not local; only snapshots can be stored elsewhere"
        )
    return storage.url


def _only(manifest: Manifest, key: str, url: str) -> Manifest:
    """The same manifest without other keys.

    Raises:
        SnapshotNotFoundError: no rank has that key.
    """
    if not any(key in entries for entries in (manifest.shared, *manifest.own)):
        raise SnapshotNotFoundError(f"the snapshot {url!r} has no {key!r}", key=key)
    shared = {name: named for name, named in manifest.shared.items() if name == key}
    own = tuple({n: named for n, named in e.items() if n == key} for e in manifest.own)
    return msgspec.structs.replace(manifest, shared=shared, own=own)


def _one_rank(manifest: Manifest, rank: int | None) -> int:
    if rank is None and any(manifest.own) and manifest.world_size > 1:
        raise LayoutMismatchError(
            f"the {manifest.world_size} ranks of the snapshot have values of their own, which the "
            "other format has no place for; say whose, rank="
        )
    return rank or 0


def _at_once(destination: str, write: Callable[[str], None]) -> None:
    """Write a folder beside ``destination``, and move it there when it is complete."""
    if os.path.lexists(destination) and (not os.path.isdir(destination) or os.listdir(destination)):
        raise SnapshotExistsError(
            f"{destination!r} is there already, and not empty; choose another folder",
            details={"path": destination},
        )
    parent, name = os.path.split(destination)
    with naming_local(destination):
        made = _making(destination, lambda: make_folders(parent))
        folder = os.path.join(parent, f".{name}-{new_take_id()}.tmp")
        try:
            _making(destination, lambda: os.mkdir(folder))
            _write_beside(destination, folder, write)
            os.rename(folder, destination)  # which may be an empty folder
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            LocalStorage(parent).remove_if_empty(len(made))
            raise


def _write_beside(destination: str, folder: str, write: Callable[[str], None]) -> None:
    """Write a folder that is to be moved to ``destination``, and is called that in errors."""
    try:
        write(folder)
    except NotWrittenError as error:
        known = error.details
        file = os.path.relpath(os.path.join(known["path"], known["file"]), folder)
        raise not_written(destination, file, known["nbytes"], known["errno"]) from error


def _making(destination: str, make: Callable[[], T]) -> T:
    try:
        return make()
    except FileNotFoundError as error:
        raise no_folder(destination, error) from error


def _counted(kind: Kind, target: Kind, manifest: Manifest) -> Converted:
    found = [
        entry
        for entries in (manifest.shared, *manifest.own)
        for named in entries.values()
        for entry in named.values()
    ]
    tensors = [entry for entry in found if isinstance(entry, TensorEntry)]
    nbytes = sum(entry.nbytes for entry in tensors)
    return Converted(kind, target, len(tensors), len(found) - len(tensors), nbytes)
