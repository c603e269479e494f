"""A real server on a simulated loop, and what it runs in."""

from __future__ import annotations

import asyncio
import copy
import functools
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tests.simulation.machine.halves import TRANSPORT, TravellingHalves
from tests.simulation.machine.loop import SimulatedLoop
from tests.simulation.machine.memory import Memory, simulated_volume

from torchstore_core.contracts.strategy import Strategy
from torchstore_core.server.server import Server, ServerOptions
from torchstore_core.server.serving.conversation import Conversation
from torchstore_core.server.serving.journal import Refusals

__all__ = ["running", "server_on"]


class _InOrder(set[Conversation]):
    """A set that is looked through in the order of its parts' coming, in every run the same."""

    def __init__(self) -> None:
        super().__init__()
        self._parts: dict[Conversation, None] = {}

    def add(self, one: Conversation) -> None:
        super().add(one)
        self._parts[one] = None

    def discard(self, one: object) -> None:
        super().discard(one)
        self._parts.pop(one, None)  # type: ignore[call-overload]

    def __iter__(self) -> Iterator[Conversation]:
        return iter(self._parts)


class _Twice(Strategy, frozen=True, tag="twice"):
    """A copy of everything on a second volume."""

    @property
    def copies(self) -> int:
        return 2


@functools.cache
def _pattern() -> Server:
    """A server that has looked at its machine, which takes long."""
    return Server(ServerOptions(store_name="simulated", prefault=0))


def server_on(
    loop: SimulatedLoop,
    memories: Sequence[Memory],
    halves: Sequence[TravellingHalves],
    copies: int,
    grace_s: float,
) -> Server:
    """A server of its own that does not listen anywhere."""
    server = copy.copy(_pattern())
    server.conversations = _InOrder()
    server.connections = set()
    server.refusals = Refusals()
    server._when_trimmed = []
    server._loop = loop
    server._strategy = Strategy() if copies == 1 else _Twice()
    volumes = [
        simulated_volume(at, memory, half, server.topology, (TRANSPORT,))
        for at, (memory, half) in enumerate(zip(memories, halves, strict=True))
    ]
    server._begin(volumes)
    loop.forget_timers()  # what a server does every second is of no interest
    holds = server.controller.holds
    holds._clock, holds._grace_s, holds._number = loop.time, grace_s, 0
    # The controller has been given the method of the class: let a world take its place.
    server.controller.detached._watch = lambda volume, wanted: server._watch(volume, wanted)
    return server


@contextmanager
def running(loop: SimulatedLoop) -> Iterator[None]:
    """While the loop is the one that asyncio knows, and nothing is logged."""
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    asyncio._set_running_loop(loop)
    try:
        yield
    finally:
        loop.end()
        asyncio._set_running_loop(None)
        logging.disable(disabled)
