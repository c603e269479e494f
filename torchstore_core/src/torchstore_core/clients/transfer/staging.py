"""Transfers over links that have no window: batches of copies, packed where the link needs that.

A link takes what it declares (``contracts.transport``): strided rows, memory of devices. Everything
else is staged in contiguous memory of this process, on the copy threads.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import torch

from torchstore_core.clients.transfer import cuda
from torchstore_core.clients.transfer.link_errors import link_errors
from torchstore_core.clients.transfer.moves import Batch, Rows, TensorMove
from torchstore_core.clients.values.tensors import (
    address_of,
    byte_like,
    split_rows,
    strided_copy,
)
from torchstore_core.contracts.transport import Copy, Link, SupportsRegistration
from torchstore_core.errors import TransportError
from torchstore_core.machine import copying

__all__ = ["CopyPlan", "by_copies"]


class CopyPlan(msgspec.Struct, eq=False):
    """What a link without a window moves for a batch.

    Args:
        copies: those that have not arrived yet.
        abilities: of the links that they are for.
        tensors: what is staged, and where: tensors of the same shape and dtype.
        grids: rows that are staged, from staging memory to their place (for a put, the reverse).
        memory: the staging memory.
    """

    copies: list[Copy]
    abilities: tuple[bool, frozenset[str]]
    tensors: list[tuple[TensorMove, torch.Tensor]]
    grids: list[copying.Grid]
    memory: list[torch.Tensor]


async def by_copies(link: Link, batch: Batch, room: int | None) -> None:
    """Move a batch over a link that only takes copies.

    If it fails and is tried again, over another link of the same abilities, what has arrived is not
    moved again.
    """
    abilities = (link.rows, link.devices)
    plan = batch.prepared
    if not isinstance(plan, CopyPlan) or plan.abilities != abilities:
        plan = batch.prepared = _plan(link, batch, room)
        if batch.into_segment:
            await _pack(plan)
    try:
        with link_errors():
            await _move(link, batch, plan.copies)
    except TransportError as error:
        done = error.details.get("done")
        if type(done) is int and 0 < done <= len(plan.copies):
            del plan.copies[:done]
        raise
    if not batch.into_segment:
        await _unpack(plan)
    batch.prepared = None


async def _move(link: Link, batch: Batch, copies: list[Copy]) -> None:
    if isinstance(link, SupportsRegistration):
        move = link.write_from if batch.into_segment else link.read_into
        await move(copies, batch.memory())
    else:
        await (link.write if batch.into_segment else link.read)(copies)


def _plan(link: Link, batch: Batch, room: int | None) -> CopyPlan:
    segment, into = batch.segment, batch.into_segment
    plan = CopyPlan([], (link.rows, link.devices), [], [], [])
    copies = plan.copies
    for move in batch.moves(room):
        if isinstance(move, list):
            copies += [Copy(run[0], segment, run[1], run[2]) for run in move]
        elif isinstance(move, TensorMove):
            _plan_tensor(link, plan, move, segment)
        else:
            _plan_rows(plan, move, segment, into=into)
    return plan


def _plan_rows(plan: CopyPlan, move: Rows, segment: int, *, into: bool) -> None:
    address, offset, nbytes, count, stride, step = move
    if plan.abilities[0]:
        plan.copies.append(Copy(address, segment, offset, nbytes, count, stride, step))
    elif step == nbytes:  # one run in the segment, so it is worth being one here
        packed = torch.empty(nbytes * count, dtype=torch.uint8)
        plan.memory.append(packed)
        at = address_of("", packed)
        plan.grids.append(
            (at, address, nbytes, count, nbytes, stride)
            if into
            else (address, at, nbytes, count, stride, nbytes)
        )
        plan.copies.append(Copy(at, segment, offset, nbytes * count))
    else:
        plan.copies += [
            Copy(address + row * stride, segment, offset + row * step, nbytes)
            for row in range(count)
        ]


def _plan_tensor(link: Link, plan: CopyPlan, move: TensorMove, segment: int) -> None:
    tensor = move.tensor
    runs = list(move.runs())
    device = ""
    if tensor.device.type in link.devices and tensor.dtype is move.dtype and tensor.is_contiguous():
        device = str(tensor.device)
        address = address_of(move.key, tensor)
    else:
        staged = torch.empty(tuple(tensor.shape), dtype=move.dtype, device="cpu")
        plan.tensors.append((move, staged))
        address = address_of(move.key, staged)
    for offset, nbytes in runs:
        plan.copies.append(Copy(address, segment, offset, nbytes, device=device))
        address += nbytes


async def _pack(plan: CopyPlan) -> None:
    """Fill the staging memory of a put."""
    device = [(staged, move.tensor) for move, staged in plan.tensors if not move.tensor.is_cpu]
    if device:
        await cuda.copy(device)
    pairs = [
        _same_dtype(staged, move.tensor) for move, staged in plan.tensors if move.tensor.is_cpu
    ]
    await _run(pairs, plan.grids)


async def _unpack(plan: CopyPlan) -> None:
    """Put what a get has read into its places."""
    for move, _ in plan.tensors:
        address_of(move.key, move.tensor)  # it may have changed in the meantime
    device = [(move.tensor, staged) for move, staged in plan.tensors if not move.tensor.is_cpu]
    if device:
        await cuda.copy(device)
    pairs = [
        _same_dtype(move.tensor, staged) for move, staged in plan.tensors if move.tensor.is_cpu
    ]
    await _run(pairs, plan.grids)


def _same_dtype(
    destination: torch.Tensor, source: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both as bytes where nothing is converted: torch cannot copy every dtype."""
    if destination.dtype is source.dtype:
        return byte_like(destination), byte_like(source)
    return destination, source


async def _run(pairs: list[tuple[torch.Tensor, torch.Tensor]], grids: list[copying.Grid]) -> None:
    nbytes = sum([one.nbytes for one, _ in pairs]) + sum([grid[2] * grid[3] for grid in grids])
    if nbytes:
        await copying.run(_tasks(pairs, grids, nbytes), nbytes)


def _tasks(
    pairs: list[tuple[torch.Tensor, torch.Tensor]], grids: list[copying.Grid], nbytes: int
) -> Iterator[copying.Task]:
    for destination, source in pairs:
        for some in split_rows(destination, source, copying.CHUNK):
            yield strided_copy(*some, stream=False)
    for few in copying.cut_grids(grids, copying.chunk_size(nbytes)):
        yield _grids_task(few)


def _grids_task(grids: list[copying.Grid]) -> copying.Task:
    return lambda: copying.copy_grids(grids, stream=False)
