"""The server's view of a volume in another process, which has attached: see ``remote.attached``."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import msgspec

from torchstore_core import moments
from torchstore_core.errors import TransportUnavailableError
from torchstore_core.machine.processes import ProcessWatch, started
from torchstore_core.server.memory.allocator import Allocator
from torchstore_core.server.memory.volume_record import VolumeRecord
from torchstore_core.server.remote.spill_files import AttachedFile
from torchstore_core.server.remote.volume_line import VolumeLine
from torchstore_core.server.spilling.delays import Delayed
from torchstore_core.wire import messages as m
from torchstore_core.wire.calls import Calls

# That a volume's host does not have some memory is believed for so long.
_REFUSED_S = 1.0


class AttachedMemory:
    """The controller's ``SegmentView`` of memory in another process.

    Args:
        line: to the volume.

    Attributes:
        delayed: makes what a request raises that waits for the volume's answer.
        left: what the volume's host had left of its memory when it said so the last time.
    """

    def __init__(self, line: VolumeLine) -> None:
        self._line = line
        self.delayed: Callable[[str], Delayed] = lambda why: Delayed(why, lambda retry: None)
        self.left: int | None = None
        self._warm = 0
        self._target = 0
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
            self._line.send(m.Prefault(target))

    def trim(self, start: int) -> int:
        """Ask the volume to return the pages from ``start`` on to the system."""
        if not self._line.is_open or start >= self._warm:
            return 0
        given = self._warm - start
        self._line.send(m.Trim(start, self._warm))
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
            self._line.send(m.MayGrow(end))
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
        """Ask the volume to watch a process on its host; if it is there, see
        ``DetachedSessions.watch_again``.
        """
        if self._line.is_open:
            self._line.send(wanted)

    def start_copier(self, *, again: bool) -> None:
        """Ask the volume to start a copier beside it; ``again``: in place of one that runs, but
        not of one of an earlier life of the server.
        """
        self._line.send(m.StartCopier(again and self._line.is_open))

    def warmed(self, message: m.Warm) -> None:
        """Record how much memory is warm, as reported by the volume."""
        self._warm = message.nbytes if message.trimmed else max(self._warm, message.nbytes)
        self._target = 0


class AttachedHalves:
    """The server halves of a volume in another process, see ``memory.volume_record.Halves``.

    Args:
        volume_id: the volume's id, for error messages.
        line: to the volume.
    """

    def __init__(self, volume_id: str, line: VolumeLine) -> None:
        self._volume_id = volume_id
        self._line = line
        self._calls: Calls[m.PeerReply] = Calls()

    async def handshake(self, peer: bytes, transport: str, request: bytes) -> bytes:
        """Pass the handshake to the volume, and return its answer."""

        def send(number: int) -> None:
            self._line.send(m.PeerHandshake(number, peer, transport, request))

        return (await self._calls.make(send)).data

    async def disconnect(self, peer: bytes, transport: str = "") -> None:
        """Ask the volume to disconnect ``peer``, and wait until it has."""
        await self._calls.make(lambda number: self._line.send(m.PeerGone(number, peer, transport)))

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

    __slots__ = ("_line", "_watch", "known", "spilled")
    memory: AttachedMemory
    halves: AttachedHalves

    def __init__(self, known: KnownVolume) -> None:
        self._line = line = VolumeLine()
        memory = AttachedMemory(line)
        grow = None if known.usable is None else memory.may_grow
        allocator = Allocator(known.info.capacity_bytes, grow)
        allocator.ask(grow, allocator.capacity if known.usable is None else known.usable)
        super().__init__(known.info, memory, AttachedHalves(known.info.id, line), allocator)
        self.known = known
        self.spilled = None if known.spill is None else AttachedFile(known.spill, line)
        self._watch: ProcessWatch | None = None

    @property
    def is_connected(self) -> bool:
        """Whether it is there, or has been, in this life of the server."""
        return self._line.is_open

    def connected(self, send: Callable[[m.Message], None]) -> None:
        """The volume is there (again); ``send`` sends it a message."""
        self.unwatch()
        self._line.open(send)

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
