"""Ranks of torchrun publish one state dict together, and read it back in another layout.

    torchrun --nproc-per-node=2 examples/torchrun_reshard.py

Each rank puts its rows of every tensor, and gets its columns straight into tensors of its own. A
rank moves only bytes that it has or needs.
"""

from __future__ import annotations

import asyncio

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import torchstore_core as ts

SHAPES = {"embed": (64, 32), "layer.weight": (32, 32), "head.weight": (16, 32)}
VERSIONS = 3


def whole(step: int) -> dict[str, torch.Tensor]:
    """Return the whole tensors of a step, which are the same on every rank."""
    torch.manual_seed(step)
    return {name: torch.randn(shape) for name, shape in SHAPES.items()}


def cut(tensors: dict[str, torch.Tensor], mesh: DeviceMesh, dim: int) -> dict[str, DTensor]:
    """Return this rank's shards along ``dim``."""
    return {name: distribute_tensor(t, mesh, [Shard(dim)]) for name, t in tensors.items()}


async def run(rank: int, mesh: DeviceMesh) -> None:
    await ts.initialize_spmd(capacity=64 << 20)
    mine = cut({name: torch.zeros(shape) for name, shape in SHAPES.items()}, mesh, 1)
    for step in range(1, VERSIONS + 1):
        ref = await ts.put_state_dict(cut(whole(step), mesh, 0), "policy", version=step, keep=2)
        await ts.get_state_dict("policy", mine, min_version=step)
        for name, wanted in cut(whole(step), mesh, 1).items():
            if not torch.equal(mine[name].to_local(), wanted.to_local()):
                raise SystemExit(f"rank {rank}: {name} of version {ref.version} is wrong")
        dist.barrier()
    nbytes = sum(t.to_local().nbytes for t in mine.values())
    print(
        f"rank {rank}: {VERSIONS} versions, each {nbytes} bytes, by columns\n", end="", flush=True
    )
    await ts.shutdown()


def main() -> None:
    dist.init_process_group("gloo")
    try:
        asyncio.run(run(dist.get_rank(), init_device_mesh("cpu", (dist.get_world_size(),))))
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
