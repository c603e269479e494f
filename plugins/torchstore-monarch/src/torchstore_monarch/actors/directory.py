"""The one actor of a job that knows its stores, and starts, finds and ends them.

It lives in the process of the job's root client and owns every other actor of a store, so that
their failures are reported to it and never end the user's job.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import os
import secrets
import signal
from collections import Counter, deque
from typing import Any

import msgspec
from monarch.actor import Actor, HostMesh, MeshFailure, ProcMesh, concurrent_endpoint, this_host

from torchstore_core.errors import (
    ConfigurationError,
    StoreClosedError,
    StoreTimeoutError,
    TorchStoreError,
    in_seconds,
)
from torchstore_core.machine import topology
from torchstore_core.machine.processes import ProcessWatch
from torchstore_core.machine.topology import Topology
from torchstore_monarch.actors.controller import ControllerActor
from torchstore_monarch.actors.host import HostActor
from torchstore_monarch.actors.placing import spread
from torchstore_monarch.protocol import (
    FoundStore,
    Led,
    Placement,
    StoreRequest,
    VolumePlan,
    outcome,
    result,
)

log = logging.getLogger(__name__)

# How long the caller of `shutdown` waits, and the fraction of that for ending a store here.
_CALLER_S = 10.0
_SHARE = 0.8
_LEAST_S = 1.0
# Fractions of that for each part: a start that is under way, the server, the agents, processes.
_SETTLING, _CLOSING, _LEAVING, _STOPPING = 0.2, 0.3, 0.2, 0.2
_CANCEL_S = 1.0
# Within which time a store must have another controller: the switchboard waits a little longer.
_LEAD_S = 25.0
_TELL_S = 5.0
_POLL_S = 0.02


class _Store:
    """One store, with its actors and processes.

    It starts once, in the task ``starting``, and ends once, in the task ``ending``.
    """

    def __init__(self, request: StoreRequest) -> None:
        self.request = request
        self.store_id = secrets.token_hex(8)
        self.starting: asyncio.Task[FoundStore] | None = None
        self.ending: asyncio.Task[None] | None = None
        self.leading: asyncio.Task[None] | None = None  # starts another controller
        self.controller: Any = None
        self.led: Led | None = None
        self.generation = 0  # of controllers: how many have died
        self.controller_name = ""  # the engine's name for it
        self.controller_watch: ProcessWatch | None = None
        self.agents_name = ""
        self.controller_failed = False
        self.given_up = False  # there is no server any more
        self.spawned: Any = None  # the mesh of all agents
        self.agents: list[Any] = []  # the agents one by one
        self.agents_failed = False  # whether at least one has failed
        self.agent_pids: list[int] = []  # 0: on another host
        self.procs: list[ProcMesh] = []  # made for this store, so they end with it
        self.own_agents = False  # whether the agents are in such processes
        self.found: FoundStore | None = None
        self.volumes: dict[str, Any] = {}  # the agents that have the volumes, by volume id
        # Processes of this host that end with the store, and their start times: pids are reused.
        self.processes: dict[int, int] = {}

    def refuse_if_ended(self) -> None:
        """End a start that is not wanted any more. Called between calls, so that none is under way.

        Raises:
            StoreClosedError: the store was shut down meanwhile.
        """
        if self.ending is not None:
            raise StoreClosedError(
                f"store {self.request.store_name!r} was shut down while it was being initialized"
            )

    def has_controller(self) -> bool:
        """Return whether the controller can be called. Calling a dead actor ends the caller."""
        if self.controller is None or self.controller_failed:
            return False
        return self.led is None or _runs(self.led.pid)

    def is_gone(self) -> bool:
        """Return whether the server's owner has ended, and with it the server."""
        return self.given_up or (self.led is not None and not _runs(self.led.switchboard_pid))

    def living(self, lost: list[str] | None) -> list[Any]:
        """Return the agents that can be called.

        Args:
            lost: the volumes that the server has lost; None: the server could not say.
        """
        dead = [agent for volume, agent in self.volumes.items() if volume in (lost or ())]
        unsure = self.agents_failed and lost is None
        return [
            agent
            for agent, pid in zip(self.agents, self.agent_pids, strict=True)
            if agent not in dead and (_runs(pid) if pid else not unsure)
        ]


