"""The transport contract: how bytes get from a client's memory into a volume's segments and back.

A transport has two halves, which usually run in different processes, often on different hosts:

* the **server half** (:class:`TransportServer`) serves the segments of one volume. It is given them
  once and returns an opaque *offer*, which every client receives with the description of the store;
* the **client half** (:class:`Link`) is created from that offer. It moves batches of bytes between
  local memory and ``(segment, offset)``.

**They meet over the control connection.** Each half may need to know more about the other than an
offer can say: addresses, keys, a rendezvous. The client half asks (``LinkContext.handshake``), and
the server half answers (:meth:`TransportServer.handshake`), as often as they like; the store
carries these opaque bytes through servers and relays. So no half has to listen only in order to
meet the other, and only processes that the store has accepted can learn a secret.

**One-sided or two-sided.** A link over shared memory or RDMA moves bytes alone. A link over
send/receive describes each batch to its server half (over its own connection, or by a handshake),
and both take part. To the store, this makes no difference.

**Optional abilities** are declared; without them, the store does the work itself. A link that can
expose a segment as local memory implements :class:`SupportsWindow` (the store copies directly,
strided and in parallel); one that can provide a private copy-on-write view implements
:class:`SupportsMap` (zero-copy ``get``); one whose views can be written through implements
:class:`SupportsMapThrough` (``empty``, and puts without a copy); one that registers memory
implements :class:`SupportsRegistration`, and is told whose memory it is, so that it can keep it
registered;
one that can tell how far it is implements :class:`SupportsProgress`, and is given up early when it
stalls, but never for being slow.
``Link.rows`` declares that a link takes strided copies, and ``Link.devices`` that it reaches the
memory of devices. All other links are given contiguous host memory, packed by the store.

**Lifetimes.** An address is only passed to a link while a grant or a lease protects it, and that
protection ends when the call returns or raises, so no byte may move afterwards. A link that cannot
promise this after a failure, because its peer may still be writing, sets :attr:`Link.unsettled`:
the memory is then quarantined until the server half has disconnected this client
(:meth:`TransportServer.disconnect`), or until its volume is dead.

**Failure.** A link that raises :class:`~torchstore_core.errors.TransportError` is closed; the next
best transport moves the rest of the batch, and the link is created again after a pause.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection, Hashable, Iterator, Sequence
from typing import ClassVar, NamedTuple, Protocol, runtime_checkable

import msgspec

from torchstore_core.errors import TransportUnavailableError
from torchstore_core.machine.networks import Network
from torchstore_core.machine.topology import Topology

__all__ = [
    "Bid",
    "Copy",
    "Link",
    "LinkContext",
    "Mapping",
    "Memory",
    "Refusal",
    "Segment",
    "ServerContext",
    "SupportsMap",
    "SupportsMapThrough",
    "SupportsProgress",
    "SupportsRegistration",
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
        """Return the expected seconds for a batch of ``nbytes`` bytes."""
        return self.latency_s + nbytes / self.bytes_per_s


class Refusal(msgspec.Struct, frozen=True, tag="refusal"):
    """Why a transport cannot serve a link, as text that a person can read."""

    reason: str


class LinkContext(msgspec.Struct, frozen=True):
    """The basis of a bid: where the client and the volume run, and how they are connected.

    ``same_host`` is proven (same boot id *and* the Unix socket was reached), never guessed.
    ``offered``: whether the volume has an offer of this transport; ``offer`` is the offer.
    ``directory``: where this process has found the socket of the volume's server. In a container it
    may be another path than that by which the server knows it; empty if it is not known.
    ``handshake``: sends a request to the server half, and returns its answer; only for links, not
    for bids. It raises the error that the server half raises, and TransportUnavailableError if the
    volume does not serve the transport.
    """

    client: Topology
    volume: Topology
    same_host: bool
    offered: bool
    offer: bytes = b""
    handshake: Callable[[bytes], Awaitable[bytes]] | None = None
    directory: str = ""


class TransportSpec(msgspec.Struct, frozen=True):
    """The description of a transport, returned by a plug-in's ``torchstore_transport`` hook: a
    small descriptor without imports.

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
        isolated: the server half runs in a process of its own next to the volume, because its
            library needs torch, starts many threads, or may crash. The first handshake starts the
            process, and the result of its ``start`` is not used. If the process dies, the
            transport's links fail, and the next handshake starts it again; nothing else is
            affected. A process whose event loop hangs for 20 s is killed; one of which another
            thread hangs, if the half says so (:meth:`TransportServer.stuck`).
        offer: a cheap function that returns the offer of an isolated half, without its process;
            None: the offer is empty. Whatever depends on the process belongs in the handshake.
        loop_bound: the link belongs to the event loop that connected it (sockets on asyncio).
            Since not every loop is closed explicitly, such a link must not refer to its loop
            between transfers, and must close its resources when both are garbage-collected.
        listens: the server half listens at addresses of its host, those of ``TORCHSTORE_BIND`` if
            that is set: a volume that serves it does not start if the variable names what is no
            address of a host. It listens only while it has clients, and whoever connects there may
            be a stranger, who must hold nobody up.
        tells_route: its links say over what they move bytes (:attr:`Link.route`), which its library
            chooses: `torchstore doctor` connects one on its host to ask, and `--peer` one to there.
        libraries: distributions, beside the plug-in's own, that are used at both ends of a link:
            `torchstore doctor --peer` compares their versions.
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
    listens: bool = False
    tells_route: bool = False
    libraries: tuple[str, ...] = ()


