"""The one actor of a job that knows its stores: starts them, finds them, ends them.

It lives in the process of the job's root client and owns every other actor of a store, so that
what happens to those is told to it and never ends the user's job.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
from monarch.actor import Actor, HostMesh, MeshFailure, ProcMesh, concurrent_endpoint, this_host

from torchstore_core.errors import ConfigurationError, StoreTimeoutError
from torchstore_core.server.relaying import EXPIRE_S
from torchstore_core.topology import Topology
from torchstore_monarch.controller import ControllerActor
from torchstore_monarch.host import HostActor
from torchstore_monarch.placing import spread
from torchstore_monarch.protocol import (
    Asked,
    FoundStore,
    Placement,
    VolumePlan,
    outcome,
    result,
)

__all__ = ["Directory"]

log = logging.getLogger(__name__)

_END_S = 5.0
# Nothing else runs in the processes that are made for agents, so silence says more there.
_OWN_EXPIRE_S = 6.0


class _Store:
    """One store and what it is made of."""

    def __init__(self, asked: Asked) -> None:
        self.asked = asked
        self.controller: Any = None
        self.controller_pid = 0
        self.controller_name = ""  # as the engine calls it
        self.agents_name = ""
        self.spawned: Any = None  # the agents, in the shape of their processes
        self.hosts: Any = None  # the same in a row
        self.agents: list[Any] = []  # one by one
        self.procs: list[ProcMesh] = []  # made here, so ended here
        self.own_agents = False  # whether they are in such processes
        self.found: FoundStore | None = None
        self.volumes: dict[str, Any] = {}  # the agents that have them, by volume id


class Directory(Actor):
    """Stores by name."""

    def __init__(self) -> None:
        self._stores: dict[str, _Store] = {}
        self._telling: set[asyncio.Task[Any]] = set()

    async def __supervise__(self, failure: MeshFailure) -> bool:
        """A process or actor of a store is gone. The server notices by itself (its line to the
        volume closes); the job goes on.
        """
        log.warning("part of a store has failed: %s", str(failure).partition("\n")[0])
        for store in list(self._stores.values()):
            if failure.mesh_name == store.controller_name:
                log.error("store %r is gone: its controller has failed", store.asked.store_name)
                self._stores.pop(store.asked.store_name, None)
            elif failure.mesh_name == store.agents_name:
                self._tell(store)
        return True

    def _tell(self, store: _Store) -> None:
        """Tell the server that an agent is dead: it knows of those on other hosts only that they
        are silent.
        """
        task = asyncio.ensure_future(_bounded(store.controller.agent_failed.call()))
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)

    # ---- starting -------------------------------------------------------------------------

    @concurrent_endpoint
    async def create(self, asked: bytes, mesh: Any) -> tuple[bytes, bytes | None]:
        """Start a store: a :class:`FoundStore`."""
        return await outcome(self._create(msgspec.msgpack.decode(asked, type=Asked), mesh))

    async def _create(self, asked: Asked, mesh: Any) -> bytes:
        name = asked.store_name
        before = self._stores.get(name)
        if before is not None and before.controller_pid and not _runs(before.controller_pid):
            await self._discard(before)
        if name in self._stores:
            raise ConfigurationError(
                f"this job has a store {name!r} already; shut it down first, or give another "
                "store_name"
            )
        store = self._stores[name] = _Store(asked)
        try:
            async with asyncio.timeout(asked.timeout):
                store.found = await self._start(store, mesh)
        except TimeoutError as error:
            await self._discard(store)
            raise StoreTimeoutError(
                f"store {name!r} did not come up in {asked.timeout} s"
            ) from error
        except BaseException:
            await self._discard(store)
            raise
        return msgspec.msgpack.encode(store.found)

    async def _start(self, store: _Store, mesh: Any) -> FoundStore:
        asked = store.asked
        own = this_host().spawn_procs({"controller": 1}, name="torchstore_controller")
        store.procs.append(own)
        procs = _volume_procs(mesh, asked.num_storage_volumes)
        if procs is not mesh:
            store.procs.append(procs)
            store.own_agents = True
        store.controller = own.spawn("torchstore_controller", ControllerActor)
        store.spawned = procs.spawn("torchstore_host", HostActor)
        store.hosts = store.spawned.flatten("agent")
        begun, facts = await asyncio.gather(
            store.controller.begin.call_one(msgspec.msgpack.encode(asked)),
            store.hosts.where.call(),
        )
        host_id, address, store.controller_pid = result(begun)
        store.controller_name = str(await store.controller._name)
        store.agents_name = str(await store.spawned._name)
        agents = store.agents = [store.hosts.slice(agent=i) for i in range(len(facts))]
        hosts = [msgspec.msgpack.decode(one, type=Topology).host_id for one in facts.values()]
        relays = await self._begin_hosts(store, host_id, address, agents, hosts)
        return FoundStore(asked.store_name, host_id, address, relays)

    async def _begin_hosts(
        self, store: _Store, host_id: str, address: str, agents: list[Any], hosts: list[str]
    ) -> dict[str, list[str]]:
        """Start relays and volumes; the relays by host id.

        On other hosts than the server's each agent with volumes has a relay of its own, so that
        none takes the volumes of others with it when it dies.
        """
        asked = store.asked
        chosen = spread(hosts, asked.num_storage_volumes)
        sharing = Counter(hosts[at] for at in chosen)
        share = asked.capacity and asked.capacity // asked.num_storage_volumes
        plans: dict[int, list[VolumePlan]] = {}
        for index, at in enumerate(chosen):
            plan = VolumePlan(index, share, sharing[hosts[at]])
            plans.setdefault(at, []).append(plan)

        async def begin(at: int, control: str) -> str:
            wanted = Placement(
                asked.store_name,
                control,
                tuple(plans.get(at, ())),
                asked.block,
                asked.timeout,
                store.own_agents,
                _OWN_EXPIRE_S if store.own_agents else EXPIRE_S,
            )
            data = msgspec.msgpack.encode(wanted)
            return result(await agents[at].begin.call_one(data, store.controller))

        first = {hosts.index(host) for host in hosts if host != host_id}
        due = sorted(first | (set(range(len(agents))) if store.own_agents else set(plans)))
        made = await asyncio.gather(
            *(begin(at, address if hosts[at] == host_id else "") for at in due)
        )
        relays: dict[str, list[str]] = {}
        for at, one in zip(due, made, strict=True):
            if hosts[at] != host_id:
                relays.setdefault(hosts[at], []).append(one)
        volumes = {f"{asked.store_name}-{i}": agents[at] for i, at in enumerate(chosen)}
        ready, _ = await asyncio.gather(
            store.controller.ready.call_one(volumes, asked.timeout),
            store.hosts.introduce.call(volumes),
        )
        result(ready)
        store.volumes = volumes
        return relays

    # ---- finding --------------------------------------------------------------------------

    @concurrent_endpoint
    async def find(self, name: str) -> tuple[bytes, Any, Any]:
        """A :class:`FoundStore` (empty: there is none), its controller's actor, its volumes'."""
        store = self._stores.get(name)
        if store is None or store.found is None:
            return b"", None, None
        return msgspec.msgpack.encode(store.found), store.controller, store.volumes

    @concurrent_endpoint
    async def guest(self, proc: Any) -> Any:
        """An actor of the store's own in a process of the job, to ask for stores there.

        It belongs to the directory: what is called may be dead, and that ends who calls, and then
        who owns that.
        """
        return proc.spawn("torchstore_guest", HostActor)

    # ---- ending ---------------------------------------------------------------------------

    @concurrent_endpoint
    async def finish(self, name: str) -> bool:
        """End a store; whether there was one."""
        store = self._stores.get(name)
        if store is None:
            return False
        await self._discard(store)
        return True

    async def _discard(self, store: _Store) -> None:
        if self._stores.get(store.asked.store_name) is store:
            del self._stores[store.asked.store_name]
        lost: list[str] | None = None
        if store.controller is not None:
            lost = await _bounded(store.controller.end.call_one())
        dead = [agent for volume, agent in store.volumes.items() if volume in (lost or ())]
        living = [agent for agent in store.agents if agent not in dead]
        await asyncio.gather(*(_bounded(agent.end.call_one()) for agent in living))
        ends = [procs.stop() for procs in store.procs]
        if store.spawned is not None and not store.own_agents:
            ends.append(store.spawned.stop())
        await asyncio.gather(*(_bounded(end) for end in ends))


async def _bounded(end: Any) -> Any:
    """What one end gives; None of what is dead already."""
    try:
        return await asyncio.wait_for(end, _END_S)
    except Exception as error:  # noqa: BLE001 - whatever the engine raises
        log.info("while ending a store: %r", error)
        return None


def _volume_procs(mesh: Any, volumes: int) -> ProcMesh:
    """Where the agents go: the user's processes, or ones of our own on the user's hosts."""
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
    """Whether a process of this host runs."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"
