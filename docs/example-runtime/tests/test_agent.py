"""Runs the public conformance kit, and tests what is specific to this runtime."""

import asyncio
import os
import signal

import torchstore_core as ts
from torchstore_agents.runtime import AgentRuntime
from torchstore_core.contracts.runtime import Runtime
from torchstore_core.testing import RuntimeConformance


class TestAgent(RuntimeConformance):
    name = "agent"
    cycles = 1

    def make(self) -> Runtime:
        return AgentRuntime()


def test_an_agent_that_is_killed_takes_its_store_with_it():
    asyncio.run(_lose_the_agent())


async def _lose_the_agent() -> None:
    client = await ts.initialize(capacity=64 << 20, prefault=0, runtime="agent")
    await client.put("w", 1)
    (agent,) = await asyncio.to_thread(_children)
    os.kill(agent, signal.SIGKILL)
    try:
        await client.wait("never", timeout=100)
    except ts.StoreClosedError:
        await ts.initialize(capacity=64 << 20, prefault=0, runtime="agent")
    await ts.put("w", 2)
    await ts.shutdown()


def _children() -> list[int]:
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return [int(pid) for pid in file.read().split()]
