"""Box arithmetic: which part of a tensor a piece is, and what pieces hold together.

Everything is in elements of the global tensor, in row-major order. All functions raise ValueError,
naming the boxes, for a negative offset or extent and for different numbers of dimensions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from math import prod
from typing import NamedTuple

__all__ = ["Box", "Piece", "contiguous_runs", "covers", "intersect", "is_contiguous", "missing"]
__all__ += ["read_plan", "relative", "subtract", "subtract_all", "whole"]


class Box(NamedTuple):
    """A piece of a tensor: where it starts and how large it is, in elements, per dimension.

    Without dimensions it holds one element; with a zero extent none, but it still has a place.

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
        """Whether ``other`` is within the bounds of this box; if it is empty, its place counts."""
        _check(self, (other,))
        bounds = zip(self.offset, other.offset, other.end, self.end, strict=True)
        return all(low <= start and end <= high for low, start, end, high in bounds)


class Piece(NamedTuple):
    """One read: ``box``, in global coordinates, from the source with index ``source``."""

    source: int
    box: Box


def whole(shape: Sequence[int]) -> Box:
    """The box of a whole tensor of ``shape``: offset 0 everywhere."""
    _check(box := Box((0,) * len(shape), tuple(shape)))
    return box


def intersect(a: Box, b: Box) -> Box | None:
    """What both boxes hold; None if that is nothing.

    >>> intersect(Box((0, 0), (4, 4)), Box((2, 3), (4, 4)))
    Box(offset=(2, 3), shape=(2, 1))
    """
    _check(a, (b,))
    return _meet(a, b)


def subtract(a: Box, b: Box) -> list[Box]:
    """What ``a`` holds and ``b`` does not, as :func:`subtract_all` gives it."""
    return subtract_all(a, (b,))


def subtract_all(a: Box, bs: Iterable[Box]) -> list[Box]:
    """What ``a`` holds and no box of ``bs`` does: disjoint boxes, none empty, ordered by offset.

    >>> subtract_all(whole((4, 6)), [Box((0, 0), (2, 6)), Box((2, 2), (2, 1))])
    [Box(offset=(2, 0), shape=(2, 2)), Box(offset=(2, 3), shape=(2, 3))]
    """
    cuts = _clipped(a, bs)
    if a.is_empty or a in cuts:
        return []
    # Sweep along the dimension with most cuts. What lies behind the sweep is done with, so a cut
    # looks only at the few rests around it: about n log n for a grid, in whatever order it comes.
    axes = sorted(range(a.ndim), key=lambda d: -len({cut.offset[d] for cut in cuts}))
    done: list[Box] = []
    live = [a]
    for cut in sorted(cuts, key=lambda cut: [cut.offset[d] for d in axes]):
        rests: list[Box] = []
        for rest in live:
            if rest.offset[axes[0]] + rest.shape[axes[0]] <= cut.offset[axes[0]]:
                done.append(rest)
            elif (common := _meet(rest, cut)) is None:
                rests.append(rest)
            else:
                rests += _around(rest, common, axes)
        live = rests
    return _fused(done + live)


def missing(target: Box, boxes: Iterable[Box]) -> list[Box]:
    """What of ``target`` no box covers: :func:`subtract_all` by the name a reader looks for."""
    return subtract_all(target, boxes)


def covers(target: Box, boxes: Iterable[Box]) -> bool:
    """Whether ``boxes`` together hold every element of ``target``; True if it is empty.

    >>> covers(whole((4,)), [Box((0,), (3,)), Box((2,), (2,))]), covers(whole((4,)), [])
    (True, False)
    """
    parts = _clipped(target, boxes)
    # Overlaps count twice, so the sum proves nothing but absence. That is the answer to all the
    # questions but the last while the shards of a tensor come in one by one.
    return sum(part.numel for part in parts) >= target.numel and not subtract_all(target, parts)


def relative(inner: Box, outer: Box) -> Box:
    """``inner`` in the local coordinates of ``outer``; ``ValueError`` if it is not inside.

    >>> relative(Box((2, 3), (1, 1)), Box((2, 2), (2, 2)))
    Box(offset=(0, 1), shape=(1, 1))
    """
    if not outer.contains(inner):
        raise ValueError(f"{inner} is not inside {outer}")
    return Box(tuple([i - o for i, o in zip(inner.offset, outer.offset, strict=True)]), inner.shape)


def is_contiguous(box: Box, shape: Sequence[int]) -> bool:
    """Whether :func:`contiguous_runs` gives at most one run. Takes O(ndim)."""
    return prod(box.shape[: _run_dim(box, shape)]) == 1 or box.is_empty