class Segment(NamedTuple):
    """A volume's memory as the server half sees it: an id, a file descriptor, a size in bytes.

    The descriptor stays open until ``close()``. The store has not mapped the memory for the
    server half. It is sparse: pages are made as values need them, and returned when the last values
    are gone; see :meth:`backed_end`.
    """

    id: int
    fd: int
    nbytes: int

    def backed_end(self) -> int:
        """Return how far the memory has pages, in bytes from its start to its first hole.

        To register more of it with what pins pages makes pages that the store may never need.
        """
        return os.lseek(self.fd, 0, os.SEEK_HOLE)


class ServerContext(NamedTuple):
    """The surroundings of a server half.

    Args:
        socket_dir: a private directory (mode 0700), for a Unix socket that hands out descriptors,
            which no handshake can carry.
        told: the addresses of this host at which the others of the job reach it, as the engine
            says; empty: it does not. A half that listens for other hosts does so at those of
            ``TORCHSTORE_BIND``, or else at these, or else where the client reaches this host; never
            at every address.
    """

    store_name: str
    volume_id: str
    socket_dir: str
    topology: Topology
    told: tuple[Network, ...] = ()


class TransportServer(ABC):
    """The server half of a transport. Created once per volume, in the server process (which has no
    torch), or in a process of its own if the transport is ``isolated``. All methods are called on
    one event loop.
    """

    @abstractmethod
    async def start(self, context: ServerContext, segments: Sequence[Segment]) -> bytes:
        """Register the segments and return the offer that clients connect with.

        Raises:
            TransportUnavailableError: this host cannot serve the transport; the volume starts
                without it.
            ConfigurationError: what the user has set for the transport cannot be used; the volume
                starts without it, too, and the server's log warns. Clients learn the reason.
        """

    async def handshake(self, peer: bytes, request: bytes) -> bytes:
        """Answer a request of a client half, within 60 s: then the client gives up, and an isolated
        half is asked to disconnect it.

        Args:
            peer: the client that asks: one session of one process, as identified by the store, not
                by the client itself. A client may have several links, on several event loops.

        Raises:
            TransportUnavailableError: this transport has no handshakes.
            TransportError: the client is refused; it gets this error. Whatever else is raised is a
                fault of the half: the server logs it, and the client gets a TransportError with the
                name of its class as ``details["raised"]``.
        """
        raise TransportUnavailableError("this transport has no handshake")

    async def disconnect(self, peer: bytes) -> None:  # noqa: B027 - many have nothing to end
        """End everything that ``peer`` has under way, because the client is gone, or the outcome of
        its last write is uncertain. Once this returns, no byte of the client may reach a segment;
        only then does the store reuse the memory. All links of the client end with that, those on
        its other event loops, too; it may start again with a handshake.
        """

    def registered(self, segment: int) -> int:
        """Return the end, in bytes, of the part of a segment that is currently registered with a
        device or a library that keeps its pages; 0 if none is. No page before it is returned to the
        system.

        A half registers what its clients need, or what is backed, and deregisters it when the last
        client disconnects.
        """
        return 0

    def stuck(self) -> Collection[Hashable]:
        """Return a name for each call of a library that is under way in another thread and should
        have returned long ago, for an isolated half whose event loop answers although what moves
        the bytes hangs. It is called every 5 s; a process of which the same call is named twice in
        succession is ended, and started again.
        """
        return ()

    @abstractmethod
    async def close(self) -> None:
        """Stop serving and release everything that ``start`` took. Idempotent."""


