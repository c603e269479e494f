"""What this process holds at one store: sends the messages about holds, in order. Torch-free."""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import select
import socket
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable

import msgspec

from torchstore_core.clients.session.handshake import client_facts, socket_path
from torchstore_core.errors import StoreClosedError
from torchstore_core.machine import topology
from torchstore_core.machine.sockets.unix import OUT_OF_DESCRIPTORS
from torchstore_core.machine.threads import at_fork
from torchstore_core.values import ObjectRef
from torchstore_core.wire import messages as m
from torchstore_core.wire.batches import MOST_NUMBERS, runs
from torchstore_core.wire.framing import FrameReader, encode

# How long encoding a reference, or a fork, waits for a server that takes no messages.
_PATIENCE_S = 1
# How long a new session waits for a server that comes back.
_RETURN_S = 5.0
_RECEIVE = 1 << 16
_SEND = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
# Holds that end one after the other are told to the server together, at most this much later.
_TOGETHER_S = 0.01


class StorePlace(msgspec.Struct, frozen=True, array_like=True):
    """Where a reference belongs: what its receiver needs to find the store.

    Args:
        name: the store's name.
        incarnation: of the store, see ``StatusReport``.
        address: a socket (``unix:/path``) that leads to it on the host ``host_id``.
        keeps: whether its server comes back when it dies.
    """

    name: str
    incarnation: int
    address: str
    host_id: str
    keeps: bool = False


