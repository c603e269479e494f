"""The server process: volumes, controller, socket, and ending with its owner."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from torchstore_core import topology
from torchstore_core.contracts.strategy import Strategy
from torchstore_core.contracts.transport import Segment, ServerContext, TransportServer
from torchstore_core.errors import ConfigurationError, PluginError
from torchstore_core.plugins import Registry, load_class
from torchstore_core.server.connection import Connection
from torchstore_core.server.controller import Controller
from torchstore_core.server.memory import SegmentMemory
from torchstore_core.server.placement import session_bytes
from torchstore_core.server.records import VolumeRecord
from torchstore_core.wire import messages as m

__all__ = ["Server", "ServerOptions", "runtime_directory"]

log = logging.getLogger(__name__)

_GIB = 1 << 30
_DEFAULT_PREFAULT = 1 * _GIB
_SHUTDOWN_GRACE_S = 0.5
_STALE_AFTER_S = 10.0


class ServerOptions(msgspec.Struct, frozen=True):
    """Configuration of one server process, as JSON on its command line.

    Args:
        store_name: shown in status.
        num_storage_volumes: volumes, all in this process.
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


def runtime_directory() -> Path:
    """The per-user directory (mode 0700) that holds one directory per running server.

    Raises:
        ConfigurationError: it exists but belongs to someone else or is open to others.
    """
    base = os.environ.get("XDG_RUNTIME_DIR")
    if base and os.path.isdir(base) and os.access(base, os.W_OK):
        path = Path(base) / "torchstore"
    else:
        path = Path(tempfile.gettempdir()) / f"torchstore-{os.getuid()}"
    if len(str(path)) > 70:  # a Unix socket's path has at most 107 bytes
        path = Path("/tmp") / f"torchstore-{os.getuid()}"  # noqa: S108 - checked just below
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    info = path.lstat()
    if info.st_uid != os.getuid() or stat.S_IMODE(info.st_mode) & 0o077 or path.is_symlink():
        raise ConfigurationError(
            f"{path} must be a directory of yours with mode 0700; remove it or set XDG_RUNTIME_DIR"
        )
    return path


def remove_stale(base: Path) -> None:
    """Remove directories of servers that are gone (killed): their socket refuses connections."""
    for path in base.iterdir():
        control = path / "control.sock"
        try:
            age = time.time() - control.stat().st_mtime
        except FileNotFoundError:
            continue
        if age < _STALE_AFTER_S:  # bound, but maybe not listening yet
            continue
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(0.2)
            try:
                probe.connect(str(control))
            except ConnectionRefusedError:
                shutil.rmtree(path, ignore_errors=True)
            except OSError:
                continue


