"""The server: the controller, volumes in this or other processes, and the Unix socket."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import socket
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from torchstore_core.contracts.strategy import Strategy
from torchstore_core.contracts.when_full import WHEN_FULL, check_when_full, is_url, shown_place
from torchstore_core.errors import (
    ConfigurationError,
    PluginError,
    StoreClosedError,
    StoreFullError,
    StoreTimeoutError,
    in_seconds,
)
from torchstore_core.machine import topology
from torchstore_core.machine.directories import PrivateDirectory, explained, make_again
from torchstore_core.machine.processes import started
from torchstore_core.machine.sockets.unix import check_descriptors
from torchstore_core.machine.tasks import call_from_thread
from torchstore_core.plugins.absent_strategy import AbsentStrategy, Loading
from torchstore_core.plugins.installed import Inventory
from torchstore_core.plugins.registry import Registry
from torchstore_core.plugins.strategy_data import decode_strategy
from torchstore_core.reports.bandwidths import repair_bandwidth
from torchstore_core.reports.status import StatusReport
from torchstore_core.server.controller import Controller
from torchstore_core.server.index.records import SessionRecord
from torchstore_core.server.index.references.holds import grace_s
from torchstore_core.server.keeping.link import LOG, KeeperLink
from torchstore_core.server.memory import strategy_calls
from torchstore_core.server.memory.allocator import Allocator
from torchstore_core.server.memory.volume import Volume, default_capacity, default_prefault
from torchstore_core.server.memory.volume_record import VolumeRecord
from torchstore_core.server.remote.attached_volume import AttachedVolume, KnownVolume
from torchstore_core.server.remote.process_watches import ProcessWatches
from torchstore_core.server.repairing.copier_process import CopierProcess
from torchstore_core.server.serving import inspection, journal
from torchstore_core.server.serving.connection import Connection
from torchstore_core.server.serving.conversation import Conversation
from torchstore_core.server.serving.handshakes import Handshakes
from torchstore_core.server.serving.journal import Refusals
from torchstore_core.server.serving.listening import Listener, speaking
from torchstore_core.server.serving.members import Members, is_member
from torchstore_core.wire import messages as m

if TYPE_CHECKING:
    from torchstore_core.server.keeping.compaction import Compaction
    from torchstore_core.server.keeping.returning import Returning
    from torchstore_core.server.spilling.objects.spill_objects import SpillObjects
    from torchstore_core.server.spilling.spill_file import SpillFile

log = logging.getLogger(__name__)

_SHUTDOWN_GRACE_S = 0.5
# How long a server that has come back waits for a volume. As long as for a relay that is silent.
_RETURN_S = 15.0
# After which time the keeper is asked again to hold what it had no descriptor for.
_KEEP_AGAIN_S = 1.0
# The name by which it has the listening socket.
_CONTROL = "control"
# What precedes the number of a session in the name by which the keeper has its connection.
_SESSION = "session "
# The name by which it has the spill file, and how large that may become.
_SPILL = "spill"
# The name by which it knows the folder of objects that are spilled.
_SPILL_FOLDER = "spill folder"
# The name by which it knows how many copies the strategy wants.
_COPIES = "copies"
# What precedes the index of a volume in the name by which it knows one of another process.
_VOLUME = "volume "


class ServerOptions(msgspec.Struct, frozen=True):
    """The configuration of one server.

    Args:
        store_name: the name of the store, shown in its status.
        num_storage_volumes: how many volumes the store has.
        attached: whether the volumes are in other processes, which attach them to the server.
        capacity: bytes of all volumes together; None: half of the memory limit.
        prefault: bytes to warm at the start; None: up to 1 GiB, at most half of the capacity and
            an eighth of the memory limit; 0: never warm anything in the background.
        strategy, strategy_fields: the name and the encoded fields of the strategy.
        spill: the directory or URL to spill to; None: nothing is spilled.
        spill_capacity: the most bytes to spill; None: as many as are free at the start, or 1 TiB
            at a URL.
        when_full: what is done when memory is full with values whose put does not say it:
            "pinned", "spillable" or "evictable"; None: pinned, but spillable if older versions are
            kept and there is a directory to spill to.
        trim_after: seconds without a put after which free memory beyond ``prefault`` is returned to
            the system.
        block: names of plug-ins that must not be loaded.
        owner: the pid of the process with which the server ends; 0: none.
        directory: where to put the socket; None: a new private directory.
        incarnation: that of the store's memory, if the memory is older than this process; 0: the
            memory begins now, and is given a random one.
        repair_bandwidth: the most bytes per second to copy when copies of values are lost, or a
            volume is drained; 0: no limit; None: see ``reports.bandwidths``.
        installed: the plug-ins that the program which starts the server has found. The server
            looks for them itself if this is None, or if it would find others.
    """

    store_name: str = "torchstore"
    num_storage_volumes: int = 1
    attached: bool = False
    capacity: int | None = None
    prefault: int | None = None
    strategy: str = "singleton"
    strategy_fields: bytes = b"{}"
    spill: str | None = None
    spill_capacity: int | None = None
    when_full: str | None = None
    trim_after: float = 60.0
    block: tuple[str, ...] = ()
    owner: int = 0
    directory: str | None = None
    incarnation: int = 0
    repair_bandwidth: int | None = None
    installed: Inventory | None = None


class Ready(msgspec.Struct, frozen=True):
    """The line that a server prints when it accepts connections."""

    address: str
    pid: int


class Server:
    """A controller and volumes behind one Unix socket.

    Attributes:
        conversations: all conversations with clients and volumes, also those through relays.
        connections: the connections to the Unix socket.
        before_close: see ``serving.frames.Host``.
        returning: sessions of earlier lives of this server; None: it has no keeper.
        owner: the pid of the process with which the store ends, as shown to people; 0: none.
        members: the members, with the last of which the server ends; None: it does not use members.
    """

    def __init__(self, options: ServerOptions, keeper: KeeperLink | None = None) -> None:
        self.options = options
        self._keeper = keeper
        self.returning: Returning | None = None
        self._compaction: Compaction | None = None
        self.conversations: set[Conversation] = set()
        self.connections: set[Connection] = set()
        self.topology = topology.probe()
        told = options.installed
        found = told.plugins if told is not None and told.is_valid_here() else None
        self.registry = Registry(found, block=options.block)
        self._volumes: list[Volume] = []  # in this process
        self._attached: dict[int, AttachedVolume] = {}
        self._all_attached = asyncio.Event()
        self._when_trimmed: list[Callable[[], None]] = []
        self._controller: Controller | None = None
        self._watcher = ProcessWatches(self.process_ended)
        self.refusals = Refusals()
        self._listener = Listener(speaking(functools.partial(Connection, self)))
        self._stopping = False
        self._stopped = asyncio.Event()
        self._all_gone = asyncio.Event()
        self._directory: PrivateDirectory | None = None
        self._spill_file: SpillFile | SpillObjects | None = None
        self.before_close: Callable[[int], Awaitable[None]] | None = None
        self.owner = 0
        self.members: Members | None = None
        volumes = range(options.num_storage_volumes)
        self._copier = CopierProcess(volumes, self._copier_ended_in_thread)
        self._started = time.monotonic()
        self._rate_sample = (self._started, 0)
        self._rate = 0.0
        self._keep = 0
        self._to_keep: set[str] = set()  # what the keeper could not hold
        self._has_told_unkept = False

    # ---- life -----------------------------------------------------------------------------

    async def start(self) -> str:
        """Start the volumes of this process, and listen; returns the address to connect to."""
        options = self.options
        if options.num_storage_volumes < 1:
            raise ConfigurationError("num_storage_volumes must be at least 1")
        self._strategy = self._load_strategy()
        keeper = self._keeper
        kept = None if keeper is None else keeper.facts.get("directory")
        self._directory = PrivateDirectory(kept or options.directory)
        if kept:
            make_again(kept)
            self._directory.remove_dead()
        self._loop = asyncio.get_running_loop()
        try:
            self._spill_file = self._open_spill_file()
            if not options.attached:
                self._begin([await self._volume(i) for i in range(options.num_storage_volumes)])
            elif keeper is not None:
                self._begin_again(keeper.facts)
            await self._take_connections()
            listening = None if keeper is None else keeper.kept(_CONTROL)
            if options.attached:  # whoever leads to the volumes removes the directory
                self._listener.owner = options.owner
            with explained():
                self._listener.open(self._directory.control, listening)
            if keeper is not None:
                # In the end the keeper removes the directory, unless it was given.
                own = "" if options.directory else "yes"
                facts = {"directory": str(self._directory.path), "own_directory": own}
                keeper.keep(_CONTROL, self._listener.fileno(), **facts)
                self._listener.renewed = functools.partial(keeper.keep, _CONTROL)
                keeper.ready()
        except BaseException:
            await self.close()
            raise
        if not options.attached:
            self._say_started()
        return self._address

    def _load_strategy(self) -> Strategy:
        """Return the store's strategy. If it is gone in a later life, what the store has is not."""
        options, keeper = self.options, self._keeper

        def load(registry: Registry) -> Strategy:
            return decode_strategy(options.strategy, options.strategy_fields, registry)

        try:
            strategy = load(self.registry)
        except PluginError as error:
            if keeper is None or keeper.life == 1:
                raise
            log.error("%s; nothing can be put until it can be loaded", error.message)
            loading = Loading(lambda: load(Registry(block=options.block)), error)
            known = int(keeper.facts.get(_COPIES, 1))
            return AbsentStrategy.of(options.strategy_fields, known, loading)
        if keeper is not None:
            with contextlib.suppress(PluginError):  # puts will say it
                keeper.note(**{_COPIES: str(strategy_calls.copies(strategy))})
        return strategy

    def _open_spill_file(self) -> SpillFile | SpillObjects | None:
        options = self.options
        check_when_full(options.when_full, options.spill)
        if options.spill is None:
            return None
        if options.attached:  # each volume has a file of its own
            if options.num_storage_volumes > 1 and strategy_calls.copies(self._strategy) > 1:
                raise ConfigurationError(
                    f"strategy {options.strategy!r} keeps several copies of each value, and these "
                    "cannot be spilled by volumes in processes of their own: a value has one copy "
                    "on disk, which is lost with its volume. Leave out spill=, or use a strategy "
                    "without copies",
                    details={"spill": shown_place(options.spill)},
                )
            return None
        keeper = self._keeper
        if is_url(options.spill):
            return self._open_spill_objects(options.spill, keeper)
        from torchstore_core.server.spilling.spill_file import SpillFile

        if keeper is None:
            return SpillFile(options.spill, options.spill_capacity)
        capacity, there = options.spill_capacity, keeper.facts.get(_SPILL)
        file = SpillFile(options.spill, int(there) if there else capacity, keeper.kept(_SPILL))
        keeper.keep(_SPILL, file.fd, **{_SPILL: str(file.capacity)})
        return file

    def _open_spill_objects(self, url: str, keeper: KeeperLink | None) -> SpillObjects:
        from torchstore_core.server.spilling.objects.spill_objects import SpillObjects

        capacity = self.options.spill_capacity
        if keeper is None:
            return SpillObjects(url, capacity, os.getpid())
        folder, keeper_pid = keeper.facts.get(_SPILL_FOLDER), os.getppid()
        objects = SpillObjects(url, capacity, keeper_pid, keeper.life, folder)
        if folder is None:
            keeper.note(**{_SPILL_FOLDER: objects.folder})
        return objects

    @property
    def life(self) -> int:
        """Which one of its lives this is; 0: it has only one."""
        return 0 if self._keeper is None else self._keeper.life

    @property
    def _address(self) -> str:
        return f"unix:{self._directory.control if self._directory is not None else ''}"

    def _say_started(self) -> None:
        volumes = self.controller.volumes
        options = self.options
        journal.started(options.store_name, self._address, options.strategy, volumes)
        if (
            not options.owner or options.attached
        ):  # an owner has warned already, where its user sees it
            journal.more_than_memory(volumes)

    async def attached(self, timeout: float) -> None:
        """Wait until all volumes are attached; only then can clients open sessions.

        Raises:
            StoreTimeoutError: it took longer than ``timeout`` seconds; the message says how many
                volumes are missing.
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
        """The state of the store.

        Raises:
            StoreClosedError: not all volumes are attached yet.
        """
        if self._controller is None:
            raise StoreClosedError(f"store {self.options.store_name!r} is still starting")
        return self._controller

    def _begin(self, volumes: list[VolumeRecord]) -> None:
        """Create the controller, now that all volumes are there."""
        self.handshakes = Handshakes(volumes)
        mover = None
        if self.options.attached and self.options.spill is not None:
            from torchstore_core.server.spilling.moves import Mover, Site

            files = [self._attached[volume.index].spilled for volume in volumes]
            sites = [Site(file.capacity, file) for file in files if file is not None]
            mover = Mover(shown_place(self.options.spill), sites, volumes, by_volume=True)
        elif self._spill_file is not None:
            from torchstore_core.server.spilling.moves import Mover

            memories = [volume.memory.fd for volume in self._volumes]
            soon = functools.partial(call_from_thread, self._loop)
            mover = Mover.here(self._spill_file, volumes, memories, soon)
        # The incarnation belongs to the memory, which may be older than this process.
        kept = None if self._keeper is None else self._keeper.facts.get("incarnation")
        given: dict[str, Any] = {
            "incarnation": int(kept or self.options.incarnation),
            "prefault": self.options.prefault != 0,
            "warmed": self._warmed_in_thread,
            "watch": self._watch,
            "when_full": 0 if self.options.when_full is None else WHEN_FULL[self.options.when_full],
            "mover": mover,
            "later": self._loop.call_later,
            "grace_s": grace_s(os.environ),
            "start_copier": self._start_copier,
            "repair_bandwidth": repair_bandwidth(self.options.repair_bandwidth, os.environ),
        }
        if self._keeper is None:
            self._controller = Controller(volumes, self._strategy, **given)
        else:
            self._controller = self._restored(self._keeper, volumes, given)
        for attached in self._attached.values():
            attached.memory.delayed = self._controller.spilling.delayed
        self._start_prefault()
        self._loop.call_later(1.0, self._sample_rate)

    def _restored(
        self, keeper: KeeperLink, volumes: list[VolumeRecord], given: dict[str, Any]
    ) -> Controller:
        """The controller of the last life of this server, or a new one that the next will have."""
        # Servers without a keeper need none of this in memory.
        from torchstore_core.server.keeping.compaction import Compaction
        from torchstore_core.server.keeping.recorded import RecordedController
        from torchstore_core.server.keeping.returning import Returning

        begun = time.monotonic()
        log = keeper.log()
        controller = RecordedController(log, volumes, self._strategy, **given)

        def keep_log() -> None:
            keeper.keep(LOG, controller.log.fd, incarnation=str(controller.incarnation))

        keep_log()
        self._keep_log, keeper.unkept = keep_log, self._unkept
        keeper.late = journal.keeper_is_late
        controller.restore()
        if self.members is not None:
            self.members.restored(controller.sessions.values())
        for session in controller.sessions.values():
            # Halves in other processes have outlived the server.
            session.met.update(self._attached)
        self.returning = Returning(controller, keeper.life, self._died_meanwhile, self._settle)
        self.returning.begin(set(_sessions(keeper.names())))
        controller.unsent = lambda: [one.unsent for one in self.conversations]
        self._compaction = Compaction(controller, keeper)
        if keeper.life > 1:
            took_s = time.monotonic() - begun
            journal.restored(len(controller.catalog.newest), len(controller.sessions), took_s)
        return controller

    def keep_connection(self, session: SessionRecord, fd: int) -> bool:
        """Have a session's liveness connection outlive this server; whether it will."""
        if self._keeper is None:
            return False
        self._keeper.keep(f"{_SESSION}{session.serial}", fd)
        return True

    def _unkept(self, name: str) -> None:
        """The keeper has no descriptor left for what has this name: ask again, until it has."""
        if not self._to_keep:
            self._loop.call_later(_KEEP_AGAIN_S, self._keep_again)
        self._to_keep.add(name)
        if not self._has_told_unkept:
            self._has_told_unkept = True
            journal.keeper_is_full()

    def _keep_again(self) -> None:
        names, self._to_keep = self._to_keep, set()
        if self._keeper is None or self._stopping:
            return
        if LOG in names:
            self._keep_log()
        if _CONTROL in names:
            self._keeper.keep(_CONTROL, self._listener.fileno())
        serials = set(_sessions(names))
        for conversation in self.conversations:
            conversation.keep_again(serials)

    def drop_connection(self, session: SessionRecord) -> None:
        """The session whose liveness connection the keeper has is closed."""
        if self._keeper is not None:
            self._keeper.drop(f"{_SESSION}{session.serial}")

    async def _take_connections(self) -> None:
        """Go on with the liveness connections that have outlived an earlier life."""
        keeper, returning = self._keeper, self.returning
        if keeper is None or returning is None:
            return
        sessions = _sessions(keeper.names())
        # For the processes of the clients, and to read what is kept: see ``Conversation``. And the
        # event loop opens one with the first connection.
        check_descriptors("the sessions that it had", 2 * len(sessions) + 1)
        for serial, name in sessions.items():
            fd = keeper.kept(name)
            if fd is None:
                continue
            accepted = socket.socket(fileno=fd)
            accepted.set_inheritable(False)
            accepted.setblocking(False)
            found = returning.of(serial)
            if found is None:
                keeper.drop(name)
                accepted.close()
                continue
            session, opened, is_there = found
            made = Connection(self, opened.pid, session, is_there, opened.via)
            await _connect_kept(made, accepted)

    def _died_meanwhile(self, session: SessionRecord) -> None:
        """The process of a session has ended before it came back."""
        self.left(session, "its process has ended")
        self.handshakes.ended(session, lambda: self.controller.close_session(session))

    def _settle(self, session: SessionRecord, then: Callable[[], None]) -> None:
        """Call something when no half can write for a session any more."""
        self.handshakes.settle(session, [(index, "") for index in session.met], then)

    def resumed(self, session: SessionRecord, resume: m.Resume) -> None:
        """The client of a session has come back; it has what ``resume`` says."""
        if self.returning is not None:
            self.returning.resume(session, resume)

    async def serve(self) -> None:
        """Wait until :meth:`stop_soon` has stopped the server."""
        await self._stopped.wait()

    def stop_soon(self) -> None:
        """Stop the server after a moment, in which replies under way are still sent."""
        if not self._stopping:
            self._stopping = True
            asyncio.get_running_loop().call_later(0.01, self._stopped.set)

    def shutdown(self, request_id: int, session: SessionRecord) -> m.Reply:
        """Handle a Shutdown, and return the reply: a member only leaves, any other client stops the
        server.
        """
        if self.members is not None and is_member(session):
            return m.Flags(request_id, [self.members.left(session)])
        self.stop_soon()
        return m.Done(request_id)

    async def close(self) -> None:
        """Stop listening, close every connection, release memory, and remove the directory."""
        if not self._stopping and self._spill_file is not None and self.life > 1:
            self._spill_file.leave()
        self._stopping = True  # from now on, clients that leave are not logged
        self._watcher.close()
        for volume in self._attached.values():
            volume.unwatch()
        if self.returning is not None:
            self.returning.close()
        if self._compaction is not None:
            self._compaction.close()
        self._copier.stop()
        self._listener.close()
        for connection in list(self.connections):
            connection.close()
        if self.connections:
            self._all_gone = asyncio.Event()
            try:
                await asyncio.wait_for(self._all_gone.wait(), _SHUTDOWN_GRACE_S)
            except TimeoutError:
                log.warning("%d connections did not close in time", len(self.connections))
        if self._controller is not None:
            self.handshakes.close()
            self._controller.spilling.close()
        elif self._spill_file is not None:
            self._spill_file.close()
        for one in self._volumes:
            await one.close()
        if self._directory is not None:
            self._directory.remove()
        if self._controller is not None:
            ran_s = time.monotonic() - self._started
            journal.stopped(self.options.store_name, ran_s)

    async def _volume(self, index: int) -> VolumeRecord:
        options = self.options
        total = options.capacity if options.capacity is not None else default_capacity()
        directory = str(self._directory.path) if self._directory is not None else ""
        name = f"segment {index}"
        volume = Volume(
            options.store_name,
            index,
            total // options.num_storage_volumes,
            self.registry,
            directory,
            None if self._keeper is None else self._keeper.kept(name),
        )
        self._volumes.append(volume)
        if self._keeper is not None:
            self._keeper.keep(name, volume.memory.fd)
        info, memory = await volume.start(), volume.memory
        return VolumeRecord(info, memory, volume, Allocator(memory.nbytes, memory.may_grow))

    def volume_attached(
        self, attach: m.Attach, send: Callable[[m.Message], None], pid: int
    ) -> AttachedVolume:
        """Add a volume in another process, which has connected. ``pid``: of that process, as the
        kernel tells it to this one; 0: unknown.

        Raises:
            ConfigurationError: the store does not wait for a volume with this index.
            StoreFullError: its capacity is out of range.
        """
        info = attach.info
        before = self._attached.get(info.index)
        if before is not None and not before.is_connected:
            self._attached_again(before, info, send)
            return before
        wanted = self.options.num_storage_volumes if self.options.attached else 0
        if not 0 <= info.index < wanted or info.index in self._attached:
            raise ConfigurationError(
                f"store {self.options.store_name!r} does not wait for a volume {info.index}"
            )
        if self.options.spill is not None and attach.spill is None:
            raise ConfigurationError(f"volume {info.index} has no file to spill to")
        if not 4096 <= info.capacity_bytes < 1 << 60:
            raise StoreFullError(f"a volume cannot have {info.capacity_bytes} bytes")
        known = KnownVolume(info, pid, started(pid), attach.usable, attach.spill)
        volume = self._attached[info.index] = AttachedVolume(known)
        volume.connected(send)
        if len(self._attached) == wanted:
            if self._keeper is not None:
                for at, one in self._attached.items():
                    self._keeper.note(**{f"{_VOLUME}{at}": msgspec.json.encode(one.known).decode()})
            self._begin([self._attached[i] for i in range(wanted)])
            self._say_started()
            self._all_attached.set()
        return volume

    def _begin_again(self, facts: Mapping[str, str]) -> None:
        """Go on with the volumes that an earlier life had, which attach again; if there were all of
        them.
        """
        names = [f"{_VOLUME}{at}" for at in range(self.options.num_storage_volumes)]
        if not facts.keys() >= set(names):
            return
        known = [msgspec.json.decode(facts[name], type=KnownVolume) for name in names]
        self._attached = {at: AttachedVolume(one) for at, one in enumerate(known)}
        self._begin(list(self._attached.values()))
        self._all_attached.set()
        for volume in self._attached.values():
            self._expect(volume)

    def _expect(self, volume: AttachedVolume) -> None:
        """Give up a volume that does not attach again."""

        def give_up(why: str) -> None:
            if not (volume.is_connected or volume.lost or self._stopping):
                self.volume_ended(volume, why)

        if volume.lost:
            volume.halves.lost(volume.lost)
            if volume.spilled is not None:
                volume.spilled.lost(volume.lost)
            return
        self._loop.call_later(_RETURN_S, give_up, f"it has not come back within {_RETURN_S:g} s")
        volume.watch(functools.partial(give_up, "its process has ended"))

    def _attached_again(
        self, volume: AttachedVolume, info: m.VolumeInfo, send: Callable[[m.Message], None]
    ) -> None:
        """A volume that an earlier life had is there again.

        Raises:
            ConfigurationError: it is another one, or was given up.
        """
        if volume.lost or volume.info != info:
            raise ConfigurationError(
                f"store {self.options.store_name!r} does not wait for this volume {info.index}"
            )
        volume.connected(send)
        self.controller.trimmed(info.index)
        self._trimmed()
        self.controller.detached.watch_again(volume)

    def when_trimmed(self, call: Callable[[], None]) -> bool:
        """Make ``call`` once all memory can be allocated again, if a volume is returning some to
        the system at the moment. Returns whether that is so; if not, ``call`` is not made.
        """
        if all(volume.reserved is None or volume.lost for volume in self._attached.values()):
            return False
        self._when_trimmed.append(call)
        return True

    def _trimmed(self) -> None:
        calls, self._when_trimmed = self._when_trimmed, []
        for call in calls:
            self._loop.call_soon(call)

    def volume_warmed(self, volume: AttachedVolume, message: m.Warm) -> None:
        """Handle an attached volume's report of how much of its memory is warm."""
        volume.memory.warmed(message)
        if message.trimmed:
            self.controller.trimmed(volume.index)
            self._trimmed()
        if self._controller is not None:
            self._broadcast_warm()

    def volume_ended(self, volume: AttachedVolume, why: str) -> None:
        """Handle the end of an attached volume; values that only it had are lost."""
        volume.halves.lost(why)
        if self._controller is None:
            del self._attached[volume.index]
            return
        self._trimmed()
        if not self._stopping:
            journal.volume_lost(volume, why)
            self._controller.lose_volume(volume.index, why)
            if volume.spilled is not None:
                volume.spilled.lost(why)
            self._to_liveness_connections(m.Lost(volume.index, why))

    def joined(self, session: SessionRecord) -> None:
        """Record that a client has opened a session.

        Raises:
            StoreClosedError: see ``Members.joined``.
        """
        if self.members is not None:
            self.members.joined(session)
        journal.client_joined(session, len(self.controller.sessions))

    def died(self, session: SessionRecord) -> None:
        """Record that a session's process has died; its unfinished puts will be undone."""
        if self.members is not None:
            self.members.left(session)
        journal.process_died(session)

    def left(self, session: SessionRecord, why: str) -> None:
        """Record that a session is about to end."""
        if self.members is not None:
            self.members.left(session)
        if self.returning is not None:
            self.returning.gone(session)
        if not self._stopping:
            sessions = self.controller.sessions
            journal.client_left(session, why, len(sessions) - (session.token in sessions))

    def _watch(self, volume: VolumeRecord, wanted: m.WatchProcess) -> None:
        """Watch a process on a volume's host, from the process of that volume."""
        if isinstance(volume, AttachedVolume):
            volume.memory.watch(wanted)
        else:
            self._watcher.watch(wanted)

    def _start_copier(self, volume: VolumeRecord, *, again: bool = False) -> None:
        """Start a copier beside a volume, unless there is one; ``again``: in place of that one."""
        if isinstance(volume, AttachedVolume):
            volume.memory.start_copier(again=again)
        elif self._directory is not None:
            self._copier.start(self._directory.control, again=again)

    def _copier_ended_in_thread(self) -> None:
        """The copier beside the volumes of this process has ended."""

        def ended() -> None:
            for index in range(self.options.num_storage_volumes):
                self.controller.repairs.copiers.ended(index)

        call_from_thread(self._loop, ended)

    def process_ended(self, message: m.ProcessDied) -> None:
        """Handle the end of a process whose session was detached because its relay is gone."""
        self.controller.detached.process_ended(message.session)

    def _start_prefault(self) -> None:
        wanted = self.options.prefault
        capacity = sum(v.info.capacity_bytes for v in self.controller.volumes)
        if wanted is None:
            wanted = default_prefault(capacity)
        self._keep = share = wanted // len(self.controller.volumes)
        for volume in self.controller.volumes:
            volume.memory.prefault(share, self._warmed_in_thread)

    def _warmed_in_thread(self) -> None:
        call_from_thread(self._loop, self._broadcast_warm)

    def _broadcast_warm(self) -> None:
        self._to_liveness_connections(m.Warmed(self._warm()))

    def _warm(self) -> list[tuple[int, int, int]]:
        return [(v.index, 0, v.memory.warm) for v in self.controller.volumes]

    def _to_liveness_connections(self, message: m.Message) -> None:
        for conversation in self.conversations:
            if conversation.is_liveness and not conversation.is_deaf:
                conversation.send(message)

    def disconnected(self, connection: Connection) -> None:
        """Forget a connection that has closed."""
        self.connections.discard(connection)
        self._listener.freed()
        if not self.connections:
            self._all_gone.set()

    # ---- answers --------------------------------------------------------------------------

    def welcome(self, request_id: int, token: bytes, via: m.Via | None) -> m.Welcome:
        """Return the reply to a Hello that came through the relay ``via`` (None: directly)."""
        controller = self.controller
        volumes = [v.info for v in controller.volumes]
        return m.Welcome(
            request_id,
            m.PROTOCOL_VERSION,
            token,
            self.options.store_name,
            self.topology,
            volumes,
            self._warm(),
            self._strategy.transport,
            via=None if via is None else via.topology,
            owner=self.owner,
            life=self.life,
            incarnation=controller.incarnation,
        )

    def _sample_rate(self) -> None:
        then, count = self._rate_sample
        now = time.monotonic()
        total = sum(self.controller.operations.values())
        self._rate = (total - count) / max(now - then, 1e-9)
        self._rate_sample = (now, total)
        if self._compaction is not None:
            self._compaction.look()
        self.controller.trim(self.options.trim_after, self._keep)
        self._loop.call_later(1.0, self._sample_rate)

    def status(self) -> StatusReport:
        """Return the status of the store."""
        controller = self.controller
        sessions = [
            inspection.session_status(s, s.facts.role)
            for s in controller.sessions.values()
            if not (is_member(s) or s.is_holder)
        ]
        sessions += [
            inspection.session_status(s, "orphan") for s in controller.detached.sessions.values()
        ]
        pending, pending_versions, pending_bytes = inspection.unfinished(controller.catalog)
        return StatusReport(
            store_name=self.options.store_name,
            controller_pid=os.getpid(),
            uptime_s=time.monotonic() - self._started,
            keys=len(controller.catalog.newest),
            volumes=list(map(inspection.volume_status, controller.volumes)),
            sessions=sessions,
            operations={kind.__name__: n for kind, n in controller.operations.items()},
            operations_per_s=self._rate,
            strategy=self.options.strategy,
            plugin_errors=self.registry.errors(),
            pending=pending,
            pending_versions=pending_versions,
            pending_bytes=pending_bytes,
            incarnation=controller.incarnation,
            spill=controller.spilling.status(),
            repair=controller.repairs.status(),
            log_bytes=0 if self._compaction is None else self._compaction.memory_nbytes,
            keeper_pid=0 if self._keeper is None else os.getppid(),
        )


def _sessions(names: Iterable[str]) -> dict[int, str]:
    """The names by which a keeper has connections of sessions, by the numbers of these."""
    return {int(n.removeprefix(_SESSION)): n for n in names if n.startswith(_SESSION)}


async def _connect_kept(made: Connection, accepted: socket.socket) -> None:
    """Make a connection of an earlier life that is read as one from its beginning. What its
    transport read would be out of the kernel's buffer before it is recorded.
    """
    loop = asyncio.get_running_loop()
    connecting = loop.create_task(loop.connect_accepted_socket(lambda: made, accepted))
    await asyncio.sleep(0)
    # It comes right behind ``connection_made``, which waits to be called: no loop looks at sockets
    # in between.
    loop.call_soon(made.read_as_kept)
    await connecting
