"""The transport contract: how bytes get from a client's memory into a volume's segments and back.

A transport has two halves that never meet in one object:

* the **server half** (:class:`TransportServer`) lives beside a volume. It is shown the volume's
  segments once and answers with an opaque *offer*;
* the **client half** (:class:`Link`) is made from that offer and then moves bytes, one-sided and
  batched, between local memory and ``(segment, offset)``.

Optional abilities are Protocols: a link that can show a segment as local memory implements
:class:`SupportsWindow` (the core then copies by itself, strided and in parallel); a link that can
give a private copy-on-write view implements :class:`SupportsMap` (zero-copy ``get``).

Lifetimes are the store's business: an address is only handed to a link while a grant or a lease
protects it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import msgspec

from torchstore_core.machine.topology import Topology

__all__ = [
    "Bid",
    "Copy",
    "Link",
    "LinkContext",
    "Mapping",
    "Refusal",
    "Segment",
    "ServerContext",
    "SupportsMap",
    "SupportsWindow",
    "TransportServer",
    "TransportSpec",
    "Window",
]


class Bid(msgspec.Struct, frozen=True, tag="bid"):
    """What a transport expects of a link: ``latency_s + nbytes / bytes_per_s`` seconds a batch."""

    latency_s: float
    bytes_per_s: float
    reason: str

    def cost_s(self, nbytes: int) -> float:
        """Expected seconds for a batch of ``nbytes`` bytes."""
        return self.latency_s + nbytes / self.bytes_per_s


class Refusal(msgspec.Struct, frozen=True, tag="refusal"):
    """Why a transport cannot serve a link, in words for a person."""

    reason: str


class LinkContext(msgspec.Struct, frozen=True):
    """The two plain facts that a bid is made from, and what the volume offered.

    ``same_host`` is proven (same boot id *and* the Unix socket was reached), never guessed.
    ``control``: path of that Unix socket, which is on the client's host: the server's, or a
    relay's.
    """

    client: Topology
    volume: Topology
    same_host: bool
    offered: bool
    control: str = ""


class TransportSpec(msgspec.Struct, frozen=True):
    """What a plug-in's ``torchstore_transport`` hook returns: a small descriptor, no imports.

    Args:
        name: must equal the entry-point name.
        bid: pure function of a :class:`LinkContext`; ``Bid`` or ``Refusal``.
        client: ``"module:Class"`` of the :class:`Link`, imported only when chosen.
        server: ``"module:Class"`` of the :class:`TransportServer`, imported when a volume starts.
        probe: cheap check of this host; ``None`` if usable, else the reason why not.
        in_band: bytes ride inside control messages (the ``inline`` transport; no halves).
        max_bytes: largest batch it takes, ``None`` for no limit.
        loop_bound: the link belongs to the event loop that connected it (sockets on asyncio). Not
            all loops are closed: between transfers it does not refer to its loop, and when it is
            collected with it, it closes what it has.
    """

    name: str
    bid: Callable[[LinkContext], Bid | Refusal]
    client: str | None = None
    server: str | None = None
    probe: Callable[[], str | None] | None = None
    in_band: bool = False
    max_bytes: int | None = None
    loop_bound: bool = False


class Segment(NamedTuple):
    """A volume's memory as its server half sees it: an id, a file descriptor, a size in bytes.

    The descriptor stays open, and the memory stays mapped nowhere, until ``close()``.
    """

    id: int
    fd: int
    nbytes: int


class ServerContext(NamedTuple):
    """What a server half may use. ``socket_dir`` is a private directory (mode 0700)."""

    store_name: str
    volume_id: str
    socket_dir: str
    topology: Topology


class TransportServer(ABC):
    """Server half. Made once per volume, inside the (torch-free) server process."""

    @abstractmethod
    async def start(self, context: ServerContext, segments: Sequence[Segment]) -> bytes:
        """Register the segments and return the offer that clients connect with.

        Raises:
            TransportUnavailableError: this host cannot serve it; the volume goes on without.
        """

    @abstractmethod
    async def close(self) -> None:
        """Stop serving and release everything that ``start`` took. Idempotent."""


class Copy(NamedTuple):
    """One contiguous piece: ``nbytes`` bytes between local ``address`` and a place in a segment."""

    address: int
    segment: int
    offset: int
    nbytes: int


class Link(ABC):
    """Client half: moves batches of bytes to and from one volume."""

    @classmethod
    @abstractmethod
    async def connect(cls, offer: bytes, context: LinkContext) -> Link:
        """Make a link from a volume's offer.

        Raises:
            TransportNotReadyError: not at this moment (descriptors are used up, the server is
                slow): the store goes on with the next bid, and tries again later.
            TransportUnavailableError: the offer cannot be used from here, now or later.
        """

    @abstractmethod
    async def write(self, copies: Sequence[Copy]) -> None:
        """Move local memory into the segments. On return the bytes are there.

        When it raises (cancellation included) no byte is written any more.

        Raises:
            TransportError: the link is broken; the store tries the next bid, once.
        """

    @abstractmethod
    async def read(self, copies: Sequence[Copy]) -> None:
        """Move segments' bytes into local memory. Same promises as :meth:`write`."""

    @abstractmethod
    def close(self) -> None:
        """Let go of everything at once; never blocks. Idempotent."""


class Window(NamedTuple):
    """A whole segment as memory of this process, writable, shared with the volume."""

    address: int
    nbytes: int


class Mapping(NamedTuple):
    """Private copy-on-write memory, unmapped when ``owner`` and all that is made of it dies.

    ``owner`` is a writable, weakly referenceable buffer; the range asked for starts ``offset``
    bytes into it, at ``address``.
    """

    address: int
    offset: int
    nbytes: int
    owner: object


@runtime_checkable
class SupportsWindow(Protocol):
    """The segment is addressable: the core copies directly, with its own copy threads."""

    def window(self, segment: int) -> Window:
        """The window on ``segment``; stays valid until ``close()``."""

    def prepare(self, segment: int, offset: int, nbytes: int, *, fresh: bool) -> None:
        """Fill page tables for a range that is about to be copied. May block; thread-safe.

        ``fresh``: the range may have no pages yet (it is about to be written for the first time).
        """


@runtime_checkable
class SupportsMap(Protocol):
    """The link can hand out private, writable, copy-on-write memory of a sealed range."""

    def map(self, segment: int, offset: int, nbytes: int) -> Mapping:
        """Map ``nbytes`` bytes from ``offset`` (any alignment; ``address`` points at it)."""
