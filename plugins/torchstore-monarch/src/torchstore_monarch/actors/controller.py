"""The actor that has a store's server started, and leads the relays of other hosts to it."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Coroutine
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
from torchstore_core.runtimes.server_process import ServerProcess
from torchstore_core.wire import messages as m
from torchstore_monarch.actors.core_thread import CoreThread
from torchstore_monarch.actors.uplinks import SwitchboardLink
from torchstore_monarch.protocol import Led, StoreRequest, outcome
from torchstore_monarch.rpc.forwarder import Forwarder
from torchstore_monarch.switchboard import wire

_ENDED = "this store has ended"
# The role of the sessions by which this actor asks the server.
_ROLE = "controller"
_ASK_S = 5.0
# How long relays are told that the server has gone, before this process follows it.
_TELL_S = 0.5
# How long a switchboard waits for the next actor: the directory needs some seconds to start one,
# more on a busy machine, or if that is killed before the directory knows it.
_GRACE_S = 30.0
_SWITCHBOARD = "torchstore_monarch.switchboard"

log = logging.getLogger(__name__)


class ControllerActor(Actor):
    """Carries what the relays and the switchboard say to each other.

    The switchboard owns the server and its keeper. If this process dies, they live on, and the
    directory starts another actor, which takes over. If the server has ended for good, so does this
    process.
    """

    def __init__(self) -> None:
        self._core: CoreThread | None = None
        self._link: SwitchboardLink | None = None
        self._address = ""
        self._members = False
        self._forwarder: Forwarder | None = None
        self._ending: asyncio.Task[None] | None = None
        self._ended = False

    @concurrent_endpoint
    async def begin(self, request: bytes) -> tuple[bytes, bytes | None]:
        """Start switchboard and server, which then waits for its volumes; return a :class:`Led`."""
        wanted = msgspec.msgpack.decode(request, type=StoreRequest)
        return await outcome(self._in_thread(self._start(wanted)))

    @concurrent_endpoint
    async def take_over(self, request: bytes, led: bytes) -> tuple[bytes, bytes | None]:
        """Go on for an actor that has ended; return how that is :class:`Led` now."""
        wanted = msgspec.msgpack.decode(request, type=StoreRequest)
        before = msgspec.msgpack.decode(led, type=Led)
        return await outcome(self._in_thread(self._lead(wanted, before)))

    async def _in_thread(self, work: Coroutine[Any, Any, Led]) -> bytes:
        self._core = CoreThread("torchstore-controller")
        return msgspec.msgpack.encode(await self._core.run(work))

    async def _start(self, request: StoreRequest) -> Led:
        server = msgspec.structs.asdict(request)
        for name in ("capacity", "timeout", "token", "root"):  # of the volumes, and of the request
            del server[name]
        server["attached"] = True
        server["spill"] = None if request.spill is None else shown_place(request.spill)
        name, timeout = request.store_name, request.timeout
        options = wire.Options(name, server, timeout, os.getpid(), request.root, _GRACE_S)
        process = ServerProcess(_SWITCHBOARD)
        address = await process.launch(msgspec.structs.asdict(options), timeout)
        here = topology.probe()
        led = Led(here.host_id, address, here.pid, process.pid, process.server_pid)
        try:
            await self._lead(request, led)
        except BaseException:
            await process.stop(_ASK_S)
            raise
        process.release()  # from now on, it ends without this process
        return led

    async def _lead(self, request: StoreRequest, before: Led) -> Led:
        self._members = request.members
        self._address = before.address
        directory = os.path.dirname(socket_path(before.address))
        path = os.path.join(directory, wire.SOCKET)
        self._link = await SwitchboardLink.open(path, self._server_ended)
        self._forwarder = Forwarder(directory)
        await self._forwarder.start()
        return msgspec.structs.replace(before, pid=os.getpid())

    def _server_ended(self, good: bool) -> None:
        """The server has ended, and nobody has asked for that but its members."""
        self._ending = asyncio.ensure_future(self._follow(good))

    async def _follow(self, good: bool) -> None:
        """Whoever asked for the store notices that the last member has left, and ends the rest. All
        else is the end of the store, which the engine tells when this process ends.
        """
        if self._forwarder is not None:
            await self._forwarder.close()
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
        core = self._core
        if core is None:
            raise StoreClosedError("the server was not started")
        await core.run(self._lost_volumes(timeout))
        await self._led(volumes)
        return True

    @concurrent_endpoint
    async def lead(self, volumes: dict[str, Any]) -> None:
        """Relays find this actor from now on. ``volumes``: as for :meth:`ready`."""
        await self._led(volumes)

    async def _led(self, volumes: dict[str, Any]) -> None:
        if self._core is not None and self._link is not None and self._forwarder is not None:
            self._forwarder.volumes = volumes
            await self._core.call(self._link.led)

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
        self, here: bytes, agent: str, back: Any, token: bytes, got: int
    ) -> tuple[bytes, tuple[bytes, int, Any] | None]:
        """Call ``SwitchboardLink.open_uplink``."""
        return await outcome(self._linked("open_uplink", here, agent, back, token, got))

    @concurrent_endpoint
    async def poll(self, token: bytes, got: int) -> tuple[bytes, int | None]:
        """Call ``SwitchboardLink.poll``."""
        return await outcome(self._linked("poll", token, got))

    @concurrent_endpoint
    async def agent_of(self, peer: bytes) -> tuple[bytes, str | None]:
        """Return the path of the socket of the ``Forwarder`` that serves a client, on its host."""
        return await outcome(self._agent_of(peer))

    async def _agent_of(self, peer: bytes) -> str:
        agent: str = await self._linked("agent_of", peer)
        return agent or ("" if self._forwarder is None else self._forwarder.path)

    @concurrent_endpoint
    async def agent_failed(self) -> None:
        """Close the relays that have been silent for some seconds, because the engine reports that
        an agent died some seconds ago.
        """
        if self._core is not None and self._link is not None:
            await self._core.call(self._link.agent_failed)

    async def _linked(self, name: str, *arguments: Any) -> Any:
        core, link = self._core, self._link
        if core is None or link is None:
            raise StoreClosedError(_ENDED)
        return await core.run(getattr(link, name)(*arguments))

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
        if self._link is not None:
            try:
                await self._link.end("the store was shut down")
            except StoreClosedError as error:
                log.info("the server has ended already: %s", error)
            self._link.close()
        if self._forwarder is not None:
            await self._forwarder.close()
        return lost
