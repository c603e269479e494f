"""A real server on a simulated loop, and what it runs in."""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgspec
import pytest
from tests.simulation.machine.disks import Disk
from tests.simulation.machine.halves import TRANSPORT, TravellingHalves
from tests.simulation.machine.loop import SimulatedLoop
from tests.simulation.machine.memory import Memory, simulated_volume
from tests.simulation.machine.processes import Processes

from torchstore_core import moments
from torchstore_core.contracts.strategy import Strategy
from torchstore_core.machine.topology import Topology
from torchstore_core.server.keeping import recorded, returning
from torchstore_core.server.keeping.link import KeeperLink
from torchstore_core.server.server import Server, ServerOptions
from torchstore_core.server.serving.conversation import Conversation
from torchstore_core.server.serving.journal import Refusals

__all__ = ["here", "running", "server_on"]


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


# Where everything is. Of no real machine: on all of them, a seed sends the same messages.
_HERE = Topology("simulated", "host", 1, 0, 1, 1 << 30, 0, (), "Linux")


@functools.cache
def _pattern() -> Server:
    """A server that has looked for what is installed, which takes long."""
    server = Server(ServerOptions(store_name="simulated", prefault=0))
    server.topology = _HERE
    return server


def here() -> Topology:
    """Where everything is."""
    return _pattern().topology


def server_on(
    loop: SimulatedLoop,
    memories: Sequence[Memory],
    halves: Sequence[TravellingHalves],
    copies: int,
    place: str,
    spill_capacity: int,
    keeper: KeeperLink | None = None,
) -> Server:
    """A server of its own that does not listen anywhere; with a keeper, the next life of one.

    ``place``: what is not pinned may be spilled there; empty: it has no disk.
    """
    server = Server.__new__(Server)
    vars(server).update(vars(_pattern()))
    server._keeper = keeper
    if place:
        there = {"spill": place, "spill_capacity": spill_capacity, "when_full": "spillable"}
        server.options = msgspec.structs.replace(server.options, **there)
        server._spill_file = server._open_spill_file()
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
    server._volumes = volumes  # type: ignore[assignment]  # which have the descriptors
    server._begin(volumes)
    loop.forget_timer(server._sample_rate)  # what it does every second is of no interest
    # The controller has been given the method of the class: let a world take its place.
    server.controller.detached._watch = lambda volume, wanted: server._watch(volume, wanted)
    return server


@contextmanager
def running(loop: SimulatedLoop, processes: Processes, disk: Disk | None) -> Iterator[None]:
    """While the loop is the one that asyncio knows, there are no other clocks and processes than
    simulated ones, no number is random, and nothing is logged.
    """
    disabled = logging.root.manager.disable
    if disabled < logging.CRITICAL:  # it takes long
        logging.disable(logging.CRITICAL)
    asyncio._set_running_loop(loop)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(moments, "monotonic", loop.time)
            patch.setattr(moments, "wall", loop.time)
            patch.setattr(secrets, "randbits", lambda bits: 0)
            numbers = itertools.count(1)
            patch.setattr(secrets, "token_bytes", lambda n: next(numbers).to_bytes(n, "little"))
            for module in (recorded, returning):
                patch.setattr(module, "started", processes.started)
            patch.setattr(returning, "ProcessWatch", processes.watch)
            if disk is not None:
                disk.install(patch)
            yield
            loop.end()
    finally:
        loop.end()
        asyncio._set_running_loop(None)
        if disabled < logging.CRITICAL:
            logging.disable(disabled)
