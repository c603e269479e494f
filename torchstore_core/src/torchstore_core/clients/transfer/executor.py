"""Executes transfer plans: the only place where the bytes of values are moved.

This module is responsible for copy threads, device streams and concurrency. If a link has a window,
this process copies directly to and from that memory; for any other link see :mod:`.staging`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import msgspec
import torch

from torchstore_core.clients.session.session import Session
from torchstore_core.clients.session.volume_links import VolumeLinks
from torchstore_core.clients.transfer import cuda, mapping, staging
from torchstore_core.clients.transfer.link_errors import link_errors
from torchstore_core.clients.transfer.moves import Batch, GetBatch, Rows, Run, TensorMove
from torchstore_core.clients.transfer.targets import narrow
from torchstore_core.clients.values.tensors import (
    byte_like,
    split_rows,
    strided_copy,
    tensor_at,
)
from torchstore_core.contracts.transport import Link, SupportsMap, SupportsWindow, Window
from torchstore_core.errors import StoreClosedError, StoreTimeoutError, TransportError
from torchstore_core.machine import copying
from torchstore_core.machine.tasks import wait_ended
from torchstore_core.plugins.ranking import Candidate

__all__ = ["Moved", "by_link", "execute", "together"]

T = TypeVar("T")

# Up to this many bytes, the volumes of this host are processed one after another: creating a task
# for each would take longer.
_ONE_BY_ONE = 1 << 20


# The time that a transfer to another host may take, however long the operation's timeout is: a peer
# that has been stopped says nothing.
_LEAST_S = 60.0
_SLOWEST_BYTES_PER_S = 1e6


class Moved(msgspec.Struct, frozen=True):
    """The outcome of a batch.

    Args:
        transport: the name of the transport that moved it. Empty if the volume was lost in the
            meantime; the server decides what that means for a put.
        mappings: the parts that were mapped instead of copied.
    """

    batch: Batch
    transport: str
    mappings: Sequence[mapping.Mapped] = ()


async def execute(session: Session, batches: Sequence[Batch]) -> list[Moved]:
    """Move all batches; those of different volumes move concurrently.

    If this raises, or is cancelled, no transfer is still running afterwards.

    Raises:
        TransportError: no link could move one of the batches.
        UnsupportedValueError: a tensor has changed in the meantime.
    """
    if len(batches) == 1:
        return [await _execute(session, batches[0])]
    if sum([batch.nbytes for batch in batches]) <= _ONE_BY_ONE and all(
        session.volumes[batch.volume].context.same_host for batch in batches
    ):
        return [await _execute(session, batch) for batch in batches]
    return await together([_execute(session, batch) for batch in batches])


async def together(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run coroutines concurrently. If one fails, or the caller is cancelled, all have stopped when
    this raises. (The TaskGroup of Python 3.11 loses the caller's cancellation if a task fails while
    the others are stopping.)
    """
    tasks = [asyncio.ensure_future(one) for one in work]
    cancelled = False
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        for task in tasks:
            task.cancel()
        for task in tasks:
            cancelled |= await wait_ended(task)
        errors = [task.exception() for task in tasks if not task.cancelled()]
    if cancelled:
        raise asyncio.CancelledError
    for error in errors:
        if error is not None:
            raise error
    return [task.result() for task in tasks]


async def _execute(session: Session, batch: Batch) -> Moved:
    """Move a batch over the best link; if that fails, over the next best."""
    links = session.volumes[batch.volume]
    last: TransportError | None = None
    try:
        with links.in_use():
            for candidate in links.candidates(batch.nbytes):
                try:
                    if links.context.same_host:
                        mapped = await _by_candidate(session, links, candidate, batch)
                    else:
                        work = _by_candidate(session, links, candidate, batch)
                        mapped = await links.until_lost(work, _limit_s(batch))
                    links.worked(candidate)
                    return Moved(batch, candidate.spec.name, mapped)
                except TransportError as error:
                    links.failed(candidate, error)
                    last = error
                    if batch.unsettled:
                        await _settle(session, batch, error)
            raise links.unreachable_error(batch.nbytes, last) from last
    except TransportError:
        if not (links.lost and batch.into_segment):
            raise
    return Moved(batch, "")


def _limit_s(batch: Batch) -> float:
    return _LEAST_S + batch.nbytes / _SLOWEST_BYTES_PER_S


async def _by_candidate(
    session: Session, links: VolumeLinks, candidate: Candidate, batch: Batch
) -> Sequence[mapping.Mapped]:
    link = await links.connect(candidate)
    if batch.on_device:
        session.keep_memory()
    try:
        return await by_link(link, batch, links.info.capacity_bytes)
    except BaseException as error:
        # Nothing is awaited here: the collector may be closing this, after the event loop's end.
        if batch.into_segment and (link.unsettled or isinstance(error, GeneratorExit)):
            batch.unsettled = candidate.spec.name
            links.retire(link)
        raise


async def _settle(session: Session, batch: Batch, failed: TransportError) -> None:
    """Wait until no byte of a failed write can arrive: whatever moves the batch next would be
    overwritten, also when the memory is somebody else's.
    """
    try:
        await session.settle(batch.volume, batch.unsettled)
    except (StoreClosedError, StoreTimeoutError):
        raise failed from None
    batch.unsettled = ""


