"""Checkpoints of ``torch.distributed.checkpoint`` in files: to snapshots, and from them."""

from __future__ import annotations

import functools
import io
import os
from collections.abc import Iterator
from typing import Any

import msgspec
import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from torchstore_core import boxes
from torchstore_core.clients.values.tensors import dtype_name
from torchstore_core.errors import UnsupportedValueError
from torchstore_snapshot.committing.options import TakeOptions
from torchstore_snapshot.converting.dcp_metadata import read_metadata
from torchstore_snapshot.converting.incoming import Member, chunk, tensor_item, write_parts
from torchstore_snapshot.converting.kinds import DCP_METADATA
from torchstore_snapshot.dcp.layout import Stored, Unfolded, divided, fold, top_key
from torchstore_snapshot.dcp.objects import encoded, loaded, saved
from torchstore_snapshot.dcp.reading import described, load_values, unfolded
from torchstore_snapshot.errors import SnapshotCorruptError
from torchstore_snapshot.format.manifest import Entry, Manifest
from torchstore_snapshot.restoring.files import Files
from torchstore_snapshot.restoring.reading import empty_for, execute, plan_reads
from torchstore_snapshot.taking.collecting import Item

__all__ = ["from_dcp", "to_dcp"]

# The dtypes, beside those of floating-point and complex numbers, whose size torch can tell.
_WHOLE = {torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64}
_WHOLE |= {torch.int8, torch.int16, torch.int32, torch.int64}


# ---- from -----------------------------------------------------------------------------------


def from_dcp(source: str, destination: str, options: TakeOptions, key: str | None) -> Manifest:
    """Convert a checkpoint to a snapshot, piece by piece.

    Raises:
        UnsafeObjectError: its metadata refer to what is not part of metadata, or a value needs
            pickle, which is not allowed.
        SnapshotFormatError, SnapshotCorruptError: it cannot be read.
        SnapshotExistsError, OSError: as for a take.
    """
    with open(os.path.join(source, DCP_METADATA), "rb") as file:
        metadata = read_metadata(file.read(), source)
    reader = FileSystemReader(source)
    reader.set_up_storage_reader(metadata, True)
    places = metadata.planner_data
    top = top_key(metadata.state_dict_metadata, places, key)
    members: list[Member] = []
    names: dict[str, str] = {}
    for name, what in metadata.state_dict_metadata.items():
        own, inner = divided((places or {}).get(name, (name,)), key, top)
        short = ".".join(map(str, inner))
        names[f"{own}/{short}"] = name
        if isinstance(what, BytesStorageMetadata):
            data = _read_object(reader, name, source)
            value = loaded(name, data, allow_pickle=options.allow_pickle)
            codec, data = encoded(name, value, allow_pickle=options.allow_pickle)
            members.append(Member(Item(own, short, b"", codec=codec, data=data, common=True)))
            continue
        dtype, shape = dtype_name(what.properties.dtype), tuple(what.size)
        pieces = [
            (
                chunk(dtype, part.offsets, part.sizes, shape, name),
                functools.partial(_read_chunk, reader, name, index, part, what, source),
            )
            for index, part in enumerate(what.chunks)
        ]
        members.append(tensor_item(own, short, dtype, shape, pieces, common=True))

    def arrange(manifest: Manifest, entries: dict[str, Entry]) -> Manifest:
        by_name = {name: entries[path] for path, name in names.items()}
        shared, checkpoint = fold(by_name, places, key)
        return msgspec.structs.replace(manifest, shared=shared, checkpoint=checkpoint)

    return write_parts(destination, [members], options, arrange)


class _Receiver(DefaultLoadPlanner):
    """Receives one value."""

    def __init__(self, tensor: torch.Tensor | None = None) -> None:
        super().__init__()
        self.tensor = tensor
        self.data = b""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.data = value.getvalue()

    def resolve_tensor(self, read_item: ReadItem) -> Any:
        return self.tensor

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """It is where it belongs already."""


def _read(reader: FileSystemReader, item: ReadItem, receiver: _Receiver, source: str) -> None:
    try:
        reader.read_data(LoadPlan([item]), receiver).wait()
    except Exception as error:  # whatever a damaged file leads to; there is no common base
        name = item.storage_index.fqn
        raise SnapshotCorruptError(
            f"{name!r} of the checkpoint {source!r} cannot be read: {error!r}",
            key=name,
            details={"path": source},
        ) from error


