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
from torchstore_core.machine.tasks import together

# What must be packed is packed so many bytes at a time, meanwhile those before them move; and a
# part has at most about so many copies, meanwhile the next are planned.
_PART = 32 << 20
_MANY = 4096

#: The key of a value, its tensor or a part of that, and staging memory of the same shape.
Staged = tuple[str, torch.Tensor, torch.Tensor]


class CopyPlan(msgspec.Struct, eq=False):
    """What is left to be moved of a batch without a window, or after one has failed; or of a part.

    Args:
        copies: those that have not arrived yet.
        rest: moves that are not among the copies yet, because their form depends on the link.
        staged: tensors that are still to be copied into staging memory (for a get, out of it).
        grids: rows of which the same is true: from their source to their destination.
        memory: the staging memory.
        direct: tensors on a device that copies reach directly, by their addresses.
        strided: there may be copies of several rows.
        followed: there may be another part.
    """

    copies: list[Copy] = []
    rest: list[TensorMove] = []
    staged: list[Staged] = []
    grids: list[copying.Grid] = []
    memory: list[torch.Tensor] = []
    direct: list[tuple[int, TensorMove]] = []
    strided: bool = False
    followed: bool = False

    def add(self, other: CopyPlan) -> None:
        """Add what is left of another plan."""
        self.copies += other.copies
        self.rest += other.rest
        self.staged += other.staged
        self.grids += other.grids
        self.memory += other.memory
        self.direct += other.direct
        self.strided |= other.strided


async def by_copies(link: Link, batch: Batch, room: int | None) -> None:
    """Move a batch over a link that only takes copies.

    A large batch is moved in parts: while one moves, the next is planned and packed, and the one
    before it is unpacked. If the link fails and the batch is tried again, over any link, what has
    arrived is not moved again.
    """
    left = batch.prepared
    if isinstance(left, CopyPlan):
        parts: Iterator[CopyPlan] = iter([left])
    else:
        parts = _parts(batch.moves(room), batch.segment, link.rows)
    pipeline = _Pipeline(link, batch, parts)
    try:
        await pipeline.run()
    except TransportError:
        batch.prepared = pipeline.left()
        raise
    batch.prepared = None


class _Pipeline:
    """The parts of a batch on their way over a link."""

    def __init__(self, link: Link, batch: Batch, parts: Iterator[CopyPlan]) -> None:
        self._link = link
        self._batch = batch
        self._parts = parts
        self._coming: CopyPlan | None = None
        self._moving = CopyPlan()
        self._arrived = CopyPlan()
        self._cannot_plan = False

    async def run(self) -> None:
        await self._prepare()
        while self._coming is not None:
            self._moving, self._coming = self._coming, None
            work = [self._move()]
            if self._moving.followed:
                work.append(self._prepare())
            if self._arrived.staged or self._arrived.grids:
                work.append(unpack(self._arrived, self._batch))
            if len(work) == 1:
                await work[0]
            else:
                await together(work)
            self._arrived, self._moving = self._moving, CopyPlan()
        await unpack(self._arrived, self._batch)

    async def _prepare(self) -> None:
        """Plan the next part, if there is one, and pack it."""
        self._cannot_plan = True
        self._coming = next(self._parts, None)
        self._cannot_plan = False
        if self._coming is not None:
            link = self._link
            await adapt(self._coming, self._batch, rows=link.rows, devices=link.devices)

    async def _move(self) -> None:
        copies = self._moving.copies
        if not copies:
            return
        try:
            with link_errors():
                await _send(self._link, self._batch, copies)
        except TransportError as error:
            done = error.details.get("done")
            if type(done) is int and 0 < done <= len(copies):
                del copies[:done]
            raise
        self._moving.copies = []

    def left(self) -> CopyPlan | None:
        """What has not arrived, or has not been unpacked; None if it could not be planned."""
        if self._cannot_plan:
            return None
        left = CopyPlan()
        for plan in (self._arrived, self._moving, self._coming, *self._parts):
            if plan is not None:
                left.add(plan)
        return left


async def _send(link: Link, batch: Batch, copies: list[Copy]) -> None:
    if has_registration(link):
        move = link.write_from if batch.into_segment else link.read_into
        await move(copies, batch.memory())
    else:
        await (link.write if batch.into_segment else link.read)(copies)


async def adapt(plan: CopyPlan, batch: Batch, *, rows: bool, devices: frozenset[str]) -> None:
    """Give what is left of a batch the form that a link takes: ``rows`` and ``devices`` are as in
    :class:`Link`. When this returns, what a put needs is packed, and what was queued on tensors
    that the link reaches on their device has ended.
    """
    _change_copies(plan, batch.into_segment, rows, devices)
    for move in plan.rest:
        _plan_tensor(plan, move, batch.segment, devices)
    plan.rest = []
    await cuda.settled(move.tensor for _, move in plan.direct)
    if batch.into_segment:
        await _copy_staged(plan, pack=True)


async def unpack(plan: CopyPlan, batch: Batch) -> None:
    """Everything has arrived: put what a get has read into staging memory into its places."""
    if not batch.into_segment:
        await _copy_staged(plan, pack=False)


def planned(moves: Iterable[Move], segment: int) -> CopyPlan:
    """The plan of moves of which nothing has arrived."""
    plan = CopyPlan()
    for move in moves:
        _add(plan, move, segment)
    return plan


