"""Volumes in other processes: the server's view of one, and the volume's own connection.

A volume connects like a client, but its first message is ``Attach``. From then on the server tells
it what to warm and what to return to the system, and asks how far its memory may grow; the volume
reports what is warm. When the connection closes, the volume is lost to the server, and of no more
use itself; unless the server has died and comes back: then the volume attaches again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

import msgspec

from torchstore_core import moments
from torchstore_core.errors import (
    StoreClosedError,
    StoreTimeoutError,
    TorchStoreError,
    TransportUnavailableError,
    from_wire,
    in_seconds,
)
from torchstore_core.machine.processes import ProcessWatch, started
from torchstore_core.machine.sockets.unix import connect, unix_socket
from torchstore_core.server.memory.allocator import Allocator
from torchstore_core.server.memory.segment import call_from_thread
from torchstore_core.server.memory.volume import Volume
from torchstore_core.server.memory.volume_record import VolumeRecord
from torchstore_core.server.remote.process_watches import ProcessWatches
from torchstore_core.server.remote.spill_files import AttachedFile, VolumeFile
from torchstore_core.server.repairing.copier_process import CopierProcess
from torchstore_core.server.serving.frames import FrameProtocol
from torchstore_core.server.spilling.delays import Delayed
from torchstore_core.wire import framing
from torchstore_core.wire import messages as m
from torchstore_core.wire.calls import Calls
from torchstore_core.wire.framing import FrameReader, encode, portable

log = logging.getLogger(__name__)

#: How long a server that has come back waits for a volume. As long as for a relay that is silent.
RETURN_S = 15.0
# Between two attempts to connect to such a server.
_PAUSE_S = 0.02
# That a volume's host does not have some memory is believed for so long.
_REFUSED_S = 1.0


class AttachedMemory:
    """The controller's ``SegmentView`` of memory in another process.

    Attributes:
        send: sends a message to the volume; None: it is not connected, in this life of the server.
        delayed: makes what a request raises that waits for the volume's answer.
        left: what the volume's host had left of its memory when it said so the last time.
    """

    def __init__(self) -> None:
        self.send: Callable[[m.Message], None] | None = None
        self.delayed: Callable[[str], Delayed] = lambda why: Delayed(why, lambda retry: None)
        self.left: int | None = None
        self._warm = 0
        self._target = 0
        self._wants_copier = False
        self._asked = 0  # whether its memory may grow so far is what the volume is asked
        self._refused: m.Grown | None = None
        self._refused_at = 0.0

    @property
    def warm(self) -> int:
        """The number of bytes, from the start, that are known here to be warm."""
        return self._warm

    def touched(self, end: int) -> None:
        """Record that the memory up to ``end`` has been written to."""
        self._warm = max(self._warm, end)

    def prefault(self, target: int, done: Callable[[], None]) -> None:
        """Ask the volume to warm its first ``target`` bytes. ``done`` is not called; the volume
        sends a message to the server instead.
        """
        if target > max(self._target, self._warm):
            self._target = target
            self._tell(m.Prefault(target))

    def trim(self, start: int) -> int:
        """Ask the volume to return the pages from ``start`` on to the system."""
        if self.send is None or start >= self._warm:
            return 0
        given = self._warm - start
        self.send(m.Trim(start, self._warm))
        return given

    def may_grow(self, end: int) -> int:
        """Return how far the volume may be written to if that is less than ``end``, because its
        host does not have the memory, as it has said a moment ago.

        Raises:
            Delayed: the volume is asked.
        """
        refused = self._refused
        if refused is not None and end >= refused.end:
            if moments.monotonic() - self._refused_at < _REFUSED_S:
                return refused.usable
            self._refused = None
        if end > self._asked:
            self._asked = end
            self._tell(m.MayGrow(end))
        raise self.delayed("a volume was being asked whether its host has the memory")

    def grown(self, message: m.Grown) -> None:
        """Record how far the volume may be written to, as reported by the volume."""
        self.left = message.left
        if message.end >= self._asked:
            self._asked = 0
        self._refused, self._refused_at = None, moments.monotonic()
        if message.usable < message.end:
            self._refused = message

    @property
    def is_here(self) -> bool:
        """False: only clients can read this memory, under a lease, and write to it."""
        return False

    def read(self, offset: int, nbytes: int) -> None:
        return None

    def write(self, offsets: Sequence[int], contents: Sequence[bytes]) -> bool:
        return False

    def watch(self, wanted: m.WatchProcess) -> None:
        """Ask the volume to watch a process on its host."""
        self._tell(wanted)

    def start_copier(self, *, again: bool) -> None:
        """Ask the volume to start a copier beside it; ``again``: in place of one that runs."""
        self._wants_copier = self.send is None
        self._tell(m.StartCopier(again))

    def warmed(self, message: m.Warm) -> None:
        """Record how much memory is warm, as reported by the volume."""
        self._warm = message.nbytes if message.trimmed else max(self._warm, message.nbytes)
        self._target = 0

    def connected(self, send: Callable[[m.Message], None]) -> None:
        """The volume is there (again): ask for what it could not be asked for before."""
        self.send = send
        if self._target:
            send(m.Prefault(self._target))
        if self._asked:
            send(m.MayGrow(self._asked))
        if self._wants_copier:
            self._wants_copier = False
            send(m.StartCopier(False))

    def _tell(self, message: m.Message) -> None:
        if self.send is not None:
            self.send(message)


class AttachedHalves:
    """The server halves of a volume in another process, see ``memory.volume_record.Halves``.

    Args:
        volume_id: the volume's id, for error messages.
    """

    def __init__(self, volume_id: str) -> None:
        self._volume_id = volume_id
        self._waiting: list[m.Message] = []  # until it is connected
        self._send: Callable[[m.Message], None] = self._waiting.append
        self._calls: Calls[m.PeerReply] = Calls()

    async def handshake(self, peer: bytes, transport: str, request: bytes) -> bytes:
        """Pass the handshake to the volume, and return its answer."""

        def send(number: int) -> None:
            self._send(m.PeerHandshake(number, peer, transport, request))

        return (await self._calls.make(send)).data

    async def disconnect(self, peer: bytes, transport: str = "") -> None:
        """Ask the volume to disconnect ``peer``, and wait until it has."""
        await self._calls.make(lambda number: self._send(m.PeerGone(number, peer, transport)))

    def connected(self, send: Callable[[m.Message], None]) -> None:
        """The volume is there (again)."""
        self._send = send
        for message in self._waiting:
            send(message)
        self._waiting.clear()

    def replied(self, reply: m.PeerReply) -> None:
        """Pass the volume's answer to the call that waits for it."""
        self._calls.answered(reply)

    def lost(self, why: str) -> None:
        """Fail all calls, present and future, because the volume is gone."""
        text = f"volume {self._volume_id} is gone: {why or 'it is gone'}"
        self._calls.fail(lambda: TransportUnavailableError(text))


