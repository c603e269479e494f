"""The server: controller, volumes here or in other processes, and the socket of this host."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import time
from collections.abc import Awaitable, Callable

import msgspec

from torchstore_core.errors import (
    ConfigurationError,
    StoreClosedError,
    StoreFullError,
    StoreTimeoutError,
    in_seconds,
)
from torchstore_core.machine import topology
from torchstore_core.machine.directories import PrivateDirectory
from torchstore_core.machine.processes import Watcher
from torchstore_core.plugins.registry import Registry
from torchstore_core.plugins.strategy_data import decode_strategy
from torchstore_core.server.controller import Controller
from torchstore_core.server.index import inspection as looking
from torchstore_core.server.index.records import SessionRecord, VolumeRecord
from torchstore_core.server.memory.allocator import Allocator
from torchstore_core.server.memory.placement import session_bytes
from torchstore_core.server.memory.volume import Volume, default_capacity, default_prefault
from torchstore_core.server.remote.attached import AttachedMemory
from torchstore_core.server.remote.orphans import Orphans
from torchstore_core.server.serving.connection import Connection
from torchstore_core.server.serving.conversation import Conversation
from torchstore_core.server.serving.journal import Refusals, journal, undone, who
from torchstore_core.server.serving.listening import Listener, speaking
from torchstore_core.wire import messages as m

__all__ = ["Ready", "Server", "ServerOptions"]

log = logging.getLogger(__name__)

_SHUTDOWN_GRACE_S = 0.5


class ServerOptions(msgspec.Struct, frozen=True):
    """Configuration of one server process, as JSON on its command line.

    Args:
        store_name: shown in status.
        num_storage_volumes: how many volumes.
        attached: they live in other processes, which attach them; else all in this one.
        capacity: bytes over all volumes; None: half of the memory limit.
        prefault: bytes to warm at the start; None: up to 1 GiB, at most half of the capacity and
            an eighth of the memory limit; 0: never warm anything in the background.
        strategy: name and fields of the strategy.
        trim_after: seconds without a put after which free pool memory beyond ``prefault`` goes
            back to the system.
        block: plug-in names not to load.
        owner: pid that the server ends with; 0: none.
        directory: where to put the socket; None: a fresh private one.
    """

    store_name: str = "torchstore"
    num_storage_volumes: int = 1
    attached: bool = False
    capacity: int | None = None
    prefault: int | None = None
    strategy: str = "singleton"
    strategy_fields: bytes = b"{}"
    trim_after: float = 60.0
    block: tuple[str, ...] = ()
    owner: int = 0
    directory: str | None = None


class Ready(msgspec.Struct, frozen=True):
    """The one line a server prints when it can be connected to."""

    address: str
    pid: int


class Server:
    """Controller and volumes behind one Unix socket.

    Attributes:
        conversations: with clients and volumes, whatever carries them.
        connections: those on the Unix socket.
        before_close: awaited before what a client process held through a connection here is
            undone: an agent of this host may still be writing for it. Called with its pid.
        owner: pid of the process that the store ends with, for people to see; 0: none.
    """

    def __init__(self, options: ServerOptions) -> None:
        self.options = options
        self.conversations: set[Conversation] = set()
        self.connections: set[Connection] = set()
        self.topology = topology.probe()
        self.registry = Registry(block=options.block)
        self._volumes: list[Volume] = []  # in this process
        self._attached: dict[int, VolumeRecord] = {}
        self._all_attached = asyncio.Event()
        self._when_trimmed: list[Callable[[], None]] = []
        self._controller: Controller | None = None
        self._orphans: Orphans | None = None
        self._watcher = Watcher(self.process_ended)
        self.refusals = Refusals()
        self._listener = Listener(speaking(functools.partial(Connection, self)))
        self._stopping = False
        self._stopped = asyncio.Event()
        self._all_gone = asyncio.Event()
        self._directory: PrivateDirectory | None = None
        self.before_close: Callable[[int], Awaitable[None]] | None = None
        self.owner = 0
        self._started = time.monotonic()
        self._rate_sample = (self._started, 0)
        self._rate = 0.0
        self._keep = 0

    # ---- life -----------------------------------------------------------------------------

    async def start(self) -> str:
        """Bring everything up; the address to connect to."""
        options = self.options
        if options.num_storage_volumes < 1:
            raise ConfigurationError("num_storage_volumes must be at least 1")
        self._strategy = decode_strategy(options.strategy, options.strategy_fields, self.registry)
        self._directory = PrivateDirectory(options.directory)
        self._loop = asyncio.get_running_loop()
        try:
            if not options.attached:
                self._begin([await self._volume(i) for i in range(options.num_storage_volumes)])
            path = self._directory.control
            self._listener.open(path)
        except BaseException:
            await self.close()
            raise
        if not options.attached:
            self._say_started()
        return f"unix:{path}"

    def _say_started(self) -> None:
        volumes = self.controller.volumes
        journal.info(
            "started: store %r at unix:%s, pid %d; %d volume(s), %s bytes; strategy %s",
            self.options.store_name,
            self._directory.control if self._directory is not None else "",
            os.getpid(),
            len(volumes),
            f"{sum(volume.info.capacity_bytes for volume in volumes):,}",
            self.options.strategy,
        )
        if self.options.owner:  # it has been warned where its user sees it
            return
        hosts = {volume.info.topology.host_id: volume.info.topology for volume in volumes}
        for ident, host in hosts.items():
            there = [v.info for v in volumes if v.info.topology.host_id == ident]
            capacity = sum(info.capacity_bytes for info in there)
            if text := topology.capacity_warning(capacity, host.memory_bytes, host.hostname):
                journal.warning("%s", text)

    async def attached(self, timeout: float) -> None:
        """Wait until all volumes are attached; only then clients are let in.

        Raises:
            StoreTimeoutError: not within ``timeout`` seconds; says how many are missing.
        """
        try:
            await asyncio.wait_for(self._all_attached.wait(), timeout)
        except TimeoutError as error:
            wanted = self.options.num_storage_volumes
            raise StoreTimeoutError(
                f"{wanted - len(self._attached)} of {wanted} volumes did not attach "
                f"within {in_seconds(timeout)}",
                details={"timeout": timeout},
            ) from error

    @property
    def controller(self) -> Controller:
        """The brain.

        Raises:
            StoreClosedError: not all volumes are attached yet.
        """
        if self._controller is None:
            raise StoreClosedError(f"store {self.options.store_name!r} is still starting")
        return self._controller

    @property
    def orphans(self) -> Orphans:
        """Sessions whose relay is gone.

        Raises:
            StoreClosedError: not all volumes are attached yet.
        """
        if self._orphans is None:
            raise StoreClosedError(f"store {self.options.store_name!r} is still starting")
        return self._orphans

    def _begin(self, volumes: list[VolumeRecord]) -> None:
        """All volumes are there."""
        self._controller = Controller(
            volumes,
            self._strategy,
            prefault=self.options.prefault != 0,
            warmed=lambda: self._from_thread(self._broadcast_warm),
        )
        self._orphans = Orphans(self._controller, self._watch)
        self._start_prefault()
        self._loop.call_later(1.0, self._sample_rate)

    async def serve(self) -> None:
        """Run until :meth:`stop_soon`."""
        await self._stopped.wait()

    def stop_soon(self) -> None:
        """End the server after the replies under way are sent."""
        if not self._stopping:
            self._stopping = True
            asyncio.get_running_loop().call_later(0.01, self._stopped.set)

    async def close(self) -> None:
        """Stop listening, close every connection, release memory, remove the directory."""
        self._stopping = True  # who leaves now is not worth a line
        self._watcher.close()
        self._listener.close()
        for connection in list(self.connections):
            connection.close()
        if self.connections:
            self._all_gone = asyncio.Event()
            try:
                await asyncio.wait_for(self._all_gone.wait(), _SHUTDOWN_GRACE_S)
            except TimeoutError:
                log.warning("%d connections did not close in time", len(self.connections))
        for volume in self._volumes:
            await volume.close()
        if self._directory is not None:
            self._directory.remove()
        if self._controller is not None:
            ran_s = time.monotonic() - self._started
            journal.info("stopped: store %r, after %.0f s", self.options.store_name, ran_s)

    async def _volume(self, index: int) -> VolumeRecord:
        options = self.options
        total = options.capacity if options.capacity is not None else default_capacity()
        directory = str(self._directory.path) if self._directory is not None else ""
        volume = Volume(
            options.store_name,
            index,
            total // options.num_storage_volumes,
            self.registry,
            directory,
        )
        self._volumes.append(volume)
        return VolumeRecord(await volume.start(), volume.memory)

    def volume_attached(self, info: m.VolumeInfo, send: Callable[[m.Message], None]) -> None:
        """A volume in another process is there.

        Raises:
            ConfigurationError: this store does not wait for it.
        """
        wanted = self.options.num_storage_volumes if self.options.attached else 0
        if not 0 <= info.index < wanted or info.index in self._attached:
            raise ConfigurationError(
                f"store {self.options.store_name!r} does not wait for a volume {info.index}"
            )
        if not 4096 <= info.capacity_bytes < 1 << 60:
            raise StoreFullError(f"a volume cannot have {info.capacity_bytes} bytes")
        allocator = Allocator(info.capacity_bytes)
        record = VolumeRecord(info, AttachedMemory(send, allocator))
        record.allocator = allocator
        self._attached[info.index] = record
        if len(self._attached) == wanted:
            self._begin([self._attached[i] for i in range(wanted)])
            self._say_started()
            self._all_attached.set()

    def when_trimmed(self, call: Callable[[], None]) -> bool:
        """If memory is being given back at this moment, ``call`` when it can be used again; whether
        that is so.
        """
        memories = [record.memory for record in self._attached.values()]
        if not any(
            isinstance(memory, AttachedMemory) and memory.is_trimming for memory in memories
        ):
            return False
        self._when_trimmed.append(call)
        return True

    def _trimmed(self) -> None:
        calls, self._when_trimmed = self._when_trimmed, []
        for call in calls:
            self._loop.call_soon(call)

    def lost_volumes(self) -> list[str]:
        """Ids of the volumes that are lost."""
        there = () if self._controller is None else self._controller.volumes
        return [volume.info.id for volume in there if volume.lost]

    def volume_warmed(self, index: int, message: m.Warm) -> None:
        """A volume in another process says how much of it is warm."""
        memory = self._attached[index].memory
        if isinstance(memory, AttachedMemory):
            memory.warmed(message)
        if message.trimmed:
            self._trimmed()
        if self._controller is not None:
            self._broadcast_warm()

    def volume_ended(self, index: int, why: str) -> None:
        """A volume in another process is gone: what only it had is lost."""
        if self._controller is None:
            del self._attached[index]
            return
        self._trimmed()
        if not self._stopping:
            lost = self._controller.volumes[index].info
            journal.warning(
                "lost: volume %s on %s is gone (%s), with what was there alone",
                *(lost.id, lost.topology.hostname, why),
            )
            self._controller.lose_volume(index, why)
            self.orphans.volume_lost()
            self._to_anchors(m.Lost(index, why))

    def joined(self, session: SessionRecord) -> None:
        """A client has opened a session."""
        level = logging.DEBUG if session.facts.role else logging.INFO  # a tool looks and leaves
        journal.log(level, "joined: %s; now %d", who(session), len(self.controller.sessions))

    def died(self, session: SessionRecord) -> None:
        """A session's process has died, and what it has half done is about to be undone."""
        if half_done := undone(session):
            journal.info("died: %s. Undone: %s", who(session), half_done)

    def left(self, session: SessionRecord, why: str) -> None:
        """A session is about to end."""
        if self._stopping:
            return
        half_done = undone(session)
        level = logging.DEBUG if session.facts.role and not half_done else logging.INFO
        journal.log(
            level,
            "left: %s (%s); now %d%s",
            who(session),
            why,
            len(self.controller.sessions.keys() - {session.token}),
            f". Undone: {half_done}" if half_done else "",
        )

    def _watch(self, volume: VolumeRecord, wanted: m.Watch) -> None:
        """Have a process of a volume's host watched, there."""
        if isinstance(volume.memory, AttachedMemory):
            volume.memory.watch(wanted)
        else:
            self._watcher.watch(wanted)

    def process_ended(self, message: m.Died) -> None:
        """A process of which an orphan is left has ended."""
        self.orphans.died(message.orphan)

    def _start_prefault(self) -> None:
        wanted = self.options.prefault
        capacity = sum(v.info.capacity_bytes for v in self.controller.volumes)
        if wanted is None:
            wanted = default_prefault(capacity)
        self._keep = share = wanted // len(self.controller.volumes)
        for volume in self.controller.volumes:
            volume.memory.prefault(share, lambda: self._from_thread(self._broadcast_warm))

    def _from_thread(self, call: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(call)
        except RuntimeError:  # the loop has closed: nobody is left to tell
            log.debug("prefault ended after the server")

    def _broadcast_warm(self) -> None:
        self._to_anchors(m.Warmed(self._warm()))

    def _warm(self) -> list[tuple[int, int, int]]:
        return [(v.index, 0, v.memory.warm) for v in self.controller.volumes]

    def _to_anchors(self, message: m.Message) -> None:
        for conversation in self.conversations:
            if conversation.is_anchor:
                conversation.send(message)

    def disconnected(self, connection: Connection) -> None:
        """A connection is gone."""
        self.connections.discard(connection)
        self._listener.freed()
        if not self.connections:
            self._all_gone.set()

    # ---- answers --------------------------------------------------------------------------

    def welcome(self, request_id: int, token: bytes, via: topology.Topology | None) -> m.Welcome:
        """The answer to a Hello that came directly, or through a relay at ``via``."""
        volumes = [v.info for v in self.controller.volumes]
        return m.Welcome(
            request_id,
            m.PROTOCOL_VERSION,
            token,
            self.options.store_name,
            self.topology,
            volumes,
            self._warm(),
            self._strategy.transport,
            via=via,
            owner=self.owner,
        )

    def _sample_rate(self) -> None:
        then, count = self._rate_sample
        now = time.monotonic()
        total = sum(self.controller.operations.values())
        self._rate = (total - count) / max(now - then, 1e-9)
        self._rate_sample = (now, total)
        self.controller.trim(self.options.trim_after, self._keep)
        self._loop.call_later(1.0, self._sample_rate)

    def status(self, request_id: int) -> m.StatusReport:
        """Everything ``torchstore status`` shows."""
        controller = self.controller
        pid = os.getpid()
        now = time.monotonic()
        volumes = [
            m.VolumeStatus(
                id=v.info.id,
                pid=v.info.pid,
                host_id=v.info.topology.host_id,
                hostname=v.info.topology.hostname,
                capacity_bytes=v.info.capacity_bytes,
                used_bytes=v.used,
                leased_bytes=v.leased,
                unfinished_bytes=v.unfinished,
                free_bytes=v.free,
                warm_bytes=v.memory.warm,
                transports=sorted(v.info.offers),
                lost=v.lost,
            )
            for v in controller.volumes
        ]
        sessions = []
        orphans = list(controller.orphans.values())
        for s in [*controller.sessions.values(), *orphans]:
            leased, unfinished = session_bytes(s)
            facts = s.facts
            sessions.append(
                m.SessionStatus(
                    pid=facts.pid,
                    hostname=facts.hostname,
                    rank=facts.rank,
                    lanes=s.lanes,
                    leases=len(s.leases),
                    leased_bytes=leased,
                    unfinished_puts=len(s.txns),
                    unfinished_bytes=unfinished,
                    age_s=now - s.opened,
                    role="orphan" if s in orphans else facts.role,
                )
            )
        pending, pending_versions, pending_bytes = looking.unfinished(controller.catalog)
        return m.StatusReport(
            id=request_id,
            store_name=self.options.store_name,
            controller_pid=pid,
            uptime_s=now - self._started,
            keys=len(controller.catalog.newest),
            volumes=volumes,
            sessions=sessions,
            operations={kind.__name__: n for kind, n in controller.operations.items()},
            operations_per_s=self._rate,
            strategy=self.options.strategy,
            plugin_errors=self.registry.errors(),
            pending=pending,
            pending_versions=pending_versions,
            pending_bytes=pending_bytes,
        )
