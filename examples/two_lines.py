"""A module's weights, from one process into a module of another: one line to put, one to get.

python examples/two_lines.py
"""

from __future__ import annotations

import asyncio
import multiprocessing

import torch

import torchstore_core as ts


def make_model(seed: int) -> torch.nn.Module:
    """Build the same layers, with different weights for each seed."""
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 8))


async def read() -> None:
    """Runs in the other process, which finds the store through TORCHSTORE_ADDRESS."""
    model = make_model(seed=1)
    await ts.get_state_dict("policy", model.state_dict())  # in place: it shares the model's memory
    print(f"reader: {model(torch.ones(64)).sum():.6f}")


def reader() -> None:
    """Entry point of the other process."""
    asyncio.run(read())


async def main() -> None:
    """Own the store, put, and let a child process read."""
    await ts.initialize(capacity=64 << 20)
    try:
        model = make_model(seed=0)
        await ts.put_state_dict(model.state_dict(), "policy")
        print(f"writer: {model(torch.ones(64)).sum():.6f}")
        child = multiprocessing.get_context("spawn").Process(target=reader)
        child.start()
        await asyncio.to_thread(child.join)
    finally:
        await ts.shutdown()
    if child.exitcode != 0:
        raise SystemExit(f"the reader ended with {child.exitcode}")


if __name__ == "__main__":
    asyncio.run(main())