class KnownVolume(msgspec.Struct, frozen=True):
    """What does not change of a volume in another process.

    Args:
        info: as it has told it.
        pid, started: of its process, see ``machine.processes``; 0: unknown.
        usable: how far its memory may be used from the beginning, see ``messages.Attach``.
        spill: its spill file; None: it has none.
    """

    info: m.VolumeInfo
    pid: int
    started: int
    usable: int | None = None
    spill: m.SpillPlace | None = None


class AttachedVolume(VolumeRecord):
    """A volume in another process.

    Attributes:
        spilled: its spill file; None: it has none.
    """

    __slots__ = ("_watch", "is_connected", "known", "spilled")
    memory: AttachedMemory
    halves: AttachedHalves

    def __init__(self, known: KnownVolume) -> None:
        memory = AttachedMemory()
        grow = None if known.usable is None else memory.may_grow
        allocator = Allocator(known.info.capacity_bytes, grow)
        allocator.ask(grow, allocator.capacity if known.usable is None else known.usable)
        super().__init__(known.info, memory, AttachedHalves(known.info.id), allocator)
        self.known = known
        self.spilled = None if known.spill is None else AttachedFile(known.spill)
        self.is_connected = False
        self._watch: ProcessWatch | None = None

    def connected(self, send: Callable[[m.Message], None]) -> None:
        """The volume is there (again); ``send`` sends it a message."""
        self.is_connected = True
        self.unwatch()
        self.memory.connected(send)
        self.halves.connected(send)
        if self.spilled is not None:
            self.spilled.connected(send)

    def watch(self, ended: Callable[[], None]) -> None:
        """Call something when its process has ended, as far as that can be seen, unless it connects
        before.
        """
        known = self.known
        if known.pid and known.started != started(known.pid):
            asyncio.get_running_loop().call_soon(ended)
        elif known.pid:
            self._watch = ProcessWatch(known.pid, ended)

    def unwatch(self) -> None:
        """Watch its process no more. Idempotent."""
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.close()

    def trim(self, keep: int) -> int:
        """Ask for the end of the memory to be returned to the system. Until the volume has
        answered, nothing is placed there, because the pages' contents are discarded.
        """
        given = 0 if self.reserved is not None else super().trim(keep)
        if given:
            self.reserve()
        return given


