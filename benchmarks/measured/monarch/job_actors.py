"""The actor of ``jobs.py``. Imported once a job begins: it imports Monarch."""

from __future__ import annotations

import asyncio
from typing import Any

import torch
from measured.monarch.actor_commands import Commands
from monarch.actor import Actor, concurrent_endpoint, endpoint


class Measured(Actor):
    """A measured process of a Monarch job."""

    def __init__(self) -> None:
        self._commands: Commands | None = None

    @endpoint
    async def do(self, op: str, fields: str) -> str:
        """Obey one command; see ``actor_commands.py``."""
        if self._commands is None:
            self._commands = Commands(asyncio.get_running_loop())
        return await asyncio.to_thread(self._commands.do, op, fields)

    @endpoint
    async def meet(self, other: Any) -> None:
        """Remember the actor that bare calls go to."""
        if self._commands is not None:
            self._commands.other_hosts.peer = other

    @concurrent_endpoint
    async def nothing(self, data: bytes | torch.Tensor) -> int:
        """Take bytes."""
        return len(data)

    @concurrent_endpoint
    async def give(self, nbytes: int, tensor: bool) -> bytes | torch.Tensor:
        """Give so many bytes."""
        return torch.zeros(nbytes, dtype=torch.uint8) if tensor else bytes(nbytes)