class Directory(Actor):
    """The stores of a job, by name."""

    def __init__(self) -> None:
        self._stores: dict[str, _Store] = {}
        self._telling: set[asyncio.Task[Any]] = set()
        # Tokens of requests whose caller gave up before the store was begun.
        self._given_up: deque[str] = deque(maxlen=1000)

    async def __supervise__(self, failure: MeshFailure) -> bool:
        """Handle the death of a process or an actor of a store, and let the job continue. A server
        on the same host notices the death itself, because its connection to the volume closes.
        """
        log.warning("part of a store has failed: %s", str(failure).partition("\n")[0])
        for store in list(self._stores.values()):
            if failure.mesh_name == store.controller_name:
                self._controller_failed(store)
            elif failure.mesh_name == store.agents_name:
                store.agents_failed = True
                if store.ending is None and store.has_controller():
                    self._tell(store)
        return True

    def _tell(self, store: _Store) -> None:
        """Tell the server that an agent has died. If the agent was on another host, the server only
        knows that it is silent.
        """
        task = asyncio.ensure_future(_bounded(store.controller.agent_failed.call(), _TELL_S))
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)

    # ---- the controller -------------------------------------------------------------------

    def _controller_failed(self, store: _Store) -> None:
        """The controller must not be called any more. The server lives on without it: start another
        one. This is known from the kernel; the engine sees it some seconds later.
        """
        store.controller_failed = True
        if store.led is not None and _runs(store.led.pid):  # the actor has, and its process has not
            _signal(store.led.pid, signal.SIGKILL)
        if store.found is None or store.ending is not None:
            return  # its start fails, or it ends anyway
        if store.leading is None or store.leading.done():
            store.leading = asyncio.ensure_future(self._lead_again(store))

    async def _lead_again(self, store: _Store) -> None:
        """Start controllers until there is one that lives, or the store is gone."""
        within = asyncio.get_running_loop().time() + _LEAD_S
        while store.controller_failed and store.ending is None:
            left = within - asyncio.get_running_loop().time()
            if store.is_gone() or left < 0:
                self._give_up(store)
                return
            try:
                async with asyncio.timeout(left):
                    await self._lead_once(store)
            except TorchStoreError as error:
                log.warning("store %r: %s", store.request.store_name, error)
                await asyncio.sleep(_POLL_S)  # who refuses has ended, or is about to
            except Exception as error:  # noqa: BLE001 - whatever the engine raises
                log.warning("a controller has not come up: %s", type(error).__name__)

    async def _lead_once(self, store: _Store) -> None:
        """Start a controller that takes over, and tell everybody."""
        if store.led is None:
            return
        procs, controller = _spawn_controller()
        store.procs.append(procs)
        request = msgspec.msgpack.encode(store.request)
        before = msgspec.msgpack.encode(store.led)
        taken = await controller.take_over.call_one(request, before)
        store.led = msgspec.msgpack.decode(result(taken), type=Led)
        name = str(await controller._name)
        store.controller, store.controller_name = controller, name
        store.generation += 1
        store.controller_failed = False
        self._watch(store)
        await controller.lead.call_one(store.volumes)
        log.warning("store %r has another controller", store.request.store_name)
        said = store.volumes, controller, store.generation
        told = [agent.introduce.call_one(*said) for agent in store.living(None)]
        await asyncio.gather(*(_bounded(one, _TELL_S) for one in told))

    def _watch(self, store: _Store) -> None:
        """Learn at once when the controller's process ends."""
        if store.led is None:
            return
        if (begun := topology.start_time(store.led.pid)) is not None:
            store.processes[store.led.pid] = begun
        failed = functools.partial(self._controller_failed, store)
        store.controller_watch = ProcessWatch(store.led.pid, failed)

    def _give_up(self, store: _Store) -> None:
        log.error("store %r is gone: its controller has failed", store.request.store_name)
        store.given_up = True
        if store.led is not None:
            _signal(store.led.switchboard_pid, signal.SIGTERM)

    @concurrent_endpoint
    async def leader(self, store_id: str, back: Any) -> None:
        """Send the controller of a store, and how many others it has had; None for the controller
        while another one is being started, and None if there is no such store.

        Through a port, which may be gone: the engine ends an actor whose answer to a call does not
        arrive, and an agent that asks may be stopped meanwhile.
        """
        back.return_undeliverable = False
        back.send(self._leader_of(store_id))

    def _leader_of(self, store_id: str) -> tuple[int, Any] | None:
        for store in self._stores.values():
            if store.store_id == store_id and store.ending is None and not store.given_up:
                return store.generation, store.controller if store.has_controller() else None
        return None

    # ---- starting -------------------------------------------------------------------------

    @concurrent_endpoint
    async def create(self, request: bytes, mesh: Any) -> tuple[bytes, bytes | None]:
        """Start a store, and return its :class:`FoundStore`."""
        wanted = msgspec.msgpack.decode(request, type=StoreRequest)
        wanted = msgspec.structs.replace(wanted, root=os.getpid())
        return await outcome(self._create(wanted, mesh))

    async def _create(self, request: StoreRequest, mesh: Any) -> bytes:
        name = request.store_name
        store: _Store | None = None
        try:
            async with asyncio.timeout(request.timeout):
                await self._make_free(name)
                if request.token in self._given_up:
                    raise StoreClosedError(f"store {name!r} was given up before it was begun")
                store = self._stores[name] = _Store(request)
                store.starting = asyncio.ensure_future(self._start(store, mesh))
                found = await asyncio.shield(store.starting)
                store.refuse_if_ended()
                return msgspec.msgpack.encode(found)
        except BaseException as error:
            if store is not None:
                if isinstance(error, asyncio.CancelledError):
                    store.refuse_if_ended()
                await self._discard(store)
            if isinstance(error, TimeoutError):
                raise StoreTimeoutError(
                    f"store {name!r} did not come up within {in_seconds(request.timeout)}",
                    details={"operation": "initialize", "timeout": request.timeout},
                ) from error
            raise

    async def _make_free(self, name: str) -> None:
        """Wait until a store of that name that is ending, or dead, has ended.

        Raises:
            ConfigurationError: there is a store of that name that is not ending.
        """
        while (before := self._stores.get(name)) is not None:
            if before.ending is None and not before.is_gone():
                raise ConfigurationError(
                    f"this job has a store {name!r} already; shut it down first, or give another "
                    "store_name"
                )
            await self._discard(before)

    async def _start(self, store: _Store, mesh: Any) -> FoundStore:
        request = store.request
        own, store.controller = _spawn_controller()
        store.procs.append(own)
        procs = _volume_procs(mesh, request.num_storage_volumes)
        if procs is not mesh:
            store.procs.append(procs)
            store.own_agents = True
        store.spawned = procs.spawn("torchstore_host", HostActor)
        agents = _actors_of(store.spawned)
        begun, *facts = await asyncio.gather(
            store.controller.begin.call_one(msgspec.msgpack.encode(request)),
            *(agent.where.call_one() for agent in agents),
        )
        led = store.led = msgspec.msgpack.decode(result(begun), type=Led)
        host_id, address = led.host_id, led.address
        places = [msgspec.msgpack.decode(one, type=Topology) for one in facts]
        _note_processes(store, led, places)
        self._watch(store)
        store.agents = agents
        store.refuse_if_ended()
        store.controller_name = str(await store.controller._name)
        store.agents_name = str(await store.spawned._name)
        store.refuse_if_ended()
        hosts = [place.host_id for place in places]
        relays = await self._begin_hosts(store, host_id, address, agents, hosts)
        if store.controller_failed:
            raise StoreClosedError("the controller has ended while the store was started")
        store.found = FoundStore(request.store_name, host_id, address, relays, store.store_id)
        return store.found

    async def _begin_hosts(
        self, store: _Store, host_id: str, address: str, agents: list[Any], hosts: list[str]
    ) -> dict[str, list[str]]:
        """Start relays and volumes; return the relays' addresses by host id.

        On hosts other than the server's, each agent with volumes has a relay of its own, so that
        no agent takes the volumes of others with it when it dies.
        """
        request = store.request
        chosen = spread(hosts, request.num_storage_volumes)
        sharing = Counter(hosts[at] for at in chosen)
        share = request.capacity and request.capacity // request.num_storage_volumes
        spilled = request.spill_capacity and request.spill_capacity // request.num_storage_volumes
        plans: dict[int, list[VolumePlan]] = {}
        for index, at in enumerate(chosen):
            plan = VolumePlan(index, share, sharing[hosts[at]], request.spill, spilled)
            plans.setdefault(at, []).append(plan)

        async def begin(at: int, control: str) -> str:
            wanted = Placement(
                request.store_name,
                control,
                tuple(plans.get(at, ())),
                request.block,
                request.timeout,
                store.own_agents,
                store.store_id,
            )
            data = msgspec.msgpack.encode(wanted)
            return result(await agents[at].begin.call_one(data, store.controller))

        first = {hosts.index(host) for host in hosts if host != host_id}
        due = sorted(first | (set(range(len(agents))) if store.own_agents else set(plans)))
        made = await asyncio.gather(
            *(begin(at, address if hosts[at] == host_id else "") for at in due)
        )
        store.refuse_if_ended()
        relays: dict[str, list[str]] = {}
        for at, one in zip(due, made, strict=True):
            if hosts[at] != host_id:
                relays.setdefault(hosts[at], []).append(one)
        volumes = {f"{request.store_name}-{i}": agents[at] for i, at in enumerate(chosen)}
        ready, _ = await asyncio.gather(
            store.controller.ready.call_one(volumes, request.timeout),
            store.spawned.introduce.call(volumes, store.controller, store.generation),
        )
        result(ready)
        store.volumes = volumes
        return relays

    # ---- finding --------------------------------------------------------------------------

    @concurrent_endpoint
    async def find(self, name: str, led: bool = False) -> tuple[bytes, Any, Any]:
        """Return a :class:`FoundStore` (empty: none), its controller, and its volumes' actors.

        Args:
            led: wait for a controller that is being started. Only who opens a relay needs one.
        """
        store = self._stores.get(name)
        if led and store is not None and store.leading is not None:
            await asyncio.wait([store.leading])
            store = self._stores.get(name)
        if store is None or store.found is None or store.ending is not None:
            return b"", None, None
        return msgspec.msgpack.encode(store.found), store.controller, store.volumes

    @concurrent_endpoint
    async def spawn_caller(self, proc: Any) -> Any:
        """Return a new actor in a process of the job, as which that process calls stores.

        The directory owns it: calling a dead actor ends the caller and its owner, which then does
        not include anything of the user's.
        """
        return proc.spawn("torchstore_caller", HostActor)

    # ---- ending ---------------------------------------------------------------------------

    @concurrent_endpoint
    async def finish(self, name: str, token: str = "", timeout: float = _CALLER_S) -> bool:
        """End a store; return whether there was one.

        Args:
            token: end only the store of the request with that token, even if it is yet to begin.
            timeout: seconds that the caller waits.
        """
        store = self._stores.get(name)
        if token and (store is None or store.request.token != token):
            self._given_up.append(token)
            return False
        if store is None:
            return False
        await self._discard(store, max(min(timeout, _CALLER_S) * _SHARE, _LEAST_S))
        return True

    async def _discard(self, store: _Store, within: float = _CALLER_S * _SHARE) -> None:
        """End the store once; all callers wait for the same end."""
        if store.ending is None:
            store.ending = asyncio.ensure_future(self._end(store, within))
        await asyncio.shield(store.ending)

    async def _end(self, store: _Store, within: float) -> None:
        """Ask one part after the other to end, and kill the processes that do not."""
        deadline = asyncio.get_running_loop().time() + within
        try:
            await _settle(store.starting, within * _SETTLING)
            await _settle(store.leading, within * _SETTLING)
            if store.controller_watch is not None:
                store.controller_watch.close()
            lost: list[str] | None = None
            if store.has_controller():
                lost = await _bounded(store.controller.end.call_one(), within * _CLOSING)
            if lost is None and store.led is not None:
                _signal(store.led.switchboard_pid, signal.SIGTERM)
            ends = [agent.end.call_one() for agent in store.living(lost)]
            await asyncio.gather(*(_bounded(end, within * _LEAVING) for end in ends))
            ends = [procs.stop() for procs in store.procs]
            if store.spawned is not None and not store.own_agents:
                ends.append(store.spawned.stop())
            await asyncio.gather(*(_bounded(end, within * _STOPPING) for end in ends))
            await _kill(store, deadline)
        except Exception:
            log.exception("while ending store %r", store.request.store_name)
        finally:
            if self._stores.get(store.request.store_name) is store:
                del self._stores[store.request.store_name]


