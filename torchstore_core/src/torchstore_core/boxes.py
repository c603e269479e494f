"""Box arithmetic: difference and coverage of rectangular parts of a tensor.

All numbers count elements of the global tensor, in row-major order. Every function raises a
ValueError that shows the boxes if an offset or extent is negative, or if the numbers of dimensions
differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from math import prod
from typing import NamedTuple


class Box(NamedTuple):
    """A rectangular part of a tensor: its offset and its shape, in elements.

    A box without dimensions holds one element. A box with an extent of zero holds none, but still
    has a position.

    >>> Box((2, 0), (2, 4)).end, Box((2, 0), (2, 4)).numel, Box((), ()).numel
    ((4, 4), 8, 1)
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def is_empty(self) -> bool:
        return 0 in self.shape

    @property
    def end(self) -> tuple[int, ...]:
        return tuple([start + n for start, n in zip(self.offset, self.shape, strict=True)])

    def contains(self, other: Box) -> bool:
        """Return whether ``other`` lies within this box; an empty box has to, as well."""
        _check(self, (other,))
        bounds = zip(self.offset, other.offset, other.end, self.end, strict=True)
        return all(low <= start and end <= high for low, start, end, high in bounds)


class Piece(NamedTuple):
    """One read: ``box``, in global coordinates, from the source at index ``source``."""

    source: int
    box: Box


def whole(shape: Sequence[int]) -> Box:
    """Return the box of a whole tensor of ``shape``: its offset is 0 in every dimension."""
    _check(box := Box((0,) * len(shape), tuple(shape)))
    return box


def missing(target: Box, boxes: Iterable[Box]) -> list[Box]:
    """Return the parts of ``target`` that no box covers: disjoint, non-empty boxes, sorted by
    offset.

    >>> missing(whole((4, 6)), [Box((0, 0), (2, 6)), Box((2, 2), (2, 1))])
    [Box(offset=(2, 0), shape=(2, 2)), Box(offset=(2, 3), shape=(2, 3))]
    """
    cuts = _clipped(target, boxes)
    if target.is_empty or target in cuts:
        return []
    # Sweep along the dimension with the most cuts. Remainders that the sweep has passed are final,
    # so that each cut is compared only with the few remainders near it: about n log n for a grid,
    # whatever the order of its boxes.
    axes = sorted(range(target.ndim), key=lambda d: -len({cut.offset[d] for cut in cuts}))
    done: list[Box] = []
    live = [target]
    for cut in sorted(cuts, key=lambda cut: [cut.offset[d] for d in axes]):
        remainders: list[Box] = []
        for remainder in live:
            if remainder.offset[axes[0]] + remainder.shape[axes[0]] <= cut.offset[axes[0]]:
                done.append(remainder)
            elif (common := _intersection(remainder, cut)) is None:
                remainders.append(remainder)
            else:
                remainders += _without(remainder, common, axes)
        live = remainders
    return _merge_adjacent(done + live)


def covers(target: Box, boxes: Iterable[Box]) -> bool:
    """Return whether ``boxes`` together contain every element of ``target``; True if it is empty.

    >>> covers(whole((4,)), [Box((0,), (3,)), Box((2,), (2,))]), covers(whole((4,)), [])
    (True, False)
    """
    parts = _clipped(target, boxes)
    # Overlaps are counted twice, so a sum that is large enough proves nothing, but one that is too
    # small proves a gap. While the shards of a tensor arrive one by one, that settles every call
    # but the last.
    return sum(part.numel for part in parts) >= target.numel and not missing(target, parts)


def relative(inner: Box, outer: Box) -> Box:
    """Return ``inner`` in the local coordinates of ``outer``; ``ValueError`` if it is not inside.

    >>> relative(Box((2, 3), (1, 1)), Box((2, 2), (2, 2)))
    Box(offset=(0, 1), shape=(1, 1))
    """
    if not outer.contains(inner):
        raise ValueError(f"{inner} is not inside {outer}")
    return Box(tuple([i - o for i, o in zip(inner.offset, outer.offset, strict=True)]), inner.shape)


def is_contiguous(box: Box, shape: Sequence[int]) -> bool:
    """Return whether the box is at most one contiguous run. Takes O(ndim)."""
    return prod(box.shape[: _run_dim(box, shape)]) == 1 or box.is_empty


def contiguous_rows(box: Box, shape: Sequence[int]) -> Iterator[tuple[int, int, int, int]]:
    """Return the contiguous runs of ``box`` as rows at equal distances: ``(start, length, rows,
    step)``, in elements, in ascending order. No run is longer than a row, as far as there are gaps.

    ``shape`` is the shape of the row-major tensor that contains the box; ``ValueError`` if the box
    is not inside.

    >>> list(contiguous_rows(Box((1, 1), (2, 2)), (4, 3)))
    [(4, 2, 2, 3)]
    """
    run_dim = _run_dim(box, shape)  # raises now; a generator would raise later
    if box.is_empty:
        return iter(())
    strides = [prod(shape[d + 1 :]) for d in range(box.ndim)]
    base = sum(o * stride for o, stride in zip(box.offset, strides, strict=True))
    outer = [range(0, box.shape[d] * strides[d], strides[d]) for d in range(run_dim)]
    length, rows, step = prod(box.shape[run_dim:]), 1, 0
    while outer and (rows == 1 or outer[-1].step == rows * step):
        one = outer.pop()
        if len(one) > 1:
            rows, step = rows * len(one), step or one.step
    return ((base + sum(start), length, rows, step) for start in product(*outer))


