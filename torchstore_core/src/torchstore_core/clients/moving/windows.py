"""Transfers over links with a window: this process copies to and from the memory itself.

The copy threads copy contiguous bytes in chunks, rows as rows, and everything else as its library
does; so is what is on a device. What is left when a link fails goes to the next.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import count

from torchstore_core.clients.moving.batches import (
    Batch,
    Columns,
    CopyPlan,
    LibraryMoves,
    Move,
    Rows,
    Run,
)
from torchstore_core.clients.moving.staging import adapt, planned, unpack
from torchstore_core.clients.session.links import link_errors
from torchstore_core.contracts.transport import SupportsWindow, Window
from torchstore_core.errors import TransportError
from torchstore_core.machine import copying
from torchstore_core.wire.columns import running_totals


class _Progress:
    """What has not been copied yet, of the tasks that were made. ``complete``: all have been."""

    def __init__(self) -> None:
        self.left: dict[int, Sequence[Move]] = {}
        self.complete = False
        self._numbers = count()

    def task(self, moves: Sequence[Move], copy: copying.Task) -> copying.Task:
        """A task that copies these moves, or a part of a tensor's. Tasks end in any thread."""
        number = self.add(moves)

        def task() -> None:
            copy()
            del self.left[number]

        return task

    def add(self, moves: Sequence[Move]) -> int:
        """Moves that are left until their number is removed."""
        number = next(self._numbers)
        self.left[number] = moves
        return number

    def moves(self) -> list[Move]:
        """Each move that is left, once."""
        every = [move for moves in self.left.values() for move in moves]
        return list({id(move): move for move in every}.values())


async def by_window(link: SupportsWindow, batch: Batch) -> None:
    """Move a batch, or what another link has left of it.

    Raises:
        TransportError: the link has failed. ``batch.prepared`` has what is left.
    """
    plan = batch.prepared
    progress = _Progress()
    device: list[LibraryMoves] = []
    if isinstance(plan, CopyPlan):
        await adapt(plan, batch, rows=True, devices=frozenset())
        moves: Iterable[Move] = _moves(plan)
    else:
        plan = None
        moves = batch.moves(window_of(link, batch).nbytes)
    tasks = _tasks(link, batch, moves, progress, device)
    try:
        await copying.run(tasks, batch.nbytes)
        if device:
            await device[0].on_devices(device, window_of(link, batch), into=batch.into_segment)
    except TransportError:
        for _ in tasks:  # what had not been planned yet is left, too
            pass
        if progress.complete:
            left = planned(progress.moves(), batch.segment)
            if plan is not None:
                plan.copies, plan.rest, plan.strided = left.copies, left.rest, True
            batch.prepared = plan or left
        raise
    if plan is not None:
        await unpack(plan, batch)
        batch.prepared = None


def at_once(link: SupportsWindow, batch: Batch) -> bool:
    """Move a small batch in the calling thread. Returns False if its library has to wait for
    something; it may have been moved in part.

    Raises:
        TransportError: the link has failed.
    """
    window = window_of(link, batch)
    base, into = window.address, batch.into_segment
    for move in list(batch.moves(window.nbytes)):  # nothing is written if one does not fit
        if isinstance(move, list):
            copying.copy_runs(move, base, into=into, stream=False)
        elif isinstance(move, Columns):
            copying.copy_columns(*move, base, into=into, stream=False)
        elif not isinstance(move, LibraryMoves):
            copying.copy_grids(_as_grids([move], base, into=into), stream=False)
        elif (made := move.tasks(base, into=into, stream=False)) is not None:
            for task in made:
                task()
        else:
            return False
    return True


def _moves(plan: CopyPlan) -> Iterator[Move]:
    runs: list[Run] = []
    for one in plan.copies:
        if one.rows == 1:
            runs.append((one.address, one.offset, one.nbytes))
        else:
            yield (one.address, one.offset, one.nbytes, one.rows, one.stride, one.step)
    yield runs


def window_of(link: SupportsWindow, batch: Batch) -> Window:
    """The memory that a link gives on the segment of a batch."""
    with link_errors():
        return link.window(batch.segment)