class Holder:
    """The holds of one session of this process.

    Of an ordinary session it uses the liveness connection, which it shares with the reclaimer
    thread. Where there is no such session (a reference arrives in a process that has not joined the
    store; a child was forked while its parent had references) it opens one that is there for holds
    alone: it needs neither an event loop nor a thread, and waits for no reply.

    References end in any thread at any moment, also within a collection of garbage: this only
    appends to a deque. Whoever holds the lock sends what is there.

    Args:
        place: the store.
        connection: the liveness connection of the session; None: there is none yet.
        next_id: gives ids that are unique in the session.
        wake: wakes the thread that calls :meth:`flush`; None: nobody else does.

    Attributes:
        ends_when_unused: its session ends as soon as its references have, so new ones begin
            elsewhere.
    """

    def __init__(
        self,
        place: StorePlace,
        connection: socket.socket | None,
        next_id: Callable[[], int],
        wake: Callable[[], None] | None = None,
    ) -> None:
        self.place = place
        self.next_id = next_id
        self._connection = connection
        self._wake = wake
        self._lock = threading.Lock()
        #: What the references that live refer to, by the id of their hold.
        self.live: dict[int, ObjectRef] = {}
        self._outbox: deque[m.Message | int] = deque()  # an int: this hold has ended
        self._unsent = bytearray()
        self._flushed_at = 0.0
        self._looks_again = False  # the thread does so by itself, for ends of holds
        self._is_urgent = False
        self._is_stuck = False
        # What the child is lent: its connection, if there is one, the ticket, and the references.
        self._forking: tuple[socket.socket | None, int, dict[int, ObjectRef]] | None = None
        self._pid = os.getpid()
        self.ends_when_unused = False
        with _lock:
            _holders.add(self)

    @classmethod
    def open(cls, place: StorePlace) -> Holder:
        """Open a session that is there for holds alone.

        Raises:
            OSError: nothing listens there, or it cannot be reached at this moment.
        """
        return cls(place, _connect(place), itertools.count(1).__next__)

    @property
    def usable(self) -> bool:
        """Whether new holds can begin here."""
        return self._connection is not None and not self.ends_when_unused

    @property
    def busy(self) -> bool:
        """Whether references live, or have ended without the server knowing it."""
        return bool(self.live or self._outbox or self._unsent)

    # ---- any thread -----------------------------------------------------------------------

    def claim(self, ident: int, ticket: int, ref: ObjectRef, where: str) -> None:
        """A reference has arrived. The server learns of it even if this process is killed now: it
        would count as in flight for as long as its sender lives.
        """
        self.live[ident] = ref
        self._outbox.append(m.Claim(ident, ticket, ref.key, ref.version, ref.timeline, where))
        self._send_now()

    def end(self, ident: int) -> None:
        """A reference has ended. Safe in finalizers."""
        if self.live.pop(ident, None) is not None:
            self._outbox.append(ident)
            if not self._looks_again:
                self._flush_soon()

    def _flush_soon(self) -> None:
        if self._wake is None:
            self.flush(0.0)
        elif not self._looks_again:
            self._looks_again = True
            self._wake()

    def lend(self, ident: int) -> int:
        """A reference is being sent: returns a ticket for it, of which the server learns even if
        this process is killed now. 0 if there is no server any more.
        """
        if self._connection is None:
            return 0
        ticket = secrets.randbits(63) | 1
        self._outbox.append(m.Lend(ident, ticket))
        self._send_now()
        return ticket

    def take_back(self, tickets: list[int]) -> None:
        """What was encoded with these tickets was sent to nobody. Safe in finalizers."""
        self._outbox.extend(map(m.TakeBack, runs(tickets)))
        self._flush_soon()

    def _send_now(self) -> None:
        # A server that is stopped is waited for once, not for each reference of a large message.
        self.flush(0.0 if self._is_stuck else _PATIENCE_S)
        if self._outbox or self._unsent:
            self._is_stuck = True
            self._nudge()

    def _nudge(self) -> None:
        if self._wake is not None:
            self._is_urgent = True
            self._wake()
        else:
            self.flush(0.0)

    def due_in(self) -> float | None:
        """In how many seconds :meth:`flush_if_due` is to be called; None: when there is more."""
        if not (self._looks_again or self._is_urgent):
            return None
        if self._is_urgent:
            return 0.0
        return max(0.0, self._flushed_at + _TOGETHER_S - time.monotonic())

    def flush_if_due(self, *, now: bool) -> None:
        """Send what has been waiting for long enough; ``now``: all of it. For the thread."""
        if now or self.due_in() == 0.0:
            self._looks_again = self._is_urgent = False  # before: what ends later wakes it again
            self._flushed_at = time.monotonic()
            more_may_end = bool(self._outbox)
            self.flush(None)
            if more_may_end:  # as in a loop, where none of them has to wake the thread
                self._looks_again = True

    def flush(self, patience_s: float | None) -> None:
        """Send what is there. If the server takes it not within ``patience_s`` seconds (None: as
        long as it takes), what is left is sent by a later call.
        """
        # Whoever holds the lock may have taken something out of the outbox, and not sent it yet.
        while self._outbox or self._unsent or self._lock.locked():
            if not self._acquire(patience_s):
                return  # whoever holds the lock looks again when it has released it
            try:
                self._collect()
                done = self._push(patience_s)
            finally:
                self._lock.release()
            if not done:
                return

    def write(self, frame: bytearray) -> None:
        """Send another message of the session; for the reclaimer thread.

        Raises:
            OSError: the server is gone.
        """
        with self._lock:
            self._collect()
            self._unsent += frame
            self._push(None)
        if self._connection is None:
            raise ConnectionResetError("the server is gone")

    def use(self, connection: socket.socket) -> None:
        """Go on with another connection of the same session: the server has come back, but the one
        before was lost. What that had not read is said again. For the reclaimer thread.
        """
        with self._lock:
            self._connection = connection
            self._unsent.clear()
            for ident, ref in self.live.copy().items():
                self._outbox.append(m.Claim(ident, 0, ref.key, ref.version, ref.timeline))
        self._nudge()

    def close(self) -> None:
        """The session has ended: nothing can be held any more."""
        connection, self._connection = self._connection, None
        if self._wake is None and connection is not None:
            connection.close()
        self._outbox.clear()

    def __del__(self) -> None:
        if hasattr(self, "_outbox"):
            self.close()

    def _acquire(self, patience_s: float | None) -> bool:
        if patience_s is None:
            return self._lock.acquire()
        return self._lock.acquire(timeout=patience_s)

    def _collect(self) -> None:
        """Encode what is in the outbox, holds that have ended together."""
        ended: list[int] = []
        while self._outbox:
            one = self._outbox.popleft()
            if isinstance(one, int):
                ended.append(one)
                if len(ended) < MOST_NUMBERS:
                    continue
            if ended:
                self._unsent += encode(m.Unhold(ended))
                ended = []
            if not isinstance(one, int):
                self._unsent += encode(one)
        if ended:
            self._unsent += encode(m.Unhold(ended))

    def _push(self, patience_s: float | None) -> bool:
        """Send what is encoded; returns whether all of it was sent, or never will be."""
        deadline = None if patience_s is None else time.monotonic() + patience_s
        while self._unsent:
            connection = self._connection
            if connection is None:
                self._unsent.clear()
                break
            try:
                sent = connection.send(self._unsent, _SEND)
                del self._unsent[:sent]
            except BlockingIOError:
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                if left == 0 or not _wait_writable(connection, left):
                    return False
            except OSError:
                self.close()
                self._unsent.clear()
        self._is_stuck = False
        return True

    # ---- fork -----------------------------------------------------------------------------

    def before_fork(self) -> None:
        """In the parent: lend all holds to a session for the child, on a connection that the child
        inherits. So it ends with the child, however early the child ends. Without a descriptor for
        it, the child opens one; if it cannot, they are lent as long as this process lives.
        """
        self._forking = None
        if self._connection is None or not self.live:
            return
        ticket = secrets.randbits(63) | 1
        theirs: socket.socket | None = None
        try:
            theirs = _connect(self.place, m.Adopt(ticket))
        except StoreClosedError:
            return
        except OSError as error:
            if error.errno not in OUT_OF_DESCRIPTORS:
                return
        self._forking = theirs, ticket, dict(self.live)
        self._outbox.append(m.LendAll(ticket))
        self._send_now()

    def after_fork_in_parent(self) -> None:
        """The connection is the child's alone."""
        forking, self._forking = self._forking, None
        if forking is not None and forking[0] is not None:
            forking[0].close()

    def after_fork_in_child(self) -> None:
        """Go on with what the parent has lent."""
        if self._pid == os.getpid():
            return  # done already
        self._pid = os.getpid()
        forking, self._forking = self._forking, None
        if self._wake is None and self._connection is not None:
            self._connection.close()  # nobody else does
        self._connection = self._wake = None
        self._looks_again = False
        self._lock = threading.Lock()
        self._outbox.clear()
        self._unsent.clear()
        if forking is None:
            return
        self._connection, ticket, lent = forking
        if self._connection is None:
            with contextlib.suppress(OSError, StoreClosedError):
                self._connection = _connect(self.place, m.Adopt(ticket))
        self.ends_when_unused = False
        self._outbox.append(m.Adopt(0, self._pid))
        self._outbox.extend([ident for ident in lent if ident not in self.live])
        for ident, ref in self.live.copy().items():
            if ident not in lent:  # it began in another thread, after all was lent
                self._outbox.append(m.Claim(ident, 0, ref.key, ref.version, ref.timeline))
        self.flush(_PATIENCE_S)


