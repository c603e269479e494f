"""What tests make the workers of a job do with DTensors. A module of its own: importing them takes
a process half a second, and most jobs have none.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import torchstore_core as ts

__all__ = ["get_dtensor", "join_group", "leave_group", "put_dtensor", "whole"]

MESH = (4, 6)


async def join_group(rank: int, size: int, path: str) -> None:
    """Make the workers a gloo group."""
    dist.init_process_group("gloo", store=dist.FileStore(path, size), rank=rank, world_size=size)


async def leave_group() -> None:
    dist.destroy_process_group()


def whole() -> torch.Tensor:
    """The DTensor's values."""
    return torch.arange(24.0).reshape(MESH)


async def put_dtensor(key: str, dim: int) -> None:
    """Sharded along ``dim`` over all workers."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    await ts.put(key, distribute_tensor(whole(), mesh, [Shard(dim)]))


async def get_dtensor(key: str, dim: int | None) -> bool:
    """Into one sharded along ``dim`` (None: replicated); whether this rank's part is right."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    placement = Replicate() if dim is None else Shard(dim)
    mine: DTensor = distribute_tensor(torch.zeros(MESH), mesh, [placement])
    await ts.get(key, mine)
    expected = distribute_tensor(whole(), mesh, [placement])
    return torch.equal(mine.to_local(), expected.to_local())
