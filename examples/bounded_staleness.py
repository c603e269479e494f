"""A learner and two generators, which never use weights that are too old.

    python examples/bounded_staleness.py [--lag 1] [--steps 60]

A small policy learns by reinforcement (REINFORCE) which of 16 actions is right in each of 16
situations. This process owns the store and learns: it publishes version n of the policy, takes the
n-th rollouts of both generator processes, improves the policy with them, and continues with n + 1.

A generator makes its n-th rollouts with the newest policy there is, but never with one older than
version n - lag: `min_version` waits for a newer one. So the generators need not wait while the
learner learns, but run ahead of it by no more than `lag` steps. With --lag 0 everything is
on-policy, in lockstep.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
from collections import Counter
from typing import Any

import torch

import torchstore_core as ts

GENERATORS = 2
SITUATIONS = 16
BATCH = 64
RIGHT = torch.randperm(SITUATIONS, generator=torch.Generator().manual_seed(7))


def make_policy() -> torch.nn.Module:
    """Build the policy: it maps a situation to scores of the actions."""
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Embedding(SITUATIONS, 64), torch.nn.Tanh(), torch.nn.Linear(64, SITUATIONS)
    )


# ---- a generator --------------------------------------------------------------------------


async def generate(rank: int, steps: int, lag: int) -> None:
    """Act, and publish the results: the n-th rollouts are version n of a state dict."""
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    policy = make_policy()
    wanted = {"policy": policy.state_dict(), "version": 0}  # filled in place
    for n in range(1, steps + 1):
        await ts.get_state_dict("policy", wanted, min_version=n - lag)
        situations = torch.randint(SITUATIONS, (BATCH,))
        with torch.no_grad():
            actions = torch.distributions.Categorical(logits=policy(situations)).sample()
        rollout = {
            "situations": situations,
            "actions": actions,
            "rewards": (actions == RIGHT[situations]).float(),
            "policy_version": wanted["version"],
        }
        # The learner may be `lag` versions behind: rollouts are kept until it has read them.
        await ts.put_state_dict(rollout, f"rollouts/{rank}", version=n, keep=lag + 1)


def generator_main(rank: int, steps: int, lag: int) -> None:
    """Entry point of the spawned processes, which find the store through TORCHSTORE_ADDRESS."""
    asyncio.run(generate(rank, steps, lag))


# ---- the learner --------------------------------------------------------------------------


async def learn(steps: int) -> tuple[list[float], Counter[int]]:
    """Return the mean rewards by step, and how many rollouts came from weights of each age."""
    policy = make_policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.02)
    rewards: list[float] = []
    staleness: Counter[int] = Counter()
    for n in range(1, steps + 1):
        await ts.put_state_dict({"policy": policy.state_dict(), "version": n}, "policy", version=n)
        rollouts: list[dict[str, Any]] = [
            await ts.get_state_dict(f"rollouts/{rank}", version=n, min_version=n)
            for rank in range(GENERATORS)
        ]
        staleness.update(n - rollout["policy_version"] for rollout in rollouts)
        situations, actions, gained = (
            torch.cat([rollout[name] for rollout in rollouts])
            for name in ("situations", "actions", "rewards")
        )
        taken = torch.distributions.Categorical(logits=policy(situations)).log_prob(actions)
        loss = -((gained - gained.mean()) * taken).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rewards.append(gained.mean().item())
        if n == 1 or n % 10 == 0:
            used = [rollout["policy_version"] for rollout in rollouts]
            print(f"version {n:2}: reward {rewards[-1]:.2f}, rollouts came from versions {used}")
    return rewards, staleness


async def main(steps: int, lag: int) -> None:
    """Own the store and learn, while child processes generate."""
    torch.set_num_threads(1)
    await ts.initialize(capacity=64 << 20)
    context = multiprocessing.get_context("spawn")
    children = [
        context.Process(target=generator_main, args=(rank, steps, lag), daemon=True)
        for rank in range(GENERATORS)
    ]
    try:
        for child in children:
            child.start()
        rewards, staleness = await learn(steps)
        for child in children:
            await asyncio.to_thread(child.join)
    finally:
        await ts.shutdown()
    print(f"reward: {rewards[0]:.2f} -> {rewards[-1]:.2f}")
    ages = ", ".join(f"{age} ({count} rollouts)" for age, count in sorted(staleness.items()))
    print(f"age of the weights, in versions: {ages}; at most {lag} was allowed")
    if max(staleness) > lag or any(child.exitcode for child in children):
        raise SystemExit("the bound did not hold, or a generator failed")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="bounded staleness with min_version")
    parser.add_argument("--steps", type=int, default=60, help="versions of the policy")
    parser.add_argument("--lag", type=int, default=1, help="how old weights may be, in versions")
    options = parser.parse_args()
    if options.steps < 1 or options.lag < 0:
        parser.error("--steps is at least 1, --lag at least 0")
    asyncio.run(main(options.steps, options.lag))