class VolumeConnection(FrameProtocol):
    """A volume's connection to its server; made by :meth:`open`. If the server comes back when it
    dies, so does this connection.

    Args:
        volume: the volume, which has been started.
        info: the result of ``volume.start()``.
        lost: called once, when the server of an attached volume is gone for good.
        spill: the volume's spill file, which ends with this connection; None: it has none.
    """

    def __init__(
        self,
        volume: Volume,
        info: m.VolumeInfo,
        lost: Callable[[], None],
        spill: VolumeFile | None = None,
    ) -> None:
        super().__init__(m.MAX_FRAME)
        self._volume = volume
        self._info = info
        self._lost = lost
        self._spill = spill
        self._loop = asyncio.get_running_loop()
        self._attached: asyncio.Future[int] = self._loop.create_future()
        self._returning: asyncio.Task[None] | None = None
        self._watcher = ProcessWatches(self._send)
        self._answers: set[asyncio.Task[None]] = set()
        self._copier = CopierProcess([info.index], self._copier_ended_in_thread)
        self._path = ""
        self._closing = False

    @classmethod
    async def open(
        cls,
        path: str,
        volume: Volume,
        info: m.VolumeInfo,
        lost: Callable[[], None],
        timeout: float,
        spill: VolumeFile | None = None,
    ) -> VolumeConnection:
        """Attach a volume to the server whose control socket, or relay, is at ``path``.

        Raises:
            StoreClosedError: there is no server at ``path``.
            StoreTimeoutError: it took longer than ``timeout`` seconds.
            ProtocolError, ConfigurationError: the server rejected the volume.
        """
        made = cls(volume, info, lost, spill)
        made._path = path
        try:
            async with asyncio.timeout(timeout):
                await made._attach()
        except TimeoutError as error:
            made.close()
            raise StoreTimeoutError(
                f"volume {info.id} could not attach within {in_seconds(timeout)}",
                details={"timeout": timeout, "volume": info.id},
            ) from error
        except OSError as error:
            made.close()
            raise StoreClosedError(f"volume {info.id}: no server at {path}: {error}") from error
        except BaseException:
            made.close()
            raise
        return made

    async def _attach(self) -> None:
        """Connect, and wait until the server has accepted the volume.

        Raises:
            StoreClosedError: the connection was lost.
            OSError: nobody listens there.
            TorchStoreError: the server has rejected the volume.
        """
        with unix_socket() as sock:
            await connect(sock, self._path)
            await self._loop.create_unix_connection(lambda: self, sock=sock)
        await self._attached

    async def _return(self) -> None:
        """Attach again to a server that comes back, as often as that takes."""
        while not self._closing:
            self._attached = self._loop.create_future()
            if self._spill is not None:
                await self._spill.drop()
            try:
                await self._attach()
            except StoreClosedError:  # it has died again
                await asyncio.sleep(_PAUSE_S)
            except (TorchStoreError, OSError) as error:
                log.info("volume %s: its server does not come back: %s", self._info.id, error)
                self._closing = True
                self._lost()
            else:
                self._tell()
                return

    def close(self) -> None:
        """Disconnect from the server; ``lost`` is not called after this."""
        self._closing = True
        if self._returning is not None:
            self._returning.cancel()
        self._watcher.close()
        self._copier.stop()
        super().close()
        if self._spill is not None:
            self._spill.close()

    # ---- FrameProtocol --------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.reader = FrameReader(m.MAX_FRAME)
        self._watcher = ProcessWatches(self._send)
        memory = self._volume.memory
        usable = memory.may_grow(memory.warm)
        spill = None if self._spill is None else self._spill.place
        self._send(m.Attach(1, m.PROTOCOL_VERSION, self._info, usable, spill))

    def received(self, bodies: list[bytes]) -> None:
        """Handle the messages that the server has sent."""
        try:
            for body in bodies:
                self._handle(framing.decode_reply(body))
        except msgspec.DecodeError as error:
            self.unreadable(error)

    def unreadable(self, error: Exception) -> None:
        """Disconnect from a server whose messages cannot be decoded."""
        log.warning("volume %s: its server sent something unreadable: %s", self._info.id, error)
        self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._watcher.close()
        self._copier.stop()
        for task in self._answers:
            task.cancel()
        if not self._attached.done():
            self._fail(StoreClosedError(f"volume {self._info.id}: its server is gone"))
        elif self._closing or self._attached.cancelled() or self._attached.exception():
            return  # it has never been attached
        elif self._attached.result():
            self._returning = self._loop.create_task(self._return())
        else:
            self._closing = True
            self._lost()

    # ---- inside ---------------------------------------------------------------------------

    def _send(self, message: m.Message) -> None:
        self.write(encode(message))

    def _handle(self, message: m.Reply) -> None:
        memory = self._volume.memory
        match message:
            case m.Attached():
                if not self._attached.done():
                    self._attached.set_result(message.life)
            case m.Failure():
                self._fail(from_wire(message.code, message.message, message.key, message.details))
            case m.Prefault():
                memory.prefault(message.nbytes, self._warmed_in_thread)
            case m.Trim():
                memory.touched(message.warm)  # clients write without telling this process
                memory.trim(message.start)
                self._tell(trimmed=True)
            case m.MayGrow():
                usable = memory.may_grow(message.end)
                self._send(m.Grown(message.end, usable, memory.left))
            case m.WatchProcess():
                self._watcher.watch(message)
            case (
                m.WriteValues()
                | m.WriteTogether()
                | m.ReadPieces()
                | m.ReadTogether()
                | m.CutSpill()
                | m.FreeSpill()
                | m.KeepSpill()
            ) if self._spill is not None:
                self._spill.order(message, self._send)
            case m.HurrySpill() if self._spill is not None:
                self._spill.hurry()
            case m.StartCopier():
                self._copier.start(self._path, again=message.again)
            case m.PeerHandshake() | m.PeerGone():
                task = self._loop.create_task(self._answer(message))
                self._answers.add(task)
                task.add_done_callback(self._answers.discard)
            case _:
                log.debug("volume %s: nothing to do for %s", self._info.id, type(message).__name__)

    async def _answer(self, message: m.PeerHandshake | m.PeerGone) -> None:
        data = b""
        try:
            if isinstance(message, m.PeerGone):
                await self._volume.disconnect(message.peer, message.transport)
            else:
                data = await self._volume.handshake(message.peer, message.transport, message.data)
        except TorchStoreError as error:
            self._send(m.PeerReply(message.id, b"", error.code, *portable(error)))
        else:
            self._send(m.PeerReply(message.id, data))

    def _fail(self, error: TorchStoreError) -> None:
        if not self._attached.done():
            self._attached.set_exception(error)

    def _copier_ended_in_thread(self) -> None:
        call_from_thread(self._loop, lambda: self._send(m.CopierEnded()))

    def _warmed_in_thread(self) -> None:
        call_from_thread(self._loop, self._tell)

    def _tell(self, *, trimmed: bool = False) -> None:
        self._send(m.Warm(self._volume.memory.warm, trimmed))