class Copy(msgspec.Struct, frozen=True, gc=False):
    """``rows`` rows of ``nbytes`` bytes each, between local memory and a segment.

    Row ``i`` lies at ``address + i * stride`` and at ``offset + i * step``. Only links with
    ``Link.rows`` are given more than one row, and only those with a device's type in
    ``Link.devices`` an address in the memory of a ``device`` (such as ``"cuda:0"``; empty: host).
    For all others, the first four fields are sufficient; a copy unpacks into these four.

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
    """The client half of a transport: moves batches of bytes to and from one volume.

    Attributes:
        rows: whether it takes copies of several rows.
        devices: types of devices, such as ``"cuda"``, whose memory it reads and writes itself. The
            work that the caller had queued there has ended by then.
        unsettled: set if a write has raised, for whatever reason, and the peer may still be
            writing; see :meth:`TransportServer.disconnect`.
    """

    rows: ClassVar[bool] = False
    devices: ClassVar[frozenset[str]] = frozenset()
    unsettled: bool = False

    @property
    def route(self) -> str:
        """Over what it moves bytes, as its library has told since it connected, as text for people;
        empty if there is nothing to add to the bid.
        """
        return ""

    @classmethod
    @abstractmethod
    async def connect(cls, offer: bytes, context: LinkContext) -> Link:
        """Create a link from a volume's offer.

        Raises:
            TransportNotReadyError: the link cannot be created at the moment (no file descriptors
                are left, the server is slow). The store uses the next bid, and tries again later.
            TransportUnavailableError: the offer cannot be used from here, now or later. (If this
                transport has been connected to the volume before, it is tried again all the same.)
        """

    @abstractmethod
    async def write(self, copies: Sequence[Copy]) -> None:
        """Copy local memory into the segments. When it returns, all bytes have arrived.

        The call is cancelled when the operation's time is over, and must then raise within a
        second, whatever its peer does. Once it has raised, no further byte may be written, unless
        the link sets :attr:`unsettled`. Otherwise the store goes on using a link whose call was
        cancelled; one that cannot go on raises a TransportError in its next call. Calls may be
        concurrent.

        Raises:
            TransportError: the link is broken. It is closed, and the next bid moves the bytes.
                ``details["done"]``, if set, is the number of copies, counted from the first, that
                have certainly arrived; they are not sent again.
        """

    @abstractmethod
    async def read(self, copies: Sequence[Copy]) -> None:
        """Copy bytes of the segments to local memory, with the same guarantees as :meth:`write`."""

    @abstractmethod
    def close(self) -> None:
        """Release all resources immediately, without blocking. Idempotent. The store closes a link
        only when none of its calls is under way, except in a forked child, where none of them runs.
        """


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


class Memory(NamedTuple):
    """Host memory that copies may lie in: ``nbytes`` bytes at ``address``, such as the storage of a
    tensor.

    ``owner`` can be weakly referenced, and dies with the memory. While it lives, it may also give
    the memory back and get other memory, even at the same address, which the library
    ``torchstore_transports.registered`` notices.
    """

    address: int
    nbytes: int
    owner: object


@runtime_checkable
class SupportsRegistration(Protocol):
    """The link registers memory of this process, and keeps registered what it knows the owner of.

    Its batches come by these methods instead of :meth:`Link.write` and :meth:`Link.read`, to which
    they are the same otherwise. ``memory`` is in no order, and need not contain all copies: those
    in the store's own staging memory are not in it.
    """

    async def write_from(self, copies: Sequence[Copy], memory: Sequence[Memory]) -> None:
        """See :meth:`Link.write`."""

    async def read_into(self, copies: Sequence[Copy], memory: Sequence[Memory]) -> None:
        """See :meth:`Link.read`."""


@runtime_checkable
class SupportsProgress(Protocol):
    """The link can tell a transfer that is slow from one that stands still.

    An operation that has time left for another transport gives up a transfer that stands still.
    Of other links, the store only knows how long a transfer has taken.
    """

    def progress(self) -> int:
        """Return a number that differs from the last one if bytes have moved in between, in any
        transfer of this link, and is the same if none have. Several times a second is often
        enough. Does not block; thread-safe.
        """


@runtime_checkable
class SupportsMap(Protocol):
    """The link can map a sealed range as private, writable, copy-on-write memory."""

    def map(self, segment: int, offset: int, nbytes: int) -> Mapping:
        """Map ``nbytes`` bytes at ``offset`` (of any alignment; ``address`` points to it)."""


@runtime_checkable
class SupportsMapThrough(Protocol):
    """The link can map a granted range so that what is written to the mapping is in the segment,
    and make it copy-on-write when the range is to be sealed.
    """

    def map_through(self, segment: int, offset: int, nbytes: int) -> Mapping:
        """Map ``nbytes`` bytes at ``offset``, as :meth:`SupportsMap.map`, but not privately yet.
        That the host has no memory for them is an error here, rather than when they are written.
        May block; called in any thread.
        """

    def make_private(self, segment: int, offset: int, mapping: Mapping) -> None:
        """Make a mapping of ``offset`` what :meth:`SupportsMap.map` would have returned, at the
        same address and in one step: no write is lost, and none that comes later is in the segment.
        """
