"""The actor that serves a store on one host, or in one process: its volumes and its relay."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from monarch.actor import Actor, Channel, concurrent_endpoint, context

from torchstore_core.errors import StoreClosedError, TorchStoreError, TransportNotReadyError
from torchstore_core.machine import topology
from torchstore_core.machine.directories import PrivateDirectory
from torchstore_core.plugins.registry import Registry
from torchstore_core.server.memory.volume import Volume, default_capacity
from torchstore_core.server.remote.attached import VolumeConnection
from torchstore_core.server.remote.relay import Relay
from torchstore_core.server.remote.spill_files import VolumeFile
from torchstore_monarch.actors.core_thread import CoreThread
from torchstore_monarch.actors.hosting import Host, HostedServer, hosting
from torchstore_monarch.actors.placing import told_addresses
from torchstore_monarch.actors.swept_directory import SweptDirectory
from torchstore_monarch.actors.uplinks import RelayUplink
from torchstore_monarch.protocol import FoundStore, Placement, outcome, result
from torchstore_monarch.rdma.server import RdmaServer
from torchstore_monarch.rpc.forwarder import Forwarder
from torchstore_monarch.rpc.server import RpcServer
from torchstore_monarch.rpc.wire import Place

if TYPE_CHECKING:
    from torchstore_monarch import job

H = TypeVar("H", bound=HostedServer)
T = TypeVar("T")
_WATCH_S = 1.0
# Longer than a server, or a relay, takes to make its socket again.
_GRACE_S = 3.0


class HostActor(Actor):
    """Hosts volumes of one store, and the relay through which clients of its host reach the server.

    It may live in one of the user's processes, so everything runs in a thread of its own.
    """

    def __init__(self) -> None:
        # It imports this module. It is imported now because a relay asks through it who leads when
        # it gets no answer, often as this process is busy, and an import beside one of torch takes
        # up to 10 s, in which the relay is silent.
        from torchstore_monarch import job

        self._job = job
        self._core: CoreThread | None = None
        self._directory: SweptDirectory | None = None
        self._volumes: list[Volume] = []
        self._lines: list[VolumeConnection] = []
        self._uplink: RelayUplink | None = None
        self._relay: Relay | None = None
        self._forwarder: Forwarder | None = None
        self._controller: Any = None
        self._stores: Any = None  # the job's directory
        self._store_id = ""
        self._own = False
        self._ended = False
        self._starting: asyncio.Task[Any] | None = None  # runs in the core thread
        self._leaving: asyncio.Task[None] | None = None
        self._used: job.StoreActor | None = None

    async def __cleanup__(self, error: Exception | None) -> None:
        """Called by the engine when this actor has ended."""
        if self._used is not None:
            self._used.end()

    @concurrent_endpoint
    async def where(self) -> bytes:
        """Return this process's Topology as msgpack."""
        return msgspec.msgpack.encode(topology.probe())

    @concurrent_endpoint
    async def begin(self, placement: bytes, controller: Any) -> tuple[bytes, str | None]:
        """Carry out the :class:`Placement`; return the address of the relay, or of the server."""
        wanted = msgspec.msgpack.decode(placement, type=Placement)
        return await outcome(self._begin(wanted, controller))

    async def _begin(self, wanted: Placement, controller: Any) -> str:
        if self._ended:
            raise StoreClosedError("this agent has ended")
        if self._core is None:
            self._core = CoreThread("torchstore-host")
        self._controller = controller
        return await self._core.run(self._start(wanted))

    async def _leader(self) -> tuple[int, Any] | None:
        """See ``Directory.leader``."""
        back, answers = Channel.open()
        self._stores.leader.broadcast(self._store_id, back)
        found: tuple[int, Any] | None = await answers.recv()
        return found

    async def _start(self, wanted: Placement) -> str:
        self._starting = asyncio.current_task()
        self._store_id = wanted.store_id
        try:
            return await self._place(wanted)
        except asyncio.CancelledError as error:
            await self._close_all()
            raise StoreClosedError("this agent was ended while it started") from error
        except BaseException:
            await self._close_all()
            raise
        finally:
            self._starting = None

    async def _place(self, wanted: Placement) -> str:
        if self._directory is None:
            self._directory = SweptDirectory()
        control = wanted.control or await self._start_relay()
        path = control.partition(":")[2]
        registry = Registry(block=wanted.block)
        for plan in wanted.volumes:
            capacity = plan.capacity
            if capacity is None:
                capacity = default_capacity() // plan.sharing
            volume = Volume(
                *(wanted.store_name, plan.index, capacity, registry, self._directory.path),
                told=told_addresses(context().actor_instance.actor_id.addr),
            )
            self._volumes.append(volume)
            with hosting(Host(wanted.store_id, self._agent_of)):
                info = await volume.start()
            spill = None
            if plan.spill is not None:
                memory = volume.memory.fd
                spill = VolumeFile(plan.spill, plan.spill_capacity, plan.sharing, memory)
            line = await VolumeConnection.open(
                path, volume, info, self._server_gone, wanted.timeout, spill
            )
            self._lines.append(line)
        self._own = wanted.own
        if wanted.own:
            self._watch(path)
        return control

    def _watch(self, control: str, gone: bool = False) -> None:
        """End this process once that socket is gone for good, which means that the server or the
        relay has ended. The engine lets processes run on even if their root is gone.

        Args:
            gone: whether the socket was gone some time ago; it is made again if somebody else has
                removed it.
        """
        loop = asyncio.get_running_loop()
        if os.path.exists(control):
            loop.call_later(_WATCH_S, self._watch, control)
        elif not gone:  # in a shutdown, `end` comes before that, and ends this loop
            loop.call_later(_GRACE_S, self._watch, control, True)
        else:
            self._leaving = loop.create_task(self._leave())

    async def _leave(self) -> None:
        await self._close()
        os._exit(0)

    async def _start_relay(self) -> str:
        if self._directory is None:
            raise StoreClosedError("this agent has ended")
        # Not when it is needed: this actor may be stopped then, and the engine ends an actor whose
        # answer does not arrive. This answer is that of its own in the root, and with that one end
        # all actors of the job that are found by a name.
        self._stores = await self._job.directory()
        here = msgspec.msgpack.encode(topology.probe())
        uplink = self._uplink = RelayUplink(self._controller, self._leader)
        directory = self._directory.path
        forwarder = Forwarder(directory, lambda: self._relay is not None and self._relay.valid)
        try:
            await uplink.open(here, forwarder.path)
        except TorchStoreError:
            raise
        except Exception as error:  # whatever the engine raises for a dead actor
            raise StoreClosedError(
                f"the controller of this store is gone ({type(error).__name__})"
            ) from error
        relay = Relay(uplink, PrivateDirectory(directory), lost=self._server_gone)
        relay.before_close = forwarder.idle
        self._relay, self._forwarder = relay, forwarder
        await forwarder.start()
        return await relay.start()

    async def _agent_of(self, peer: bytes) -> str:
        """See ``hosting.Host``."""
        controller = self._controller if self._uplink is None else self._uplink.controller
        try:
            return result(await controller.agent_of.call_one(peer))
        except Exception as error:  # whatever the engine raises, or the controller
            raise TransportNotReadyError(
                f"the store's controller does not say where a client's agent is: {error!r}"
            ) from error

    @concurrent_endpoint
    async def introduce(self, volumes: dict[str, Any], controller: Any, generation: int) -> None:
        """Learn which actors have the store's volumes, and which one leads to the server.

        Args:
            volumes: the actors, by volume id.
            generation: of the controller, see ``Directory.leader``.
        """
        self._controller = controller
        if self._forwarder is not None:
            self._forwarder.volumes = volumes
        core, uplink = self._core, self._uplink
        if core is not None and uplink is not None:
            core.loop.call_soon_threadsafe(uplink.led, generation)

    # ---- monarch-rpc ----------------------------------------------------------------------

    @concurrent_endpoint
    async def read(
        self, volume_id: str, ticket: bytes, places: Sequence[Place]
    ) -> tuple[bytes, bytes | None]:
        """Read bytes of a volume of this actor."""
        work = _served(RpcServer, volume_id, lambda half: half.read(ticket, places))
        return await outcome(work)

    @concurrent_endpoint
    async def write(
        self, volume_id: str, ticket: bytes, places: Sequence[Place], data: bytes
    ) -> tuple[bytes, int | None]:
        """Write bytes of a volume of this actor; return their number."""
        work = _served(RpcServer, volume_id, lambda half: half.write(ticket, places, data))
        return await outcome(work)

    @concurrent_endpoint
    async def move(
        self,
        volume_id: str,
        ticket: bytes,
        groups: Sequence[Sequence[Place]],
        buffers: Sequence[Any],
        write: bool,
    ) -> tuple[bytes, int | None]:
        """Move bytes for ``monarch-rdma``: see ``RdmaServer.move``."""
        asked = ticket, groups, buffers
        work = _served(RdmaServer, volume_id, lambda half: half.move(*asked, write=write))
        return await outcome(work)

    # ---- as the actor with which a process uses stores -------------------------------------

    @concurrent_endpoint
    async def use_this_actor(self) -> None:
        """Let this process make its calls to stores as this actor from now on; see ``job``."""
        self._used = self._job.use_this_actor(self)

    async def open_relay(
        self, store: FoundStore, controller: Any, volumes: dict[str, Any], timeout: float
    ) -> str:
        """Open a relay for clients of this process; return its address. Called in this process, as
        this actor, which has no relay. ``volumes``: see :meth:`introduce`.
        """
        named = store.store_name, ""
        wanted = Placement(*named, (), (), timeout, store_id=store.store_id)
        address = await self._begin(wanted, controller)
        if self._forwarder is not None:
            self._forwarder.volumes = volumes
        return address

    # ---- the end --------------------------------------------------------------------------

    def _server_gone(self) -> None:
        """Close everything, because the server has ended."""
        core = self._core
        if core is None:
            return
        if not self._own:  # otherwise its loop is needed to end the process
            self._core = None
        core.loop.create_task(self._end_alone(core))

    async def _end_alone(self, core: CoreThread) -> None:
        await self._close()
        if not self._own:
            core.close()

    @concurrent_endpoint
    async def end(self) -> None:
        """Close everything."""
        await self._end()

    async def _end(self) -> None:
        self._ended = True
        core, self._core = self._core, None
        if core is not None:
            await core.run(self._close())
            core.close()

    async def _close(self) -> None:
        starting = self._starting
        if starting is not None:
            starting.cancel()
            await asyncio.wait([starting])
        await self._close_all()

    async def _close_all(self) -> None:
        if self._forwarder is not None:
            await self._forwarder.close()
        if self._relay is not None:
            self._relay.close()
        if self._uplink is not None:
            self._uplink.close()
        lines, self._lines = self._lines, []
        for line in lines:
            line.close()
        volumes, self._volumes = self._volumes, []
        for volume in volumes:
            await volume.close()
        directory, self._directory = self._directory, None
        if directory is not None:
            directory.remove()


async def _served(half: type[H], volume_id: str, call: Callable[[H], Coroutine[Any, Any, T]]) -> T:
    """Call the server half of a volume of this process.

    Raises:
        TransportError: the volume is not here, or what the half raises.
    """
    return await call(half.of(volume_id))
