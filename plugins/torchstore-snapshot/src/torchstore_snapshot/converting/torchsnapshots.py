"""Reads snapshots of torchsnapshot.

Their metadata are JSON (YAML, if a very old version wrote them): containers, values of simple
types, and where in which file the bytes of each tensor are. Everything else is a file of
``torch.save``.
"""

from __future__ import annotations

import base64
import binascii
import functools
import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from typing import Any
from urllib.parse import unquote

import msgspec
import torch

from torchstore_core.clients.values import nesting
from torchstore_core.errors import UnsafeObjectError
from torchstore_snapshot.committing.options import TakeOptions
from torchstore_snapshot.converting.incoming import (
    Load,
    Member,
    chunk,
    loaded_from,
    tensor_item,
    write_parts,
)
from torchstore_snapshot.converting.kinds import TORCHSNAPSHOT_METADATA
from torchstore_snapshot.dcp.objects import encoded, loaded
from torchstore_snapshot.errors import SnapshotCorruptError, SnapshotFormatError
from torchstore_snapshot.format.manifest import Manifest
from torchstore_snapshot.storage.local import LocalReader
from torchstore_snapshot.taking.collecting import Item, LocalPiece

__all__ = ["from_torchsnapshot"]

_CONTAINERS = ("list", "dict", "OrderedDict")


class _Tensor(msgspec.Struct):
    """Where a tensor is."""

    location: str
    serializer: str
    dtype: str
    shape: list[int]
    replicated: bool = False
    byte_range: list[int] | None = None


class _Shard(msgspec.Struct):
    offsets: list[int]
    sizes: list[int]
    tensor: _Tensor


class _Entry(msgspec.Struct):
    """An entry of any type; which fields it has depends on that."""

    type: str
    keys: list[str | int] = []
    serialized_value: str = ""
    location: str = ""
    serializer: str = ""
    dtype: str = ""
    shape: list[int] = []
    byte_range: list[int] | None = None
    replicated: bool = False
    shards: list[_Shard] = []
    chunks: list[_Shard] = []


class _Metadata(msgspec.Struct):
    version: str
    world_size: int
    manifest: dict[str, _Entry]


def from_torchsnapshot(source: str, destination: str, options: TakeOptions) -> Manifest:
    """Convert a snapshot of torchsnapshot, of all its ranks. Bytes are copied from mappings of the
    files; tensors that were saved with ``torch.save`` are in memory two at a time.

    Raises:
        SnapshotFormatError, SnapshotCorruptError: it cannot be read.
        UnsafeObjectError: a value needs pickle, which is not allowed.
        SnapshotExistsError, OSError: as for a take.
    """
    metadata = _read(source)
    with ExitStack() as stack:
        folder = _Folder(source, stack, allow_pickle=options.allow_pickle)
        ranks: list[list[Member]] = []
        done: set[str] = set()
        for rank in range(metadata.world_size):
            prefix = f"{rank}/"
            own = {
                path[len(prefix) :]: entry
                for path, entry in metadata.manifest.items()
                if path.startswith(prefix)
            }
            ranks.append([*_members(own, metadata, folder, done)])
        return write_parts(destination, ranks, options)


def _read(source: str) -> _Metadata:
    with open(os.path.join(source, TORCHSNAPSHOT_METADATA), "rb") as file:
        data = file.read()
    try:
        try:
            return msgspec.json.decode(data, type=_Metadata)
        except msgspec.ValidationError:
            raise
        except msgspec.DecodeError:
            return msgspec.convert(_from_yaml(data, source), _Metadata)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise SnapshotFormatError(
            f"the metadata of {source!r} cannot be read: {error}", details={"path": source}
        ) from error


def _from_yaml(data: bytes, source: str) -> Any:
    try:
        import yaml  # only for these
    except ImportError as error:
        raise SnapshotFormatError(
            f"the metadata of {source!r} are no JSON; if a very old version wrote them as YAML, "
            "install pyyaml",
            details={"path": source},
        ) from error
    try:
        return yaml.safe_load(data)
    except yaml.YAMLError as error:
        raise SnapshotFormatError(
            f"the metadata of {source!r} cannot be read: {error}", details={"path": source}
        ) from error


