"""Shards of tensors: which part of the whole tensor this process holds."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard, cast

import torch

from torchstore_core.clients.values.tensors import check_storage, is_inside, plain_slice
from torchstore_core.errors import LayoutMismatchError, UnsupportedValueError
from torchstore_core.values import TensorSlice

if TYPE_CHECKING:
    from torch.distributed._shard.sharded_tensor.api import ShardedTensor
    from torch.distributed.tensor import DTensor


@dataclass(frozen=True, eq=False)
class TensorShard:
    """A plain tensor that is one piece of a larger one: for shards that are not DTensors.

    It can be put, as a value or as an entry of a state dict, and can be the destination of a get.

    Args:
        tensor: the piece, with any strides.
        tensor_slice: its position; ``local_shape`` is the shape of ``tensor``. With ``mesh_shape``
            and ``coordinates``, several ranks may hold the same piece; without them, each piece is
            put once per version.

    >>> part = TensorSlice(offsets=(2, 0), local_shape=(2, 4), global_shape=(4, 4))
    >>> TensorShard(torch.zeros(2, 4), part).tensor_slice.offsets
    (2, 0)
    """

    tensor: torch.Tensor
    tensor_slice: TensorSlice


class ShardList(list[TensorShard]):
    """Several pieces of one tensor as one value: what one rank holds if placements interleave."""


class LocalPart(NamedTuple):
    """A view of local memory, and its position in the whole tensor."""

    tensor: torch.Tensor
    part: TensorSlice


def is_dtensor(value: object) -> TypeGuard[DTensor]:
    """Whether ``value`` is a DTensor. Does not import the module that defines them."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def _is_sharded_tensor(value: object) -> TypeGuard[ShardedTensor]:
    """Whether ``value`` is a ShardedTensor, as FSDP1 and torchrec have them. Does not import the
    module that defines them.
    """
    module = sys.modules.get("torch.distributed._shard.sharded_tensor")
    return module is not None and isinstance(value, module.ShardedTensor)


def is_distributed(value: object) -> TypeGuard[DTensor | ShardedTensor]:
    """Whether ``value`` is a tensor that itself says which ranks hold which parts of it."""
    return is_dtensor(value) or _is_sharded_tensor(value)


def is_sharded(value: object) -> bool:
    """Whether ``value`` represents a larger tensor of which this process holds only a part."""
    if type(value) is torch.Tensor:
        return False
    return isinstance(value, TensorShard | ShardList) or is_distributed(value)


def local_parts(key: str, value: Any) -> list[LocalPart]:
    """Return the parts that this process holds of a DTensor, a ShardedTensor or a
    :class:`TensorShard`.

    Usually this is one part; there are several if the placements interleave, and none on a rank
    outside of the mesh, or without a shard.

    Raises:
        UnsupportedValueError: a DTensor has Partial placements, or has no memory.
        LayoutMismatchError: the local tensor does not match its placements or its slice.
    """
    if isinstance(value, TensorShard):
        return [_checked(key, value)]
    if isinstance(value, ShardList):
        return [_checked(key, shard) for shard in value]
    if _is_sharded_tensor(value):
        return [_checked(key, shard) for shard in _shards_of(value)]
    with torch.no_grad():
        local = value.to_local()
    mesh, placements, shape = value.device_mesh, value.placements, tuple(value.shape)
    for placement in placements:
        if placement.is_partial():
            raise UnsupportedValueError(
                f"{key!r}: a DTensor with {placement!r} holds summands, not values; "
                ".redistribute() it to Replicate or Shard first",
                key=key,
            )
    at = mesh.get_coordinate()
    if at is None:
        return []
    mesh_shape, coordinates = tuple(mesh.shape), tuple(at)
    spans = [
        _spans(len(shape), dim, shape[dim], placements, mesh_shape, coordinates)
        for dim in range(len(shape))
    ]
    wanted = tuple(sum(length for _, length in dim) for dim in spans)
    if tuple(local.shape) != wanted:
        raise LayoutMismatchError(
            f"{key!r}: a DTensor of {list(shape)} with {list(placements)} on a mesh of "
            f"{list(mesh_shape)} has {list(wanted)} at {list(coordinates)}, but its local tensor "
            f"is {list(local.shape)}; give shape= and stride= to DTensor.from_local",
            key=key,
        )
    # Identify the rank among all that put: ranks of other submeshes have the same coordinates.
    root = _root_of(mesh)
    if root is not mesh and (place := root.get_coordinate()) is not None:
        mesh_shape, coordinates = tuple(root.shape), tuple(place)
    parts: list[LocalPart] = []
    for choice in product(*[_with_positions(dim) for dim in spans]):
        view = local
        for dim, (position, _, length) in enumerate(choice):
            if length != local.shape[dim]:
                check_storage(key, local)  # the error of torch shows only numbers
                view = view.narrow(dim, position, length)
        offsets = tuple([start for _, start, _ in choice])
        extents = tuple([length for _, _, length in choice])
        parts.append(LocalPart(view, TensorSlice(offsets, extents, shape, mesh_shape, coordinates)))
    return parts


def outline(value: Any) -> tuple[torch.dtype, tuple[int, ...]]:
    """Return the dtype and the whole shape of a sharded value, of which a part may be here."""
    if isinstance(value, ShardList):
        value = value[0]
    if isinstance(value, TensorShard):
        return value.tensor.dtype, tuple(value.tensor_slice.global_shape)
    if _is_sharded_tensor(value):  # its own attributes warn that it is deprecated
        whole = value.metadata()
        return whole.tensor_properties.dtype, tuple(whole.size)
    return value.dtype, tuple(value.shape)


