"""The transport contract: how bytes get from a client's memory into a volume's segments and back.

A transport has two halves, which usually run in different processes, often on different hosts:

* the **server half** (:class:`TransportServer`) serves the segments of one volume. It is given them
  once and returns an opaque *offer*, which every client receives with the description of the store;
* the **client half** (:class:`Link`) is created from that offer. It moves batches of bytes between
  local memory and ``(segment, offset)``.

**They meet over the control connection.** Either may need to know more of the other than an offer
can say: addresses, keys, a rendezvous. The client half asks (``LinkContext.handshake``), the server
half answers (:meth:`TransportServer.handshake`), as often as they like; the store carries the bytes
through servers and relays and does not look into them. So nothing has to listen only in order to
meet, and whoever has not been let in by the store learns no secret.

**One-sided or two-sided.** A link over shared memory or RDMA moves bytes alone. One over
send/receive describes each batch to its server half (over its own connection, or by a handshake)
and both take part. The store does not care.

**Optional abilities** are declared, and the store does itself what is not: a link that can expose a
segment as local memory implements :class:`SupportsWindow` (the store copies directly, strided and
in parallel); one that can provide a private copy-on-write view implements :class:`SupportsMap`
(zero-copy ``get``); ``Link.rows`` says that it takes strided copies, ``Link.devices`` that it
reaches the memory of devices. All others are given contiguous host memory, packed by the store.

**Lifetimes.** An address is only passed to a link while a grant or a lease protects it, and that
protection ends when the call returns or raises, so no byte may move afterwards. A link that cannot
promise this after a failure, because its peer may still be writing, sets :attr:`Link.unsettled`:
the memory stays in quarantine until the server half has said that it is done with this client
(:meth:`TransportServer.disconnect`), or until its volume is dead.

**Failure.** A link that raises :class:`~torchstore_core.errors.TransportError` is closed; the next
best transport moves what is left of the batch, and the link is made anew after a pause.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import ClassVar, NamedTuple, Protocol, runtime_checkable

import msgspec

from torchstore_core.errors import TransportUnavailableError
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
    ``offered``: the volume has an offer of this transport, and ``offer`` is that.
    ``control``: path of that Unix socket, which is on the client's host and belongs to the server
    or to a relay.
    ``handshake``: sends a request to the server half, and returns its answer; only for links, not
    for bids. It raises what the server half raises, and TransportUnavailableError if the volume
    does not serve the transport.
    """

    client: Topology
    volume: Topology
    same_host: bool
    offered: bool
    control: str = ""
    offer: bytes = b""
    handshake: Callable[[bytes], Awaitable[bytes]] | None = None


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
        isolated: the server half runs in a process of its own beside the volume: for one whose
            library needs torch, starts many threads, or may crash. It is started by the first
            handshake, and what it returns from ``start`` is not used. If it dies, the transport's
            links fail, and the next handshake starts it again; everything else carries on.
        offer: of an isolated half, the offer, made by a cheap function without the process; None:
            an empty one. What depends on the process is for the handshake.
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
    isolated: bool = False
    offer: Callable[[], bytes] | None = None
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
    """Server half. Created once per volume, in the server process (which has no torch), or in one
    of its own if the transport is ``isolated``. Everything is called on one event loop.
    """

    @abstractmethod
    async def start(self, context: ServerContext, segments: Sequence[Segment]) -> bytes:
        """Register the segments and return the offer that clients connect with.

        Raises:
            TransportUnavailableError: this host cannot serve the transport; the volume starts
                without it.
        """

    async def handshake(self, peer: bytes, request: bytes) -> bytes:
        """Answer a request of a client half.

        Args:
            peer: which client asks: one session of one process. The store knows it, it is not what
                the client says. A client may have several links, on several event loops.

        Raises:
            TransportUnavailableError: this transport has no handshakes.
            TransportError: the client is refused; it gets this error.
        """
        raise TransportUnavailableError("this transport has no handshake")

    async def disconnect(self, peer: bytes) -> None:  # noqa: B027 - many have nothing to end
        """End everything that ``peer`` has under way: it is gone, or the outcome of its last write
        is uncertain. No byte of it reaches a segment once this returns, and only then the store
        uses the memory again. Afterwards the client may begin anew, with a handshake.
        """

    def registered(self, segment: int) -> int:
        """The end, in bytes, of what is registered of a segment now, with a device or a library
        that keeps its pages: no page before it goes back to the system. 0: nothing is.

        A half registers what its clients need, and deregisters when the last of them disconnects.
        """
        return 0

    @abstractmethod
    async def close(self) -> None:
        """Stop serving and release everything that ``start`` took. Idempotent."""


class Copy(msgspec.Struct, frozen=True, gc=False):
    """``rows`` rows of ``nbytes`` bytes each, between local memory and a segment.

    Row ``i`` lies at ``address + i * stride`` and at ``offset + i * step``. Only links with
    ``Link.rows`` are given more than one row, and only those with a device's type in
    ``Link.devices`` an address in the memory of a ``device`` (such as ``"cuda:0"``; empty: host).
    For all others the first four fields say everything, and those are what it unpacks into.

    >>> address, segment, offset, nbytes = Copy(4096, 0, 128, 64)
    >>> offset
    128
    """

    address: int
    segment: int
    offset: int
    nbytes: int
    rows: int = 1
    stride: int = 0
    step: int = 0
    device: str = ""

    def __iter__(self) -> Iterator[int]:
        return iter((self.address, self.segment, self.offset, self.nbytes))


class Link(ABC):
    """Client half: moves batches of bytes to and from one volume.

    Attributes:
        rows: whether it takes copies of several rows.
        devices: types of devices, such as ``"cuda"``, whose memory it reads and writes itself.
        unsettled: set when a write has raised, whatever that was, and its peer may still be
            writing; see :meth:`TransportServer.disconnect`.
    """

    rows: ClassVar[bool] = False
    devices: ClassVar[frozenset[str]] = frozenset()
    unsettled: bool = False

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

        It is cancelled when the operation's time is over, and then raises soon: within a second,
        whatever its peer does. Once it has raised, no further byte is written, unless it says
        :attr:`unsettled`. It is called concurrently.

        Raises:
            TransportError: the link is broken: it is closed, and the next bid moves the bytes.
                ``details["done"]``, if set, is how many of the copies, counted from the first, have
                certainly arrived: those are not sent again.
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
