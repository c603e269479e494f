"""Copies between tensors and a window on a segment, planned while the first ones already run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from torchstore_core.clients.transfer import cuda
from torchstore_core.clients.values.tensors import split_rows, strided_copy
from torchstore_core.contracts.transport import SupportsWindow
from torchstore_core.machine import copying

__all__ = ["Move", "move"]

#: Contiguous bytes, or rows of them; or a pair of tensors of one shape: target, source.
Move = copying.Piece | copying.Grid | tuple[torch.Tensor, torch.Tensor]


async def move(
    link: SupportsWindow, segment: int, moves: Iterable[Move], nbytes: int, *, into: bool
) -> None:
    """Do all ``moves``, of ``nbytes`` bytes together: contiguous ones in chunks over the copy
    threads, strided and casting ones by rows, those of a device on its side stream.

    Args:
        into: the targets lie in the segment; else the sources do.
    """
    device: list[tuple[torch.Tensor, torch.Tensor]] = []
    stream = nbytes >= copying.STREAM_MIN
    size = copying.chunk_size(nbytes)
    base = link.window(segment).address

    def tasks() -> Iterator[copying.Task]:
        pieces: list[copying.Piece] = []
        grids: list[copying.Grid] = []
        gathered = 0
        for one in moves:
            if len(one) == 3:
                pieces.append(one)
                gathered += one[2]
            elif len(one) == 6:
                grids.append(one)
                gathered += one[2] * one[3]
            elif one[0].is_cpu and one[1].is_cpu:
                for rows in split_rows(*one, copying.CHUNK):
                    yield strided_copy(*rows, stream=stream)
            else:
                device.append(one)
            if gathered >= size:
                yield from planned(pieces, grids)
                pieces, grids, gathered = [], [], 0
        yield from planned(pieces, grids)

    def planned(pieces: list[copying.Piece], grids: list[copying.Grid]) -> Iterator[copying.Task]:
        for chunk in copying.cut(pieces, size):
            yield _chunk(link, segment, base, chunk, stream=stream, into=into)
        for rows in copying.cut_grids(grids, size):
            yield _rows(link, segment, base, rows, stream=stream, into=into)

    await copying.run(tasks(), nbytes)
    if device:
        await cuda.transfer(device, link.window(segment))


def _chunk(
    link: SupportsWindow,
    segment: int,
    base: int,
    chunk: list[copying.Piece],
    *,
    stream: bool,
    into: bool,
) -> copying.Task:
    side = 0 if into else 1
    low = min(piece[side] for piece in chunk) - base
    high = max(piece[side] + piece[2] for piece in chunk) - base
    size = sum(piece[2] for piece in chunk)

    def task() -> None:
        # A batch lies in one run, so a chunk is one range; when it is not, faults do the work.
        if 0 < high - low <= size + size // 2:
            link.prepare(segment, low, high - low, fresh=into)
        copying.copy_pieces(chunk, stream=stream)

    return task


def _rows(
    link: SupportsWindow,
    segment: int,
    base: int,
    grids: list[copying.Grid],
    *,
    stream: bool,
    into: bool,
) -> copying.Task:
    side = 0 if into else 1
    low = min(grid[side] for grid in grids) - base
    high = max(grid[side] + grid[2] + (grid[3] - 1) * grid[4 + side] for grid in grids) - base
    size = sum(grid[2] * grid[3] for grid in grids)

    def task() -> None:
        # Shards of columns touch every page of the rows that they are part of.
        if 0 < high - low <= 8 * size:
            link.prepare(segment, low, high - low, fresh=into)
        copying.copy_grids(grids, stream=stream)

    return task
