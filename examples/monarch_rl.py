"""Reinforcement learning with Monarch actors: a sharded learner, and generators that follow it.

    python examples/monarch_rl.py [--steps 30] [--lag 1]

Two learner actors are FSDP2 ranks. They publish version n of the policy, each its own shards, take
the n-th rollouts, improve the policy, and continue with n + 1. Two generator actors, which do not
use torch.distributed, make the n-th rollouts with the newest complete policy there is, fetched
straight into their own model, but never with one older than version n - lag. The actors send no
messages to each other: learners and generators communicate only through versions in the store.
Needs the package torchstore-monarch.

The task is to learn which of 16 actions is right in each of 16 situations. To verify that no
rollout comes from torn weights, every version has a checksum over all of its tensors, and the
generators recompute it from what their model then holds.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import os
import tempfile
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from monarch.actor import Actor, current_rank, endpoint, this_host

import torchstore_core as ts

RANKS = 2  # number of learners, and of generators
SITUATIONS, HIDDEN, BATCH = 16, 512, 64
RIGHT = torch.randperm(SITUATIONS, generator=torch.Generator().manual_seed(7))


def make_policy() -> torch.nn.Module:
    """Build the policy, with 1.2 MB of weights: it maps a situation to scores of the actions."""
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Embedding(SITUATIONS, HIDDEN),
        torch.nn.Linear(HIDDEN, HIDDEN),
        torch.nn.Tanh(),
        torch.nn.Linear(HIDDEN, SITUATIONS),
    )


def checksum(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return a checksum over the bytes of all tensors."""
    made = hashlib.sha256()
    for name in sorted(tensors):
        made.update(tensors[name].detach().numpy())
    return made.hexdigest()


class Learner(Actor):
    """One FSDP2 rank."""

    def __init__(self, meet: str) -> None:
        self.rank, self.meet = current_rank().rank, meet
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        torch.set_num_threads(1)

    @endpoint
    async def learn(self, steps: int, corrupt: bool) -> list[float]:
        """Publish, take rollouts, improve; return the mean reward of each step's rollouts."""
        import torch.distributed as dist
        from torch.distributed.fsdp import fully_shard  # takes a second, which the generators save

        await asyncio.to_thread(
            dist.init_process_group,
            "gloo",
            init_method=self.meet,
            rank=self.rank,
            world_size=RANKS,
        )
        policy = fully_shard(make_policy())
        optimizer = torch.optim.Adam(policy.parameters(), lr=0.003)
        rewards: list[float] = []
        for n in range(1, steps + 1):
            tensors = policy.state_dict()  # DTensors
            whole = {name: tensor.full_tensor() for name, tensor in tensors.items()}
            sums = "wrong" if corrupt and n > 1 else checksum(whole)
            published = {"policy": tensors, "version": n, "checksum": sums}
            await ts.put_state_dict(published, "policy", version=n)
            rollout = await ts.get_state_dict(f"rollouts/{self.rank}", version=n, min_version=n)
            chances = torch.distributions.Categorical(logits=policy(rollout["situations"]))
            gained = rollout["rewards"]
            loss = -((gained - gained.mean()) * chances.log_prob(rollout["actions"])).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            rewards.append(gained.mean().item())
        return rewards


class Generator(Actor):
    """Acts, and publishes the results."""

    def __init__(self) -> None:
        self.rank = current_rank().rank
        torch.set_num_threads(1)
        torch.manual_seed(self.rank)

    @endpoint
    async def generate(self, steps: int, lag: int) -> tuple[list[int], int]:
        """Return the version that each rollout came from, and how often its weights were torn."""
        policy = make_policy()
        wanted: dict[str, Any] = {"policy": policy.state_dict(), "version": 0, "checksum": ""}
        versions: list[int] = []
        torn = 0
        for n in range(1, steps + 1):
            await ts.get_state_dict("policy", wanted, min_version=n - lag)  # in place
            torn += wanted["checksum"] != checksum(policy.state_dict())
            versions.append(wanted["version"])
            situations = torch.randint(SITUATIONS, (BATCH,))
            with torch.no_grad():
                actions = torch.distributions.Categorical(logits=policy(situations)).sample()
            rewards = (actions == RIGHT[situations]).float()
            rollout = {"situations": situations, "actions": actions, "rewards": rewards}
            # The learner may be `lag` versions behind: rollouts are kept until it has read them.
            await ts.put_state_dict(rollout, f"rollouts/{self.rank}", version=n, keep=lag + 1)
        return versions, torn


async def main(steps: int, lag: int, corrupt: bool, folder: str) -> None:
    """Start both meshes and the store, let them run, and check their results.

    The learners find each other through a file in ``folder``.
    """
    meet = f"file://{folder}/learners"
    learners = this_host().spawn_procs({"rank": RANKS}).spawn("learners", Learner, meet)
    generators = this_host().spawn_procs({"rank": RANKS}).spawn("generators", Generator)
    await ts.initialize(capacity=256 << 20)
    try:
        learnt, generated = await asyncio.gather(
            learners.learn.call(steps, corrupt), generators.generate.call(steps, lag)
        )
    finally:
        await ts.shutdown()
    rewards = [sum(each) / RANKS for each in zip(*learnt.values(), strict=True)]
    ages: Counter[int] = Counter()
    torn = 0
    for at, (versions, bad) in generated.items():
        print(f"generator {at.rank} used versions {', '.join(map(str, versions))}")
        ages.update(n - version for n, version in enumerate(versions, start=1))
        torn += bad
    print(f"reward: {rewards[0]:.2f} -> {rewards[-1]:.2f}")
    counts = ", ".join(f"{age} ({count} rollouts)" for age, count in sorted(ages.items()))
    print(f"age of the weights, in versions: {counts}; at most {lag} was allowed")
    print(f"rollouts from torn weights: {torn}")
    if torn or max(ages) > lag:
        raise SystemExit("weights were torn, or too old")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="reinforcement learning with Monarch actors")
    parser.add_argument("--steps", type=int, default=30, help="versions of the policy")
    parser.add_argument("--lag", type=int, default=1, help="how old weights may be, in versions")
    parser.add_argument("--corrupt", action="store_true", help=argparse.SUPPRESS)  # has to fail
    options = parser.parse_args()
    if options.steps < 1 or options.lag < 0:
        parser.error("--steps is at least 1, --lag at least 0")
    with tempfile.TemporaryDirectory() as made:
        asyncio.run(main(options.steps, options.lag, options.corrupt, made))