class Server:
    """Controller and volumes behind one Unix socket."""

    def __init__(self, options: ServerOptions) -> None:
        self.options = options
        self.connections: set[Connection] = set()
        self.topology = topology.probe()
        self.registry = Registry(block=options.block)
        self._halves: list[TransportServer] = []
        self._memories: list[SegmentMemory] = []
        self._listener: asyncio.AbstractServer | None = None
        self._stopping = False
        self._stopped = asyncio.Event()
        self._all_gone = asyncio.Event()
        self._directory = Path()
        self._own_directory = False
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
        strategy = _make_strategy(self.registry, options)
        if options.directory is None:
            base = runtime_directory()
            remove_stale(base)
            self._directory = Path(tempfile.mkdtemp(dir=base))
            self._own_directory = True
        else:
            self._directory = Path(options.directory)
        self._loop = asyncio.get_running_loop()
        try:
            volumes = [await self._volume(i) for i in range(options.num_storage_volumes)]
            self.controller = Controller(
                volumes,
                strategy,
                prefault=options.prefault != 0,
                warmed=lambda: self._from_thread(self._broadcast_warm),
            )
            path = str(self._directory / "control.sock")
            self._listener = await self._loop.create_unix_server(
                lambda: Connection(self), path, backlog=512
            )
            os.chmod(path, 0o600)
        except BaseException:
            await self.close()
            raise
        self._start_prefault()
        self._loop.call_later(1.0, self._sample_rate)
        return f"unix:{path}"

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
        if self._listener is not None:
            self._listener.close()
        for connection in list(self.connections):
            connection.close()
        if self.connections:
            self._all_gone = asyncio.Event()
            try:
                await asyncio.wait_for(self._all_gone.wait(), _SHUTDOWN_GRACE_S)
            except TimeoutError:
                log.warning("%d connections did not close in time", len(self.connections))
        for half in self._halves:
            await half.close()
        for memory in self._memories:
            memory.close()
        if self._own_directory:
            shutil.rmtree(self._directory, ignore_errors=True)

    async def _volume(self, index: int) -> VolumeRecord:
        options = self.options
        total = options.capacity if options.capacity is not None else default_capacity()
        capacity = total // options.num_storage_volumes
        if capacity < 4096:
            raise ConfigurationError(f"capacity of {total} bytes is too small")
        volume_id = f"{options.store_name}-{index}"
        memory = SegmentMemory(volume_id, capacity)
        self._memories.append(memory)
        context = ServerContext(options.store_name, volume_id, str(self._directory), self.topology)
        offers: dict[str, bytes] = {}
        for spec in self.registry.transports():
            if spec.server is None:
                continue
            try:
                if spec.probe is not None and spec.probe() is not None:
                    continue
                half: TransportServer = load_class(spec.server)()
                offer: object = await half.start(context, [Segment(0, memory.fd, capacity)])
                self._halves.append(half)
                if not isinstance(offer, bytes):
                    raise PluginError(f"its offer is a {type(offer).__qualname__}, not bytes")
                offers[spec.name] = offer
            except Exception as error:  # noqa: BLE001 - a broken transport must not end the others
                log.warning("transport %s is not served: %r", spec.name, error)
        pid = os.getpid()
        info = m.VolumeInfo(volume_id, index, pid, self.topology, capacity, offers)
        return VolumeRecord(info, memory)

    def _start_prefault(self) -> None:
        wanted = self.options.prefault
        capacity = sum(v.info.capacity_bytes for v in self.controller.volumes)
        if wanted is None:
            wanted = min(_DEFAULT_PREFAULT, capacity // 2, topology.memory_limit_bytes() // 8)
        self._keep = share = wanted // len(self._memories)
        for memory in self._memories:
            memory.prefault(share, lambda: self._from_thread(self._broadcast_warm))

    def _from_thread(self, call: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(call)
        except RuntimeError:  # the loop has closed: nobody is left to tell
            log.debug("prefault ended after the server")

    def _broadcast_warm(self) -> None:
        warm = [(i, 0, memory.warm) for i, memory in enumerate(self._memories)]
        for connection in self.connections:
            if connection.is_anchor:
                connection.send(m.Warmed(warm))

    def disconnected(self, connection: Connection) -> None:
        """A connection is gone."""
        self.connections.discard(connection)
        if not self.connections:
            self._all_gone.set()

    # ---- answers --------------------------------------------------------------------------

    def welcome(self, request_id: int, token: bytes) -> m.Welcome:
        """The answer to a Hello."""
        volumes = [v.info for v in self.controller.volumes]
        warm = [(i, 0, memory.warm) for i, memory in enumerate(self._memories)]
        return m.Welcome(
            request_id,
            m.PROTOCOL_VERSION,
            token,
            self.options.store_name,
            self.topology,
            volumes,
            warm,
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
                free_bytes=max(0, v.info.capacity_bytes - v.used),
                warm_bytes=v.memory.warm,
                transports=sorted(v.info.offers),
            )
            for v in controller.volumes
        ]
        sessions = []
        for s in controller.sessions.values():
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
                )
            )
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
        )


def default_capacity() -> int:
    """Half of the memory this process may use, in bytes."""
    return topology.memory_limit_bytes() // 2


def _make_strategy(registry: Registry, options: ServerOptions) -> Strategy:
    cls = registry.strategy(options.strategy)
    try:
        return msgspec.json.decode(options.strategy_fields, type=cls)
    except msgspec.DecodeError as error:
        raise PluginError(f"strategy {options.strategy!r}: bad fields: {error}") from error
