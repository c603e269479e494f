"""Layouts of tensors as plain data, and what each rank of a job with a layout has of a tensor."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist
from tests.support import bits, noise
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

__all__ = ["SS", "Layout", "R", "S", "every_rank", "mesh_of", "roomy", "same", "value_of"]

R = Replicate()


def S(dim: int) -> Placement:
    """``Shard(dim)``."""
    return Shard(dim)


def SS(dim: int, split_factor: int) -> Placement:
    """``_StridedShard``, as FSDP2 makes it over tensor parallelism of so many ranks."""
    return _StridedShard(dim, split_factor=split_factor)


@functools.cache
def mesh_of(shape: tuple[int, ...], first: int = 0) -> DeviceMesh:
    """A mesh of as many ranks as it takes, from ``first`` on. Made by all ranks together, and kept:
    gloo has a thread for each group of a mesh, which polls until the process ends.
    """
    size = torch.Size(shape).numel()
    return DeviceMesh("cpu", torch.arange(first, first + size).view(shape))


class Layout(NamedTuple):
    """A mesh's shape, and a placement for each of its dimensions."""

    mesh: tuple[int, ...]
    placements: tuple[Placement, ...]

    @property
    def size(self) -> int:
        """How many ranks it takes."""
        return math.prod(self.mesh)

    @property
    def copies(self) -> int:
        """How many ranks have each element."""
        sides = zip(self.mesh, self.placements, strict=True)
        return math.prod(extent for extent, placement in sides if placement == R)

    def cut(self, full: torch.Tensor, mesh: DeviceMesh) -> DTensor:
        """This rank's part of ``full``, which every rank has."""
        # Without a source each rank cuts for itself, and nothing is sent.
        return distribute_tensor(full, mesh, self.placements, src_data_rank=None)

    def empty(self, full: torch.Tensor, mesh: DeviceMesh) -> DTensor:
        """Like :meth:`cut`, in memory that is not contiguous and holds other values."""
        local = roomy(self.cut(full, mesh).to_local())[1]
        return DTensor.from_local(
            local, mesh, self.placements, run_check=False, shape=full.shape, stride=full.stride()
        )


def value_of(shape: Sequence[int], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """A tensor of random bits, the same in every process."""
    nbytes = math.prod(shape) * dtype.itemsize
    if not nbytes:
        return torch.empty(tuple(shape), dtype=dtype)
    raw = noise(nbytes, seed)
    return (raw & 1 if dtype is torch.bool else raw).view(dtype).view(tuple(shape))


def roomy(like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory that is all ones, and a part of it: a destination like ``like``, with strides that
    are not its, and room around all of its elements.
    """
    shape = [2 * extent + 1 for extent in reversed(like.shape)]
    raw = torch.ones(math.prod(shape) * like.element_size(), dtype=torch.uint8)
    around = raw.view(like.dtype).view(shape)
    part = around.permute(tuple(reversed(range(like.dim()))))
    for dim in range(like.dim()):
        part = part[(slice(None),) * dim + (slice(1, None, 2),)]
    return around, part


def same(got: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether they have the same shape, dtype and bits, whatever their strides."""
    kind = (got.dtype, got.shape) == (expected.dtype, expected.shape)
    return kind and torch.equal(bits(_packed(got)), bits(_packed(expected)))


def _packed(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with row-major strides, also where a dimension of one element has another one."""
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)


@contextmanager
def _job(rank: int, size: int) -> Iterator[None]:
    """A process group in which this process is one rank, and nobody is there to talk to."""
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def every_rank(
    layout: Layout, full: torch.Tensor, make: Callable[[Layout, torch.Tensor, DeviceMesh], DTensor]
) -> list[DTensor]:
    """What ``make`` (``Layout.cut`` or ``Layout.empty``) gives each rank of a job.

    The cut is torch's own; only the job is missing.
    """
    made: list[DTensor] = []
    for rank in range(layout.size):
        with _job(rank, layout.size):
            made.append(make(layout, full, init_device_mesh("cpu", layout.mesh)))
    return made