def _tasks(
    link: SupportsWindow,
    batch: Batch,
    moves: Iterable[Move],
    progress: _Progress,
    device: list[LibraryMoves],
) -> Iterator[copying.Task]:
    """Tasks for the copy threads. Moves to or from devices go into ``device`` instead."""
    base, into = window_of(link, batch).address, batch.into_segment
    stream = batch.nbytes >= copying.STREAM_MIN
    size = copying.chunk_size(batch.nbytes)
    runs: list[Run] = []
    rows: list[Rows] = []
    gathered = 0
    for move in moves:
        if isinstance(move, list):
            runs += move
            gathered += sum([run[2] for run in move])
        elif isinstance(move, Columns):
            yield from _column_tasks(link, batch, base, move, size, progress)
        elif not isinstance(move, LibraryMoves):
            rows.append(move)
            gathered += move[2] * move[3]
        elif (made := move.tasks(base, into=into, stream=stream)) is not None:
            for task in made:
                yield progress.task([move], task)
        else:
            progress.add([move])
            device.append(move)
        if gathered >= size:
            yield from _chunks(link, batch, base, runs, rows, size, progress)
            runs, rows, gathered = [], [], 0
    yield from _chunks(link, batch, base, runs, rows, size, progress)
    progress.complete = True


def _column_tasks(
    link: SupportsWindow, batch: Batch, base: int, move: Columns, size: int, progress: _Progress
) -> Iterator[copying.Task]:
    """Divide columns into tasks of about ``size`` bytes."""
    ends = running_totals(move.sizes)
    first = done = 0
    while first < len(ends):
        last = bisect_right(ends, done + size, lo=first)
        part = Columns(*[column[first : max(last, first + 1)] for column in move])
        if last == first:  # a single value that must be divided
            last += 1
            yield from _chunks(link, batch, base, part.runs(), [], size, progress)
        else:
            low, high = part.offsets[0], part.offsets[-1] + part.sizes[-1]
            stream = batch.nbytes >= copying.STREAM_MIN
            copy = partial(
                copying.copy_columns, *part, base, into=batch.into_segment, stream=stream
            )
            most = _most_prepared(ends[last - 1] - done)
            yield progress.task([part], _task(link, batch, low, high, most, copy))
        first, done = last, ends[last - 1]


def _chunks(
    link: SupportsWindow,
    batch: Batch,
    base: int,
    runs: Sequence[Run],
    rows: Sequence[Rows],
    size: int,
    progress: _Progress,
) -> Iterator[copying.Task]:
    """Divide runs and rows into tasks of about ``size`` bytes."""
    into, stream = batch.into_segment, batch.nbytes >= copying.STREAM_MIN
    for chunk in copying.cut(runs, size):
        low, high = chunk[0][1], chunk[-1][1] + chunk[-1][2]
        most = _most_prepared(sum([nbytes for _, _, nbytes in chunk]))
        copy = partial(copying.copy_runs, chunk, base, into=into, stream=stream)
        yield progress.task([chunk], _task(link, batch, low, high, most, copy))
    grids = _as_grids(rows, base, into=into)
    side = 0 if into else 1
    for some in copying.cut_grids(grids, size):
        low = min([grid[side] for grid in some]) - base
        high = max([grid[side] + grid[2] + (grid[3] - 1) * grid[4 + side] for grid in some]) - base
        # Column shards touch every page of the rows that they belong to.
        most = 8 * sum([grid[2] * grid[3] for grid in some])
        copy = partial(copying.copy_grids, some, stream=stream)
        task = _task(link, batch, low, high, most, copy)
        yield progress.task(_as_rows(some, base, into), task)


def _as_grids(rows: Sequence[Rows], base: int, *, into: bool) -> list[copying.Grid]:
    if into:
        return [
            (base + offset, address, nbytes, count, there, here)
            for address, offset, nbytes, count, here, there in rows
        ]
    return [
        (address, base + offset, nbytes, count, here, there)
        for address, offset, nbytes, count, here, there in rows
    ]


def _as_rows(grids: list[copying.Grid], base: int, into: bool) -> list[Rows]:
    if into:
        return [(of, to - base, size, rows, b, a) for to, of, size, rows, a, b in grids]
    return [(to, of - base, size, rows, a, b) for to, of, size, rows, a, b in grids]


def _most_prepared(nbytes: int) -> int:
    """How long a range may be for its pages to be prepared, if so many bytes of it are copied. A
    batch usually is one contiguous run, in order, so that a chunk is one range. If it is not, the
    pages are faulted in as they are touched.
    """
    return nbytes + nbytes // 2


def _task(
    link: SupportsWindow, batch: Batch, low: int, high: int, most: int, copy: copying.Task
) -> copying.Task:
    """A task that copies to or from a range, whose pages it prepares unless it is longer than
    ``most`` bytes.
    """
    segment, into = batch.segment, batch.into_segment

    def task() -> None:
        if 0 < high - low <= most:
            with link_errors():
                link.prepare(segment, low, high - low, fresh=into)
        copy()

    return task