async def by_link(link: Link, batch: Batch, room: int | None = None) -> Sequence[mapping.Mapped]:
    """Move a batch over a link, in the best way that the link supports.

    Args:
        room: size of the segment in bytes, if it is known.
    """
    mapped: Sequence[mapping.Mapped] = ()
    if isinstance(batch, GetBatch):
        if isinstance(link, SupportsMap):
            mapped, batch = mapping.map_runs(link, batch)
        if not batch.jobs and not batch.plain:
            return mapped
    if isinstance(link, SupportsWindow):
        await _by_window(link, batch)
    else:
        await staging.by_copies(link, batch, room)
    return mapped


# ---- links with a window ------------------------------------------------------------------


async def _by_window(link: SupportsWindow, batch: Batch) -> None:
    """Copy between memory and the segment. The copy threads copy contiguous bytes in chunks, rows
    as rows, and everything else with torch; tensors on a device are copied on its side stream.
    """
    device: list[tuple[torch.Tensor, torch.Tensor]] = []
    await copying.run(_tasks(link, batch, device), batch.nbytes)
    if device:
        await cuda.transfer(device, _window(link, batch))


def _window(link: SupportsWindow, batch: Batch) -> Window:
    with link_errors():
        return link.window(batch.segment)


def _tasks(
    link: SupportsWindow, batch: Batch, device: list[tuple[torch.Tensor, torch.Tensor]]
) -> Iterator[copying.Task]:
    """Tasks for the copy threads. Pairs with a tensor on a device go into ``device`` instead."""
    window = _window(link, batch)
    base, into = window.address, batch.into_segment
    stream = batch.nbytes >= copying.STREAM_MIN
    size = copying.chunk_size(batch.nbytes)
    runs: list[Run] = []
    rows: list[Rows] = []
    gathered = 0
    for move in batch.moves(window.nbytes):
        if isinstance(move, list):
            runs += move
            gathered += sum([run[2] for run in move])
        elif not isinstance(move, TensorMove):
            rows.append(move)
            gathered += move[2] * move[3]
        elif move.tensor.is_cpu:
            for some in split_rows(*_pair(move, base, into), copying.CHUNK):
                yield strided_copy(*some, stream=stream)
        else:
            device.append(_pair(move, base, into))
        if gathered >= size:
            yield from _chunks(link, batch, base, runs, rows, size)
            runs, rows, gathered = [], [], 0
    yield from _chunks(link, batch, base, runs, rows, size)


def _chunks(
    link: SupportsWindow,
    batch: Batch,
    base: int,
    runs: Sequence[Run],
    rows: Sequence[Rows],
    size: int,
) -> Iterator[copying.Task]:
    """Divide runs and rows into tasks of about ``size`` bytes."""
    stream = batch.nbytes >= copying.STREAM_MIN
    if batch.into_segment:
        grids = [
            (base + offset, address, nbytes, count, there, here)
            for address, offset, nbytes, count, here, there in rows
        ]
    else:
        grids = [
            (address, base + offset, nbytes, count, here, there)
            for address, offset, nbytes, count, here, there in rows
        ]
    for chunk in copying.cut(runs, size):
        yield _run_task(link, batch, base, chunk, stream)
    for some in copying.cut_grids(grids, size):
        yield _row_task(link, batch, base, some, stream)


def _run_task(
    link: SupportsWindow, batch: Batch, base: int, chunk: list[Run], stream: bool
) -> copying.Task:
    segment, into = batch.segment, batch.into_segment
    low, high = chunk[0][1], chunk[-1][1] + chunk[-1][2]
    nbytes = sum([nbytes for _, _, nbytes in chunk])

    def task() -> None:
        # A batch usually is one contiguous run, in order, so that a chunk is one range. If it is
        # not, the pages are faulted in as they are touched.
        if 0 < high - low <= nbytes + nbytes // 2:
            with link_errors():
                link.prepare(segment, low, high - low, fresh=into)
        copying.copy_runs(chunk, base, into=into, stream=stream)

    return task


def _row_task(
    link: SupportsWindow, batch: Batch, base: int, grids: list[copying.Grid], stream: bool
) -> copying.Task:
    segment, into = batch.segment, batch.into_segment
    side = 0 if into else 1
    low = min([grid[side] for grid in grids]) - base
    high = max([grid[side] + grid[2] + (grid[3] - 1) * grid[4 + side] for grid in grids]) - base
    nbytes = sum([grid[2] * grid[3] for grid in grids])

    def task() -> None:
        # Column shards touch every page of the rows that they belong to.
        if 0 < high - low <= 8 * nbytes:
            with link_errors():
                link.prepare(segment, low, high - low, fresh=into)
        copying.copy_grids(grids, stream=stream)

    return task


def _pair(move: TensorMove, base: int, into: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The target and source of a move, as tensors of the same shape."""
    tensor = move.tensor
    stored = tensor_at(base + move.offset, move.shape, move.dtype)
    if move.box is not None:
        stored = narrow(stored, move.box)
    if tensor.dtype is move.dtype:
        tensor = byte_like(tensor)
    else:
        stored = stored.view(move.dtype)
    return (stored, tensor) if into else (tensor, stored)
