"""What is staged, in which order, and how much of it at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from torchstore_core.clients.values.tensors import from_buffer
from torchstore_snapshot.background import messages as m
from torchstore_snapshot.format.hashes import BLOCK
from torchstore_snapshot.taking.preparing import Prepared

__all__ = ["Staged", "batches", "ranges_of", "units_of"]


class Staged(NamedTuple):
    """A tensor to be staged, with any strides, and which bytes of which file it holds."""

    chunk: m.Chunk
    tensor: torch.Tensor


def units_of(prepared: Prepared) -> Iterator[tuple[m.Chunk, int]]:
    """Return everything that a rank writes, in the order of its files, with its size in bytes."""
    for index, file in enumerate(prepared.files):
        order = sorted(range(len(file.units)), key=lambda i: file.layout.starts[i])
        for position in order:
            unit = file.units[position]
            item = prepared.items[unit.item]
            nbytes = item.pieces[unit.piece].tensor.nbytes if item.is_tensor else len(item.data)
            yield m.Chunk(index, position, 0), nbytes


def batches(prepared: Prepared, limit: int) -> Iterator[list[Staged]]:
    """Return everything to be staged, in batches, of which each two in a row are within the limit
    (of at least two blocks). One at a time: what is to be copied for a batch is copied when it is
    asked for.
    """
    everything = list(units_of(prepared))
    if sum(nbytes for _, nbytes in everything) <= limit:
        if everything:
            yield [
                Staged(chunk, part)
                for chunk, nbytes in everything
                for part in _range(prepared, chunk, 0, nbytes)
            ]
        return
    size = max(limit // 2 // BLOCK, 1) * BLOCK
    room = size
    batch: list[Staged] = []
    for chunk, nbytes in everything:
        for begin in range(0, max(nbytes, 1), size):
            end = min(begin + size, nbytes)
            if batch and end - begin > room:
                yield batch
                batch, room = [], size
            for part in _range(prepared, chunk, begin, end):
                batch.append(Staged(m.Chunk(chunk.file, chunk.unit, begin), part))
                begin += part.nbytes
                room -= part.nbytes
    if batch:
        yield batch


def _range(prepared: Prepared, chunk: m.Chunk, begin: int, end: int) -> list[torch.Tensor]:
    unit = prepared.files[chunk.file].units[chunk.unit]
    item = prepared.items[unit.item]
    if not item.is_tensor:
        data = bytearray(memoryview(item.data)[begin:end])
        return [from_buffer(data, 0, (len(data),), torch.uint8)]
    tensor = item.pieces[unit.piece].tensor
    return [tensor] if end - begin == tensor.nbytes else ranges_of(tensor, begin, end)


def ranges_of(tensor: torch.Tensor, begin: int, end: int) -> list[torch.Tensor]:
    """Return views of a tensor, of whatever strides, that have the bytes from ``begin`` to ``end``
    of its values in row-major order, one view after the other. Copies nothing.

    >>> [view.tolist() for view in ranges_of(torch.arange(6).view(2, 3).t(), 8, 40)]
    [[3], [[1, 4]], [2]]
    """
    first, last = begin // tensor.itemsize, end // tensor.itemsize
    if tensor.is_contiguous():
        return [tensor.view(-1)[first:last]]
    found: list[torch.Tensor] = []
    _collect(tensor, first, last, found)
    return found


def _collect(tensor: torch.Tensor, first: int, last: int, found: list[torch.Tensor]) -> None:
    if first >= last:
        return
    if tensor.dim() <= 1:
        found.append(tensor[first:last] if tensor.dim() else tensor)
        return
    row = tensor.numel() // tensor.shape[0]
    top, bottom = -(-first // row), last // row  # the rows of which everything is wanted
    if top > bottom:  # the range is inside of one row
        _collect(tensor[bottom], first - bottom * row, last - bottom * row, found)
        return
    if first < top * row:
        _collect(tensor[top - 1], first - (top - 1) * row, row, found)
    if top < bottom:
        found.append(tensor[top:bottom])
    if bottom * row < last:
        _collect(tensor[bottom], 0, last - bottom * row, found)
