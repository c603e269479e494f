"""The server's half of a simulated transport whose bytes travel: some land long after their client
has died or given up, until the half has ended what is under way for that client.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from tests.simulation.machine.memory import Holder
from tests.simulation.machine.scheduling import Name

from torchstore_core.errors import TransportUnavailableError

if TYPE_CHECKING:
    from tests.simulation.world import World

__all__ = ["TRANSPORT", "Packet", "TravellingHalves"]

TRANSPORT = "net"


class Packet(NamedTuple):
    """Bytes on their way to a volume.

    Args:
        ticket: what a handshake has answered: without it, nothing lands.
        operation: that sends them.
    """

    ticket: bytes
    operation: int
    holder: Holder
    volume: int
    offset: int
    data: bytes


class TravellingHalves:
    """Those of one volume. Handshakes, ends and landings happen when the simulation says so."""

    def __init__(self, world: World, volume: int) -> None:
        self._world = world
        self._volume = volume
        self._numbers = itertools.count(1)
        self._lost = False
        self._peers: dict[bytes, bytes] = {}  # by their tickets
        self._names: dict[bytes, str] = {}  # of the peers
        self._times: dict[Name, int] = {}

    async def handshake(self, peer: bytes, transport: str, request: bytes) -> bytes:
        """A client's half asks to be let in."""
        name = self._names[peer] = request.decode()
        await self._some_time("handshake", name)
        ticket = b"%d" % next(self._numbers)
        self._peers[ticket] = peer
        return ticket

    async def disconnect(self, peer: bytes, transport: str = "") -> None:
        """Nothing that is under way for that client lands after this has returned."""
        await self._some_time("disconnect", self._names.get(peer, ""))
        for ticket in [ticket for ticket, whose in self._peers.items() if whose == peer]:
            del self._peers[ticket]

    def lose(self) -> None:
        """The volume is gone."""
        self._lost = True
        self._peers.clear()

    def restart(self) -> None:
        """The server is dead, and these with it; its next life has others."""
        self._peers.clear()

    def _once(self, what: str, whose: str, happens: Callable[[], None]) -> None:
        """The names are those of the clients, so that they mean the same in similar runs."""
        key = (what, self._volume, whose)
        self._times[key] = number = self._times.get(key, 0) + 1
        self._world.once((*key, number), happens)

    async def _some_time(self, what: str, whose: str) -> None:
        waits = asyncio.get_running_loop().create_future()

        def over() -> None:
            if not waits.done():
                waits.set_result(None)

        self._once(what, whose, over)
        await waits
        if self._lost:
            raise TransportUnavailableError("the volume is gone")

    def send(self, packet: Packet, then: Callable[[bool], None]) -> None:
        """Bytes are on their way; ``then`` is told whether they have landed."""

        def land() -> None:
            landed = packet.ticket in self._peers
            if landed:
                self._world.owners.write(packet.holder, *packet[3:])
            if self._world.telling:
                where = f"{packet.volume}:{packet.offset}"
                how = "land" if landed else "are dropped"
                self._world.tell(f"{len(packet.data)} bytes for {where} {how}")
            then(landed)

        self._once("land", str(packet.operation), land)
