"""LoRA: the whole model is published once, then only its adapters.

    python examples/lora.py [--steps 8]

This process owns the store and trains a transformer whose linear layers are frozen and have LoRA
adapters of rank 8. First it publishes everything; then, after every step, it publishes what has
changed, the adapters, with `partial=True`. Each of these puts creates a new version of the whole
model, which shares everything else with the previous version.

A reader process gets the whole model once, into its own model, and then the adapters of every
version: the key of a state dict's entry is `<key>/<name>`. At the end it gets the whole last
version into another model. Checksums verify that it has the same weights as the trainer.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import multiprocessing
import statistics
import time
from collections.abc import Awaitable, Mapping

import torch
from torch import nn

import torchstore_core as ts

WIDTH, LAYERS, RANK = 768, 4, 8
KEY = "policy"


# ---- the model ----------------------------------------------------------------------------


class LoRALinear(nn.Module):
    """A frozen linear layer, to which the product of two small matrices is added."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        self.lora_a = nn.Parameter(torch.randn(RANK, inputs) / inputs**0.5)
        self.lora_b = nn.Parameter(torch.zeros(outputs, RANK))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.lora_a.T @ self.lora_b.T


class Block(nn.Module):
    """Attention and a feed-forward part, as in every transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(WIDTH).requires_grad_(False) for _ in range(2))
        self.query, self.key, self.value, self.out = (LoRALinear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = LoRALinear(WIDTH, 4 * WIDTH), LoRALinear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x)
        heads = [part(y).unflatten(-1, (8, -1)).mT for part in (self.query, self.key, self.value)]
        mixed = nn.functional.scaled_dot_product_attention(*(h.movedim(-1, -2) for h in heads))
        x = x + self.out(mixed.flatten(-2))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


def make_model(seed: int) -> nn.Module:
    """Build the same layers, with different weights for each seed."""
    torch.manual_seed(seed)
    return nn.Sequential(*(Block() for _ in range(LAYERS)))


def adapters(model: nn.Module, *, keep_vars: bool = False) -> dict[str, torch.Tensor]:
    """Return the part of a model's state dict that training changes."""
    state_dict = model.state_dict(keep_vars=keep_vars)
    return {name: tensor for name, tensor in state_dict.items() if "lora_" in name}


def checksum(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return a checksum over the bytes of all tensors."""
    made = hashlib.sha256()
    for name in sorted(tensors):
        made.update(tensors[name].numpy())
    return made.hexdigest()


async def timed(work: Awaitable[object]) -> float:
    """Await it, and return how many seconds that took."""
    started = time.perf_counter()
    await work
    return time.perf_counter() - started


# ---- the reader ---------------------------------------------------------------------------


async def read(steps: int) -> None:
    """Follow the trainer; after every version, put a checksum of what this process holds."""

    async def report(tensors: Mapping[str, torch.Tensor], seconds: float) -> None:
        await ts.put("reader", {"checksum": checksum(tensors), "seconds": seconds})

    model = make_model(seed=1)  # all its weights differ from the trainer's
    seconds = await timed(ts.get_state_dict(KEY, model.state_dict(), min_version=1))
    await report(model.state_dict(), seconds)
    mine = {f"{KEY}/{name}": tensor for name, tensor in adapters(model).items()}
    for version in range(2, steps + 2):
        await ts.wait(KEY, min_version=version)
        seconds = await timed(ts.get_batch(mine))  # in place, all of one version
        await report(adapters(model), seconds)
    model = make_model(seed=2)
    seconds = await timed(ts.get_state_dict(KEY, model.state_dict()))
    await report(model.state_dict(), seconds)


def reader_main(steps: int) -> None:
    """Entry point of the other process, which finds the store through TORCHSTORE_ADDRESS."""
    torch.set_num_threads(1)
    asyncio.run(read(steps))


# ---- the trainer --------------------------------------------------------------------------


async def check(tensors: Mapping[str, torch.Tensor], version: int) -> float:
    """Check that the reader has exactly these tensors; return the seconds its get took."""
    await ts.wait("reader", min_version=version)
    seen = await ts.get("reader")
    if seen["checksum"] != checksum(tensors):
        raise SystemExit(f"version {version}: the reader has other weights than the trainer")
    return float(seen["seconds"])


async def train(steps: int) -> None:
    """Train the adapters; publish every version, and check that the reader has it."""
    model = make_model(seed=0)
    optimizer = torch.optim.Adam(adapters(model, keep_vars=True).values(), lr=1e-3)
    inputs, wanted = torch.randn(2, 4, 8, WIDTH)
    whole = model.state_dict()
    await ts.put_state_dict(whole, KEY)
    await check(whole, 1)
    partial_s: list[float] = []
    fetch_s: list[float] = []
    for version in range(2, steps + 2):
        loss = nn.functional.mse_loss(model(inputs), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seconds = await timed(ts.put_state_dict(adapters(model), KEY, partial=True))
        partial_s.append(seconds)
        print(f"version {version}: loss {loss.item():.3f}, adapters put in {seconds * 1e3:.1f} ms")
        fetch_s.append(await check(adapters(model), version))
    await check(whole, steps + 2)
    held = (await ts.status()).volumes[0].used_bytes
    whole_s = [await timed(ts.put_state_dict(whole, KEY)) for _ in range(3)]  # for comparison

    def row(name: str, tensors: Mapping[str, torch.Tensor], seconds: list[float]) -> None:
        nbytes, median = sum(t.nbytes for t in tensors.values()), statistics.median(seconds)
        size = f"{len(tensors):3} tensors, {nbytes / 1e6:5.1f} MB"
        print(f"{name:16} {size}, {median * 1e3:5.1f} ms (median of {len(seconds)})")

    row("whole publish", whole, whole_s)
    row("partial publish", adapters(model), partial_s)
    row("partial get", adapters(model), fetch_s)
    share = statistics.median(partial_s) / statistics.median(whole_s)
    print(f"a partial publish took {share:.0%} of the time of a whole one")
    print(f"after {steps} of them the store held {held / 1e6:.1f} MB")
    print(f"all {steps + 1} versions arrived bit by bit")


async def main(steps: int) -> None:
    """Own the store, train, and let a child process read."""
    torch.set_num_threads(1)
    await ts.initialize(capacity=1 << 30)
    child = multiprocessing.get_context("spawn").Process(
        target=reader_main, args=(steps,), daemon=True
    )
    try:
        child.start()
        await train(steps)
        await asyncio.to_thread(child.join)
    finally:
        await ts.shutdown()
    if child.exitcode != 0:
        raise SystemExit(f"the reader ended with {child.exitcode}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="LoRA: partial publishes")
    parser.add_argument("--steps", type=int, default=8, help="partial publishes")
    options = parser.parse_args()
    if options.steps < 1:
        parser.error("--steps is at least 1")
    asyncio.run(main(options.steps))
