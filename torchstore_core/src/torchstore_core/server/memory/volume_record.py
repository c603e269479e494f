"""The controller's record of each volume: its allocator and its accounts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from torchstore_core import moments
from torchstore_core.contracts.strategy import VolumeFacts
from torchstore_core.server.memory.allocator import Allocator
from torchstore_core.wire import messages as m


class SegmentView(Protocol):
    """The part of a segment's interface that the controller needs (see ``memory.segment``)."""

    @property
    def warm(self) -> int:
        """The number of bytes, from the start, that are warm."""

    def touched(self, end: int) -> None:
        """Record that the memory up to ``end`` has been written to."""

    def prefault(self, target: int, done: Callable[[], None]) -> None:
        """Warm the first ``target`` bytes in the background; memory of this process calls ``done``
        when that has ended.
        """

    def trim(self, start: int) -> int:
        """Return the pages from ``start`` on to the system; returns the number of bytes."""

    @property
    def left(self) -> int | None:
        """How many bytes of memory its host, or a cgroup, has left; None: that is not known."""

    @property
    def is_here(self) -> bool:
        """Whether this process can read and write it; otherwise it belongs to another process."""

    def read(self, offset: int, nbytes: int) -> bytes | None:
        """Read ``nbytes`` bytes at ``offset``; None if it is not here."""

    def write(self, offsets: Sequence[int], contents: Sequence[bytes]) -> bool:
        """Write each of the contents at its offset. Returns False if not all could be written:
        the memory is not here, or the system has no page for it.
        """


class Halves(Protocol):
    """The server halves of a volume's transports, see ``contracts.transport.TransportServer``.

    Both methods raise TransportUnavailableError if the volume is gone.
    """

    async def handshake(self, peer: bytes, transport: str, request: bytes) -> bytes:
        """Return the answer of the transport's half to a client's handshake."""

    async def disconnect(self, peer: bytes, transport: str = "") -> None:
        """Return once the transport's half (all halves if ``transport`` is empty) has nothing under
        way for ``peer``.
        """


class VolumeRecord:
    """One volume: its allocator and its accounts, in bytes.

    ``lost`` says why its memory is permanently lost; it is empty while the volume is live. Inline
    values are kept by the controller, so they survive the loss, but they are counted here, too.
    ``draining``: it is to be taken away, so nothing new is placed on it. ``reserved``: the free
    range that a volume in another process is returning to the system; nothing is placed there.

    Args:
        allocator: of the memory; without it, all of the memory may be used at any time.
    """

    __slots__ = (
        "allocator",
        "draining",
        "halves",
        "index",
        "info",
        "inline",
        "leased",
        "lost",
        "lost_at",
        "memory",
        "reserved",
        "unfinished",
    )

    def __init__(
        self,
        info: m.VolumeInfo,
        memory: SegmentView,
        halves: Halves,
        allocator: Allocator | None = None,
    ) -> None:
        self.info = info
        self.index = info.index
        self.memory = memory
        self.halves = halves
        self.allocator = allocator or Allocator(info.capacity_bytes)
        self.inline = 0
        self.leased = 0
        self.unfinished = 0
        self.lost = ""
        self.lost_at = 0.0
        self.draining = False
        self.reserved: tuple[int, int] | None = None

    @property
    def closed(self) -> str:
        """Why nothing new is placed on it; empty if something is."""
        return self.lost or ("it is being drained" if self.draining else "")

    @property
    def used(self) -> int:
        """The bytes in use, in the segment and inline, including leased and unfinished ones."""
        return self.inline if self.lost else self.allocator.used + self.inline

    @property
    def free(self) -> int:
        """The bytes that are left for puts, though maybe not in one piece."""
        return 0 if self.closed else self.left

    @property
    def left(self) -> int:
        """The same, whether or not something new may be placed there."""
        return 0 if self.lost else max(0, self.info.capacity_bytes - self.used)

    def lose(self, why: str) -> None:
        """Record that the volume's memory is permanently lost."""
        self.lost = why or "it is gone"
        self.lost_at = moments.wall()
        self.leased = self.unfinished = 0
        self.info = msgspec.structs.replace(self.info, offers={}, lost=self.lost)

    def look_ahead(self, nbytes: int, warmed: Callable[[], None]) -> None:
        """Prefault as much free memory as the last put took, because the next will need as much."""
        memory = self.memory
        short = nbytes - (memory.warm - self.allocator.used)
        if short > 0:
            memory.prefault(min(max(memory.warm, 0) + short, self.info.capacity_bytes), warmed)

    def trim(self, keep: int) -> int:
        """Return free memory beyond the first ``keep`` bytes to the system; returns how much."""
        given = self.memory.trim(max(self.allocator.used_end, keep))
        if given:
            self.allocator.ask_again()
        return given

    def reserve(self) -> None:
        """Place nothing at the end of the memory until :meth:`trimmed`."""
        self.reserved = self.allocator.take_tail()

    def trimmed(self) -> None:
        """The end of the memory has been returned to the system, or never will be."""
        reserved, self.reserved = self.reserved, None
        if reserved is not None:
            self.allocator.free([reserved])

    def facts(self, *, for_puts: bool = True) -> VolumeFacts:
        """Return the facts about the volume that a strategy sees. For puts, one that is drained is
        as good as lost.
        """
        info = self.info
        return VolumeFacts(
            info.id,
            info.index,
            info.topology.host_id,
            info.capacity_bytes,
            self.free,
            bool(self.closed if for_puts else self.lost),
            info.topology.hostname,
        )
