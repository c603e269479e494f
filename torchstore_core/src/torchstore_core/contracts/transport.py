"""The transport contract: how bytes get from a client's memory into a volume's segments and back.

A transport has two halves, which usually run in different processes:

* the **server half** (:class:`TransportServer`) runs in the process of a volume. It is given the
  volume's segments once and returns an opaque *offer*;
* the **client half** (:class:`Link`) is created from that offer and then moves bytes, one-sided and
  batched, between local memory and ``(segment, offset)``.

Optional abilities are Protocols: a link that can expose a segment as local memory implements
:class:`SupportsWindow` (the core then does the copies itself, strided and in parallel); a link that
can provide a private copy-on-write view implements :class:`SupportsMap` (zero-copy ``get``).

The store takes care of lifetimes: an address is only passed to a link while a grant or a lease
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
    """The expected cost of a link: a batch takes ``latency_s + nbytes / bytes_per_s`` seconds."""

    latency_s: float
    bytes_per_s: float
    reason: str

    def cost_s(self, nbytes: int) -> float:
        """Expected seconds for a batch of ``nbytes`` bytes."""
        return self.latency_s + nbytes / self.bytes_per_s


class Refusal(msgspec.Struct, frozen=True, tag="refusal"):
    """Why a transport cannot serve a link, as text that a person can read."""

    reason: str


class LinkContext(msgspec.Struct, frozen=True):
    """What a bid is based on: where the client and the volume run, and how they are connected.

    ``same_host`` is proven (same boot id *and* the Unix socket was reached), never guessed.
    ``offered``: the volume has an offer of this transport.
    ``control``: path of that Unix socket, which is on the client's host and belongs to the server
    or to a relay.
    """

    client: Topology
    volume: Topology
    same_host: bool
    offered: bool
    control: str = ""


class TransportSpec(msgspec.Struct, frozen=True):
    """What a plug-in's ``torchstore_transport`` hook returns: a small descriptor without imports.

    Args:
        name: must be the same as the entry-point name.
        bid: pure function of a :class:`LinkContext` that returns a ``Bid`` or a ``Refusal``.
        client: ``"module:Class"`` of the :class:`Link`, imported only when it is chosen.
        server: ``"module:Class"`` of the :class:`TransportServer`, imported when a volume starts.
        probe: cheap check of this host; returns ``None`` if the transport is usable, else the
            reason why not.
        in_band: the bytes travel inside control messages (the ``inline`` transport, which has no
            halves).
        max_bytes: largest batch that the transport accepts; ``None`` for no limit.
        loop_bound: the link belongs to the event loop that connected it (sockets on asyncio).
            Since not every loop is closed explicitly, such a link must not refer to its loop
            between transfers, and must close its resources when both are garbage-collected.
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
    """A volume's memory as the server half sees it: an id, a file descriptor, a size in bytes.

    The descriptor stays open until ``close()``. The store has not mapped the memory for the
    server half.
    """

    id: int
    fd: int
    nbytes: int


class ServerContext(NamedTuple):
    """What a server half may rely on. ``socket_dir`` is a private directory (mode 0700)."""

    store_name: str
    volume_id: str
    socket_dir: str
    topology: Topology


class TransportServer(ABC):
    """Server half. Created once per volume, in the server process (which has no torch)."""

    @abstractmethod
    async def start(self, context: ServerContext, segments: Sequence[Segment]) -> bytes:
        """Register the segments and return the offer that clients connect with.

        Raises:
            TransportUnavailableError: this host cannot serve the transport; the volume starts
                without it.
        """

    @abstractmethod
    async def close(self) -> None:
        """Stop serving and release everything that ``start`` took. Idempotent."""


class Copy(NamedTuple):
    """One contiguous copy: ``nbytes`` bytes between a local ``address`` and a segment's offset."""

    address: int
    segment: int
    offset: int
    nbytes: int


class Link(ABC):
    """Client half: moves batches of bytes to and from one volume."""

    @classmethod
    @abstractmethod
    async def connect(cls, offer: bytes, context: LinkContext) -> Link:
        """Create a link from a volume's offer.

        Raises:
            TransportNotReadyError: the link cannot be made at the moment (no file descriptors are
                left, the server is slow). The store uses the next bid, and tries again later.
            TransportUnavailableError: the offer cannot be used from here, now or later.
        """

    @abstractmethod
    async def write(self, copies: Sequence[Copy]) -> None:
        """Copy local memory into the segments. When it returns, all bytes have arrived.

        Once it has raised (``CancelledError`` included), no further byte is written.

        Raises:
            TransportError: the link is broken; the store tries the next bid, once.
        """

    @abstractmethod
    async def read(self, copies: Sequence[Copy]) -> None:
        """Copy bytes of the segments to local memory, with the same guarantees as :meth:`write`."""

    @abstractmethod
    def close(self) -> None:
        """Release all resources immediately, without blocking. Idempotent."""


class Window(NamedTuple):
    """A whole segment as memory of this process: writable, and shared with the volume."""

    address: int
    nbytes: int


class Mapping(NamedTuple):
    """Private copy-on-write memory. It is unmapped when ``owner`` and all its views are dead.

    ``owner`` is a writable buffer that can be weakly referenced; the requested range starts
    ``offset`` bytes into it, at ``address``.
    """

    address: int
    offset: int
    nbytes: int
    owner: object


@runtime_checkable
class SupportsWindow(Protocol):
    """The segment is addressable, so the core copies directly, with its own copy threads."""

    def window(self, segment: int) -> Window:
        """Return the window on ``segment``, which stays valid until ``close()``."""

    def prepare(self, segment: int, offset: int, nbytes: int, *, fresh: bool) -> None:
        """Fill the page tables of a range that is about to be copied. May block; thread-safe.

        ``fresh``: the range may not have pages yet (it is about to be written for the first time).
        """


@runtime_checkable
class SupportsMap(Protocol):
    """The link can map a sealed range as private, writable, copy-on-write memory."""

    def map(self, segment: int, offset: int, nbytes: int) -> Mapping:
        """Map ``nbytes`` bytes from ``offset`` (any alignment; ``address`` points at it)."""
