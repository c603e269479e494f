"""What is staged, in which order, and how much of it at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from torchstore_core.clients.values.tensors import from_buffer
from torchstore_snapshot.background import messages as m
from torchstore_snapshot.format.hashes import BLOCK
from torchstore_snapshot.taking.preparing import Prepared
from torchstore_snapshot.taking.strided import ranges_of

__all__ = ["Staged", "batches", "units_of"]


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