def _parts(moves: Iterable[Move], segment: int, rows: bool) -> Iterator[CopyPlan]:
    """Plan moves part by part, for a link that takes ``rows`` or does not."""
    part, nbytes = CopyPlan(), 0
    for move in moves:
        for piece, to_pack in _cut(move, rows):
            _add(part, piece, segment)
            nbytes += to_pack
            if nbytes >= _PART or len(part.copies) >= _MANY:
                part.followed = True
                yield part
                part, nbytes = CopyPlan(), 0
    yield part


def _cut(move: Move, rows: bool) -> Iterator[tuple[Move, int]]:
    """Cut a move that must be packed into pieces of about :data:`_PART`, each with its bytes."""
    if isinstance(move, TensorMove):
        yield from _cut_tensor(move)
    elif isinstance(move, (list, Columns)) or rows or move[5] != move[2]:
        yield move, 0
    else:
        address, offset, nbytes, count, stride, step = move
        most = -(-_PART // nbytes)
        for first in range(0, count, most):
            some = min(most, count - first)
            at, to = address + first * stride, offset + first * step
            yield (at, to, nbytes, some, stride, step), some * nbytes


def _cut_tensor(move: TensorMove) -> Iterator[tuple[Move, int]]:
    key, tensor, offset, shape, dtype, box = move
    nbytes = tensor.numel() * dtype.itemsize
    if box is not None or nbytes <= _PART:
        yield move, nbytes
        return
    each = nbytes // shape[0]
    most = -(-_PART // each)
    for first in range(0, shape[0], most):
        there = offset + first * each
        if most == 1:  # a row is a part, or several
            yield from _cut_tensor(TensorMove(key, tensor[first], there, shape[1:], dtype))
            continue
        some = tensor[first : first + most]
        piece = TensorMove(key, some, there, tuple(some.shape), dtype)
        yield piece, some.numel() * dtype.itemsize


def _add(plan: CopyPlan, move: Move, segment: int) -> None:
    if isinstance(move, Columns):
        move = move.runs()
    if isinstance(move, list):
        plan.copies += [Copy(run[0], segment, run[1], run[2]) for run in move]
    elif isinstance(move, TensorMove):
        plan.rest.append(move)
    else:
        address, offset, nbytes, count, stride, step = move
        plan.copies.append(Copy(address, segment, offset, nbytes, count, stride, step))
        plan.strided = True


def _change_copies(plan: CopyPlan, into: bool, rows: bool, devices: frozenset[str]) -> None:
    """Change those copies that are of rows, or of a device, where the link takes none of these."""
    if (rows or not plan.strided) and not plan.direct:
        return
    old, plan.copies = plan.copies, []
    plan.strided = rows
    for copy in old:
        if copy.device and _kind(copy) not in devices:
            _stage_device(plan, copy)
        elif copy.rows > 1 and not rows:
            _stage_rows(plan, copy, into)
        else:
            plan.copies.append(copy)


def _kind(copy: Copy) -> str:
    return copy.device.partition(":")[0]


def _stage_rows(plan: CopyPlan, copy: Copy, into: bool) -> None:
    address, nbytes, count, stride = copy.address, copy.nbytes, copy.rows, copy.stride
    if copy.step == nbytes:  # one run in the segment, so it is worth being one here
        packed = torch.empty(nbytes * count, dtype=torch.uint8)
        plan.memory.append(packed)
        at = address_of("", packed)
        plan.grids.append(
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


def _stage_device(plan: CopyPlan, copy: Copy) -> None:
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
    plan.staged.append((move.key, part, staged))
    plan.copies.append(Copy(address_of("", staged), copy.segment, copy.offset, copy.nbytes))


def _plan_tensor(plan: CopyPlan, move: TensorMove, segment: int, devices: frozenset[str]) -> None:
    tensor = move.tensor
    device = ""
    if tensor.device.type in devices and tensor.dtype is move.dtype and tensor.is_contiguous():
        device = str(tensor.device)
        address = address_of(move.key, tensor)
        plan.direct.append((address, move))
    else:
        staged = torch.empty(tuple(tensor.shape), dtype=move.dtype, device="cpu")
        plan.staged.append((move.key, tensor, staged))
        address = address_of(move.key, staged)
    for offset, nbytes in move.runs():
        plan.copies.append(Copy(address, segment, offset, nbytes, device=device))
        address += nbytes


async def _copy_staged(plan: CopyPlan, *, pack: bool) -> None:
    """Copy what is staged from its tensors into staging memory, or out of it."""
    for key, tensor, _ in plan.staged:
        address_of(key, tensor)  # it may have changed in the meantime
    pairs = [(b, a) if pack else (a, b) for _, a, b in plan.staged]
    device = [pair for pair in pairs if not (pair[0].is_cpu and pair[1].is_cpu)]
    if device:
        await cuda.copy(device)
    host = [_same_dtype(*pair) for pair in pairs if pair[0].is_cpu and pair[1].is_cpu]
    nbytes = sum([one.nbytes for one, _ in host])
    nbytes += sum([grid[2] * grid[3] for grid in plan.grids])
    if nbytes:
        await copying.run(_tasks(host, plan.grids, nbytes), nbytes)
    plan.memory += [staged for _, _, staged in plan.staged]
    plan.staged, plan.grids = [], []


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