async def _bounded(end: Any, timeout: float) -> Any:
    """Return the result of ending one part; None if it is dead already, or does not answer."""
    try:
        return await asyncio.wait_for(end, timeout)
    except Exception as error:  # noqa: BLE001 - whatever the engine raises
        log.info("while ending a store: %r", error)
        return None


async def _settle(starting: asyncio.Task[Any] | None, timeout: float) -> None:
    """Wait until a start that is under way has noticed that it must end, or cancel it."""
    if starting is None:
        return
    _, left = await asyncio.wait([starting], timeout=timeout)
    if left:
        starting.cancel()
        await asyncio.wait(left, timeout=_CANCEL_S)
    if starting.done() and not starting.cancelled():
        starting.exception()  # the caller of `create` gets it


async def _kill(store: _Store, deadline: float) -> None:
    """Kill the store's own processes on this host that have not ended by ``deadline``."""
    clock = asyncio.get_running_loop().time
    while (left := _left(store)) and clock() < deadline:  # noqa: ASYNC110 - only the kernel knows
        await asyncio.sleep(_POLL_S)
    for pid in left:
        log.warning("process %d of store %r is killed", pid, store.request.store_name)
        _signal(pid, signal.SIGKILL)


def _signal(pid: int, signum: signal.Signals) -> None:
    try:
        os.kill(pid, signum)
    except OSError as error:
        log.info("while ending a store: %r", error)


