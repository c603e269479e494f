"""Reads ranges of data files, on several threads, straight into the memory of tensors.

A :class:`Read` is one box of one tensor. :func:`plan_reads` plans all reads of a restore before the
first byte is read; files are then checked, and only then is anything written to.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import NamedTuple

import torch
import xxhash

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
from torchstore_snapshot.restoring.files import Files
from torchstore_snapshot.storage.base import Maps, Reader
from torchstore_snapshot.taking.writing import bytes_of
from torchstore_snapshot.threads import run_tasks

__all__ = ["Read", "bytes_read", "check_pieces", "empty_for", "execute", "plan_reads"]
__all__ += ["read_piece"]

# Bytes that are hashed at a time where a file cannot be mapped: they stay in the cache.
_SCRATCH = 256 << 10
# Fewer bytes are read rather than mapped, which takes some microseconds.
_MAP_MIN = 256 << 10


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


def execute(files: Files, reads: Sequence[Read], *, verify: bool, new: bool = False) -> None:
    """Carry all reads out.

    Args:
        verify: compare the hashes of all pieces that are read as a whole. (The hash of a piece does
            not say whether a part of it is right.)
        new: nobody else has the targets yet, so they may be checked after they were read, instead
            of reading everything twice.

    Raises:
        SnapshotCorruptError: a file is missing, has the wrong size, or its bytes have changed. No
            target was written to, unless a file changed in the meantime.
    """
    for read in reads:
        files.reader(read.piece.file)
    whole = [read for read in reads if read.whole] if verify else []
    if not new:
        check_pieces(files, [(read.path, read.piece) for read in whole])
    run_tasks(_tasks(files, reads))
    if new:
        _check_targets(files, whole)


def _check_targets(files: Files, reads: Sequence[Read]) -> None:
    """Compare the hashes of pieces with what was read."""
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


def check_pieces(files: Files, pieces: Sequence[tuple[str, Piece]]) -> None:
    """Compare the hashes of pieces, given with the paths of their tensors.

    Raises:
        SnapshotCorruptError: the bytes of a piece have changed.
    """
    distinct = list({(piece.file, piece.start): (path, piece) for path, piece in pieces}.values())
    hashes: list[list[bytes]] = []

    def tasks() -> Iterator[Callable[[], None]]:
        for _, piece in distinct:
            reader = files.reader(piece.file)
            spans = list(blocks(piece.nbytes))
            found = [b""] * len(spans)
            hashes.append(found)
            for number, (begin, end) in enumerate(spans):
                yield functools.partial(
                    _hash_block, reader, piece.start + begin, end - begin, found, number
                )

    run_tasks(tasks())
    for (path, piece), found in zip(distinct, hashes, strict=True):
        if combined(found) != piece.digest:
            raise files.damaged(piece, path)


def _hash_block(reader: Reader, start: int, nbytes: int, found: list[bytes], number: int) -> None:
    mapped = _mapped(reader, start, nbytes)
    if mapped is not None:
        found[number] = block_hash(mapped)
        return
    # Through a buffer that stays in the cache: the bytes are not needed.
    hasher = xxhash.xxh3_128()
    scratch = memoryview(bytearray(min(_SCRATCH, nbytes)))
    for at in range(0, nbytes, _SCRATCH):
        part = scratch[: min(_SCRATCH, nbytes - at)]
        reader.read_into(start + at, part)
        hasher.update(part)
    found[number] = hasher.digest()


def _mapped(reader: Reader, start: int, nbytes: int) -> memoryview | None:
    """The mapped bytes of a file; None if they should, or must, be read instead."""
    if nbytes < _MAP_MIN or not isinstance(reader, Maps):
        return None
    try:
        return memoryview(reader.map(start, nbytes, populate=True))
    except OSError:  # an old kernel, or bytes that cannot be read: reading shows what is wrong
        return None


def _tasks(files: Files, reads: Sequence[Read]) -> Iterator[Callable[[], None]]:
    for read in reads:
        reader = files.reader(read.piece.file)
        target = read.target.detach()
        begin, end = read.span
        if target.is_cpu and target.is_contiguous() and end - begin == target.nbytes:
            memory = bytes_of(read.path, target)
            for start, stop in blocks(target.nbytes):
                yield functools.partial(_fill, files, read, begin + start, memory[start:stop])
        else:
            yield functools.partial(_scatter, files, reader, read, target)


def _fill(files: Files, read: Read, start: int, memory: memoryview) -> None:
    reader = files.reader(read.piece.file)
    mapped = _mapped(reader, start, len(memory))
    if mapped is not None:  # faster than reading: with stores that bypass the cache
        pieces = [(_address(memory), _address(mapped), len(memory))]
        copying.copy_pieces(pieces, stream=True)
        return
    try:
        reader.read_into(start, memory)
    except EOFError as error:
        raise files.corrupt(read.piece.file, "became shorter", read.path) from error


def _address(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _scatter(files: Files, reader: Reader, read: Read, target: torch.Tensor) -> None:
    """Read a box whose bytes are not contiguous, in the file or in its target."""
    for box, view in _cut(read.box, target):
        part = read._replace(box=box, target=view)
        begin, end = part.span
        strides = _strides(read.source.shape)
        if isinstance(reader, Maps):
            buffer = reader.map(begin, end - begin, populate=False)
        else:
            buffer = bytearray(end - begin)
            try:
                reader.read_into(begin, buffer)
            except EOFError as error:
                raise files.corrupt(read.piece.file, "became shorter", read.path) from error
        flat = from_buffer(buffer, 0, ((end - begin) // view.itemsize,), view.dtype)
        source = flat.as_strided(tuple(view.shape), strides)
        if view.is_cpu:
            strided_copy(byte_like(view), byte_like(source), stream=False)()
        else:
            with torch.inference_mode():
                view.copy_(source)


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
