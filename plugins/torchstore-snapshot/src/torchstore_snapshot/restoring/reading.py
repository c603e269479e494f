"""Reads ranges of data files, on several threads, straight into the memory of tensors.

A :class:`Read` is one box of one tensor. :func:`plan_reads` plans all reads of a restore before the
first byte is read; files are then checked, and only then is anything written to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Literal

import torch

from torchstore_core import boxes
from torchstore_core.clients.values.new_tensors import new_tensor
from torchstore_core.clients.values.tensors import dtype_of, were_written
from torchstore_core.machine import copying
from torchstore_core.values import TensorMeta
from torchstore_snapshot.devices import Devices
from torchstore_snapshot.format.hashes import BLOCK, digest_of
from torchstore_snapshot.format.manifest import Piece, TensorEntry
from torchstore_snapshot.garbage import no_collections
from torchstore_snapshot.progress import Advance, Progress, metered
from torchstore_snapshot.restoring.checking import (
    UNLIMITED,
    Limits,
    Range,
    check_ranges,
    checkable,
    covering,
    holds,
    united,
)
from torchstore_snapshot.restoring.fetching import (
    REQUESTS,
    WINDOW,
    Fetched,
    hold_max,
    merged,
    windows,
)
from torchstore_snapshot.restoring.files import Files
from torchstore_snapshot.restoring.filling import Read, apart, fills, tasks
from torchstore_snapshot.threads import run_tasks

__all__ = ["Check", "Read", "bytes_read", "check_reads", "empty_for", "execute", "open_files"]
__all__ += ["plan_reads", "read_piece"]

# As many bytes or more, of storage with expensive requests, go straight into their tensor.
_DIRECT = 1 << 20
# A thread that may use less memory than this is not worth starting.
_THREAD_MIN = 1 << 20
# Nothing can be read with less.
_BUDGET_MIN = 64 << 10

#: When hashes are compared, and which; see :func:`execute`.
Check = Literal["before", "during", "all"]


def plan_reads(
    path: str, entry: TensorEntry, target: torch.Tensor, wanted: boxes.Box
) -> list[Read]:
    """Plan how to read ``wanted``, a box of the tensor, into ``target``, which has its shape."""
    if wanted.is_empty:
        return []
    if wanted.shape == entry.shape and len(entry.pieces) == 1 and entry.pieces[0].slice is None:
        return [Read(path, entry.pieces[0], wanted, wanted, target)]  # nearly all are
    sources = entry.boxes()
    if len(sources) == 1 and sources[0] == wanted:
        return [Read(path, entry.pieces[0], wanted, wanted, target)]
    reads: list[Read] = []
    for index, box in boxes.read_plan(wanted, sources):
        view = target
        inner = boxes.relative(box, wanted)
        for dim, (start, extent) in enumerate(zip(*inner, strict=True)):
            if extent != view.shape[dim]:
                view = view.narrow(dim, start, extent)
        reads.append(Read(path, entry.pieces[index], sources[index], box, view))
    return reads


def bytes_read(reads: Sequence[Read]) -> int:
    """Return the number of bytes that the reads need."""
    return sum(read.target.nbytes for read in reads)


def execute(
    files: Files,
    reads: Sequence[Read],
    *,
    check: Check | None,
    budget: int | None = None,
    progress: Progress = False,
    ready: Callable[[], None] | None = None,
) -> None:
    """Carry all reads out.

    Args:
        check: when to compare hashes, those of all blocks of which everything is read; None: never.
            ``"before"`` anything is written to, which reads everything twice; or ``"during"`` the
            reads, so that damage is only found when targets have been written to. ``"all"``: before
            anything is written to, those of all blocks of which anything is read, for which all of
            these blocks are read.
        budget: bytes of memory that may be used besides the targets; None: no matter.
        progress: who is told how far it is.
        ready: called once, when what is to be checked before anything is written to has been, and
            before anything is. If it raises, nothing is written to.

    Raises:
        SnapshotCorruptError: a file is missing, has the wrong size, or its bytes have changed. With
            ``"before"`` and ``"all"``, no target was written to, unless a file changed meanwhile.
    """
    open_files(files, reads)
    reads = _without_gaps(files, reads)
    limits = UNLIMITED
    if budget is not None:
        most = REQUESTS if files.remote else copying.copy_threads()
        threads = max(1, min(most, budget // _THREAD_MIN))
        # Storage libraries have a copy of what they return.
        limits = Limits(threads, max(budget, _BUDGET_MIN) // threads // (2 if files.remote else 1))
        if not all(read.target.is_cpu for read in reads):  # half of it for what goes to devices
            budget //= 2
            limits = Limits(threads, max(limits.nbytes or 0, 2) // 2)
    total = _total(files, reads, check, limits) if progress else 0
    with (
        metered(progress, "restoring", total) as advance,
        Devices(BLOCK, budget, limits.threads) as devices,
    ):
        _execute(files, reads, check, advance, limits, devices, ready)


def _without_gaps(files: Files, reads: Sequence[Read]) -> Sequence[Read]:
    """Divide reads whose rows are so far from each other that to request each of them costs less
    than what lies between them; see :attr:`Files.gap`.
    """
    return [part for read in reads for part in apart(read, files.gap)] if files.remote else reads


def _total(files: Files, reads: Sequence[Read], check: Check | None, limits: Limits) -> int:
    """How many bytes are checked and read, one after the other."""
    total = bytes_read(reads)
    for of in _ranges(files, reads, check, limits):
        total += sum(end - begin for _, begin, end in checkable(of, files.block(of.piece.file)))
    return total


def open_files(files: Files, reads: Sequence[Read]) -> None:
    """Open all files that the reads need.

    Raises:
        SnapshotCorruptError: one of them is missing, or has the wrong size.
    """
    for read in reads:
        files.reader(read.piece.file)


def check_reads(files: Files, reads: Sequence[Read], check: Check | None) -> None:
    """Compare the hashes that :func:`execute` compares before it writes, and write nothing. The
    targets may be on the meta device.

    Raises:
        SnapshotCorruptError: as for :func:`execute`.
    """
    open_files(files, reads)
    reads = _without_gaps(files, reads)
    if check in ("before", "all"):
        for index in {read.piece.file for read in reads}:
            if not files.remote:
                files.map(index)
        check_ranges(files, _ranges(files, reads, check, UNLIMITED))


@no_collections()
def _ranges(
    files: Files | Fetched, reads: Sequence[Read], check: Check | None, limits: Limits
) -> list[Range]:
    """What is checked before it is read: because everything is, or because it cannot be hashed on
    the way.
    """
    if check is None:
        return []
    if check == "all":
        return united(_covering(files, read) for read in reads)
    found = [read.range for read in reads if check == "before" or not _hashed(files, read, limits)]
    return [of for of in found if of is not None]


def _hashed(files: Files | Fetched, read: Read, limits: Limits) -> bool:
    """Whether the hashes of a read can be compared on the way. Of what goes to a device, a whole
    block has to be in memory for that.
    """
    if not fills(read):
        return False
    return read.target.is_cpu or (limits.nbytes is None and files.block(read.piece.file) <= BLOCK)


def _covering(files: Files | Fetched, read: Read) -> Range:
    """The blocks that contain what is read, and perhaps, between rows, others."""
    return covering(read.around, files.block(read.piece.file))


def _execute(
    files: Files | Fetched,
    reads: Sequence[Read],
    check: Check | None,
    advance: Advance | None,
    limits: Limits,
    devices: Devices,
    ready: Callable[[], None] | None = None,
) -> None:
    if limits.nbytes is None and isinstance(files, Files) and files.remote:
        _execute_remote(files, reads, check, advance, devices, ready)
        return
    checked = _ranges(files, reads, check, limits)
    if limits.nbytes is None:
        _map(files, reads, checked)
    check_ranges(files, checked, advance, limits)
    if ready is not None:
        ready()
    _carry_out(files, reads, check, advance, limits, devices)


def _map(files: Files | Fetched, reads: Sequence[Read], checked: Sequence[Range]) -> None:
    """Map what will be read and checked."""
    spans = {of.span for of in checked}
    for read in reads:
        if (rows := read.rows) is None or not rows.apart:
            spans.add(read.span)
    ranges: dict[int, list[tuple[int, int]]] = {read.piece.file: [] for read in reads}
    for file, begin, end in merged(spans, 0):
        ranges[file].append((begin, end))
    for file, of in ranges.items():
        files.map(file, of)


def _carry_out(
    files: Files | Fetched,
    reads: Sequence[Read],
    check: Check | None,
    advance: Advance | None,
    limits: Limits,
    devices: Devices,
) -> None:
    """Read, and compare hashes if that is to be done on the way."""
    hashes: dict[int, dict[int, bytes]] = {}
    if check == "during":
        hashes = {i: {} for i, read in enumerate(reads) if _hashed(files, read, limits)}
    work = tasks(files, dict(enumerate(reads)), hashes, advance, limits, devices)
    try:
        run_tasks(work, limits.threads)
    finally:
        were_written(read.target for read in reads)
    for index, found in hashes.items():
        of = reads[index].range
        if of is not None and not holds(of, found):
            raise files.damaged(of.piece, of.path)


def _execute_remote(
    files: Files,
    reads: Sequence[Read],
    check: Check | None,
    advance: Advance | None,
    devices: Devices,
    ready: Callable[[], None] | None,
) -> None:
    """As :func:`execute`, with few requests. What has to be checked before it is used is held in
    memory, and is read twice only if there is too much of it.
    """
    before = check in ("before", "all")
    if not before:
        if ready is not None:
            ready()
        ready = None
        direct = [
            read
            for read in reads
            if read.target.is_cpu and read.target.nbytes >= _DIRECT and fills(read)
        ]
        _carry_out(files, direct, check, advance, Limits(REQUESTS), devices)
        chosen = {id(read) for read in direct}
        reads = [read for read in reads if id(read) not in chosen]
    spans = [read.span for read in reads]
    if check == "all":
        spans = [_covering(files, read).span for read in reads]
    groups = list(windows(spans, hold_max() if before else WINDOW))
    if before and len(groups) != 1:
        for group in groups:
            some = _ranges(files, [reads[i] for i in group], check, UNLIMITED)
            check_ranges(files, some, advance)
        if ready is not None:
            ready()
        check, ready = None, None
        spans = [read.span for read in reads]
    for group in groups:
        held = Fetched(files, [spans[i] for i in group])
        _execute(held, [reads[i] for i in group], check, advance, UNLIMITED, devices, ready)


def read_piece(files: Files, path: str, piece: Piece) -> bytes:
    """Return all bytes of a piece, checked against its hash.

    Raises:
        SnapshotCorruptError: the file is missing or too short, or the bytes have changed.
    """
    data = bytearray(piece.nbytes)
    try:
        files.reader(piece.file).read_into(piece.start, data)
    except (EOFError, FileNotFoundError) as error:
        raise files.corrupt(piece.file, "became shorter, or was removed", path) from error
    if digest_of(data, files.block(piece.file)) != piece.digest:
        raise files.damaged(piece, path)
    return bytes(data)


def empty_for(path: str, entry: TensorEntry, shape: Sequence[int]) -> torch.Tensor:
    """Return a new tensor on the host for a part of an entry.

    Raises:
        OutOfMemoryError: there is no memory for it.
    """
    dtype = dtype_of(TensorMeta(entry.dtype, entry.shape), path)
    raw = new_tensor((prod(shape) * dtype.itemsize,), torch.uint8)
    return raw.view(dtype).view(tuple(shape))  # torch warns about new tensors of some dtypes
