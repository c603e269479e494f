"""Plans: which bytes move between this process's memory and the segments of volumes.

These are pure functions of the values to put or get and of their locations. A plan is a
:class:`Batch` for each segment. Its moves are generated lazily, so that copies can run while the
rest of a large batch is still being planned. The room ``moving`` carries them out.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import compress
from typing import Any, TypeVar

from torchstore_core import boxes
from torchstore_core.boxes import Box
from torchstore_core.clients.moving.batches import MAP_MIN, Mapped, Move, ReadsInPlace, Rows, Run
from torchstore_core.clients.moving.mapping import map_values
from torchstore_core.clients.moving.windows import window_of
from torchstore_core.clients.session.links import link_errors
from torchstore_core.clients.transfer.sources import Source
from torchstore_core.clients.transfer.targets import Plain, Results, Target, TargetPiece, narrow
from torchstore_core.clients.transfer.tensor_moves import TensorBatch, TensorMove
from torchstore_core.clients.values.codec import has_aside
from torchstore_core.clients.values.plain import Looked, look
from torchstore_core.clients.values.tensors import from_buffer
from torchstore_core.contracts.transport import SupportsMap, SupportsWindow
from torchstore_core.errors import TransportError
from torchstore_core.machine import copying
from torchstore_core.values import ValueMeta
from torchstore_core.wire import messages as m

T = TypeVar("T")


class PutBatch(TensorBatch):
    """Values to be written to the places that were granted for them."""

    into_segment = True

    def __init__(
        self, volume: int, segment: int, sources: Sequence[Source], offsets: Sequence[int]
    ) -> None:
        self.volume = volume
        self.segment = segment
        self.nbytes = sum([source.nbytes for source in sources])
        easy = [source.plain for source in sources]
        self._plain = list(compress(sources, easy))
        self._offsets = list(compress(offsets, easy))
        pairs = zip(sources, offsets, easy, strict=True)
        self._others = [] if all(easy) else [(s, at) for s, at, is_easy in pairs if not is_easy]
        tensors = [source.tensor for source, _ in self._others]
        self.on_device = any(tensor is not None and not tensor.is_cpu for tensor in tensors)

    def moves(self, room: int | None) -> Iterator[Move]:
        plain, offsets = self._plain, self._offsets
        looked = look([source.tensor for source in plain])
        # If the ``.data`` of a tensor is replaced during the copy, its memory must stay alive.
        self._memory = list(looked.storages)
        runs, changed = _same(looked, [source.meta for source in plain], offsets)
        if _are_inside(runs, room):
            yield runs
            others = [*[(plain[at], offsets[at]) for at in changed], *self._others]
        else:
            others = [*zip(plain, offsets, strict=True), *self._others]
        for source, offset in others:
            nbytes = source.nbytes
            if room is not None and not 0 <= offset <= room - nbytes:
                raise TransportError(f"{source.key!r} would lie outside segment {self.segment}")
            tensor = source.tensor
            if tensor is None:
                yield source.runs(offset)
                continue
            self._memory.append(tensor.untyped_storage())
            address = source.address(tensor)
            if source.cast is None and tensor.is_cpu:
                if tensor.is_contiguous():
                    yield [(address, offset, nbytes)]
                    continue
                shape, itemsize = tuple(tensor.shape), tensor.element_size()
                _, steps = _row_major(shape, None)
                rows = copying.grids(shape, itemsize, address, tensor.stride(), offset, steps)
                if rows is not None:
                    yield from rows
                    continue
            dtype = source.cast or tensor.dtype
            yield TensorMove(source.key, tensor, offset, tuple(tensor.shape), dtype)


def put_batches(granted: Iterable[tuple[Source, m.Grant | None]]) -> Sequence[PutBatch]:
    """The plan of a put. Sources whose grant is None are not written."""
    return [PutBatch(*place, *there) for place, there in _by_place(granted).items()]


#: A piece of a target that is to be read.
Job = tuple[Target, TargetPiece]


class GetBatch(TensorBatch, ReadsInPlace):
    """Pieces to be read from a segment into their destinations."""

    into_segment = False

    def __init__(
        self,
        volume: int,
        segment: int,
        results: Results,
        jobs: Sequence[Job],
        plain: Sequence[Plain] = (),
        offsets: Sequence[int] = (),
    ) -> None:
        self.volume = volume
        self.segment = segment
        self.results = results
        self.jobs = jobs
        self.plain = plain
        self.offsets = offsets  # of the plain ones
        self.sizes = [one.entry.nbytes for one in plain]
        self.nbytes = sum([piece.nbytes for _, piece in jobs]) + sum(self.sizes)
        tensors = [target.tensor for target, _ in jobs]
        self.on_device = any(tensor is not None and not tensor.is_cpu for tensor in tensors)

    @property
    def is_empty(self) -> bool:
        return not self.jobs and not self.plain

    def map(self, link: SupportsMap) -> tuple[Sequence[Mapped], GetBatch]:
        rest: list[Job] = []
        plain, offsets = self.plain, self.offsets
        large: list[tuple[int, int, Target | Plain]] = []
        if max(self.sizes, default=0) >= MAP_MIN:
            rows = list(zip(plain, offsets, self.sizes, strict=True))
            is_large = [one.tensor is None and size >= MAP_MIN for one, _, size in rows]
            large += [(start, size, one) for one, start, size in compress(rows, is_large)]
            left = [not mapped for mapped in is_large]
            plain, offsets = list(compress(plain, left)), list(compress(offsets, left))
        for target, piece in self.jobs:
            start = None
            if (
                target.tensor is None
                and (target.codec is None or has_aside(target.codec))
                and piece.into is None
                and piece.nbytes >= MAP_MIN
            ):
                start = _contiguous_start(piece, target.dtype.itemsize)
            if start is None:
                rest.append((target, piece))
            else:
                large.append((start, target.nbytes, target))
        if not large:
            return (), self
        found, refused = map_values(link, self.segment, large)
        for at, _, one in refused:
            if isinstance(one, Target):
                rest.append((one, one.pieces[0]))
            else:
                plain, offsets = [*plain, one], [*offsets, at]
        mapped = [
            Mapped(owner, [(t, from_buffer(owner, at, t.shape, t.dtype)) for t, at in inside])
            for owner, inside in found
        ]
        where = self.volume, self.segment
        return mapped, GetBatch(*where, self.results, rest, plain, offsets)

    def decode(self, link: SupportsWindow) -> None:
        """Decode the large objects where they are stored, which saves a copy of their bytes, unless
        they keep those. The link must be in use.
        """
        left: list[Job] = []
        for target, piece in self.jobs:
            codec, grant, nbytes = target.codec, piece.grant, piece.nbytes
            if codec is None or has_aside(codec) or grant is None or nbytes < MAP_MIN:
                left.append((target, piece))
                continue
            window = window_of(link, self)
            if not 0 <= grant.offset <= window.nbytes - nbytes:
                raise TransportError(f"{target.key!r} lies outside segment {self.segment}")
            with link_errors():
                link.prepare(self.segment, grant.offset, nbytes, fresh=False)
            memory = (ctypes.c_char * nbytes).from_address(window.address + grant.offset)
            self.results.decode(target, codec, memoryview(memory))
        self.jobs = left

    def moves(self, room: int | None) -> Iterator[Move]:
        plain, offsets = self.plain, self.offsets
        given = [one.tensor is not None for one in plain]
        filled = list(compress(plain, given))
        looked = look([one.tensor for one in filled])
        self._memory = list(looked.storages)
        runs, changed = _same(looked, [one.meta for one in filled], list(compress(offsets, given)))
        if len(filled) < len(plain):
            fresh = [one for one in plain if one.tensor is None]
            places = [at for at, is_given in zip(offsets, given, strict=True) if not is_given]
            addresses = [tensor.data_ptr() for tensor in self.results.tensors(fresh)]
            runs += zip(addresses, places, [one.entry.nbytes for one in fresh], strict=True)
        others = [filled[at] for at in changed]
        if _are_inside(runs, room):
            yield runs
        else:
            others = list(plain)
        targets = [one.target() for one in others]
        jobs = [*[(target, target.pieces[0]) for target in targets], *self.jobs]
        into = [self.results.tensor(target) for target, _ in jobs]
        looked = look(into)
        self._memory += looked.storages
        columns = zip(jobs, into, looked.metas, looked.addresses, strict=True)
        for (target, piece), result, meta, address in columns:
            grant, nbytes, itemsize = piece.grant, piece.nbytes, target.dtype.itemsize
            if grant is None or not nbytes:
                continue
            stored = nbytes if piece.box is None else math.prod(piece.shape) * itemsize
            if room is not None and not 0 <= grant.offset <= room - stored:
                raise TransportError(f"{target.key!r} lies outside segment {self.segment}")
            if meta is None or meta.shape != target.shape:
                self._memory.append(result.untyped_storage())
                address = target.address(result)
            offset = grant.offset
            if result.dtype is target.dtype and result.is_cpu:
                # Of two dimensions there is one grid at most: little to keep.
                find = _rows if result.dim() <= 2 else _rows.__wrapped__
                rows = find(piece.shape, piece.box, piece.into, result.stride(), itemsize)
                if rows is not None:
                    for to, of, size, count, stride, step in rows:
                        if count == 1:
                            yield [(address + to, offset + of, size)]
                        else:
                            yield (address + to, offset + of, size, count, stride, step)
                    continue
            part = result if piece.into is None else narrow(result, piece.into)
            yield TensorMove(target.key, part, grant.offset, piece.shape, target.dtype, piece.box)


def get_batches(
    targets: Iterable[Target], results: Results, plain: Sequence[Plain] = ()
) -> Sequence[GetBatch]:
    """The plan of a get, except for values that are contained in the reply."""
    pieces = [((target, piece), piece.grant) for target in targets for piece in target.pieces]
    jobs = _by_place(pieces)
    whole = _by_place(zip(plain, [one.entry.grant for one in plain], strict=True))
    nothing: tuple[list[Any], list[int]] = ([], [])
    return [
        GetBatch(*place, results, jobs.get(place, nothing)[0], *whole.get(place, nothing))
        for place in jobs | whole
    ]


def _by_place(
    granted: Iterable[tuple[T, m.Grant | None]],
) -> dict[tuple[int, int], tuple[list[T], list[int]]]:
    """Group items by volume and segment, each with its offset. (Two lists instead of a list of
    pairs: the garbage collector would visit every pair, in the middle of a large transfer.)
    """
    found: dict[tuple[int, int], tuple[list[T], list[int]]] = {}
    volume = segment = -1
    items: list[T] = []
    offsets: list[int] = []
    for item, grant in granted:
        if grant is None:
            continue
        if grant.volume != volume or grant.segment != segment:
            volume, segment = grant.volume, grant.segment
            items, offsets = found.setdefault((volume, segment), ([], []))
        items.append(item)
        offsets.append(grant.offset)
    return found


def _same(
    looked: Looked, metas: Sequence[ValueMeta], offsets: Sequence[int]
) -> tuple[list[Run], Sequence[int]]:
    """The runs of the plain tensors that have not changed since they were inspected, and the
    positions of those that have: the caller handles these one by one.
    """
    runs = list(zip(looked.addresses, offsets, looked.sizes, strict=True))
    if looked.metas == metas:
        return runs, ()
    same = [now == meta for now, meta in zip(looked.metas, metas, strict=True)]
    changed = [at for at, is_same in enumerate(same) if not is_same]
    return list(compress(runs, same)), changed


def _are_inside(runs: Sequence[Run], room: int | None) -> bool:
    """Whether all runs lie inside a segment of ``room`` bytes (None: its size is not known)."""
    if room is None or not runs:
        return True
    ends = [offset + nbytes for _, offset, nbytes in runs]
    return min([offset for _, offset, _ in runs]) >= 0 and max(ends) <= room


def _contiguous_start(piece: TargetPiece, itemsize: int) -> int | None:
    """Byte offset of the requested part in its segment if it is one run there, else None."""
    if piece.grant is None:
        return None
    start = _first_if_run(piece.box, piece.shape)
    return None if start is None else piece.grant.offset + start * itemsize


@lru_cache(maxsize=4096)  # layers of a model repeat, and so do training steps
def _rows(
    shape: tuple[int, ...],
    box: Box | None,
    into: Box | None,
    steps: tuple[int, ...],
    itemsize: int,
) -> Sequence[Rows] | None:
    """How to copy ``box`` of a stored value of ``shape``, row by row, to ``into`` in a result with
    these strides: addresses and offsets count from the first byte of both. Computed with plain
    numbers: a torch operation releases the GIL, and while copy threads are running it takes long to
    reacquire it.
    """
    first = 0 if into is None else sum([o * n for o, n in zip(into.offset, steps, strict=True)])
    start, stored_steps = _row_major(shape, box)
    extents = shape if box is None else box.shape
    return copying.grids(extents, itemsize, first * itemsize, steps, start * itemsize, stored_steps)


@lru_cache(maxsize=4096)
def _row_major(shape: tuple[int, ...], box: Box | None) -> tuple[int, list[int]]:
    """Index of the first element of a box (None: everything) in a row-major tensor; its strides."""
    steps = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    if box is None:
        return 0, steps
    return sum([o * step for o, step in zip(box.offset, steps, strict=True)]), steps


@lru_cache(maxsize=4096)
def _first_if_run(box: Box | None, shape: tuple[int, ...]) -> int | None:
    """Index of the first element of a box in a row-major tensor, if the box is one run."""
    if box is None:
        return 0
    if box.is_empty or not boxes.is_contiguous(box, shape):
        return None
    return next(boxes.contiguous_rows(box, shape))[0]