def _read_object(reader: FileSystemReader, name: str, source: str) -> bytes:
    none, index = torch.Size([0]), MetadataIndex(name)
    receiver = _Receiver()
    _read(reader, ReadItem(LoadItemType.BYTE_IO, index, none, index, none, none), receiver, source)
    return receiver.data


def _read_chunk(
    reader: FileSystemReader,
    name: str,
    index: int,
    part: ChunkStorageMetadata,
    what: TensorStorageMetadata,
    source: str,
) -> torch.Tensor:
    origin = torch.Size([0] * len(part.sizes))
    at = MetadataIndex(name, part.offsets, index)
    nbytes = part.sizes.numel() * what.properties.dtype.itemsize
    raw = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
    made = raw.view(what.properties.dtype).view(part.sizes)
    item = ReadItem(LoadItemType.TENSOR, at, origin, at, origin, part.sizes)
    _read(reader, item, _Receiver(made), source)
    return made


# ---- to -------------------------------------------------------------------------------------


def to_dcp(
    files: Files,
    manifest: Manifest,
    folder: str,
    *,
    rank: int,
    key: str | None,
    allow_pickle: bool,
    fsync: bool,
    file_max: int,
) -> None:
    """Convert a snapshot to a checkpoint, through at most ``file_max`` bytes of memory, or the
    largest piece.

    Raises:
        UnsupportedValueError: torch does not save tensors of some dtype.
        UnsafeObjectError: a value was pickled.
        SnapshotCorruptError: the snapshot is damaged.
        OSError: the folder cannot be written to, for example because the disk is full.
    """
    state = unfolded(files, manifest, rank, key, allow_pickle=allow_pickle)
    metadata: Metadata = described(state)
    for name, what in metadata.state_dict_metadata.items():
        if isinstance(what, TensorStorageMetadata):
            _refuse_bits(name, what.properties.dtype)
    writer = FileSystemWriter(folder, sync_files=fsync)
    writer.set_up_storage_writer(True)
    parts = [SavePlan(items) for items in _grouped(state, metadata, file_max)]
    parts = writer.prepare_global_plan([writer.prepare_local_plan(part) for part in parts])
    planner = _Giver(files, state)
    try:
        writer.finish(metadata, [writer.write_data(part, planner).value() for part in parts])
    except RuntimeError as error:
        failed = _storage_error(error)
        if failed is None:
            raise
        raise failed from error


def _refuse_bits(name: str, dtype: torch.dtype) -> None:
    """Refuse tensors whose elements are no whole bytes to torch, which cannot tell their size."""
    if not (dtype.is_floating_point or dtype.is_complex or dtype in _WHOLE):
        raise UnsupportedValueError(
            f"{name!r} is {str(dtype).removeprefix('torch.')}, which torch.distributed.checkpoint "
            "cannot save in a folder; store its bytes, as uint8",
            key=name,
        )


def _storage_error(error: BaseException) -> OSError | None:
    """The error of a file because of which torch could not finish an archive: what it raises then
    says nothing about it.
    """
    before = error.__context__
    while before is not None and not isinstance(before, OSError):
        before = before.__context__
    return before


class _Giver(DefaultSavePlanner):
    """Gives pieces of a snapshot, when they are written."""

    def __init__(self, files: Files, state: Unfolded) -> None:
        super().__init__()
        self._files, self._state = files, state

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        name, data = write_item.index.fqn, write_item.tensor_data
        value = self._state.values[name]
        if data is None:
            return saved(load_values(self._files, name, value))
        box = boxes.Box(tuple(data.chunk.offsets), tuple(data.chunk.sizes))
        made = empty_for(value.path, value.entry, box.shape)
        execute(self._files, plan_reads(value.path, value.entry, made, box), check="during")
        return made


def _grouped(state: Unfolded, metadata: Metadata, limit: int) -> Iterator[list[WriteItem]]:
    """The items of each file. torch keeps all tensors of a file until it is written."""
    items: list[WriteItem] = []
    nbytes = 0
    for name, value in state.values.items():
        what = metadata.state_dict_metadata[name]
        if isinstance(what, BytesStorageMetadata) or not isinstance(value, Stored):
            items.append(WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO))
            continue
        for index, part in enumerate(what.chunks):
            size = part.sizes.numel() * what.properties.dtype.itemsize
            if items and nbytes + size > limit:
                yield items
                items, nbytes = [], 0
            data = TensorWriteData(part, what.properties, what.size)
            at = MetadataIndex(name, part.offsets, index)
            items.append(WriteItem(at, WriteItemType.SHARD, tensor_data=data))
            nbytes += size
    yield items