class _Folder:
    """The files of a snapshot, opened when they are first needed."""

    def __init__(self, source: str, stack: ExitStack, *, allow_pickle: bool) -> None:
        self._source = source
        self._stack = stack
        self._open: dict[str, LocalReader] = {}
        self.allow_pickle = allow_pickle

    def reader(self, location: str) -> LocalReader:
        """Return a file.

        Raises:
            SnapshotFormatError: it is outside of the folder.
            SnapshotCorruptError: it is missing.
        """
        found = self._open.get(location)
        if found is not None:
            return found
        steps = location.split("/")
        if not location or ".." in steps or "\0" in location or os.path.isabs(location):
            raise SnapshotFormatError(
                f"{self._source!r} names {location!r} as a file, which is outside of it",
                details={"path": self._source, "file": location},
            )
        try:
            made = LocalReader(os.path.join(self._source, *steps))
        except FileNotFoundError as error:
            raise SnapshotCorruptError(
                f"{self._source!r} is damaged: {location!r} is missing",
                details={"path": self._source, "file": location},
            ) from error
        self._open[location] = self._stack.enter_context(closing(made))
        return made

    def bytes_of(self, path: str, location: str, span: Sequence[int] | None) -> memoryview:
        """Return bytes of a file, in memory."""
        reader = self.reader(location)
        begin, end = span if span is not None else (0, reader.nbytes)
        return loaded_from(reader, begin, end - begin, path, self._source)

    def load(self, path: str, tensor: _Tensor) -> torch.Tensor | memoryview:
        """Return a tensor, or its bytes."""
        data = self.bytes_of(path, tensor.location, tensor.byte_range)
        if tensor.serializer == "buffer_protocol":
            return data
        found = loaded(path, bytes(data), allow_pickle=self.allow_pickle)
        if not isinstance(found, torch.Tensor):
            raise SnapshotCorruptError(
                f"{path!r} in {self._source!r} is no tensor, but a {type(found).__qualname__}",
                key=path,
            )
        return found


# The place of what says which container it is in: no step of a path, which slashes divide.
_SELF = "/"


class _Leaf:
    """Stands for a value in the nested state dict."""

    def __init__(self, path: str, entry: _Entry) -> None:
        self.path, self.entry = path, entry
        self.keep: object = None  # keeps the id of the stand-in in use


def _members(
    own: Mapping[str, _Entry], metadata: _Metadata, folder: _Folder, done: set[str]
) -> Iterator[Member]:
    """What one rank has. Of replicated values, only what no rank before it had."""
    states: dict[str, Any] = {}
    for path, entry in own.items():
        _place(states, own, path, entry)
    for key, state in states.items():
        stand_ins: dict[int, _Leaf] = {}
        nested = _built(key, state, folder, stand_ins)
        if not isinstance(nested, dict):
            raise SnapshotFormatError(f"{key!r} is no state dict, but one value", key=key)
        for leaf in nesting.flatten(key, nested, unnamed=True):
            found = stand_ins.get(id(leaf.value))
            if found is None:
                codec, data = encoded(leaf.name, leaf.value, allow_pickle=folder.allow_pickle)
                yield Member(Item(key, leaf.name, leaf.path, codec=codec, data=data))
                continue
            entry = found.entry
            common = entry.replicated or bool(entry.shards)
            if entry.replicated and found.path in done:
                continue
            done.add(found.path)
            dtype, shape, pieces = _pieces(found, metadata, folder)
            yield tensor_item(key, leaf.name, dtype, shape, pieces, steps=leaf.path, common=common)


