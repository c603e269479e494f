"""Folders of safetensors files, as model libraries publish them: to snapshots, and from them."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from math import prod
from typing import Any

import msgspec

from torchstore_core import boxes
from torchstore_core.errors import LayoutMismatchError, UnsupportedValueError
from torchstore_snapshot.committing.files import OpenFiles, Source
from torchstore_snapshot.committing.options import TakeOptions
from torchstore_snapshot.converting.incoming import (
    Member,
    chunk,
    loaded_from,
    tensor_item,
    write_parts,
)
from torchstore_snapshot.errors import SnapshotFormatError, SnapshotNotFoundError
from torchstore_snapshot.format.manifest import Entry, Manifest, TensorEntry
from torchstore_snapshot.format.paths import check_file_name
from torchstore_snapshot.format.safetensors_files import DTYPES, RESERVED, Stored, group, lay_out
from torchstore_snapshot.restoring.files import Files
from torchstore_snapshot.restoring.reading import empty_for, execute, plan_reads
from torchstore_snapshot.storage.local import LocalReader, LocalStorage
from torchstore_snapshot.storage.naming import naming_written
from torchstore_snapshot.taking.strided import bytes_of

__all__ = ["from_safetensors", "to_safetensors"]

_NAMES = {name: dtype for dtype, name in DTYPES.items()}
_INDEX = ".safetensors.index.json"
_HEADER_MAX = 100 << 20


class _Described(msgspec.Struct):
    """What a header says of a tensor."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


_headers = msgspec.json.Decoder(dict[str, msgspec.Raw])
_tensor = msgspec.json.Decoder(_Described)
_indices = msgspec.json.Decoder(dict[str, Any])


# ---- from -----------------------------------------------------------------------------------


def from_safetensors(
    source: str, destination: str, options: TakeOptions, key: str | None
) -> Manifest:
    """Convert a folder to a snapshot with one key, ``"model"`` unless ``key`` is given. Its bytes
    are copied from mappings of the files.

    Raises:
        SnapshotFormatError, SnapshotCorruptError: a file is damaged.
        UnsupportedValueError: a tensor has a dtype that is not known here.
        SnapshotExistsError, OSError: as for a take.
    """
    with ExitStack() as stack:
        members = [*_members(source, key or "model", stack)]
        return write_parts(destination, [members], options)


def _members(source: str, key: str, stack: ExitStack) -> Iterator[Member]:
    wanted = _index(source)
    files = sorted({*wanted.values()} or _files(source))
    seen: set[str] = set()
    for file in files:
        where = os.path.join(source, check_file_name(file, source))
        try:
            reader = stack.enter_context(closing(LocalReader(where)))
        except FileNotFoundError as error:
            raise SnapshotNotFoundError(f"{source!r} has no file {file!r}") from error
        start, described = _header(reader, where)
        for name, found in described.items():
            if wanted and wanted.get(name) != file:
                continue
            if name in seen:
                raise LayoutMismatchError(f"{source!r} has {name!r} in two files", key=name)
            seen.add(name)
            dtype = _NAMES.get(found.dtype)
            if dtype is None:
                raise UnsupportedValueError(
                    f"{name!r} in {where!r} has the dtype {found.dtype!r}, unknown here", key=name
                )
            begin, end = found.data_offsets
            piece = chunk(dtype, [0] * len(found.shape), found.shape, found.shape, name)
            load = functools.partial(loaded_from, reader, start + begin, end - begin, name, where)
            yield tensor_item(key, name, dtype, found.shape, [(piece, load)])
    missing = wanted.keys() - seen
    if missing:
        raise SnapshotFormatError(
            f"{source!r} lacks {len(missing)} tensors that its index names, such as "
            f"{min(missing)!r}",
            details={"path": source},
        )


def _files(source: str) -> list[str]:
    return [name for name in os.listdir(source) if name.endswith(".safetensors")]


def _index(source: str) -> Mapping[str, str]:
    """Which file has which tensor, if the folder has an index; otherwise nothing."""
    found = sorted(name for name in os.listdir(source) if name.endswith(_INDEX))
    if not found:
        return {}
    if len(found) > 1:
        raise LayoutMismatchError(f"{source!r} has several indices: {', '.join(found)}")
    try:
        with open(os.path.join(source, found[0]), "rb") as file:
            weights = _indices.decode(file.read())["weight_map"]
        return msgspec.convert(weights, dict[str, str])
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, KeyError) as error:
        raise SnapshotFormatError(
            f"the index {found[0]!r} in {source!r} cannot be read: {error}",
            details={"path": source},
        ) from error


