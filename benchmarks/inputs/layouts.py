"""Which rank holds which box of a tensor, what is in it, and marks that tell versions apart.

The layouts are those of the usual one-dimensional meshes: ``rows`` (``Shard(0)``, as with FSDP),
``columns`` (``Shard(1)``, as of a tensor-parallel linear layer; tensors of one dimension are
replicated) and ``whole``. Uneven shards are cut as ``torch.chunk`` cuts them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache

import torch

from torchstore_cli.bench import workload
from torchstore_core import TensorShard, TensorSlice

ROWS, COLUMNS, WHOLE = "rows", "columns", "whole"
#: The dimension that a layout cuts.
DIMS = {ROWS: 0, COLUMNS: 1}
_MARKS = 8

#: Name to a plain tensor (whole) or a shard.
Part = dict[str, torch.Tensor | TensorShard]


def box(
    layout: str, shape: tuple[int, ...], rank: int, world: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Offsets and shape of what a rank holds of a tensor.

    >>> box("rows", (5, 4), 1, 2), box("columns", (5, 4), 3, 4), box("columns", (5,), 1, 2)
    (((3, 0), (2, 4)), ((0, 3), (5, 1)), ((0,), (5,)))
    >>> box("rows", (5, 4), 3, 4)
    ((5, 0), (0, 4))
    """
    dim = DIMS.get(layout, len(shape))
    offsets, local = [0] * len(shape), list(shape)
    if dim < len(shape):
        step = -(-shape[dim] // world)
        offsets[dim] = min(rank * step, shape[dim])
        local[dim] = min(step, shape[dim] - offsets[dim])
    return tuple(offsets), tuple(local)


@workload.one_thread()
def part(
    of: workload.Shapes,
    layout: str,
    rank: int,
    world: int,
    seed: int | None = None,
    *,
    finite: bool = False,
) -> Part:
    """A rank's part of a set: with the set's bits (``seed``), or zeros to get into."""
    made: Part = {}
    for at, (name, shape) in enumerate(of.items()):
        offsets, extents = box(layout, shape, rank, world)
        if seed is None:
            tensor = torch.zeros(extents, dtype=workload.DTYPE)
        else:
            full = workload.random_tensor(shape, seed + at, finite=finite)
            tensor = _cut(full, offsets, extents).clone(memory_format=torch.contiguous_format)
        whole = layout == WHOLE
        made[name] = tensor if whole else TensorShard(tensor, TensorSlice(offsets, extents, shape))
    return made


def local(value: torch.Tensor | TensorShard) -> torch.Tensor:
    """The memory of a part's entry."""
    return value.tensor if isinstance(value, TensorShard) else value


def nbytes(parts: Iterable[Part]) -> int:
    """Bytes of all of them."""
    return sum(local(v).numel() * workload.DTYPE.itemsize for p in parts for v in p.values())


@workload.one_thread()
def mark(parts: Iterable[Part], number: int) -> None:
    """Write ``number`` at marked places of every tensor, the same ones in every layout."""
    for one in parts:
        for value in one.values():
            places = _marks(*_place(value))
            if places is not None:
                _bits(local(value)).view(-1)[places] = number


@workload.one_thread()
def wrong(
    parts: Iterable[Part],
    of: workload.Shapes,
    seed: int,
    number: Callable[[int], int],
    *,
    full: bool,
    finite: bool = False,
) -> list[str]:
    """Names of entries that are not those of the set with their mark, bit for bit.

    Args:
        number: the mark of an entry, by its place in the set.
        full: compare all bytes, else marks.
        finite: as the set was made.
    """
    bad: list[str] = []
    for one in parts:
        if one.keys() != of.keys():
            bad.extend(one.keys() ^ of.keys())
            continue
        for at, (name, value) in enumerate(one.items()):
            offsets, shape, whole = _place(value)
            bits = _bits(local(value))
            if full:
                want = workload.random_tensor(whole, seed + at, finite=finite)
                mark([{name: want}], number(at))
                same = torch.equal(bits, _bits(_cut(want, offsets, shape)))
            else:
                places = _marks(offsets, shape, whole)
                same = places is None or bool((bits.view(-1)[places] == number(at)).all())
            if not same:
                bad.append(name)
    return bad


_Shape = tuple[int, ...]


def _place(value: torch.Tensor | TensorShard) -> tuple[_Shape, _Shape, _Shape]:
    """Offsets, shape, shape of the whole."""
    if isinstance(value, TensorShard):
        part = value.tensor_slice
        return part.offsets, part.local_shape, part.global_shape
    shape = tuple(value.shape)
    return (0,) * value.dim(), shape, shape


@lru_cache(maxsize=1024)
def _marks(offsets: _Shape, shape: _Shape, whole: _Shape) -> torch.Tensor | None:
    """Where in a part, flat, the marks are; None if there are none."""
    places = torch.zeros((), dtype=torch.int64)
    for offset, extent, size in zip(offsets, shape, whole, strict=True):
        marks = {i * (size - 1) // _MARKS for i in range(_MARKS + 1)}
        here = sorted(i - offset for i in marks if offset <= i < offset + extent)
        places = places.unsqueeze(-1) * extent + torch.tensor(here, dtype=torch.int64)
    return places.flatten() if places.numel() else None


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int16)


def _cut(tensor: torch.Tensor, offsets: _Shape, shape: _Shape) -> torch.Tensor:
    for dim, (offset, extent) in enumerate(zip(offsets, shape, strict=True)):
        tensor = tensor.narrow(dim, offset, extent)
    return tensor
