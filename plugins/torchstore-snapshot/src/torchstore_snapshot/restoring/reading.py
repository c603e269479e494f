"""Reads ranges of data files, on several threads, straight into the memory of tensors.

A :class:`Read` is one box of one tensor. :func:`plan_reads` plans all reads of a restore before the
first byte is read; files are then checked, and only then is anything written to.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

import torch

from torchstore_core import boxes
from torchstore_core.clients.values.tensors import (
    byte_like,
    dtype_of,
    from_buffer,
    strided_copy,
)
from torchstore_core.machine import copying
from torchstore_core.values import TensorMeta
from torchstore_snapshot.format.hashes import BLOCK, block_hash, blocks, combined
from torchstore_snapshot.format.manifest import Piece, TensorEntry
from torchstore_snapshot.progress import Advance, Progress, metered
from torchstore_snapshot.restoring.checking import check_pieces
from torchstore_snapshot.restoring.fetching import (
    REQUESTS,
    WINDOW,
    Fetched,
    Span,
    hold_max,
    windows,
)
from torchstore_snapshot.restoring.files import Files
from torchstore_snapshot.restoring.mappings import address_of
from torchstore_snapshot.taking.writing import bytes_of
from torchstore_snapshot.threads import run_tasks

__all__ = ["Read", "bytes_read", "empty_for", "execute", "plan_reads", "read_piece"]

# As many bytes or more, of storage with expensive requests, go straight into their tensor.
_DIRECT = 1 << 20


class Read(NamedTuple):
    """A box to be read from a piece.

    Args:
        path: of the tensor, for errors.
        piece: where it comes from.
        source: the box of the piece, in the whole tensor.
        box: what is read of it.
        target: where it goes: a tensor of the shape of ``box``, with any strides, on any device.
    """

    path: str
    piece: Piece
    source: boxes.Box
    box: boxes.Box
    target: torch.Tensor

    @property
    def whole(self) -> bool:
        """Whether everything in the piece is read."""
        return self.box == self.source

    @property
    def span(self) -> tuple[int, int]:
        """The first byte and the end, in the file, of what contains the box."""
        itemsize = self.target.itemsize
        inner = boxes.relative(self.box, self.source)
        strides = _strides(self.source.shape)
        first = sum(o * s for o, s in zip(inner.offset, strides, strict=True))
        last = sum((e - 1) * s for e, s in zip(inner.end, strides, strict=True))
        return self.piece.start + first * itemsize, self.piece.start + (last + 1) * itemsize


def _strides(shape: Sequence[int]) -> list[int]:
    strides = [1] * len(shape)
    for dim in range(len(shape) - 1, 0, -1):
        strides[dim - 1] = strides[dim] * shape[dim]
    return strides


def plan_reads(
    path: str, entry: TensorEntry, target: torch.Tensor, wanted: boxes.Box
) -> list[Read]:
    """Plan how to read ``wanted``, a box of the tensor, into ``target``, which has its shape."""
    if wanted.is_empty:
        return []
    sources = entry.boxes()
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
    verify: bool,
    new: bool = False,
    progress: Progress = False,
) -> None:
    """Carry all reads out.

    Args:
        verify: compare the hashes of all pieces that are read as a whole. (The hash of a piece does
            not say whether a part of it is right.)
        new: nobody else has the targets yet, so they may be checked after they were read, instead
            of reading everything twice.
        progress: who is told how far it is.

    Raises:
        SnapshotCorruptError: a file is missing, has the wrong size, or its bytes have changed. No
            target was written to, unless a file changed in the meantime.
    """
    total = bytes_read(reads)
    if verify and not new:
        total += bytes_read([read for read in reads if read.whole])
    with metered(progress, "restoring", total) as advance:
        _execute(files, reads, verify=verify, new=new, advance=advance)


def _execute(
    files: Files | Fetched,
    reads: Sequence[Read],
    *,
    verify: bool,
    new: bool,
    advance: Advance | None,
) -> None:
    needed: dict[int, int] = {}
    for read in reads:
        files.reader(read.piece.file)
        needed[read.piece.file] = needed.get(read.piece.file, 0) + read.target.nbytes
    if isinstance(files, Files) and files.remote:
        _execute_remote(files, reads, verify=verify, new=new, advance=advance)
        return
    for index, nbytes in needed.items():
        files.map(index, nbytes)
    whole = [read for read in reads if read.whole] if verify else []
    if not new:
        check_pieces(files, [(read.path, read.piece) for read in whole], advance)
    run_tasks(_tasks(files, reads, advance))
    if new:
        _check_memory(files, whole)


def _execute_remote(
    files: Files, reads: Sequence[Read], *, verify: bool, new: bool, advance: Advance | None
) -> None:
    """As :func:`execute`, with few requests. What has to be checked before it is used is held in
    memory, and is read twice only if there is too much of it.
    """
    if new or not verify:
        direct = [read for read in reads if read.target.nbytes >= _DIRECT and _fills(read)]
        run_tasks(_tasks(files, direct, advance), REQUESTS)
        if verify:
            _check_memory(files, [read for read in direct if read.whole])
        chosen = {id(read) for read in direct}
        reads = [read for read in reads if id(read) not in chosen]
    spans = [Span(read.piece.file, *read.span) for read in reads]
    groups = list(windows(spans, WINDOW if new or not verify else hold_max()))
    if not new and verify and len(groups) > 1:
        for group in groups:
            mine = [(reads[i].path, reads[i].piece) for i in group if reads[i].whole]
            held = Fetched(files, [spans[i] for i in group if reads[i].whole])
            check_pieces(held, mine, advance)
        verify = False
    for group in groups:
        held = Fetched(files, [spans[i] for i in group])
        _execute(held, [reads[i] for i in group], verify=verify, new=new, advance=advance)


def _fills(read: Read) -> bool:
    """Whether the bytes of a read lie in its target as they do in the file."""
    begin, end = read.span
    target = read.target
    return target.is_cpu and target.is_contiguous() and end - begin == target.nbytes


def _check_memory(files: Files | Fetched, reads: Sequence[Read]) -> None:
    """Compare the hashes of pieces with the tensors that they were read into.

    Raises:
        SnapshotCorruptError: the bytes of a piece are not those that were written.
    """
    hashes = [[b""] * len(list(blocks(read.piece.nbytes))) for read in reads]

    def tasks() -> Iterator[Callable[[], None]]:
        for read, found in zip(reads, hashes, strict=True):
            packed = read.target.detach().cpu().contiguous()
            memory = bytes_of(read.path, packed)
            for number, (begin, end) in enumerate(blocks(len(memory))):
                yield functools.partial(_hash_memory, packed, memory[begin:end], found, number)

    run_tasks(tasks())
    for read, found in zip(reads, hashes, strict=True):
        if combined(found) != read.piece.digest:
            raise files.damaged(read.piece, read.path)


def _hash_memory(owner: torch.Tensor, memory: memoryview, found: list[bytes], number: int) -> None:
    del owner  # it was passed only to be kept alive
    found[number] = block_hash(memory)


def _tasks(
    files: Files | Fetched, reads: Sequence[Read], advance: Advance | None
) -> Iterator[Callable[[], None]]:
    for read in reads:
        target = read.target.detach()
        begin, _ = read.span
        if _fills(read):
            memory = bytes_of(read.path, target)
            for start, stop in blocks(target.nbytes):
                yield functools.partial(
                    _fill, files, read, begin + start, memory[start:stop], advance
                )
        else:
            yield functools.partial(_scatter, files, read, target, advance)


def _fill(
    files: Files | Fetched, read: Read, start: int, memory: memoryview, advance: Advance | None
) -> None:
    window = files.window(read.piece.file, start, len(memory))
    if window is not None:  # faster than reading: with stores that bypass the cache
        pieces = [(address_of(memory), address_of(window), len(memory))]
        copying.copy_pieces(pieces, stream=True)
    else:
        _read(files, read, start, memory)
    if advance is not None:
        advance(len(memory))


def _read(files: Files | Fetched, read: Read, start: int, buffer: memoryview | bytearray) -> None:
    try:
        files.reader(read.piece.file).read_into(start, buffer)
    except EOFError as error:
        raise files.corrupt(read.piece.file, "became shorter", read.path) from error


def _scatter(
    files: Files | Fetched, read: Read, target: torch.Tensor, advance: Advance | None
) -> None:
    """Read a box whose bytes are not contiguous, in the file or in its target."""
    for box, view in _cut(read.box, target):
        part = read._replace(box=box, target=view)
        begin, end = part.span
        strides = _strides(read.source.shape)
        buffer: Any = files.window(read.piece.file, begin, end - begin, sparse=True)
        if buffer is None:
            buffer = bytearray(end - begin)
            _read(files, read, begin, buffer)
        flat = from_buffer(buffer, 0, ((end - begin) // view.itemsize,), view.dtype)
        source = flat.as_strided(tuple(view.shape), strides)
        if view.is_cpu:
            strided_copy(byte_like(view), byte_like(source), stream=False)()
        else:
            with torch.inference_mode():
                view.copy_(source)
        if advance is not None:
            advance(view.nbytes)


def _cut(box: boxes.Box, target: torch.Tensor) -> Iterator[tuple[boxes.Box, torch.Tensor]]:
    """Cut a box and its target along the first dimension, into parts of about one block."""
    if target.nbytes <= BLOCK or not box.shape:
        yield box, target
        return
    rows = max(1, BLOCK * box.shape[0] // target.nbytes)
    for start in range(0, box.shape[0], rows):
        count = min(rows, box.shape[0] - start)
        offset = (box.offset[0] + start, *box.offset[1:])
        yield boxes.Box(offset, (count, *box.shape[1:])), target.narrow(0, start, count)


def read_piece(files: Files, path: str, piece: Piece) -> bytes:
    """Return all bytes of a piece, checked against its hash.

    Raises:
        SnapshotCorruptError: the file is missing or too short, or the bytes have changed.
    """
    data = bytearray(piece.nbytes)
    try:
        files.reader(piece.file).read_into(piece.start, data)
    except EOFError as error:
        raise files.corrupt(piece.file, "became shorter", path) from error
    view = memoryview(data)
    if combined(block_hash(view[start:end]) for start, end in blocks(piece.nbytes)) != piece.digest:
        raise files.damaged(piece, path)
    return bytes(data)


def empty_for(path: str, entry: TensorEntry, shape: Sequence[int]) -> torch.Tensor:
    """Return a new tensor on the host for a part of an entry."""
    dtype = dtype_of(TensorMeta(entry.dtype, entry.shape), path)
    raw = torch.empty(prod(shape) * dtype.itemsize, dtype=torch.uint8, device="cpu")
    return raw.view(dtype).view(tuple(shape))  # torch warns about new tensors of some dtypes
