"""Transfers over links that have no window: batches of copies, packed where the link needs that.

A link takes what it declares (``contracts.transport``): strided rows, memory of devices. Everything
else is staged in contiguous memory of this process, on the copy threads.

What has arrived is not moved again, whichever link goes on. So a batch that has failed keeps what
is left of it (:class:`CopyPlan`), and the next link is given that, in the form that it takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec
import torch

from torchstore_core.clients.session.abilities import has_registration
from torchstore_core.clients.session.link_errors import link_errors
from torchstore_core.clients.transfer import cuda
from torchstore_core.clients.transfer.moves import Batch, Columns, Move, TensorMove
from torchstore_core.clients.values.tensors import (
    address_of,
    byte_like,
    split_rows,
    strided_copy,
)
from torchstore_core.contracts.transport import Copy, Link
from torchstore_core.errors import TransportError
from torchstore_core.machine import copying

__all__ = ["CopyPlan", "adapt", "by_copies", "planned", "unpack"]

#: The key of a value, its tensor or a part of that, and staging memory of the same shape.
Staged = tuple[str, torch.Tensor, torch.Tensor]


class CopyPlan(msgspec.Struct, eq=False):
    """What is left to be moved of a batch without a window, or after one has failed.

    Args:
        copies: those that have not arrived yet.
        rest: moves that are not among the copies yet, because their form depends on the link.
        staged: what is staged, and where.
        grids: rows that are staged, from staging memory to their place (for a put, the reverse).
        memory: the staging memory.
        direct: tensors on a device that copies reach directly, by their addresses.
        strided: there may be copies of several rows.
    """

    copies: list[Copy] = []
    rest: list[TensorMove] = []
    staged: list[Staged] = []
    grids: list[copying.Grid] = []
    memory: list[torch.Tensor] = []
    direct: list[tuple[int, TensorMove]] = []
    strided: bool = False


async def by_copies(link: Link, batch: Batch, room: int | None) -> None:
    """Move a batch over a link that only takes copies.

    If it fails and is tried again, over any link, what has arrived is not moved again.
    """
    plan = batch.prepared
    if not isinstance(plan, CopyPlan):
        plan = batch.prepared = planned(batch.moves(room), batch.segment)
    await adapt(plan, batch, rows=link.rows, devices=link.devices)
    try:
        with link_errors():
            await _move(link, batch, plan.copies)
    except TransportError as error:
        done = error.details.get("done")
        if type(done) is int and 0 < done <= len(plan.copies):
            del plan.copies[:done]
        raise
    await unpack(plan, batch)
    batch.prepared = None


async def _move(link: Link, batch: Batch, copies: list[Copy]) -> None:
    if has_registration(link):
        move = link.write_from if batch.into_segment else link.read_into
        await move(copies, batch.memory())
    else:
        await (link.write if batch.into_segment else link.read)(copies)


async def adapt(plan: CopyPlan, batch: Batch, *, rows: bool, devices: frozenset[str]) -> None:
    """Give what is left of a batch the form that a link takes: ``rows`` and ``devices`` are as in
    :class:`Link`. What a put needs is staged when this returns.
    """
    added = CopyPlan()
    _change_copies(plan, added, batch.into_segment, rows, devices)
    for move in plan.rest:
        _plan_tensor(plan, added, move, batch.segment, devices)
    plan.rest = []
    if batch.into_segment:
        await _pack(added)
    plan.staged += added.staged
    plan.grids += added.grids
    plan.memory += added.memory


async def unpack(plan: CopyPlan, batch: Batch) -> None:
    """Everything has arrived: put what a get has read into staging memory into its places."""
    if batch.into_segment:
        return
    for key, tensor, _ in plan.staged:
        address_of(key, tensor)  # it may have changed in the meantime
    await _copy_staged([(tensor, staged) for _, tensor, staged in plan.staged], plan.grids)


def planned(moves: Iterable[Move], segment: int) -> CopyPlan:
    """The plan of moves of which nothing has arrived."""
    plan = CopyPlan()
    copies = plan.copies
    for move in moves:
        if isinstance(move, Columns):
            move = move.runs()
        if isinstance(move, list):
            copies += [Copy(run[0], segment, run[1], run[2]) for run in move]
        elif isinstance(move, TensorMove):
            plan.rest.append(move)
        else:
            address, offset, nbytes, count, stride, step = move
            copies.append(Copy(address, segment, offset, nbytes, count, stride, step))
            plan.strided = True
    return plan


def _change_copies(
    plan: CopyPlan, added: CopyPlan, into: bool, rows: bool, devices: frozenset[str]
) -> None:
    """Change those copies that are of rows, or of a device, where the link takes none of these."""
    if (rows or not plan.strided) and not plan.direct:
        return
    old, plan.copies = plan.copies, []
    plan.strided = rows
    for copy in old:
        if copy.device and _kind(copy) not in devices:
            _stage_device(plan, added, copy)
        elif copy.rows > 1 and not rows:
            _stage_rows(plan, added, copy, into)
        else:
            plan.copies.append(copy)


def _kind(copy: Copy) -> str:
    return copy.device.partition(":")[0]


def _stage_rows(plan: CopyPlan, added: CopyPlan, copy: Copy, into: bool) -> None:
    address, nbytes, count, stride = copy.address, copy.nbytes, copy.rows, copy.stride
    if copy.step == nbytes:  # one run in the segment, so it is worth being one here
        packed = torch.empty(nbytes * count, dtype=torch.uint8)
        added.memory.append(packed)
        at = address_of("", packed)
        added.grids.append(
            (at, address, nbytes, count, nbytes, stride)
            if into
            else (address, at, nbytes, count, stride, nbytes)
        )
        plan.copies.append(Copy(at, copy.segment, copy.offset, nbytes * count))
    else:
        plan.copies += [
            Copy(address + row * stride, copy.segment, copy.offset + row * copy.step, nbytes)
            for row in range(count)
        ]


def _stage_device(plan: CopyPlan, added: CopyPlan, copy: Copy) -> None:
    """Of a tensor on a device, stage the bytes of one copy."""
    move, start = next(
        (move, copy.address - address)
        for address, move in plan.direct
        if address <= copy.address < address + move.tensor.nbytes
    )
    address_of(move.key, move.tensor)  # it may have changed since it was planned
    whole = byte_like(move.tensor).reshape(-1).view(torch.uint8)
    part = whole[start : start + copy.nbytes]
    staged = torch.empty(copy.nbytes, dtype=torch.uint8)
    added.staged.append((move.key, part, staged))
    plan.copies.append(Copy(address_of("", staged), copy.segment, copy.offset, copy.nbytes))


def _plan_tensor(
    plan: CopyPlan, added: CopyPlan, move: TensorMove, segment: int, devices: frozenset[str]
) -> None:
    tensor = move.tensor
    device = ""
    if tensor.device.type in devices and tensor.dtype is move.dtype and tensor.is_contiguous():
        device = str(tensor.device)
        address = address_of(move.key, tensor)
        plan.direct.append((address, move))
    else:
        staged = torch.empty(tuple(tensor.shape), dtype=move.dtype, device="cpu")
        added.staged.append((move.key, tensor, staged))
        address = address_of(move.key, staged)
    for offset, nbytes in move.runs():
        plan.copies.append(Copy(address, segment, offset, nbytes, device=device))
        address += nbytes


async def _pack(plan: CopyPlan) -> None:
    """Fill the staging memory of a put."""
    await _copy_staged([(staged, tensor) for _, tensor, staged in plan.staged], plan.grids)


async def _copy_staged(
    pairs: list[tuple[torch.Tensor, torch.Tensor]], grids: list[copying.Grid]
) -> None:
    """Copy pairs of destination and source, and rows."""
    device = [pair for pair in pairs if not (pair[0].is_cpu and pair[1].is_cpu)]
    if device:
        await cuda.copy(device)
    host = [_same_dtype(*pair) for pair in pairs if pair[0].is_cpu and pair[1].is_cpu]
    nbytes = sum([one.nbytes for one, _ in host]) + sum([grid[2] * grid[3] for grid in grids])
    if nbytes:
        await copying.run(_tasks(host, grids, nbytes), nbytes)


def _same_dtype(
    destination: torch.Tensor, source: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both as bytes where nothing is converted: torch cannot copy every dtype."""
    if destination.dtype is source.dtype:
        return byte_like(destination), byte_like(source)
    return destination, source


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