def read_plan(target: Box, sources: Iterable[Box]) -> list[Piece]:
    """Plan how to read ``target``: each element once, from the first source that has it.

    ``sources`` may overlap (replicas) and may leave gaps, for which the plan has no pieces. No
    piece is empty; pieces are sorted by source, then by offset. A grid of n sources takes about
    n log n.

    >>> plan = read_plan(whole((3,)), [Box((0,), (2,)), Box((0,), (2,)), Box((1,), (3,))])
    >>> [(piece.source, piece.box.offset) for piece in plan]
    [(0, (0,)), (2, (2,))]
    """
    parts = _clipped(target, sources)
    # If parts and gaps add up to the whole, no two parts overlap; a regular grid is such a case.
    disjoint = sum(b.numel for b in (*parts, *missing(target, parts))) == target.numel
    earlier = [[] for _ in parts] if disjoint else _earlier_overlaps([*parts])
    remainders = [missing(part, others) for part, others in zip(parts, earlier, strict=True)]
    return [Piece(i, box) for i, own in zip(parts.values(), remainders, strict=True) for box in own]


def _check(box: Box, others: Iterable[Box] = ()) -> None:
    for other in (box, *others):
        if not len(box.shape) == len(other.shape) == len(other.offset):
            raise ValueError(f"different numbers of dimensions: {box}, {other}")
        if min((0, *other.offset, *other.shape)) < 0:
            raise ValueError(f"negative offset or extent: {other}")


def _intersection(a: Box, b: Box) -> Box | None:
    offset, shape = [], []
    for i, m, j, n in zip(*a, *b, strict=True):
        low, high = max(i, j), min(i + m, j + n)
        if low >= high:
            return None
        offset.append(low)
        shape.append(high - low)
    return Box(tuple(offset), tuple(shape))


def _clipped(target: Box, boxes: Iterable[Box]) -> dict[Box, int]:
    """Return the distinct parts of ``target`` in ``boxes``, each with its first box's index."""
    _check(target, boxes := tuple(boxes))
    parts: dict[Box, int] = {}
    for index, box in enumerate(boxes):
        if (part := _intersection(target, box)) is not None:
            parts.setdefault(part, index)
    return parts


def _without(box: Box, hole: Box, axes: Iterable[int]) -> Iterator[Box]:
    """Yield ``box`` without ``hole``, which lies in it, as slabs cut off along each axis."""
    offset, shape = list(box.offset), list(box.shape)
    for d in axes:
        low, high = hole.offset[d], hole.offset[d] + hole.shape[d]
        for start, end in ((offset[d], low), (high, offset[d] + shape[d])):
            if start < end:
                offset[d], shape[d] = start, end - start
                yield Box(tuple(offset), tuple(shape))
        offset[d], shape[d] = low, high - low


def _merge_adjacent(boxes: list[Box]) -> list[Box]:
    """Return the disjoint ``boxes`` with adjacent ones merged, sorted by offset."""
    for d in range(boxes[0].ndim if boxes else 0):
        by_end: dict[tuple[object, ...], Box] = {}
        for box in sorted(boxes):
            outer, inner = box.shape[:d], box.shape[d + 1 :]
            last = by_end.pop((box.offset, outer, inner), box)
            end = (*box.offset[:d], box.end[d], *box.offset[d + 1 :])
            by_end[end, outer, inner] = Box(last.offset, (*outer, end[d] - last.offset[d], *inner))
        boxes = list(by_end.values())
    return sorted(boxes)


def _earlier_overlaps(boxes: Sequence[Box]) -> list[list[Box]]:
    """Return, for each box, the boxes before it in the sequence that overlap it."""
    axis = max(range(boxes[0].ndim), key=lambda d: len({box.offset[d] for box in boxes}))
    earlier: list[list[Box]] = [[] for _ in boxes]
    live: list[int] = []
    for j, box in sorted(enumerate(boxes), key=lambda item: item[1].offset[axis]):
        live = [i for i in live if boxes[i].end[axis] > box.offset[axis]]
        for i in live:
            if _intersection(boxes[i], box) is not None:
                earlier[max(i, j)].append(boxes[min(i, j)])
        live.append(j)
    return earlier


def _run_dim(box: Box, shape: Sequence[int]) -> int:
    """Return the dimension along which a run extends; the box spans all later ones in full."""
    relative(box, whole(shape))  # raises if the box is not inside
    return max((d for d in range(box.ndim) if box.shape[d] != shape[d]), default=0)