def _header(reader: LocalReader, where: str) -> tuple[int, dict[str, _Described]]:
    """Where the data of a file begin, and what is in it."""
    try:
        first = bytearray(8)
        reader.read_into(0, first)
        length = int.from_bytes(first, "little")
        if length > min(_HEADER_MAX, reader.nbytes - 8):
            raise EOFError(f"a header of {length} bytes")
        text = bytearray(length)
        reader.read_into(8, text)
        parts = _headers.decode(text)
        described = {n: _tensor.decode(raw) for n, raw in parts.items() if n != RESERVED}
    except (EOFError, msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError) as error:
        raise SnapshotFormatError(
            f"{where!r} is no safetensors file: {error}", details={"path": where}
        ) from error
    return 8 + length, described


# ---- to -------------------------------------------------------------------------------------


def to_safetensors(
    files: Files,
    manifest: Manifest,
    folder: str,
    *,
    rank: int,
    key: str | None,
    fsync: bool,
    file_max: int,
) -> None:
    """Convert one key of a snapshot to a folder. Sharded tensors become whole; two tensors are in
    memory at a time.

    Raises:
        LayoutMismatchError: there are several keys, or values that are not tensors.
        UnsupportedValueError: safetensors does not have a dtype.
        SnapshotCorruptError: the snapshot is damaged.
    """
    entries = _tensors(manifest.of_rank(rank), key, files.url)
    names = [*entries]
    for name, entry in entries.items():
        if name == RESERVED:
            raise UnsupportedValueError(
                f"no tensor in a safetensors file can have the name {name!r}", key=name
            )
        if entry.dtype not in DTYPES:
            raise UnsupportedValueError(
                f"{name!r} is {entry.dtype}, which safetensors does not have", key=name
            )
    stored = [Stored(n, e.dtype, e.shape, _nbytes(e, n)) for n, e in entries.items()]
    groups = group([s.nbytes for s in stored], file_max) or [[]]
    layouts = [
        (_name(number, len(groups)), lay_out([stored[i] for i in members]))
        for number, members in enumerate(groups)
    ]
    storage = LocalStorage(folder)
    storage.prepare(durable=fsync)
    opened = OpenFiles(storage, layouts, durable=fsync)

    def sources() -> Iterator[Source]:
        for index, members in enumerate(groups):
            for position, number in enumerate(members):
                entry = entries[names[number]]
                made = empty_for(names[number], entry, entry.shape)
                reads = plan_reads(names[number], entry, made, boxes.whole(entry.shape))
                execute(files, reads, check="during")
                yield Source(index, position, 0, bytes_of(names[number], made), made)

    try:
        opened.write(sources())
        opened.close()
    except BaseException:
        opened.abort()
        raise
    if len(groups) > 1:
        placed = {names[i]: layouts[n][0] for n, members in enumerate(groups) for i in members}
        index = {
            "metadata": {"total_size": sum(s.nbytes for s in stored)},
            "weight_map": placed,
        }
        data = msgspec.json.format(msgspec.json.encode(index))
        where = os.path.join(folder, f"model{_INDEX}")
        with naming_written(where, len(data)), open(where, "wb") as file:
            file.write(data)
    if fsync:
        storage.flush([f"model{_INDEX}"] if len(groups) > 1 else [])


def _nbytes(entry: TensorEntry, path: str) -> int:
    return prod(entry.shape) * empty_for(path, entry, ()).itemsize


def _name(number: int, count: int) -> str:
    return f"model-{number + 1:05}-of-{count:05}.safetensors" if count > 1 else "model.safetensors"


def _tensors(
    states: Mapping[str, Mapping[str, Entry]], key: str | None, url: str
) -> dict[str, TensorEntry]:
    if key is None:
        if len(states) != 1:
            raise LayoutMismatchError(
                f"the snapshot {url!r} has the keys {', '.join(sorted(states))}, and a folder of "
                "safetensors files is one state dict: say which, key="
            )
        (key,) = states
    if key not in states:
        raise SnapshotNotFoundError(f"the snapshot {url!r} has no {key!r}", key=key)
    tensors = {n: e for n, e in states[key].items() if isinstance(e, TensorEntry)}
    others = states[key].keys() - tensors.keys()
    if others:
        raise LayoutMismatchError(
            f"{len(others)} values of {key!r} are not tensors, such as {min(others)!r}, and "
            "safetensors has only tensors",
            key=key,
        )
    return tensors
