"""A trainer that is killed goes back to its checkpoint, and generators follow it there.

    python examples/restarted_trainer.py [--steps 12] [--killed-at 8]

The trainer publishes its weights after every step, and saves a checkpoint after every fifth. In its
first run it is killed (SIGKILL) between two checkpoints. This process, which owns the store,
restarts it, as torchrun or a cluster would; some steps are then trained for the second time.

The version is the step. The versions of a key only increase, so `version=step` alone is refused
after the restart: the first version that a run publishes goes back, with `rewind=True`. As soon as
it is there, what the earlier run published from that step on is gone, in one step.

Generators follow the ref of the version that they have (`after=`). If that version is gone, because
the trainer went back or because the store was restarted without its memory, they are told so
(`VersionGoneError`) and start over from what there is. They would wait for ever if they waited for
a number. They verify that the weights of every version are those of its step, and that a step that
was trained twice has the same weights both times.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import multiprocessing
import os
import signal
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

import torchstore_core as ts

GENERATORS = 2
CHECKPOINT_EVERY = 5


def make_model() -> torch.nn.Module:
    """Build the policy; every process has one."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 4))


def say(line: str) -> None:
    """Print in one write: several processes print to the same file."""
    print(f"{line}\n", end="", flush=True)


def digest(model: torch.nn.Module) -> str:
    """Return a digest over the exact bits of all weights."""
    weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    return hashlib.sha256(weights).hexdigest()


# ---- the trainer --------------------------------------------------------------------------


async def train(run: int, checkpoint: Path, steps: int, killed_at: int) -> None:
    """Train from the checkpoint, if there is one, and publish every step."""
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    done = 0
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        done = saved["step"]
        try:  # to show that this does not work
            await ts.put_state_dict({"model": model.state_dict()}, "policy", version=done)
        except ts.VersionGoneError as error:
            say(f"trainer, run {run}: {error}")
    say(f"trainer, run {run}: starts after step {done}")
    for step in range(done + 1, steps + 1):
        inputs = torch.randn(32, 16, generator=torch.Generator().manual_seed(step))
        loss = (model(inputs) - inputs[:, :4]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

        published = {
            "model": model.state_dict(),
            "step": step,
            "run": run,
            "digest": digest(model),
        }
        back = step == done + 1
        await ts.put_state_dict(published, "policy", version=step, rewind=back)
        if step % CHECKPOINT_EVERY == 0:
            save(checkpoint, model, optimizer, step)
        # On-policy: the next step starts when all generators have this version.
        await ts.wait([f"taken/{run}/{rank}" for rank in range(GENERATORS)], min_version=step)
        if run == 1 and step == killed_at:
            os.kill(os.getpid(), signal.SIGKILL)


def save(
    checkpoint: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int
) -> None:
    """Write the checkpoint atomically."""
    partial = checkpoint.with_suffix(".part")
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, partial
    )
    partial.replace(checkpoint)


# ---- a generator --------------------------------------------------------------------------


async def generate(rank: int, steps: int) -> None:
    """Get every version, and check it."""
    model = make_model()
    mine: dict[str, Any] = {"model": model.state_dict(), "step": 0, "run": 0, "digest": ""}
    digests: dict[int, str] = {}
    report = ts.StateDictReport()
    seen: list[tuple[int, int]] = []
    while mine["step"] < steps:
        # While no trainer is running, this waits.
        newer: dict[str, Any] = {"after": report.ref} if report.ref else {"min_version": 1}
        try:
            await ts.get_state_dict("policy", mine, report=report, **newer)
        except ts.VersionGoneError:  # the trainer, or the store, has gone back: so do we
            report.ref = None
            continue
        run, step = mine["run"], mine["step"]
        if step != report.version:
            raise SystemExit(f"generator {rank}: version {report.version} is step {step}")
        if not digest(model) == mine["digest"] == digests.setdefault(step, mine["digest"]):
            raise SystemExit(f"generator {rank}: the weights of step {step} are wrong")
        seen.append((run, step))
        await ts.put(f"taken/{run}/{rank}", step, version=step)
    after = "the trainer never went back"
    for (earlier, step), (run, again) in pairwise(seen):
        if again <= step:
            after = f"after step {step} of run {earlier} came step {again} of run {run}"
    say(f"generator {rank}: {len(seen)} versions of {len(digests)} steps; {after}")


# ---- the process that starts them ---------------------------------------------------------


def entry(target: Any, *arguments: Any) -> None:
    """Entry point of the other processes, which find the store through TORCHSTORE_ADDRESS."""
    torch.set_num_threads(1)
    asyncio.run(target(*arguments))


async def main(steps: int, killed_at: int) -> None:
    """Own the store, and keep a trainer running."""
    await ts.initialize(capacity=64 << 20)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", "torchstore_core"])  # imported once

    def start(*arguments: Any) -> Any:
        process = context.Process(target=entry, args=arguments, daemon=True)
        process.start()
        return process

    try:
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = Path(folder) / "checkpoint.pt"
            generators = [start(generate, rank, steps) for rank in range(GENERATORS)]
            for run in range(1, 4):
                trainer = start(train, run, checkpoint, steps, killed_at)
                await asyncio.to_thread(trainer.join)
                if trainer.exitcode == 0:
                    break
                say(f"trainer, run {run}: ended with {trainer.exitcode}")
            for generator in generators:
                await asyncio.to_thread(generator.join)
    finally:
        await ts.shutdown()
    if any(process.exitcode for process in (trainer, *generators)):
        raise SystemExit("the trainer or a generator failed")
    say(f"all {steps} steps arrived bit by bit, also those that were trained twice")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="a trainer goes back to its checkpoint")
    parser.add_argument("--steps", type=int, default=12, help="steps to train")
    parser.add_argument(
        "--killed-at", type=int, default=8, help="the step after which it is killed"
    )
    options = parser.parse_args()
    if options.steps < 1 or options.killed_at < 1:
        parser.error("--steps and --killed-at are at least 1")
    asyncio.run(main(options.steps, options.killed_at))
