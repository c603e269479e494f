"""Server half: the segments, mapped and registered anew for each connection of each client.

Nothing but the end of an agent stops bytes that a client has sent, or is about to send: neither
deregistering memory nor removing the remote agent does. So each connection has an agent of its own,
and mappings of its own, which end together: then its sockets are closed, its keys are void, and its
addresses lead nowhere.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
import weakref
from collections.abc import Collection, Hashable, Sequence

import msgspec

from torchstore_core.contracts.transport import Segment, ServerContext, TransportServer
from torchstore_core.errors import TransportError, TransportNotReadyError
from torchstore_core.machine.networks import Network
from torchstore_core.machine.virtual_memory import map_shared, unmap
from torchstore_rdma import fabric
from torchstore_rdma.library.agent import Agent
from torchstore_rdma.pacing import Pace
from torchstore_rdma.protocol import Exposed, Goodbye, Hello, Met, Request, Wake, Welcome
from torchstore_transports.listeners import refuse_all

__all__ = ["RdmaServer"]

log = logging.getLogger(__name__)

# Registering pins pages, and so makes them: a sparse segment is registered as far as it is needed.
_LEAST_STEP = 256 << 20
_LEAST = 16 << 20
# A transfer that needs the server half (over TCP) may be noticed this late if nobody says so.
_LONGEST_PAUSE_S = 50e-3
# How long it may take to look for what clients want, and to end a connection.
_LONGEST_S = 12.0


class _Connection:
    """An agent with mappings of all segments, for one connection of a client. Blocks."""

    def __init__(
        self, hello: Hello, place: fabric.Place, segments: Sequence[Segment], *, pins: bool
    ) -> None:
        self.lock = threading.Lock()
        self.exposed: list[Exposed] = []
        self._mapped: list[tuple[int, int]] = []
        self._agent: Agent | None = None
        try:
            options = fabric.options(place, hello.place)
            agent = self._agent = Agent(f"volume-{hello.connection}", options)
            for segment in segments:
                end = registered_end(hello.need, segment) if pins else segment.nbytes
                address = map_shared(segment.fd, segment.nbytes)
                self._mapped.append((address, segment.nbytes))
                agent.register([(address, end)])
                self.exposed.append(Exposed(segment.id, address, end, segment.nbytes))
            self.metadata = agent.metadata()
            self.listening = agent.listening
        except OSError as error:
            self.close()
            raise TransportNotReadyError(f"a segment cannot be mapped: {error}") from error
        except BaseException:
            self.close()
            raise

    def progress(self) -> None:
        """Do what the client wants of this side."""
        with self.lock:
            if self._agent is not None:
                self._agent.progress()

    def close(self) -> None:
        """No byte of the client moves afterwards. Idempotent."""
        with self.lock:
            agent, self._agent = self._agent, None
            if agent is not None and not agent.close():
                # Bytes might still arrive. Without this process they cannot.
                log.critical("an agent of NIXL cannot be destroyed: this process ends")
                os._exit(1)
            while self._mapped:
                unmap(*self._mapped.pop())


class RdmaServer(TransportServer):
    """Serves segments to clients that have said :class:`Hello`."""

    def __init__(self) -> None:
        self._segments: Sequence[Segment] = ()
        self._rdma_devices: tuple[str, ...] = ()
        self._told: tuple[Network, ...] = ()
        self._pins = False
        self._connections: dict[tuple[bytes, str], _Connection] = {}
        # By client; each lives as long as somebody holds it or waits for it.
        self._locks: weakref.WeakValueDictionary[bytes, asyncio.Lock] = (
            weakref.WeakValueDictionary()
        )
        self._polling: threading.Thread | None = None
        self._polled_at = 0.0
        self._closing: dict[object, float] = {}  # connections, and when their end has begun
        self._pace = Pace(_LONGEST_PAUSE_S)
        self._closed = False

    async def start(self, context: ServerContext, segments: Sequence[Segment]) -> bytes:
        self._segments = segments
        self._rdma_devices, self._told = context.topology.rdma_devices, context.told
        self._pins = fabric.pins(self._rdma_devices, context.topology.cuda_devices)
        self._place()  # refuses what cannot be
        # The library takes 30 MB, and is loaded for the first client.
        return b""

    async def handshake(self, peer: bytes, request: bytes) -> bytes:
        try:
            asked = msgspec.msgpack.decode(request, type=Request)
        except msgspec.DecodeError as error:
            raise TransportError(f"a handshake cannot be understood: {error}") from error
        if isinstance(asked, Wake):
            self._pace.hurry()
            return b""
        async with self._locks.setdefault(peer, asyncio.Lock()):
            if isinstance(asked, Goodbye):
                await self._end([(peer, asked.connection)])
                return b""
            if isinstance(asked, Met):
                if (met := self._connections.get((peer, asked.connection))) is not None:
                    await asyncio.to_thread(refuse_all, met.listening)
                return b""
            return msgspec.msgpack.encode(await self._welcome(peer, asked))

    async def disconnect(self, peer: bytes) -> None:
        async with self._locks.setdefault(peer, asyncio.Lock()):
            await self._end([at for at in self._connections if at[0] == peer])

    def registered(self, segment: int) -> int:
        if not self._pins:
            return 0
        ends = [
            one.end
            for connection in list(self._connections.values())
            for one in connection.exposed
            if one.segment == segment
        ]
        return max(ends, default=0)

    def stuck(self) -> Collection[Hashable]:
        late = time.monotonic() - _LONGEST_S
        found = [one for one, begun in self._closing.copy().items() if begun < late]
        if self._polling is not None and not self._closed and self._polled_at < late:
            found.append(self._polled_at)
        return found

    async def close(self) -> None:
        self._closed = True
        await self._end(list(self._connections))

    def _place(self) -> fabric.Place:
        return fabric.here(self._rdma_devices, self._told)

    async def _welcome(self, peer: bytes, hello: Hello) -> Welcome:
        if self._closed:
            raise TransportError("this volume has closed")
        gone = [at for at in self._connections if at[0] == peer and at[1] not in hello.alive]
        await self._end([*gone, (peer, hello.connection)])
        place = self._place()
        made = await asyncio.to_thread(_Connection, hello, place, self._segments, pins=self._pins)
        self._connections[peer, hello.connection] = made
        if self._polling is None:
            self._polled_at = time.monotonic()
            self._polling = threading.Thread(target=self._poll, name="rdma-poll", daemon=True)
            self._polling.start()
        self._pace.hurry()  # the client connects next
        return Welcome(made.metadata, made.exposed, place)

    async def _end(self, which: Sequence[tuple[bytes, str]]) -> None:
        gone = [one for at in which if (one := self._connections.pop(at, None)) is not None]
        if gone:
            await asyncio.to_thread(self._close, gone)

    def _close(self, connections: Sequence[_Connection]) -> None:
        for connection in connections:
            self._closing[connection] = time.monotonic()
            connection.close()
            del self._closing[connection]

    def _poll(self) -> None:
        """In a thread: over TCP, a transfer needs this side, too."""
        while not self._closed:
            self._polled_at = time.monotonic()
            connections = list(self._connections.values())
            if not connections:
                time.sleep(_LONGEST_PAUSE_S)
                continue
            for connection in connections:
                connection.progress()
            del connection
            self._pace.wait(len(connections))


def registered_end(need: int, segment: Segment) -> int:
    """How much of a segment to register if ``need`` bytes of it are needed: in few and large steps,
    but hardly more than has pages, or is needed.
    """
    end = _LEAST_STEP
    while end < need:
        end *= 2
    useful = max(segment.backed_end(), need + need // 4, _LEAST)
    return min(end, useful, segment.nbytes)
