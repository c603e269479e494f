"""Transfers over links that have no window: batches of copies, packed where the link needs that.

A link takes what it declares (``contracts.transport``): strided rows, memory of devices. Everything
else is staged in contiguous memory of this process, on the copy threads.

What has arrived is not moved again, whichever link goes on. So a batch that has failed keeps what
is left of it (:class:`CopyPlan`), and the next link is given that, in the form that it takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torchstore_core.clients.moving.batches import (
    Batch,
    Columns,
    CopyPlan,
    LibraryMoves,
    Move,
    Staged,
)
from torchstore_core.clients.session.links import has_registration, link_errors
from torchstore_core.contracts.transport import Copy, Link
from torchstore_core.errors import TransportError
from torchstore_core.machine import copying
from torchstore_core.machine.tasks import together
from torchstore_core.machine.virtual_memory import allocate

# What must be packed is packed so many bytes at a time, meanwhile those before them move; and a
# part has at most about so many copies, meanwhile the next are planned.
_PART = 32 << 20
_MANY = 4096


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
    for move in plan.rest:
        move.plan(plan, batch.segment, devices)
    plan.rest = []
    _change_copies(plan, batch.into_segment, rows, devices)
    direct = [move for _, move in plan.direct]
    if direct:
        await direct[0].settled(direct)
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
    if isinstance(move, LibraryMoves):
        for one in move.each():
            yield from one.cut(_PART)
    elif isinstance(move, (list, Columns)) or rows or move[5] != move[2]:
        yield move, 0
    else:
        address, offset, nbytes, count, stride, step = move
        most = -(-_PART // nbytes)
        for first in range(0, count, most):
            some = min(most, count - first)
            at, to = address + first * stride, offset + first * step
            yield (at, to, nbytes, some, stride, step), some * nbytes


def _add(plan: CopyPlan, move: Move, segment: int) -> None:
    if isinstance(move, Columns):
        move = move.runs()
    if isinstance(move, list):
        plan.copies += [Copy(run[0], segment, run[1], run[2]) for run in move]
    elif isinstance(move, LibraryMoves):
        plan.rest += move.each()
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
    for one in old:
        copy = one
        if one.device and _kind(one) not in devices:
            at, move = next(direct for direct in plan.direct if one.address in direct[0])
            copy = move.stage(plan, one, one.address - at.start)
        if copy.rows > 1 and not rows:
            _stage_rows(plan, copy, into)
        else:
            plan.copies.append(copy)


def _kind(copy: Copy) -> str:
    return copy.device.partition(":")[0]


def _stage_rows(plan: CopyPlan, copy: Copy, into: bool) -> None:
    address, nbytes, count, stride = copy.address, copy.nbytes, copy.rows, copy.stride
    if copy.step == nbytes:  # one run in the segment, so it is worth being one here
        at, packed = allocate(nbytes * count)
        plan.memory.append(packed)
        plan.grids.append(
            (at, address, nbytes, count, nbytes, stride)
            if into
            else (address, at, nbytes, count, stride, nbytes)
        )
        plan.copies.append(Copy(at, copy.segment, copy.offset, nbytes * count))
    else:
        segment, offset, step, device = copy.segment, copy.offset, copy.step, copy.device
        plan.copies += [
            Copy(address + row * stride, segment, offset + row * step, nbytes, device=device)
            for row in range(count)
        ]


async def _copy_staged(plan: CopyPlan, *, pack: bool) -> None:
    """Copy what is staged from its values into staging memory, or out of it."""
    for one in plan.staged:
        one.check()
    device = [one for one in plan.staged if one.on_device]
    if device:
        await device[0].on_devices(device, pack=pack)
    host = [one for one in plan.staged if not one.on_device]
    nbytes = sum([one.nbytes for one in host])
    nbytes += sum([grid[2] * grid[3] for grid in plan.grids])
    if nbytes:
        await copying.run(_tasks(host, plan.grids, nbytes, pack), nbytes)
    plan.memory += [one.memory for one in plan.staged]
    plan.staged, plan.grids = [], []


def _tasks(
    staged: list[Staged], grids: list[copying.Grid], nbytes: int, pack: bool
) -> Iterator[copying.Task]:
    for one in staged:
        yield from one.tasks(pack=pack)
    for few in copying.cut_grids(grids, copying.chunk_size(nbytes)):
        yield _grids_task(few)


def _grids_task(grids: list[copying.Grid]) -> copying.Task:
    return lambda: copying.copy_grids(grids, stream=False)
