"""The actor that has a store's server started, and leads the relays of other hosts to it."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import socket
from typing import Any

import msgspec
from monarch.actor import Actor, concurrent_endpoint

from torchstore_core.clients.session.channel import Channel
from torchstore_core.clients.session.handshake import handshake, socket_path
from torchstore_core.contracts.engine import MEMBER_ROLE
from torchstore_core.contracts.strategy import ClientFacts
from torchstore_core.contracts.when_full import shown_place
from torchstore_core.errors import StoreClosedError, TorchStoreError
from torchstore_core.machine import topology
from torchstore_core.machine.processes import ProcessWatch
from torchstore_core.runtimes.server_process import ServerProcess
from torchstore_core.server.remote.lines import Line
from torchstore_core.server.remote.relay_server import RelayServer
from torchstore_core.wire import messages as m
from torchstore_monarch.actors.core_thread import CoreThread
from torchstore_monarch.actors.swept_directory import SweptDirectory
from torchstore_monarch.actors.uplinks import Uplinks
from torchstore_monarch.protocol import StoreRequest, outcome
from torchstore_monarch.rpc.forwarder import Forwarder

# The fraction of an uplink's patience after which a silent uplink is dead, if an agent is known to
# have died: while a relay lives, it is never silent for so long.
_SILENT = 1 / 3
_ENDED = "this store has ended"
# The role of the sessions by which this actor asks the server.
_ROLE = "controller"
_ASK_S = 5.0
_END_S = 3.0
# How long relays are told that the server has gone, before this process follows it.
_TELL_S = 0.5
# How long it may take until each relay has polled, and so knows that the store has ended. None may
# poll after that: the engine ends an actor that calls one that has stopped.
_POLLED_S = 2.0

log = logging.getLogger(__name__)


class ControllerActor(Actor):
    """The owner of one store's server, which is a process of its own, and its keeper.

    This process has the server's end of all relays, and no other part in what the store does. If it
    dies, so does the server; if the server has ended for good, so does this process.
    """

    def __init__(self) -> None:
        self._core: CoreThread | None = None
        self._server = ServerProcess()
        self._address = ""
        self._watch: ProcessWatch | None = None
        self._members = False
        self._relay_server: RelayServer | None = None
        self._uplinks: Uplinks | None = None
        self._forwarder: Forwarder | None = None
        self._directory: SweptDirectory | None = None
        self._ending: asyncio.Task[None] | None = None
        self._ended = False

    @concurrent_endpoint
    async def begin(self, request: bytes) -> tuple[bytes, tuple[str, str, int, int] | None]:
        """Start the server, which then waits for its volumes; return host id, address, the pid of
        this process, and that of the server's or its keeper's.
        """
        return await outcome(self._begin(msgspec.msgpack.decode(request, type=StoreRequest)))

    async def _begin(self, request: StoreRequest) -> tuple[str, str, int, int]:
        core = self._core = CoreThread("torchstore-server")
        return await core.run(self._start(request))

    async def _start(self, request: StoreRequest) -> tuple[str, str, int, int]:
        self._directory = SweptDirectory()
        self._members = request.members
        config = {
            "store_name": request.store_name,
            "num_storage_volumes": request.num_storage_volumes,
            "attached": True,
            "prefault": request.prefault,
            "strategy": request.strategy,
            "strategy_fields": request.strategy_fields,
            "block": request.block,
            "when_full": request.when_full,
            "spill": None if request.spill is None else shown_place(request.spill),
            "spill_capacity": request.spill_capacity,
            "repair_bandwidth": request.repair_bandwidth,
            "directory": self._directory.path,
            "owner": os.getpid(),
            "members": request.members,
            "keeper": request.keeper,
        }
        self._address = await self._server.launch(config, request.timeout)
        self._watch = ProcessWatch(self._server.pid, self._server_ended)
        self._relay_server = RelayServer(functools.partial(Line, socket_path(self._address)))
        self._uplinks = Uplinks(self._relay_server)
        self._forwarder = Forwarder(self._directory.path)
        await self._forwarder.start()
        here = topology.probe()
        return here.host_id, self._address, here.pid, self._server.pid

    def _server_ended(self) -> None:
        """The server has ended, and nobody has asked for that but its members."""
        self._ending = asyncio.ensure_future(self._follow())

    async def _follow(self) -> None:
        """Whoever asked for the store notices that the last member has left, and ends the rest. All
        else is the end of the store, which the engine tells when this process ends.
        """
        good = self._members and self._server.exit_status == 0
        await self._close("its server has ended")
        if not good:
            log.error("the server has ended, and what the store had is lost")
            await asyncio.sleep(_TELL_S)
            os._exit(1)

    @concurrent_endpoint
    async def starter_ended(self) -> None:
        """Call ``Members.starter_ended``: a member that leaves at once is the last, or not."""
        if self._core is not None and self._members:
            await self._core.run(self._join_and_leave())

    async def _join_and_leave(self) -> None:
        try:
            sock, _ = await self._connected(MEMBER_ROLE)
        except StoreClosedError as error:
            log.info("the server ends already: %s", error)
        else:
            sock.close()

    @concurrent_endpoint
    async def ready(self, volumes: dict[str, Any], timeout: float) -> tuple[bytes, bool | None]:
        """All volumes are attached. ``volumes``: their actors, by the volume's id."""
        return await outcome(self._ready(volumes, timeout))

    async def _ready(self, volumes: dict[str, Any], timeout: float) -> bool:
        core, forwarder = self._core, self._forwarder
        if core is None or forwarder is None:
            raise StoreClosedError("the server was not started")
        forwarder.volumes = volumes
        await core.run(self._lost_volumes(timeout))
        return True

    async def _connected(self, role: str, timeout: float = _ASK_S) -> tuple[socket.socket, Any]:
        """Open a session at the server.

        Raises:
            StoreClosedError: there is no server, or it lacks a volume.
        """
        here = topology.probe()
        facts = ClientFacts(here.pid, here.host_id, here.hostname, role=role)
        return await handshake(self._address, b"", facts, here, timeout)

    async def _lost_volumes(self, timeout: float) -> list[str]:
        """Ask the server which volumes are lost."""
        sock, _ = await self._connected(_ROLE, timeout)
        channel = Channel(sock, asyncio.get_running_loop(), "the server is gone")
        try:
            asked = m.Status(channel.next_id())
            status = (await channel.call(asked, m.StatusReply, timeout)).status
        finally:
            channel.close()
        return [volume.id for volume in status.volumes if volume.lost]

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
        if core is None or uplinks is None or self._ended:
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
        core = self._core
        if core is None or self._ended:
            return []
        self._ended = True
        lost = await core.run(self._end())
        self._core = None  # until now, relays have been told
        core.close()
        return lost

    async def _end(self) -> list[str]:
        lost: list[str] = []
        try:
            if self._address:
                lost = await self._lost_volumes(_ASK_S)
        except TorchStoreError as error:
            log.info("the server does not say which volumes are lost: %s", error)
        await self._close("the store was shut down")
        return lost

    async def _close(self, why: str) -> None:
        if self._watch is not None:
            self._watch.close()
        # Before the relays: a server that saw its volumes leave would tell clients that their
        # values are lost, where the store has been shut down.
        await self._server.stop(_END_S)
        if self._forwarder is not None:
            await self._forwarder.close()
        if self._relay_server is not None:
            await self._relay_server.end(why, _POLLED_S)
        if self._uplinks is not None:
            self._uplinks.close()
        if self._directory is not None:
            self._directory.remove()
