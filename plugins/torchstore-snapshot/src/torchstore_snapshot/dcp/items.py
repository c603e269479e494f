"""What a planner wants to be written, as pieces of a snapshot, and back from what was written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import NamedTuple

import msgspec
import torch
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from torchstore_core import boxes
from torchstore_core.clients.values.tensors import dtype_name, storable
from torchstore_core.errors import LayoutMismatchError
from torchstore_core.values import TensorSlice
from torchstore_snapshot.committing.files import Source
from torchstore_snapshot.devices import Devices
from torchstore_snapshot.format.file_headers import header_digest
from torchstore_snapshot.format.hashes import BLOCK, Digest
from torchstore_snapshot.format.manifest import DataFile, Entry, ObjectEntry, Piece, TensorEntry
from torchstore_snapshot.taking.collecting import Item, LocalPiece
from torchstore_snapshot.taking.planning import PlannedFile
from torchstore_snapshot.taking.strided import data_of

__all__ = ["Written", "entry_of", "planned", "resolved", "results_of", "sources_of", "whole"]


class Written(NamedTuple):
    """What a rank tells the coordinator of an item.

    Args:
        file: where it is; None if it is in ``data``, or if there is nothing of it.
        piece: its place in that file.
        dtype, shape: of the whole tensor.
        codec, data: of a value that is not a tensor.
    """

    file: DataFile | None = None
    piece: Piece | None = None
    dtype: str = ""
    shape: tuple[int, ...] = ()
    codec: str = ""
    data: bytes = b""


def whole(item: WriteItem) -> tuple[str, tuple[int, ...]]:
    """The dtype and the global shape of a tensor."""
    data = item.tensor_data
    if data is None:
        raise LayoutMismatchError(f"the planner says nothing about {item.index.fqn!r}")
    return dtype_name(data.properties.dtype), tuple(data.size)


def planned(item: WriteItem) -> LocalPiece | None:
    """What is to be written of a tensor, as a tensor without memory; None: an empty share."""
    data = item.tensor_data
    if data is None:
        raise LayoutMismatchError(f"the planner says nothing about {item.index.fqn!r}")
    offsets, sizes, shape = tuple(data.chunk.offsets), tuple(data.chunk.sizes), tuple(data.size)
    if 0 in sizes and 0 not in shape:
        return None
    dtype = data.properties.dtype  # torch warns about new tensors of some dtypes
    raw = torch.empty(prod(sizes) * dtype.itemsize, dtype=torch.uint8, device="meta")
    like = raw.view(dtype).view(sizes)
    whole = sizes == shape
    return LocalPiece(like, None if whole else TensorSlice(offsets, sizes, shape))


def resolved(planner: SavePlanner, item: WriteItem) -> torch.Tensor:
    """Return the tensor of a write item, as strided memory on the host or on CUDA.

    Raises:
        UnsupportedValueError: it has no memory.
        LayoutMismatchError: it is not what the plan says.
    """
    name, data = item.index.fqn, item.tensor_data
    tensor = planner.resolve_data(item)
    if isinstance(tensor, torch.Tensor) and hasattr(tensor, "wait"):
        tensor = tensor.wait()  # the result of a collective that may still be running
    if (
        not isinstance(tensor, torch.Tensor)
        or data is None
        or tensor.dtype != data.properties.dtype
        or tuple(tensor.shape) != tuple(data.chunk.sizes)
    ):
        raise LayoutMismatchError(
            f"{name!r} is not of the dtype and the shape that the planner had planned", key=name
        )
    return storable(name, tensor)


def sources_of(
    items: Sequence[Item],
    members: Sequence[WriteItem],
    files: Sequence[PlannedFile],
    planner: SavePlanner,
    devices: Devices,
) -> Iterator[Source]:
    """The bytes of all files. Tensors are resolved when it is their turn: that may make copies."""
    for index, file in enumerate(files):
        for position, unit in enumerate(file.units):
            if not items[unit.item].is_tensor:
                yield Source(index, position, 0, memoryview(items[unit.item].data))
                continue
            tensor = resolved(planner, members[unit.item])
            if not tensor.is_cpu:
                devices.follow(tensor.device)
            data = data_of(members[unit.item].index.fqn, tensor, devices)
            yield Source(index, position, 0, data, tensor)


def results_of(
    items: Sequence[Item],
    members: Sequence[WriteItem],
    files: Sequence[PlannedFile],
    digests: Sequence[Sequence[Digest]],
    rank: int,
) -> Iterator[WriteResult]:
    for file, hashes in zip(files, digests, strict=True):
        head = header_digest(file.layout.header)
        described = DataFile(file.name, file.layout.nbytes, rank, block=BLOCK, header=head)
        columns = zip(file.units, file.layout.starts, hashes, strict=True)
        for unit, start, digest in columns:
            item = items[unit.item]
            if item.is_tensor:
                local = item.pieces[0]
                nbytes, where = local.tensor.nbytes, local.slice
            else:
                nbytes, where = len(item.data), None
            piece = Piece(0, start, nbytes, digest.whole, where, digest.blocks)
            written = Written(described, piece, item.dtype, item.shape, item.codec)
            yield WriteResult(members[unit.item].index, piece.nbytes, written)


def entry_of(name: str, written: Sequence[Written], numbers: Mapping[str, int]) -> Entry:
    """The entry that consists of what all ranks have written."""
    pieces: list[Piece] = []
    first: Written | None = None
    for part in written:
        if part.codec and part.file is None:
            return ObjectEntry(part.codec, part.data)
        if part.file is None or part.piece is None:
            continue
        first = first or part
        pieces.append(msgspec.structs.replace(part.piece, file=numbers[part.file.name]))
    if first is not None and first.codec:
        return ObjectEntry(first.codec, piece=pieces[0])
    gaps: Sequence[boxes.Box] = []
    if first is not None:
        entry = TensorEntry(first.dtype, first.shape, tuple(pieces))
        gaps = boxes.missing(boxes.whole(entry.shape), entry.boxes())
        if not gaps:
            return entry
    listed = ", ".join(f"{list(box.shape)} at {list(box.offset)}" for box in gaps[:3])
    raise LayoutMismatchError(
        f"{name!r}: no rank has written {listed or 'it'}; all ranks of a sharded tensor must take "
        "part in a save",
        key=name,
    )
