"""Writes snapshots for torchsnapshot.

Its format has no place for what it calls sharded tensors in a way that any program can restore, so
all tensors become whole ones, in chunks if they were sharded. What all ranks have in common is
replicated there.
"""

from __future__ import annotations

import base64
import os
import struct
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from torchstore_core import boxes
from torchstore_core.clients.values import nesting
from torchstore_core.clients.values.codec import decode_object
from torchstore_core.clients.values.tensors import dtype_of
from torchstore_core.errors import UnsupportedValueError
from torchstore_core.values import ObjectMeta, TensorMeta
from torchstore_snapshot.converting.kinds import TORCHSNAPSHOT_METADATA
from torchstore_snapshot.dcp.layout import Stored, holds_stored
from torchstore_snapshot.dcp.objects import saved
from torchstore_snapshot.dcp.reading import load_values
from torchstore_snapshot.format.hashes import digest_of
from torchstore_snapshot.format.manifest import Entries, Manifest, ObjectEntry
from torchstore_snapshot.restoring.files import Files
from torchstore_snapshot.restoring.reading import empty_for, execute, plan_reads, read_piece
from torchstore_snapshot.storage.naming import naming_written
from torchstore_snapshot.taking.strided import bytes_of

__all__ = ["to_torchsnapshot"]

_VERSION = "0.1.0"
# What its format has as plain bytes, and what it has besides, as files of torch.save.
_PLAIN = {
    *("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8"),
    "bool",
}
_SAVED = {"complex64", "complex128"}
# Bytes in the name of a file. File systems have 255, and there may be a number behind it.
_NAME_MAX = 200


def to_torchsnapshot(
    files: Files, manifest: Manifest, folder: str, *, allow_pickle: bool, fsync: bool
) -> None:
    """Convert a snapshot, of all its ranks. One piece of a tensor is in memory at a time.

    Raises:
        UnsupportedValueError: a dtype is not part of the format.
        UnsafeObjectError: a value was pickled.
        SnapshotCorruptError: the snapshot is damaged.
    """
    out = _Folder(files, folder, allow_pickle=allow_pickle, fsync=fsync)
    everything: dict[str, Any] = {}
    for rank in range(manifest.world_size):
        own = manifest.own[rank] if rank < len(manifest.own) else {}
        states = out.states(manifest.of_rank(rank))
        mine = {f"{key}/{name}" for key, named in own.items() for name in named}
        for path, value, keys in _walk("", states):
            if keys is not None:
                everything[f"{rank}/{path}"] = keys
                continue
            where = value.path if isinstance(value, Stored) else None
            replicated = where is not None and where not in mine
            if replicated and rank:
                continue
            prefix = "replicated" if replicated else str(rank)
            everything[f"{rank}/{path}"] = out.entry(f"{prefix}/{path}", value, replicated)
    described = {"version": _VERSION, "world_size": manifest.world_size, "manifest": everything}
    data = msgspec.json.format(msgspec.json.encode(described))
    out.write(TORCHSNAPSHOT_METADATA, [data])


def _walk(path: str, value: Any) -> Iterator[tuple[str, Any, dict[str, Any] | None]]:
    """Every value, and every container, with its entry, in the order of torchsnapshot."""
    if isinstance(value, list):
        yield path, value, {"type": "list"}
        for index, inner in enumerate(value):
            yield from _walk(f"{path}/{index}", inner)
        return
    names = {str(name) for name in value} if isinstance(value, dict) else set()
    if isinstance(value, dict) and (
        len(names) == len(value) and all(type(name) in (str, int) for name in value)
    ):
        if path:
            yield path, value, {"type": "dict", "keys": [*value]}
        for name, inner in value.items():
            step = str(name).replace("%", "%25").replace("/", "%2F")
            yield from _walk(f"{path}/{step}" if path else step, inner)
        return
    yield path, value, None


def _location(path: str) -> str:
    """Return where the file of a value is, in the folder: the path of the value, as far as each of
    its steps can be the name of a file or folder there.

    >>> _location("replicated/m/../%2Fw"), _location("0/./") == "0/%2E/%"
    ('replicated/m/%2E%2E/%2Fw', True)
    """
    return "/".join(_file_name(step) for step in path.split("/"))


