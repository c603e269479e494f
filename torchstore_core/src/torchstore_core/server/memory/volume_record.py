"""What the controller keeps of each volume: its allocator and its accounts."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import msgspec

from torchstore_core.contracts.strategy import VolumeFacts
from torchstore_core.server.memory.allocator import Allocator
from torchstore_core.wire import messages as m

__all__ = ["Halves", "SegmentView", "VolumeRecord"]


class SegmentView(Protocol):
    """What the controller needs of a segment's memory (see ``memory.segment``)."""

    @property
    def warm(self) -> int:
        """How many bytes, from the start, are warm."""

    def touched(self, end: int) -> None:
        """A client has written up to ``end``."""

    def prefault(self, target: int, done: Callable[[], None]) -> None:
        """Warm the first ``target`` bytes in the background."""

    def trim(self, start: int) -> int:
        """Give pages from ``start`` on back to the system."""

    def read(self, offset: int, nbytes: int) -> bytes | None:
        """Bytes at ``offset``; None if only clients can read them, because the memory belongs to
        another process.
        """


class Halves(Protocol):
    """The server halves of a volume's transports, see ``contracts.transport.TransportServer``.

    Both methods raise TransportUnavailableError if the volume is gone.
    """

    async def handshake(self, peer: bytes, transport: str, request: bytes) -> bytes:
        """What the half of that transport answers."""

    async def disconnect(self, peer: bytes, transport: str = "") -> None:
        """Return when the half of that transport, or no half at all if it is empty, has anything
        under way for ``peer``.
        """


class VolumeRecord:
    """One volume: its allocator and its accounts, in bytes.

    ``lost`` says why its memory is gone for good; it is empty while the volume lives. Inline values
    lie with the controller, so they survive that; they are counted here, too.
    """

    __slots__ = (
        "allocator",
        "halves",
        "index",
        "info",
        "inline",
        "leased",
        "lost",
        "lost_at",
        "memory",
        "unfinished",
    )

    def __init__(self, info: m.VolumeInfo, memory: SegmentView, halves: Halves) -> None:
        self.info = info
        self.index = info.index
        self.memory = memory
        self.halves = halves
        self.allocator = Allocator(info.capacity_bytes)
        self.inline = 0
        self.leased = 0
        self.unfinished = 0
        self.lost = ""
        self.lost_at = 0.0

    @property
    def used(self) -> int:
        """Bytes in use, in the segment and inline, leased and unfinished ones included."""
        return self.inline if self.lost else self.allocator.used + self.inline

    @property
    def free(self) -> int:
        """Bytes that are left for puts, though maybe not in one piece."""
        return 0 if self.lost else max(0, self.info.capacity_bytes - self.used)

    def lose(self, why: str) -> None:
        """Its memory is gone."""
        self.lost = why or "it is gone"
        self.lost_at = time.time()
        self.leased = self.unfinished = 0
        self.info = msgspec.structs.replace(self.info, offers={}, lost=self.lost)

    def look_ahead(self, nbytes: int, warmed: Callable[[], None]) -> None:
        """Keep as much warm memory free as the last put took: its successor will need as much."""
        memory = self.memory
        short = nbytes - (memory.warm - self.allocator.used)
        if short > 0:
            memory.prefault(min(max(memory.warm, 0) + short, self.info.capacity_bytes), warmed)

    def facts(self) -> VolumeFacts:
        """The volume as a strategy sees it."""
        info = self.info
        return VolumeFacts(
            info.id,
            info.index,
            info.topology.host_id,
            info.capacity_bytes,
            self.free,
            bool(self.lost),
        )