def _place(states: dict[str, Any], own: Mapping[str, _Entry], path: str, entry: _Entry) -> None:
    """Put an entry where it belongs: a dict of containers by their encoded keys."""
    steps = path.split("/")
    place = states
    for end, step in enumerate(steps[:-1], start=1):
        name = step if end > 1 else unquote(step)
        inner = place.setdefault(name, {})
        if isinstance(inner, _Leaf):
            inner = place[name] = {_SELF: inner}
        place = inner
    last = steps[-1] if len(steps) > 1 else unquote(steps[-1])
    if entry.type in _CONTAINERS:
        place.setdefault(last, {})[_SELF] = _Leaf(path, entry)
    else:
        place[last] = _Leaf(path, entry)


def _built(path: str, value: Any, folder: _Folder, stand_ins: dict[int, _Leaf]) -> Any:
    """The nested value, with stand-ins for tensors."""
    if isinstance(value, _Leaf):
        entry = value.entry
        if entry.type in ("Tensor", "ShardedTensor", "ChunkedTensor"):
            made = torch.empty(0, device="cpu")
            stand_ins[id(made)] = value
            value.keep = made
            return made
        return _value(value, folder)
    members = dict(value)
    container = members.pop(_SELF, None)
    if container is None:
        raise SnapshotFormatError(f"nothing says what {path!r} is", key=path)
    built = {
        name: _built(f"{path}/{name}", inner, folder, stand_ins) for name, inner in members.items()
    }
    if container.entry.type == "list":
        return [built[name] for name in sorted(built, key=int)]
    names = {str(key).replace("%", "%25").replace("/", "%2F"): key for key in container.entry.keys}
    return {key: built[name] for name, key in names.items() if name in built}


def _value(leaf: _Leaf, folder: _Folder) -> Any:
    entry, path = leaf.entry, leaf.path
    read: Callable[[str], Any] | None = _PRIMITIVES.get(entry.type)
    try:
        if read is not None:
            return read(entry.serialized_value)
    except (ValueError, KeyError, binascii.Error, struct.error) as error:
        raise SnapshotFormatError(
            f"the value of {path!r} cannot be read: {entry.serialized_value[:40]!r}", key=path
        ) from error
    if entry.type != "object":
        raise SnapshotFormatError(f"{path!r} is of the type {entry.type!r}, unknown here", key=path)
    data = bytes(folder.bytes_of(path, entry.location, entry.byte_range))
    try:
        return loaded(path, data, allow_pickle=False)
    except UnsafeObjectError:
        if not folder.allow_pickle:
            raise
        return loaded(path, data, allow_pickle=True)


_PRIMITIVES: dict[str, Callable[[str], Any]] = {
    "int": int,
    "str": str,
    "bool": {"True": True, "False": False}.__getitem__,
    "bytes": base64.b64decode,
    "float": lambda text: struct.unpack("d", base64.b64decode(text))[0],
}


def _pieces(
    leaf: _Leaf, metadata: _Metadata, folder: _Folder
) -> tuple[str, list[int], list[tuple[LocalPiece, Load]]]:
    """The dtype, the shape and the pieces of a tensor."""
    entry, path = leaf.entry, leaf.path
    if entry.type == "Tensor":
        tensor = msgspec.convert(msgspec.to_builtins(entry), _Tensor)
        shards = [_Shard([0] * len(entry.shape), entry.shape, tensor)]
        shape = entry.shape
    elif entry.type == "ChunkedTensor":
        shards, shape = entry.chunks, entry.shape
    else:
        shards = entry.shards
        everywhere = [
            shard
            for rank in range(metadata.world_size)
            if (other := metadata.manifest.get(f"{rank}/{path}")) is not None
            for shard in other.shards
        ]
        ends = [[o + n for o, n in zip(s.offsets, s.sizes, strict=True)] for s in everywhere]
        shape = [max(dim) for dim in zip(*ends, strict=True)]
    dtype = (entry.dtype or shards[0].tensor.dtype).removeprefix("torch.")
    pieces: list[tuple[LocalPiece, Load]] = [
        (
            chunk(dtype, shard.offsets, shard.sizes, shape, path),
            functools.partial(folder.load, path, shard.tensor),
        )
        for shard in shards
    ]
    return dtype, shape, pieces
