"""Destinations that share a part of their memory: two values would be written to it at once.

The memory of a strided tensor is described as runs of ``width`` bytes, repeated with one stride
after another. Tensors whose memory does not interleave are told apart by sorting where each begins
and ends. Parts of one tensor that do interleave (its columns, say) are told apart by sorting where
they lie within a row, for rows of each stride that occurs. Only what is left is compared in pairs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations
from operator import add, le
from typing import NamedTuple

import torch

from torchstore_core.errors import LayoutMismatchError

Steps = tuple[tuple[int, int], ...]


class Place(NamedTuple):
    """The memory of a tensor with at least one element.

    Args:
        at: the position of the tensor among the given ones.
        start: the address of its first byte.
        width: the number of bytes in each contiguous run.
        steps: the strides, in bytes, at which the runs are repeated, each with the number of its
            repetitions; the largest stride comes first.
        view: equal for tensors with the same elements, in the same order, in the same memory.
    """

    at: int
    start: int
    width: int
    steps: Steps
    view: object


def are_disjoint(addresses: Sequence[int], sizes: Iterable[int]) -> bool:
    """Whether no two of these ranges, none of which is empty, have a byte in common.

    >>> are_disjoint([8, 0, 4], [4, 4, 4]), are_disjoint([8, 0, 4], [4, 4, 5])
    (True, False)
    """
    # If ranges are disjoint, then the n-th one to end has ended where the one after it begins.
    ends = sorted(map(add, addresses, sizes))
    starts = sorted(addresses)
    return all(map(le, ends, starts[1:]))


def extent(tensor: torch.Tensor) -> int:
    """The number of bytes from the first to the last one of a tensor."""
    if tensor.is_contiguous() or not tensor.numel():
        return tensor.nbytes
    steps = zip(tensor.stride(), tensor.shape, strict=True)
    return tensor.element_size() * (1 + sum([stride * (count - 1) for stride, count in steps]))


def find_overlap(
    tensors: Sequence[torch.Tensor],
    extents: Sequence[int] | None = None,
    again: dict[int, int] | None = None,
) -> tuple[int, int] | None:
    """The positions of two tensors that share some of their memory, but are not the same view of
    it; None if there are none.

    Args:
        extents: the :func:`extent` of each, where it is known.
        again: is given the position of each tensor that is the same view as an earlier one, with
            the position of the first.

    >>> w = torch.zeros(4, 6)
    >>> find_overlap([w[:, :2], w[:, 2:], w[:, :2]]), find_overlap([w[:2], w[2:], w[:, 5]])
    (None, (0, 2))
    """
    addresses = [tensor.data_ptr() for tensor in tensors]
    if are_disjoint(addresses, extents or map(extent, tensors)):
        return None
    places: dict[object, Place] = {}
    for at, (tensor, start) in enumerate(zip(tensors, addresses, strict=True)):
        if tensor.numel():
            place = _place(at, start, tensor)
            first = places.setdefault(place.view, place)
            if first is not place and again is not None:
                again[at] = first.at
    found = _find([*places.values()])
    return None if found is None else (min(found), max(found))


def overlap_error(first: str, second: str) -> LayoutMismatchError:
    """The error for two destinations, given by their keys, that share some of their memory."""
    both = sorted([first, second])
    return LayoutMismatchError(
        f"the destinations of {both[0]!r} and {both[1]!r} overlap in memory, and each would "
        "overwrite a part of the other; give each of them memory of its own (the very same tensor "
        "may be given for both); nothing was written",
        key=both[0],
        details={"overlapping": both},
    )


def _place(at: int, start: int, tensor: torch.Tensor) -> Place:
    itemsize = tensor.element_size()
    if tensor.is_contiguous():
        return Place(at, start, tensor.nbytes, (), (start, tensor.numel(), tensor.dtype))
    width = itemsize
    steps: list[tuple[int, int]] = []
    for stride, extent in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if extent == 1:
            continue
        step = stride * itemsize
        if not steps and step == width:
            width *= extent
        elif steps and step == steps[-1][0] * steps[-1][1]:
            steps[-1] = steps[-1][0], steps[-1][1] * extent
        else:
            steps.append((step, extent))
    view = start, tensor.shape, tensor.stride(), tensor.dtype
    return Place(at, start, width, tuple(reversed(steps)), view)


def _span(width: int, steps: Steps) -> int:
    """The number of bytes from the first to the last one."""
    return width + sum([stride * (extent - 1) for stride, extent in steps])


def _find(places: list[Place]) -> tuple[int, int] | None:
    """The positions of two tensors that share memory."""
    if len(places) < 2:
        return None
    places.sort(key=lambda place: place.start)
    strides = {stride for place in places for stride, _ in place.steps}
    for row in (0, *sorted(strides, reverse=True)):
        groups = _apart(places, row)
        if len(groups) > 1:
            for group in groups:
                if (found := _find(group)) is not None:
                    return found
            return None
    for a, b in combinations(places, 2):
        if _meet(a.start, a.width, a.steps, b.start, b.width, b.steps):
            return a.at, b.at
    return None


def _apart(places: list[Place], row: int) -> list[list[Place]]:
    """Groups of tensors, none of which shares memory with one of another group, since no two of
    these lie in the same place within a row of ``row`` bytes (0: in the same place in memory).
    """
    first = places[0].start
    spans = sorted([(*_within(place, row, first), at) for at, place in enumerate(places)])
    groups: list[list[Place]] = []
    reached = -1
    for start, end, at in spans:
        if start >= reached:
            groups.append([])
        groups[-1].append(places[at])
        reached = max(reached, end)
    return groups


def _within(place: Place, row: int, first: int) -> tuple[int, int]:
    """Where a tensor begins and ends within a row, if rows are counted from address ``first``. All
    of the row if that differs from row to row.
    """
    start = place.start - first
    if not row:
        return start, start + _span(place.width, place.steps)
    start %= row
    end = start + _span(place.width, tuple([step for step in place.steps if step[0] < row]))
    if end > row or any(stride >= row and stride % row for stride, _ in place.steps):
        return 0, row
    return start, end


def _meet(a: int, width_a: int, steps_a: Steps, b: int, width_b: int, steps_b: Steps) -> bool:
    """Whether two tensors that begin at ``a`` and ``b`` share memory."""
    if not steps_a and not steps_b:
        return a < b + width_b and b < a + width_a
    if not steps_a or (steps_b and steps_b[0][0] > steps_a[0][0]):
        return _meet(b, width_b, steps_b, a, width_a, steps_a)
    (stride, extent), inner_a = steps_a[0], steps_a[1:]
    # Row i of the one against row j of the other is row i - j against row 0, if the rows of both
    # have the same stride; otherwise each row of the one against the other as a whole.
    before = 0
    if steps_b and steps_b[0][0] == stride:
        before, steps_b = steps_b[0][1] - 1, steps_b[1:]
    lowest = (b - a - _span(width_a, inner_a)) // stride + 1
    highest = (b - a + _span(width_b, steps_b) - 1) // stride
    return any(
        _meet(a + row * stride, width_a, inner_a, b, width_b, steps_b)
        for row in range(max(lowest, -before), min(highest, extent - 1) + 1)
    )