def _shards_of(value: ShardedTensor) -> list[TensorShard]:
    shape = tuple(value.metadata().size)
    found: list[TensorShard] = []
    for shard in value.local_shards():
        # Beyond the end are the empty shards of ranks for which nothing was left.
        at = map(min, shard.metadata.shard_offsets, shape)
        part = TensorSlice(tuple(at), tuple(shard.metadata.shard_sizes), shape)
        found.append(TensorShard(shard.tensor, part))
    return found


def ranks_of(value: DTensor | ShardedTensor) -> frozenset[int]:
    """Return the global ranks that put it: those of a DTensor's root mesh, or those that have a
    shard of a ShardedTensor.

    If a DTensor's mesh is a submesh, the parallel submeshes of the same root hold replicas. If each
    of them were a version's participants by itself, a late rank of one submesh could complete the
    version that the ranks of the next one began.
    """
    if not _is_sharded_tensor(value):
        return _ranks_of(_root_of(cast("DTensor", value).device_mesh))
    places = [shard.placement for shard in value.metadata().shards_metadata]
    ranks = [place.rank() for place in places if place is not None]
    return frozenset(rank for rank in ranks if rank is not None)


def takes_part(value: DTensor | ShardedTensor) -> bool:
    """Whether this process is one of the ranks in :func:`ranks_of`."""
    if is_dtensor(value):
        return _root_of(value.device_mesh).get_coordinate() is not None
    return torch.distributed.get_rank() in ranks_of(value)


def this_rank() -> str:
    """Return the rank of this process; empty if it has none."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return str(torch.distributed.get_rank())
    return os.environ.get("RANK", "")


def _root_of(mesh: Any) -> Any:
    """Return the mesh that a submesh was sliced from; for any other mesh, the mesh itself."""
    if hasattr(mesh, "_get_root_mesh"):
        return mesh._get_root_mesh()
    from torch.distributed.device_mesh import _mesh_resources  # in older releases of torch

    return _mesh_resources.get_root_mesh(mesh)


@lru_cache(maxsize=64)
def _ranks_of(mesh: Any) -> frozenset[int]:
    return frozenset(mesh.mesh.flatten().tolist())


def _checked(key: str, shard: TensorShard) -> LocalPart:
    part: object = shard.tensor_slice
    tensor: object = shard.tensor
    if not isinstance(tensor, torch.Tensor) or not isinstance(part, TensorSlice):
        raise UnsupportedValueError(
            f"{key!r}: a shard is a tensor and a TensorSlice, not a "
            f"{type(tensor).__qualname__} and a {type(part).__qualname__}",
            key=key,
        )
    if is_dtensor(shard.tensor):
        raise UnsupportedValueError(f"{key!r}: a DTensor says itself which slice it is", key=key)
    part = plain_slice(key, part)
    if len(part.coordinates) != len(part.mesh_shape) or any(
        not 0 <= at < n for at, n in zip(part.coordinates, part.mesh_shape, strict=True)
    ):
        raise LayoutMismatchError(
            f"{key!r}: {list(part.coordinates)} is no place in a mesh of {list(part.mesh_shape)}; "
            "give both mesh_shape and coordinates, or neither",
            key=key,
        )
    if shard.tensor.shape != part.local_shape or not is_inside(
        part.offsets, part.local_shape, part.global_shape
    ):
        raise LayoutMismatchError(
            f"{key!r}: a tensor of {list(shard.tensor.shape)} is not the slice of "
            f"{list(part.local_shape)} at {list(part.offsets)} of {list(part.global_shape)}",
            key=key,
        )
    return LocalPart(tensor, part)


Span = tuple[int, int]  # start in the whole tensor's dimension, length


def _with_positions(spans: Sequence[Span]) -> list[tuple[int, int, int]]:
    """Return ``(position in the local tensor, start in the whole tensor, length)`` of each span."""
    position = 0
    found: list[tuple[int, int, int]] = []
    for start, length in spans:
        found.append((position, start, length))
        position += length
    return found


@lru_cache(maxsize=4096)
def _spans(
    ndim: int,
    dim: int,
    size: int,
    placements: tuple[Any, ...],
    mesh_shape: tuple[int, ...],
    coordinates: tuple[int, ...],
) -> tuple[Span, ...]:
    """Return the indices of a dimension that this rank holds: one span, unless placements
    interleave.
    """
    steps = [
        (placement, parts, at)
        for placement, parts, at in zip(placements, mesh_shape, coordinates, strict=True)
        if not placement.is_replicate() and placement.dim % ndim == dim
    ]
    if all(
        placement.is_shard() and not hasattr(placement, "split_factor") for placement, *_ in steps
    ):
        start, length = 0, size
        for _, parts, at in steps:  # in the same way as torch.chunk
            chunk = -(-length // parts)
            begin = min(length, chunk * at)
            start, length = start + begin, min(chunk, length - begin)
        return ((start, length),)
    # Strided shards (FSDP over TP): the placement itself splits the indices.
    shape = [1] * ndim
    shape[dim] = size
    indices = torch.arange(size, device="cpu").view(shape)
    for placement, parts, at in steps:
        pieces, _ = placement._split_tensor(indices, parts, with_padding=False, contiguous=False)
        indices = pieces[at]
    return _as_spans(indices.flatten().tolist())


def _as_spans(indices: list[int]) -> tuple[Span, ...]:
    spans: list[Span] = []
    for index in indices:
        if spans and spans[-1][0] + spans[-1][1] == index:
            spans[-1] = (spans[-1][0], spans[-1][1] + 1)
        else:
            spans.append((index, 1))
    return tuple(spans) or ((0, 0),)
