"""Plans: which bytes move between this process's memory and the segments of volumes.

Pure functions of what is put or wanted and of where it lies. A plan is a :class:`Batch` for each
segment; its moves are made as they are asked for, so that copies can run while the rest of a large
batch is still being planned. :mod:`.executor` carries them out.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

from torchstore_core import boxes
from torchstore_core.boxes import Box
from torchstore_core.clients.transfer.sources import Source
from torchstore_core.clients.transfer.targets import Piece, Results, Target, narrow
from torchstore_core.errors import TransportError
from torchstore_core.machine import copying
from torchstore_core.wire import messages as m

__all__ = ["Batch", "GetBatch", "Job", "Move", "PutBatch", "Rows", "Run", "TensorMove"]
__all__ += ["contiguous_start", "get_batches", "put_batches"]

#: Contiguous bytes: their address here, their offset in the segment, and how many there are.
Run = tuple[int, int, int]
#: Rows of bytes: address, offset, bytes of a row, number of rows, and the bytes from one row to
#: the next, here and in the segment.
Rows = tuple[int, int, int, int, int, int]


class TensorMove(NamedTuple):
    """What torch has to move: rows too short to be worth it, another dtype, or a device.

    Args:
        tensor: in this process's memory, any strides.
        offset, shape, dtype: of the stored value in its segment, where it is row-major.
        box: the part of the stored value; None: all of it.
    """

    key: str
    tensor: torch.Tensor
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    box: Box | None = None

    def runs(self) -> Iterator[tuple[int, int]]:
        """Offset and bytes of each contiguous run of it in the segment, in row-major order."""
        itemsize = self.dtype.itemsize
        box = boxes.whole(self.shape) if self.box is None else self.box
        for start, length in boxes.contiguous_runs(box, self.shape):
            yield self.offset + start * itemsize, length * itemsize


Move = Run | Rows | TensorMove


class Batch(ABC):
    """What moves between this process and one segment of one volume.

    Attributes:
        volume, segment: their indices.
        nbytes: of all moves.
        into_segment: a put; else a get.
        on_device: some of the tensors lie on a device.
    """

    volume: int
    segment: int
    nbytes: int
    into_segment: bool
    on_device: bool

    @abstractmethod
    def moves(self, room: int | None) -> Iterator[Move]:
        """The moves, in order, planned as they are asked for.

        Args:
            room: bytes of the segment, if its memory is addressable here; None: it is not, so
                that what is strided here comes as a :class:`TensorMove`.

        Raises:
            TransportError: a value would lie outside of the segment.
            UnsupportedValueError: a tensor has changed since it was looked at.
        """


class PutBatch(Batch):
    """Values on their way into the places that were granted for them."""

    into_segment = True

    def __init__(self, volume: int, segment: int) -> None:
        self.volume = volume
        self.segment = segment
        self.items: list[tuple[Source, int]] = []  # and the offset of each
        self.nbytes = 0
        self.on_device = False

    def add(self, source: Source, offset: int) -> None:
        """One more."""
        self.items.append((source, offset))
        self.nbytes += source.nbytes
        if source.tensor is not None and not source.tensor.is_cpu:
            self.on_device = True

    def moves(self, room: int | None) -> Iterator[Move]:
        for source, offset in self.items:
            nbytes = source.nbytes
            if room is not None and not 0 <= offset <= room - nbytes:
                raise TransportError(f"{source.key!r} would lie outside segment {self.segment}")
            address = source.address()
            tensor = source.tensor
            if tensor is None:
                yield address, offset, nbytes
                continue
            if source.cast is None and tensor.is_cpu:
                if tensor.is_contiguous():
                    yield address, offset, nbytes
                    continue
                if room is not None:
                    shape, itemsize = tuple(tensor.shape), tensor.element_size()
                    _, steps = _row_major(shape, None)
                    rows = copying.grids(shape, itemsize, address, tensor.stride(), offset, steps)
                    if rows is not None:
                        yield from rows
                        continue
            dtype = source.cast or tensor.dtype
            yield TensorMove(source.key, tensor, offset, tuple(tensor.shape), dtype)


def put_batches(granted: Iterable[tuple[Source, m.Grant]]) -> Sequence[PutBatch]:
    """The plan of a put."""
    batches: dict[tuple[int, int], PutBatch] = {}
    for source, grant in granted:
        place = grant.volume, grant.segment
        batch = batches.get(place)
        if batch is None:
            batch = batches[place] = PutBatch(*place)
        batch.add(source, grant.offset)
    return list(batches.values())


#: A piece of a target that is to be read.
Job = tuple[Target, Piece]


class GetBatch(Batch):
    """Pieces on their way from a segment to where they are wanted."""

    into_segment = False

    def __init__(self, volume: int, segment: int, results: Results) -> None:
        self.volume = volume
        self.segment = segment
        self.jobs: list[Job] = []
        self.results = results
        self.nbytes = 0
        self.on_device = False

    def add(self, target: Target, piece: Piece) -> None:
        """One more."""
        self.jobs.append((target, piece))
        self.nbytes += piece.nbytes
        if target.tensor is not None and not target.tensor.is_cpu:
            self.on_device = True

    def moves(self, room: int | None) -> Iterator[Move]:
        into = [self.results.tensor(target) for target, _ in self.jobs]
        for (target, piece), result in zip(self.jobs, into, strict=True):
            grant, nbytes, itemsize = piece.grant, piece.nbytes, target.dtype.itemsize
            if grant is None or not nbytes:
                continue
            stored = nbytes if piece.box is None else math.prod(piece.shape) * itemsize
            if room is not None and not 0 <= grant.offset <= room - stored:
                raise TransportError(f"{target.key!r} lies outside segment {self.segment}")
            address = target.address(result)
            if result.dtype is target.dtype and result.is_cpu:
                if result.is_contiguous():
                    start = contiguous_start(piece, itemsize)
                    first = None if start is None else _first_if_run(piece.into, target.shape)
                    if start is not None and first is not None:
                        yield address + first * itemsize, start, nbytes
                        continue
                if room is not None:
                    rows = _rows(piece, address, result.stride(), grant.offset, itemsize)
                    if rows is not None:
                        yield from rows
                        continue
            part = result if piece.into is None else narrow(result, piece.into)
            yield TensorMove(target.key, part, grant.offset, piece.shape, target.dtype, piece.box)


def get_batches(targets: Iterable[Target], results: Results) -> Sequence[GetBatch]:
    """The plan of a get, but for what comes inside the reply."""
    batches: dict[tuple[int, int], GetBatch] = {}
    for target in targets:
        for piece in target.pieces:
            grant = piece.grant
            if grant is None:
                continue
            place = grant.volume, grant.segment
            batch = batches.get(place)
            if batch is None:
                batch = batches[place] = GetBatch(*place, results)
            batch.add(target, piece)
    return list(batches.values())


def contiguous_start(piece: Piece, itemsize: int) -> int | None:
    """Byte offset of the wanted part in its segment if it is one run there, else None."""
    if piece.grant is None:
        return None
    start = _first_if_run(piece.box, piece.shape)
    return None if start is None else piece.grant.offset + start * itemsize


def _rows(
    piece: Piece, address: int, steps: Sequence[int], offset: int, itemsize: int
) -> list[Rows] | None:
    """How to copy a piece into its place, in a result at ``address``, by rows. In plain numbers:
    an operation of torch lets go of the interpreter lock, and while copy threads run it takes long
    to get it back.
    """
    if piece.into is not None:
        ahead = sum([o * step for o, step in zip(piece.into.offset, steps, strict=True)])
        address += ahead * itemsize
    start, stored_steps = _row_major(piece.shape, piece.box)
    shape = piece.shape if piece.box is None else piece.box.shape
    offset += start * itemsize
    return copying.grids(shape, itemsize, address, steps, offset, stored_steps)


@lru_cache(maxsize=4096)  # layers repeat, and so do steps
def _row_major(shape: tuple[int, ...], box: Box | None) -> tuple[int, list[int]]:
    """The first element of a box (None: of all) in a row-major tensor, and its strides."""
    steps = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    if box is None:
        return 0, steps
    return sum([o * step for o, step in zip(box.offset, steps, strict=True)]), steps


@lru_cache(maxsize=4096)
def _first_if_run(box: Box | None, shape: tuple[int, ...]) -> int | None:
    """The first element of a box in a row-major tensor if the box is one run of it."""
    if box is None:
        return 0
    if box.is_empty or not boxes.is_contiguous(box, shape):
        return None
    return next(iter(boxes.contiguous_runs(box, shape)))[0]
