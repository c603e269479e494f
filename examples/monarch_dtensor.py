"""A DTensor moves from one mesh of Monarch actors to another that shards it differently.

    python examples/monarch_dtensor.py

Two writer actors hold a matrix sharded by rows, and two reader actors hold theirs sharded by
columns. The two meshes are separate jobs of torch.distributed that know nothing about each other.
Each writer puts its own shard, and each reader gets only the bytes of its own shard; the matrix is
never gathered. Needs the package torchstore-monarch.
"""

from __future__ import annotations

import asyncio
import os
import tempfile

import torch
import torch.distributed as dist
from monarch.actor import Actor, current_rank, endpoint, this_host
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import torchstore_core as ts

RANKS = 2  # of each job


def matrix() -> torch.Tensor:
    """Return the matrix that should arrive, in which every element is different."""
    return torch.arange(64.0 * 48.0).reshape(64, 48)


class Rank(Actor):
    """One rank of a torch.distributed job; each mesh of actors is such a job."""

    def __init__(self, folder: str, dim: int) -> None:
        self.rank, self.dim = current_rank().rank, dim
        self.meet = f"file://{folder}/{dim}"
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        torch.set_num_threads(1)

    @endpoint
    async def join(self) -> None:
        """Join the process group of this mesh."""
        await asyncio.to_thread(
            dist.init_process_group,
            "gloo",
            init_method=self.meet,
            rank=self.rank,
            world_size=RANKS,
        )
        self.mesh = init_device_mesh("cpu", (RANKS,))

    def shard(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a tensor that is sharded along dimension ``dim``."""
        return whole.chunk(RANKS, self.dim)[self.rank].contiguous()

    @endpoint
    async def put(self) -> list[int]:
        """Put this rank's shard, and return its shape."""
        mine = self.shard(matrix())
        await ts.put("matrix", DTensor.from_local(mine, self.mesh, [Shard(self.dim)]))
        return list(mine.shape)

    @endpoint
    async def get(self) -> tuple[list[int], bool]:
        """Get this rank's shard in place; return its shape, and whether it is right."""
        mine = self.shard(torch.zeros_like(matrix()))
        await ts.get("matrix", DTensor.from_local(mine, self.mesh, [Shard(self.dim)]))
        return list(mine.shape), torch.equal(mine, self.shard(matrix()))


async def main(folder: str) -> None:
    """Start both meshes and the store; put with one, get with the other, and compare.

    The ranks of a mesh find each other through a file in ``folder``.
    """
    procs = [this_host().spawn_procs({"rank": RANKS}) for _ in range(2)]
    writers, readers = (mesh.spawn("ranks", Rank, folder, dim) for dim, mesh in enumerate(procs))
    await ts.initialize(capacity=256 << 20)
    try:
        await asyncio.gather(writers.join.call(), readers.join.call())
        for at, put in (await writers.put.call()).items():
            print(f"writer {at.rank} put {put}")
        verdicts = []
        for at, (got, right) in (await readers.get.call()).items():
            print(f"reader {at.rank} got {got}")
            verdicts.append(right)
        # This process has no device mesh, so it gets the whole matrix.
        whole = await ts.get("matrix")
        print(f"this process got {list(whole.shape)}")
        verdicts.append(torch.equal(whole, matrix()))
    finally:
        await ts.shutdown()
    if not all(verdicts):
        raise SystemExit("a part came back wrong")
    print("every element is right")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        asyncio.run(main(made))