def contiguous_runs(box: Box, shape: Sequence[int]) -> Iterator[tuple[int, int]]:
    """``(start, length)``, in elements, of each maximal run of ``box`` in a tensor, ascending.

    ``shape`` is that of the row-major tensor; ``ValueError`` if the box is not inside.

    >>> list(contiguous_runs(Box((1, 1), (2, 2)), (4, 3)))
    [(4, 2), (7, 2)]
    """
    run_dim = _run_dim(box, shape)  # raises here; a generator would at its first step
    if box.is_empty:
        return iter(())
    strides = [prod(shape[d + 1 :]) for d in range(box.ndim)]
    base = sum(o * stride for o, stride in zip(box.offset, strides, strict=True))
    rows = [range(0, box.shape[d] * strides[d], strides[d]) for d in range(run_dim)]
    # product() turns its ranges into tuples: spare it the innermost rows, which may be millions.
    inner = rows.pop() if rows else range(1)
    length = prod(box.shape[run_dim:])
    return ((base + sum(row) + start, length) for row in product(*rows) for start in inner)


def read_plan(target: Box, sources: Iterable[Box]) -> list[Piece]:
    """What to read from where to get ``target``: each element once, from the first that has it.

    ``sources`` may overlap (replicas) and leave holes, which the plan leaves out. Pieces are not
    empty and come by source, then offset. A grid of n sources takes about n log n.

    >>> plan = read_plan(whole((3,)), [Box((0,), (2,)), Box((0,), (2,)), Box((1,), (3,))])
    >>> [(piece.source, piece.box.offset) for piece in plan]
    [(0, (0,)), (2, (2,))]
    """
    parts = _clipped(target, sources)
    # Volumes that add up, holes included, prove that no two parts overlap, as in a usual grid.
    disjoint = sum(b.numel for b in (*parts, *subtract_all(target, parts))) == target.numel
    earlier = [[] for _ in parts] if disjoint else _earlier([*parts])
    rests = [subtract_all(part, others) for part, others in zip(parts, earlier, strict=True)]
    return [Piece(i, box) for i, own in zip(parts.values(), rests, strict=True) for box in own]


def _check(box: Box, others: Iterable[Box] = ()) -> None:
    for other in (box, *others):
        if not len(box.shape) == len(other.shape) == len(other.offset):
            raise ValueError(f"different numbers of dimensions: {box}, {other}")
        if min((0, *other.offset, *other.shape)) < 0:
            raise ValueError(f"negative offset or extent: {other}")


def _meet(a: Box, b: Box) -> Box | None:
    offset, shape = [], []
    for i, m, j, n in zip(*a, *b, strict=True):
        low, high = max(i, j), min(i + m, j + n)
        if low >= high:
            return None
        offset.append(low)
        shape.append(high - low)
    return Box(tuple(offset), tuple(shape))


def _clipped(target: Box, boxes: Iterable[Box]) -> dict[Box, int]:
    """The distinct parts of ``target`` that boxes hold, with the index of the first holder."""
    _check(target, boxes := tuple(boxes))
    parts: dict[Box, int] = {}
    for index, box in enumerate(boxes):
        if (part := _meet(target, box)) is not None:
            parts.setdefault(part, index)
    return parts


def _around(box: Box, hole: Box, axes: Iterable[int]) -> Iterator[Box]:
    """What is left of ``box`` without ``hole``, a part of it, cut off along each axis in turn."""
    offset, shape = list(box.offset), list(box.shape)
    for d in axes:
        low, high = hole.offset[d], hole.offset[d] + hole.shape[d]
        for start, end in ((offset[d], low), (high, offset[d] + shape[d])):
            if start < end:
                offset[d], shape[d] = start, end - start
                yield Box(tuple(offset), tuple(shape))
        offset[d], shape[d] = low, high - low


def _fused(boxes: list[Box]) -> list[Box]:
    """Disjoint ``boxes``, those that continue each other made one, ordered by offset."""
    for d in range(boxes[0].ndim if boxes else 0):
        by_end: dict[tuple[object, ...], Box] = {}
        for box in sorted(boxes):
            outer, inner = box.shape[:d], box.shape[d + 1 :]
            last = by_end.pop((box.offset, outer, inner), box)
            end = (*box.offset[:d], box.end[d], *box.offset[d + 1 :])
            by_end[end, outer, inner] = Box(last.offset, (*outer, end[d] - last.offset[d], *inner))
        boxes = list(by_end.values())
    return sorted(boxes)


def _earlier(boxes: Sequence[Box]) -> list[list[Box]]:
    """For each box those before it that overlap it."""
    axis = max(range(boxes[0].ndim), key=lambda d: len({box.offset[d] for box in boxes}))
    earlier: list[list[Box]] = [[] for _ in boxes]
    live: list[int] = []
    for j, box in sorted(enumerate(boxes), key=lambda item: item[1].offset[axis]):
        live = [i for i in live if boxes[i].end[axis] > box.offset[axis]]
        for i in live:
            if _meet(boxes[i], box) is not None:
                earlier[max(i, j)].append(boxes[min(i, j)])
        live.append(j)
    return earlier


def _run_dim(box: Box, shape: Sequence[int]) -> int:
    """The dimension along which a run extends: every later one is taken in full."""
    relative(box, whole(shape))  # raises if the box is not inside
    return max((d for d in range(box.ndim) if box.shape[d] != shape[d]), default=0)
