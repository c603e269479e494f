"""The runtime: what a program has of its agent."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import msgspec

from torchstore_agents.messages import Start, Started
from torchstore_core.contracts.runtime import Runtime, StoreOptions
from torchstore_core.errors import StoreClosedError, from_wire
from torchstore_core.plugins.strategy_data import encode_strategy

_KILL_S = 10.0


class AgentRuntime(Runtime):
    """A server that an agent has started."""

    keeps = True  # the agent's runtime can start a server again, and is told whether it is to

    def __init__(self) -> None:
        self._agent: subprocess.Popen[bytes] | None = None

    async def start(self, options: StoreOptions, mesh: object | None) -> str:
        strategy = None if options.strategy is None else encode_strategy(options.strategy)
        order = Start(msgspec.structs.replace(options, strategy=None), strategy)
        self._agent = _started()
        try:
            line = await asyncio.to_thread(_asked, self._agent, msgspec.json.encode(order))
        except BaseException:  # cancelled, say: nothing is left behind
            await self.stop(_KILL_S)
            raise
        answer = msgspec.json.decode(line, type=Started) if line else Started(message="it ended")
        if not answer.address:
            await self.stop(_KILL_S)
            raise from_wire(answer.code or StoreClosedError.code, answer.message, None, {})
        return answer.address

    @property
    def ended(self) -> bool:
        return self._agent is not None and self._agent.poll() is not None

    async def stop(self, timeout: float) -> None:
        agent, self._agent = self._agent, None
        if agent is not None:
            await asyncio.to_thread(_end, agent, timeout)


def _started() -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "torchstore_agents.agent"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is for the program, which ends its agent
    )


def _asked(agent: subprocess.Popen[bytes], order: bytes) -> bytes:
    """Give the agent an order, and return its answer; nothing if it ends before that."""
    if agent.stdin is None or agent.stdout is None:
        return b""
    agent.stdin.write(order + b"\n")
    agent.stdin.flush()
    return agent.stdout.readline()


def _end(agent: subprocess.Popen[bytes], timeout: float) -> None:
    with agent:  # closes the pipes; the end of its input tells the agent to end
        if agent.stdin is not None:
            agent.stdin.close()
        try:
            agent.wait(timeout)
        except subprocess.TimeoutExpired:
            agent.kill()  # its server ends with it, as every server does with its owner
