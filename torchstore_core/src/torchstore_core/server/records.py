"""What the controller keeps: values, unfinished puts, sessions, volumes. Plain records."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import msgspec

from torchstore_core.contracts.strategy import ClientFacts, VolumeFacts
from torchstore_core.server.allocator import Allocator
from torchstore_core.topology import Topology
from torchstore_core.values import ValueMeta
from torchstore_core.wire import messages as m

__all__ = ["SegmentView", "SessionRecord", "Txn", "Value", "VolumeRecord", "Waiter"]


class SegmentView(Protocol):
    """What the controller needs of a segment's memory (see ``server.memory``)."""

    @property
    def warm(self) -> int:
        """Bytes from the start that are warm."""

    def touched(self, end: int) -> None:
        """A client wrote up to ``end``."""

    def prefault(self, target: int, done: Callable[[], None]) -> None:
        """Warm the first ``target`` bytes in the background."""

    def trim(self, start: int) -> int:
        """Give pages from ``start`` on back to the system."""

    def read(self, offset: int, nbytes: int) -> bytes:
        """Bytes at ``offset``."""


class Value(msgspec.Struct, eq=False, gc=False):
    """One immutable version of one key: inline ``data``, or a range of a volume's segment."""

    key: str
    meta: ValueMeta
    nbytes: int
    volume: int
    data: bytes | None
    offset: int
    creator: ClientFacts
    version: int = 0
    created: float = 0.0
    pins: int = 0
    live: bool = False


class Txn:
    """An unfinished put: values whose granted memory is being written."""

    __slots__ = ("nbytes", "started", "values")

    def __init__(self, values: list[Value], nbytes: int) -> None:
        self.values = values
        self.nbytes = nbytes
        self.started = time.monotonic()


class SessionRecord:
    """One client process and everything it holds."""

    __slots__ = (
        "facts",
        "given_back",
        "keeps_memory",
        "lanes",
        "leases",
        "opened",
        "token",
        "topology",
        "txns",
    )

    def __init__(self, token: bytes, facts: ClientFacts, topology: Topology) -> None:
        self.token = token
        self.facts = facts
        self.topology = topology
        self.txns: dict[int, Txn] = {}
        self.leases: dict[int, list[Value | None]] = {}
        # Ids given back before the request that makes them was seen (it came by another pipe).
        self.given_back: set[int] = set()
        self.keeps_memory = False  # see messages.Keep
        self.lanes = 0
        self.opened = time.monotonic()


class VolumeRecord:
    """One volume: its allocator and its accounts, in bytes."""

    __slots__ = ("allocator", "index", "info", "inline", "leased", "memory", "unfinished")

    def __init__(self, info: m.VolumeInfo, memory: SegmentView) -> None:
        self.info = info
        self.index = info.index
        self.memory = memory
        self.allocator = Allocator(info.capacity_bytes)
        self.inline = 0
        self.leased = 0
        self.unfinished = 0

    @property
    def used(self) -> int:
        """Bytes taken: segments and inline values, leased and unfinished ones included."""
        return self.allocator.used + self.inline

    def facts(self) -> VolumeFacts:
        """The volume as a strategy sees it."""
        info = self.info
        free = max(0, info.capacity_bytes - self.used)
        return VolumeFacts(info.id, info.index, info.topology.host_id, info.capacity_bytes, free)


class Waiter:
    """A Wait that is not fulfilled yet."""

    __slots__ = ("keys", "min_version", "reply")

    def __init__(
        self, keys: list[str], min_version: int, reply: Callable[[list[int]], None]
    ) -> None:
        self.keys = keys
        self.min_version = min_version
        self.reply = reply
