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
from torchstore_monarch.core_thread import CoreThread
from torchstore_monarch.protocol import Asked, outcome
from torchstore_monarch.rpc.carrier import Carrier
from torchstore_monarch.sweeping import SweptDirectory

__all__ = ["ControllerActor"]


# Of an uplink's patience: more than it is ever silent while it lives.
_SILENT = 1 / 3


class ControllerActor(Actor):
    """One store's server, in a process of its own."""

    def __init__(self) -> None:
        self._core: CoreThread | None = None
        self._server: Server | None = None
        self._relay_server: RelayServer | None = None
        self._carrier: Carrier | None = None
        self._directory: SweptDirectory | None = None
        self._serving: asyncio.Task[None] | None = None  # while its members are there

    @concurrent_endpoint
    async def begin(self, asked: bytes) -> tuple[bytes, tuple[str, str, int] | None]:
        """Start the server, which then waits for its volumes: its host id, address and pid."""
        return await outcome(self._begin(msgspec.msgpack.decode(asked, type=Asked)))

    async def _begin(self, asked: Asked) -> tuple[str, str, int]:
        core = self._core = CoreThread("torchstore-server")
        return await core.run(self._start(asked))

    async def _start(self, asked: Asked) -> tuple[str, str, int]:
        self._directory = SweptDirectory()
        directory = self._directory.path
        options = ServerOptions(
            store_name=asked.store_name,
            num_storage_volumes=asked.num_storage_volumes,
            attached=True,
            prefault=asked.prefault,
            strategy=asked.strategy,
            strategy_fields=asked.strategy_fields,
            block=asked.block,
            directory=directory,
        )
        server = Server(options)
        address = await server.start()
        self._server = server
        self._relay_server = RelayServer(server)
        self._carrier = Carrier(directory)
        await self._carrier.start()
        server.before_close = self._carrier.idle
        if asked.members:
            server.members = Members(server.stop_soon)
            self._serving = asyncio.ensure_future(self._serve(server))
        return topology.probe().host_id, address, os.getpid()

    async def _serve(self, server: Server) -> None:
        """End with the last member. Whoever asked for the store sees that, and ends the rest."""
        await server.serve()
        await self._close()

    @concurrent_endpoint
    async def starter_ended(self) -> None:
        """See ``Members.starter_ended``."""
        core, server = self._core, self._server
        if core is not None and server is not None and server.members is not None:
            await core.call(server.members.starter_ended)

    @concurrent_endpoint
    async def ready(self, volumes: dict[str, Any], timeout: float) -> tuple[bytes, bool | None]:
        """Wait until all volumes are attached. ``volumes``: their actors, by volume id."""
        return await outcome(self._ready(volumes, timeout))

    async def _ready(self, volumes: dict[str, Any], timeout: float) -> bool:
        core, server, carrier = self._core, self._server, self._carrier
        if core is None or server is None or carrier is None:
            raise StoreClosedError("the server was not started")
        carrier.volumes = volumes
        await core.run(server.attached(timeout))
        return True

    # ---- the server's end of the relays ---------------------------------------------------

    @concurrent_endpoint
    async def open_uplink(self, here: bytes, expire_s: float) -> tuple[bytes, bytes | None]:
        """See ``RelayServer.open``."""
        return await outcome(self._on_uplinks("open", here, expire_s))

    @concurrent_endpoint
    async def agent_failed(self) -> None:
        """The engine says that an agent is dead, some seconds after it died: the one that has been
        silent since.
        """
        if self._core is not None and self._relay_server is not None:
            await self._core.call(self._relay_server.close_silent, _SILENT)

    @concurrent_endpoint
    async def exchange(self, token: bytes, said: bytes) -> tuple[bytes, bytes | None]:
        """See ``RelayServer.exchange``."""
        return await outcome(self._on_uplinks("exchange", token, said))

    @concurrent_endpoint
    async def poll(self, token: bytes) -> tuple[bytes, bytes | None]:
        """See ``RelayServer.poll``."""
        return await outcome(self._poll(token))

    async def _poll(self, token: bytes) -> bytes:
        core, relay_server = self._started()
        return await core.run(relay_server.poll(token))

    @concurrent_endpoint
    async def close_uplink(self, token: bytes) -> tuple[bytes, bool | None]:
        """See ``RelayServer.close``."""

        async def work() -> bool:
            await self._on_uplinks("close", token)
            return True

        return await outcome(work())

    async def _on_uplinks(self, name: str, *args: bytes | float) -> bytes:
        core, relay_server = self._started()
        made: bytes = await core.call(getattr(relay_server, name), *args)
        return made

    def _started(self) -> tuple[CoreThread, RelayServer]:
        if self._core is None or self._relay_server is None:
            raise StoreClosedError("this store has ended")
        return self._core, self._relay_server

    # ---- the end --------------------------------------------------------------------------

    @concurrent_endpoint
    async def end(self) -> list[str]:
        """Close everything; the volumes that were lost before."""
        lost = [] if self._server is None else self._server.lost_volumes()
        await self._end()
        return lost

    async def _end(self) -> None:
        core, self._core = self._core, None
        if core is not None:
            await core.run(self._close())
            core.close()

    async def _close(self) -> None:
        if self._carrier is not None:
            await self._carrier.close()
        if self._relay_server is not None:
            self._relay_server.close(why="the store was shut down")
        if self._server is not None:
            await self._server.close()
        if self._directory is not None:
            self._directory.remove()