def _left(store: _Store) -> list[int]:
    return [pid for pid, begun in store.processes.items() if topology.start_time(pid) == begun]


def _spawn_controller() -> tuple[ProcMesh, Any]:
    procs = this_host().spawn_procs({"controller": 1}, name="torchstore_controller")
    return procs, procs.spawn("torchstore_controller", ControllerActor)


def _note_processes(store: _Store, led: Led, agents: list[Topology]) -> None:
    """Record which processes of the store are on this host, and which of those are its own."""
    here = topology.probe().host_id
    store.agent_pids = [agent.pid if agent.host_id == here else 0 for agent in agents]
    own = [pid for pid in store.agent_pids if pid] if store.own_agents else []
    if led.host_id == here:
        own += [led.pid, led.switchboard_pid, led.server_pid]
    store.processes = {pid: begun for pid in own if (begun := topology.start_time(pid))}


def _actors_of(mesh: Any) -> list[Any]:
    """Return the actors of a mesh one by one, even if the mesh is a non-contiguous slice."""
    sizes = mesh.sizes
    every = itertools.product(*(range(size) for size in sizes.values()))
    return [mesh.slice(**dict(zip(sizes, at, strict=True))) for at in every]


def _volume_procs(mesh: Any, volumes: int) -> ProcMesh:
    """Return the agents' processes: the user's, or new ones on the user's hosts."""
    if isinstance(mesh, ProcMesh):
        return mesh
    hosts = this_host() if mesh is None else mesh
    if not isinstance(hosts, HostMesh):
        raise ConfigurationError(
            f"mesh is a Monarch ProcMesh or HostMesh, or None, not a {type(mesh).__qualname__}"
        )
    number = max(1, hosts.size())
    return hosts.spawn_procs({"volume": -(-volumes // number)}, name="torchstore_volumes")


def _runs(pid: int) -> bool:
    """Return whether a process of this host is running."""
    return topology.start_time(pid) is not None
