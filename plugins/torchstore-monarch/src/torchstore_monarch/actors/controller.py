"""The actor that hosts a store's server: the controller, its Unix socket, and its relays."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import msgspec
from monarch.actor import Actor, concurrent_endpoint

from torchstore_core.errors import StoreClosedError
from torchstore_core.machine import topology
from torchstore_core.server.remote.relay_server import RelayServer
from torchstore_core.server.server import Server, ServerOptions
from torchstore_core.server.serving.members import Members
from torchstore_monarch.actors.core_thread import CoreThread
from torchstore_monarch.actors.swept_directory import SweptDirectory
from torchstore_monarch.actors.uplinks import Uplinks
from torchstore_monarch.protocol import StoreRequest, outcome
from torchstore_monarch.rpc.forwarder import Forwarder

__all__ = ["ControllerActor"]


# The fraction of an uplink's patience after which a silent uplink is dead, if an agent is known to
# have died: while a relay lives, it is never silent for so long.
_SILENT = 1 / 3
_ENDED = "this store has ended"


class ControllerActor(Actor):
    """The server of one store, in a process of its own."""

    def __init__(self) -> None:
        self._core: CoreThread | None = None
        self._server: Server | None = None
        self._relay_server: RelayServer | None = None
        self._uplinks: Uplinks | None = None
        self._forwarder: Forwarder | None = None
        self._directory: SweptDirectory | None = None
        self._serving: asyncio.Task[None] | None = None  # runs until the last member has left

    @concurrent_endpoint
    async def begin(self, request: bytes) -> tuple[bytes, tuple[str, str, int] | None]:
        """Start the server, which then waits for its volumes; return host id, address and pid."""
        return await outcome(self._begin(msgspec.msgpack.decode(request, type=StoreRequest)))

    async def _begin(self, request: StoreRequest) -> tuple[str, str, int]:
        core = self._core = CoreThread("torchstore-server")
        return await core.run(self._start(request))

    async def _start(self, request: StoreRequest) -> tuple[str, str, int]:
        self._directory = SweptDirectory()
        directory = self._directory.path
        options = ServerOptions(
            store_name=request.store_name,
            num_storage_volumes=request.num_storage_volumes,
            attached=True,
            prefault=request.prefault,
            strategy=request.strategy,
            strategy_fields=request.strategy_fields,
            block=request.block,
            when_full=request.when_full,
            repair_bandwidth=request.repair_bandwidth,
            directory=directory,
        )
        server = Server(options)
        address = await server.start()
        self._server = server
        self._relay_server = RelayServer(server)
        self._uplinks = Uplinks(self._relay_server)
        self._forwarder = Forwarder(directory)
        await self._forwarder.start()
        server.before_close = self._forwarder.idle
        if request.members:
            server.members = Members(server.stop_soon)
            self._serving = asyncio.ensure_future(self._serve(server))
        return topology.probe().host_id, address, os.getpid()

    async def _serve(self, server: Server) -> None:
        """Close with the last member. Whoever asked for the store notices, and ends the rest."""
        await server.serve()
        await self._close()

    @concurrent_endpoint
    async def starter_ended(self) -> None:
        """Call ``Members.starter_ended``."""
        core, server = self._core, self._server
        if core is not None and server is not None and server.members is not None:
            await core.call(server.members.starter_ended)

    @concurrent_endpoint
    async def ready(self, volumes: dict[str, Any], timeout: float) -> tuple[bytes, bool | None]:
        """Wait until all volumes are attached. ``volumes``: their actors, by the volume's id."""
        return await outcome(self._ready(volumes, timeout))

    async def _ready(self, volumes: dict[str, Any], timeout: float) -> bool:
        core, server, forwarder = self._core, self._server, self._forwarder
        if core is None or server is None or forwarder is None:
            raise StoreClosedError("the server was not started")
        forwarder.volumes = volumes
        await core.run(server.attached(timeout))
        return True

    # ---- the server's end of the relays ---------------------------------------------------

    @concurrent_endpoint
    async def open_uplink(
        self, here: bytes, agent: str, back: Any
    ) -> tuple[bytes, tuple[bytes, Any] | None]:
        """Call ``Uplinks.open``."""
        return await outcome(self._open_uplink(here, agent, back))

    @concurrent_endpoint
    async def agent_of(self, peer: bytes) -> tuple[bytes, str | None]:
        """Return the path of the socket of the ``Forwarder`` that serves a client, on its host."""
        return await outcome(self._agent_of(peer))

    @concurrent_endpoint
    async def agent_failed(self) -> None:
        """Close the relays that have been silent for some seconds, because the engine reports that
        an agent died some seconds ago.
        """
        if self._core is not None and self._relay_server is not None:
            await self._core.call(self._relay_server.close_silent, _SILENT)

    @concurrent_endpoint
    async def poll(self, token: bytes) -> tuple[bytes, bytes | None]:
        """Call ``RelayServer.poll``."""
        return await outcome(self._poll(token))

    async def _poll(self, token: bytes) -> bytes:
        core, relay_server = self._core, self._relay_server
        if core is None or relay_server is None:
            raise StoreClosedError(_ENDED)
        return await core.run(relay_server.poll(token))

    async def _open_uplink(self, here: bytes, agent: str, back: Any) -> tuple[bytes, Any]:
        core, uplinks = self._core, self._uplinks
        if core is None or uplinks is None:
            raise StoreClosedError(_ENDED)
        return await core.call(uplinks.open, here, agent, back)

    async def _agent_of(self, peer: bytes) -> str:
        core, uplinks, forwarder = self._core, self._uplinks, self._forwarder
        if core is None or uplinks is None or forwarder is None:
            raise StoreClosedError(_ENDED)
        return await core.call(uplinks.agent_of, peer) or forwarder.path

    # ---- the end --------------------------------------------------------------------------

    @concurrent_endpoint
    async def end(self) -> list[str]:
        """Close everything. Returns the ids of the volumes that had been lost before."""
        lost = [] if self._server is None else self._server.lost_volumes()
        await self._end()
        return lost

    async def _end(self) -> None:
        core, self._core = self._core, None
        if core is not None:
            await core.run(self._close())
            core.close()

    async def _close(self) -> None:
        if self._forwarder is not None:
            await self._forwarder.close()
        if self._relay_server is not None:
            self._relay_server.close(why="the store was shut down")
        if self._uplinks is not None:
            self._uplinks.close()
        if self._server is not None:
            await self._server.close()
        if self._directory is not None:
            self._directory.remove()