def _connect(place: StorePlace, *messages: m.Message) -> socket.socket:
    """Connect to a server, say hello, and send these messages, without waiting for a reply. Only a
    server that comes back is waited for: once it has answered, it does not forget the session.

    Raises:
        OSError: nothing listens there, or it cannot be reached at this moment.
        StoreClosedError: that is no address.
    """
    here = topology.probe()
    facts = client_facts(os.environ, here, role=m.HOLDER_ROLE)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.setblocking(True)  # whatever `socket.setdefaulttimeout` says
        # The system waits while the queue of the listener is full, but not longer than this.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", _PATIENCE_S, 0))
        sock.connect(socket_path(place.address))
        hello = m.Hello(1, m.PROTOCOL_VERSION, b"", here, facts)
        sock.sendall(encode(hello), socket.MSG_NOSIGNAL)
        if place.keeps:
            _await_welcome(sock)
        if messages:
            sock.sendall(b"".join(map(encode, messages)), socket.MSG_NOSIGNAL)
    except BaseException:
        sock.close()
        raise
    return sock


def _await_welcome(sock: socket.socket) -> None:
    """Wait for the answer to a hello.

    Raises:
        OSError: there was none, or no session: the server's log may be full.
    """
    from torchstore_core.wire.framing import decode_reply  # which is made when it is imported

    sock.settimeout(_RETURN_S)
    reader = FrameReader(m.MAX_FRAME)
    while not (bodies := reader.feed(data := sock.recv(_RECEIVE))):
        if not data:
            raise ConnectionResetError("the server has closed the connection")
    answer = decode_reply(bodies[0])
    if isinstance(answer, m.Failure):
        raise ConnectionRefusedError(answer.message)
    sock.settimeout(None)


def _wait_writable(connection: socket.socket, seconds: float | None) -> bool:
    poll = select.poll()
    poll.register(connection, select.POLLOUT)
    return bool(poll.poll(None if seconds is None else seconds * 1000))


# ---- finding the one that a reference belongs to ------------------------------------------

_holders: weakref.WeakSet[Holder] = weakref.WeakSet()
#: Those that were opened for references which arrived here, by the incarnation of the store: kept
#: as long as the process, because a reference may arrive while another one is ending.
_opened: dict[int, Holder] = {}
_lock = threading.RLock()


def known_place(incarnation: int) -> StorePlace | None:
    """The store of that incarnation, if this process is connected to it."""
    with _lock:
        for holder in list(_holders):
            if holder._connection is not None and holder.place.incarnation == incarnation:
                return holder.place
    return None


def holder_of(place: StorePlace) -> Holder | None:
    """The holder of this process at a store, which is opened if need be; None if the store cannot
    be reached from here at this moment, by what a reference says of it.
    """
    with _lock:
        opened = _opened.get(place.incarnation)
        if opened is not None and opened.usable:
            return opened
        for holder in list(_holders):
            if holder.usable and holder.place.incarnation == place.incarnation:
                return holder
        if place.host_id != topology.probe().host_id:
            return None
        try:
            opened = _opened[place.incarnation] = Holder.open(place)
        except (OSError, StoreClosedError):
            return None
        return opened


def _direct() -> list[Holder]:
    """The holders that no session takes care of."""
    return [holder for holder in list(_holders) if holder._wake is None]


def _before_fork() -> None:
    for holder in _direct():
        holder.before_fork()


def _after_in_parent() -> None:
    for holder in _direct():
        holder.after_fork_in_parent()


def _after_in_child() -> None:
    for holder in _direct():
        holder.after_fork_in_child()


at_fork(_lock, before=_before_fork, in_parent=_after_in_parent, in_child=_after_in_child)
