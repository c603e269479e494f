"""Monarch actors in a ring: each puts a tensor of its own and gets its neighbour's tensor.

    python examples/monarch_ring.py [--actors 3]

This process starts the store, which runs as actors of the same Monarch job. The other actors find
it automatically: they only import torchstore_core. Needs the package torchstore-monarch.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib

import torch
from monarch.actor import Actor, current_rank, endpoint, this_host

import torchstore_core as ts


def checksum(tensor: torch.Tensor) -> str:
    """Return a checksum of the tensor's bytes."""
    return hashlib.sha256(tensor.numpy()).hexdigest()[:12]


class Member(Actor):
    """One actor of the ring."""

    def __init__(self, size: int) -> None:
        self.rank = current_rank().rank
        self.next = (self.rank + 1) % size

    @endpoint
    async def pass_on(self) -> tuple[str, str]:
        """Put a tensor, get the neighbour's, and return the checksums of both."""
        mine = torch.randn(500_000, generator=torch.Generator().manual_seed(self.rank))
        await ts.put(f"ring/{self.rank}", mine)
        await ts.wait(f"ring/{self.next}")  # the neighbour may not have put it yet
        got = await ts.get(f"ring/{self.next}")
        return checksum(mine), checksum(got)


async def main(size: int) -> None:
    """Start the actors and the store, pass the tensors on, and compare."""
    members = this_host().spawn_procs({"ring": size}).spawn("members", Member, size)
    await ts.initialize(capacity=256 << 20)
    try:
        sums = [both for _, both in (await members.pass_on.call()).items()]
        print(f"in the store: {', '.join(await ts.keys('ring/'))}")
    finally:
        await ts.shutdown()
    for rank, (put, got) in enumerate(sums):
        print(f"actor {rank} put {put}, got {got} of actor {(rank + 1) % size}")
    if any(got != sums[(rank + 1) % size][0] for rank, (_, got) in enumerate(sums)):
        raise SystemExit("a tensor came back wrong")
    print(f"all {size} tensors arrived bit by bit")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="a ring of Monarch actors")
    parser.add_argument("--actors", type=int, default=3, help="processes in the ring")
    options = parser.parse_args()
    if options.actors < 1:
        parser.error("--actors is at least 1")
    asyncio.run(main(options.actors))