def _file_name(step: str) -> str:
    if step in ("", ".", ".."):
        return step.replace(".", "%2E") or "%"
    name = step.replace("\0", "%00")
    data = name.encode()
    if len(data) <= _NAME_MAX:
        return name
    return f"{data[: _NAME_MAX // 2].decode(errors='ignore')}%{digest_of(data)}"


class _Folder:
    """A folder that is being written."""

    def __init__(self, files: Files, folder: str, *, allow_pickle: bool, fsync: bool) -> None:
        self._files = files
        self._folder = folder
        self._allow_pickle = allow_pickle
        self._fsync = fsync
        os.makedirs(folder, exist_ok=True)

    def states(self, entries: Entries) -> Mapping[str, Any]:
        """Return nested state dicts by key, with stand-ins for tensors."""
        made: dict[str, Any] = {}
        for key, named in entries.items():
            leaves: list[tuple[str, bytes, Any]] = []
            for name, entry in named.items():
                value: Any = Stored.of(f"{key}/{name}", entry)
                if isinstance(entry, ObjectEntry):
                    data = entry.data
                    if entry.piece is not None:
                        data = read_piece(self._files, value.path, entry.piece)
                    value = decode_object(
                        value.path,
                        ObjectMeta(entry.codec),
                        data,
                        allow_pickle=self._allow_pickle,
                    )
                leaves.append((name, entry.steps, value))
            made[key] = nesting.unflatten(key, iter(leaves))
        return made

    def entry(self, path: str, value: Any, replicated: bool) -> dict[str, Any]:
        """Write a value, unless it is part of the metadata. Returns its entry."""
        if isinstance(value, Stored):
            return self._tensor(path, value, replicated)
        kind = type(value).__name__
        if type(value) in (int, str, bool, bytes, float):
            text = str(value)
            if isinstance(value, bytes):
                text = base64.b64encode(value).decode()
            elif isinstance(value, float):
                text = base64.b64encode(struct.pack("d", value)).decode()
            readable = str(value) if isinstance(value, float) else None
            return {
                "type": kind,
                "serialized_value": text,
                "replicated": replicated,
                "readable": readable,
            }
        if holds_stored(value):
            value = load_values(self._files, path, value)
        location = _location(path)
        self.write(location, [saved(value).getvalue()])
        return {
            "type": "object",
            "location": location,
            "serializer": "torch_save",
            "obj_type": kind,
            "replicated": replicated,
        }

    def _tensor(self, path: str, value: Stored, replicated: bool) -> dict[str, Any]:
        entry = value.entry
        if entry.dtype not in _PLAIN | _SAVED:
            raise UnsupportedValueError(
                f"{value.path!r} is {entry.dtype}, which the format of torchsnapshot does not have",
                key=value.path,
            )
        plain = entry.dtype in _PLAIN
        location = _location(path)
        chunks: list[dict[str, Any]] = []
        dtype = dtype_of(TensorMeta(entry.dtype, entry.shape), value.path)
        for number, box in enumerate(entry.boxes() or [boxes.whole(entry.shape)]):
            made = empty_for(value.path, entry, box.shape)
            reads = plan_reads(value.path, entry, made, box)
            execute(self._files, reads, check="during")
            # No name has this sign itself; see _walk().
            where = location if len(entry.pieces) < 2 else f"{location}%{number}"
            data = bytes_of(value.path, made) if plain else saved(made).getbuffer()
            self.write(where, [data])
            tensor = {
                "type": "Tensor",
                "location": where,
                "serializer": "buffer_protocol" if plain else "torch_save",
                "dtype": str(dtype),
                "shape": list(box.shape),
                "replicated": replicated,
                "byte_range": None,
            }
            chunks.append({"offsets": list(box.offset), "sizes": list(box.shape), "tensor": tensor})
        if len(chunks) == 1:
            found: dict[str, Any] = chunks[0]["tensor"]
            return found
        return {
            "type": "ChunkedTensor",
            "dtype": str(dtype),
            "shape": list(entry.shape),
            "chunks": chunks,
            "replicated": replicated,
        }

    def write(self, name: str, parts: list[Any]) -> None:
        """Write a file."""
        where = os.path.join(self._folder, *name.split("/"))
        os.makedirs(os.path.dirname(where), exist_ok=True)
        nbytes = sum(memoryview(part).nbytes for part in parts)
        with naming_written(where, nbytes), open(where, "xb") as file:
            for part in parts:
                file.write(part)
            if self._fsync:
                file.flush()
                os.fsync(file.fileno())
