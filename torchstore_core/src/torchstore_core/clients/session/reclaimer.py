"""The thread that releases leases when mapped tensors die, and aborts puts that nobody can finish
any more, whatever thread the tensors, or their owners, die in.

It owns the session's *liveness connection*, which belongs to no event loop. When that connection
closes, the server releases and aborts everything that the session has open. Torch-free.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import logging
import operator
import os
import select
import socket
import sys
import weakref
from asyncio import Future
from collections import deque
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

import msgspec

from torchstore_core.clients.session.holder import Holder, StorePlace
from torchstore_core.clients.session.rejoining import has_ended
from torchstore_core.errors import ProtocolError
from torchstore_core.machine.tasks import call_from_thread
from torchstore_core.machine.threads import start_thread
from torchstore_core.wire import framing
from torchstore_core.wire import messages as m
from torchstore_core.wire.batches import Held, aborts, releases
from torchstore_core.wire.framing import FrameReader, encode

if TYPE_CHECKING:
    from torchstore_core.clients.session.session import Session

log = logging.getLogger(__name__)

Waiting = weakref.ref[Future[m.Message]]


class _ForkGuard:
    """Watches a forked child that may still read the mappings that it inherited."""

    __slots__ = ("fd", "idents")

    def __init__(self, fd: int, idents: frozenset[int]) -> None:
        # At end-of-file once the child and its own children are gone; -1: there was no descriptor
        # for it, so they may live as long as this process.
        self.fd = fd
        self.idents = idents


class _Watch(weakref.ref[object]):
    """A weak reference to mapped memory, with what its callback needs.

    The callbacks are functions in C: the interpreter runs handlers of signals between bytecodes, so
    a Ctrl-C within one in Python would be lost, and the release with it.
    """

    __slots__ = ("ident", "write")
    ident: int
    write: Callable[[bytes], object]


_ONE = (1).to_bytes(8, sys.byteorder)
_wake_by = operator.methodcaller("write", _ONE)


def _open_eventfd() -> io.FileIO:
    """Return a file that is closed when nobody refers to it any more: a finalizer may be writing to
    it, in another thread, when the session ends, and its number would be that of another file.
    """
    fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
    file = io.FileIO(fd, "r+", closefd=False)
    weakref.finalize(file, os.close, fd).atexit = False
    return file


class Reclaimer:
    """Holds the leases of mapped tensors, and releases them.

    Args:
        session: whose leases they are.
        connection: the liveness connection, after its handshake.
        place: what references say of the store.
    """

    def __init__(self, session: Session, connection: socket.socket, place: StorePlace) -> None:
        self._session = session
        self._connection = connection
        self._connection.setblocking(True)
        self._unread = FrameReader(m.MAX_FRAME)
        # Finalizers use these in any thread and at any moment: only atomic operations, no lock.
        self._held: dict[int, tuple[Held, _Watch, _Watch]] = {}
        self._watched: dict[int, tuple[Callable[[], None], _Watch, _Watch]] = {}
        self._dead: deque[_Watch] = deque()
        self._to_release: deque[tuple[int, Held]] = deque()
        self._to_abort: deque[tuple[int, Collection[tuple[int, str]]]] = deque()
        self._messages: deque[m.Message] = deque()
        self._waking = False
        self._has_stopped = False
        self._waiting: deque[Waiting] = deque()
        self._flushes: dict[int, list[Waiting]] = {}  # by the id of the request
        self._probes: dict[int, Callable[[], None]] = {}
        self._deferred: list[tuple[int, Held]] = []
        self._guards: list[_ForkGuard] = []
        # The end of a guard's pipe that the child of the fork under way is to have.
        self._childs_end: int | None = None
        self._wake: io.FileIO | None = _open_eventfd()
        self._write: Callable[[bytes], object] = self._wake.write
        self.holder = Holder(place, connection, session.next_id, self.wake)

    def start(self) -> None:
        """Start the thread.

        Raises:
            TransportNotReadyError: this process can have no more threads.
        """
        start_thread(self._run, "torchstore-reclaimer")

    @property
    def has_ended(self) -> bool:
        """Whether the server, and its keeper, have closed the liveness connection."""
        return has_ended(self._connection)

    def hold(self, tensors: object, lease: int, positions: list[int] | None) -> None:
        """Release ``positions`` of ``lease`` (None: all of it) when ``tensors``, the object that
        owns the mapped memory, is collected.
        """
        tells, wakes = self._watches(tensors)
        self._held[tells.ident] = (lease, positions), tells, wakes
        if self._has_stopped:
            self._held.clear()

    def watch(self, owner: object, died: Callable[[], None]) -> None:
        """Call ``died``, in the thread, when ``owner`` is collected."""
        tells, wakes = self._watches(owner)
        self._watched[tells.ident] = died, tells, wakes
        if self._has_stopped:
            self._watched.clear()

    def _watches(self, owner: object) -> tuple[_Watch, _Watch]:
        """What tells that ``owner`` is collected, and what wakes the thread up then."""
        wakes, tells = _Watch(owner, _wake_by), _Watch(owner, self._dead.append)
        wakes.write, tells.ident = self._write, self._session.next_id()
        return tells, wakes  # the last one that was made is called first

    def release(self, lease: int, positions: list[int] | None = None) -> None:
        """Release a lease. Safe in any thread and in finalizers."""
        self._to_release.append((0, (lease, positions)))
        self.wake()

    def abort(self, txn: int, unsettled: Collection[tuple[int, str]] = ()) -> None:
        """Abort a put; see ``messages.Abort``. Safe in any thread and in finalizers."""
        self._to_abort.append((txn, unsettled))
        self.wake()

    def send(self, message: m.Message) -> None:
        """Have the thread send a message that has no reply."""
        self._messages.append(message)
        self.wake()

    def cancel_when_released(self, done: Future[m.Message]) -> None:
        """Cancel ``done`` once the server has processed the releases of all tensors that have died
        so far, or once the session has ended. The caller keeps ``done`` alive.
        """
        self._waiting.append(weakref.ref(done))
        self.wake()

    def wake(self) -> None:
        """Wake the thread up. Safe in any thread and in finalizers."""
        if self._waking:
            return
        self._waking = True
        with contextlib.suppress(OSError):  # a program may close all descriptors that it has
            self._write(_ONE)

    def _wake_nobody(self) -> None:
        """From now on there is no thread to be woken."""
        self._write, self._wake = len, None

    # ---- the thread -----------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._run_connected():
                continue
        finally:  # without this thread nothing would be released any more: the server must see that
            self.holder.close()
            self._session.on_end()
            _cancel([*self._waiting, *itertools.chain(*self._flushes.values())])
            self._has_stopped = True
            self._held.clear()  # what dies later wakes nobody
            self._watched.clear()
            self._connection.close()
            self._wake_nobody()

    def _run_connected(self) -> bool:
        """Work until the connection ends. Returns whether there is another one."""
        try:
            while self._step():
                continue
        except (OSError, ProtocolError, msgspec.DecodeError) as error:
            log.debug("liveness connection: %s", error)
        else:
            return False
        found = self._session.rejoin()
        if found is None:
            return False
        self._connection.close()
        self._connection, self._unread = found
        self.holder.use(self._connection)
        self._ask_again()
        return True

    def _ask_again(self) -> None:
        """What the server was asked before it died, and has not answered."""
        self._waiting.extend(itertools.chain(*self._flushes.values()))
        self._flushes.clear()
        self._probes.clear()
        self._waking = False
        self.wake()

    def leases(self) -> list[Held]:
        """What tensors hold, those included whose releases are still to be sent."""
        found: dict[int, list[int] | None] = {}
        waiting = [held for _, held in [*list(self._to_release), *self._deferred]]
        for lease, positions in [*(held for held, *_ in list(self._held.values())), *waiting]:
            if positions is None:
                found[lease] = None
            elif (known := found.setdefault(lease, [])) is not None:
                known += positions
        return list(found.items())

    def probe(self, alive: Callable[[], None]) -> None:
        """Ask the server whether it lives, and call ``alive`` if it answers. In the thread."""
        probe = m.Exists(self._session.next_id(), [])
        self._probes[probe.id] = alive
        self.holder.write(encode(probe))

    def _step(self) -> bool:
        """Wait for work and do it. Returns False when the session has ended."""
        if self._wake is None:
            return False
        wake, connection = self._wake.fileno(), self._connection.fileno()
        watched = {wake, connection} | {guard.fd for guard in self._guards if guard.fd >= 0}
        poll = select.poll()
        for fd in watched:
            poll.register(fd, select.POLLIN)
        due = self.holder.due_in()
        ready = {fd for fd, _ in poll.poll(None if due is None else due * 1000)}
        if wake in ready:
            self._wake.read(8)
        # Before the queues are drained, so that a finalizer that runs later wakes the thread again.
        self._waking = False
        if connection in ready and not self._receive():
            return False
        for guard in [g for g in self._guards if g.fd in ready]:
            self._guards.remove(guard)
            os.close(guard.fd)
            self._to_release.extend(self._deferred)
            self._deferred.clear()
        waiting = [self._waiting.popleft() for _ in range(len(self._waiting))]
        self._send_all()
        self.holder.flush_if_due(now=bool(waiting))
        if waiting:  # replies come in order: by then all that was sent is processed
            flush = m.Exists(self._session.next_id(), [])
            self._flushes[flush.id] = waiting
            self.holder.write(encode(flush))
        self._session.after_wake_up()
        return not self._session.finish_if_idle() or bool(
            self._held or self._deferred or self._to_release or self.holder.busy
        )

    def _receive(self) -> bool:
        """Handle what the server has sent. Returns False when it has ended the session."""
        data = self._connection.recv(1 << 16)
        if not data:
            raise ConnectionResetError("the server has closed it")
        for body in self._unread.feed(data):
            message = framing.decode_reply(body)
            if isinstance(message, m.Failure):
                log.warning("the server ends this session: %s", message.message)
                return False
            if isinstance(message, m.Welcome):
                self._ask_again()
                self._session.came_back(message, self._connection)
            elif isinstance(message, m.Flags) and message.id in self._probes:
                self._probes.pop(message.id)()
            elif isinstance(message, m.Flags):
                _cancel(self._flushes.pop(message.id, []))
            else:
                self._session.on_notification(message)
        return True

    def _send_all(self) -> None:
        while self._dead:
            ident = self._dead.popleft().ident
            if ident in self._watched:
                self._watched.pop(ident)[0]()
            else:
                self._to_release.append((ident, self._held.pop(ident)[0]))
        released: list[Held] = []
        while self._to_release:
            ident, (lease, positions) = self._to_release.popleft()
            if ident and any(ident in guard.idents for guard in self._guards):
                self._deferred.append((ident, (lease, positions)))
            else:
                released.append((lease, positions))
        for release in releases(released):
            self.holder.write(encode(release))
        while self._messages:
            self.holder.write(encode(self._messages.popleft()))
        aborted: list[int] = []
        unsettled: set[tuple[int, str]] = set()
        while self._to_abort:
            txn, writes = self._to_abort.popleft()
            aborted.append(txn)
            unsettled.update(writes)
        for abort in aborts(aborted, unsettled):
            self.holder.write(encode(abort))

    # ---- fork -----------------------------------------------------------------------------

    def before_fork(self) -> None:
        """In the parent: keep everything mapped now leased until the child has ended, too."""
        self.holder.before_fork()
        if self._held and self._childs_end is None:
            read = write = -1
            with contextlib.suppress(OSError):
                read, write = os.pipe()
            self._guards.append(_ForkGuard(read, frozenset(self._held)))
            self._childs_end = write

    def after_fork_in_parent(self) -> None:
        """Start to watch the pipe, whose other end the child holds."""
        self.holder.after_fork_in_parent()
        if self._childs_end is not None:
            write, self._childs_end = self._childs_end, None
            if write >= 0:
                os.close(write)
            self._waking = False
            self.wake()

    def after_fork_in_child(self, *, lost: bool) -> None:
        """Close everything that belongs to the parent, except what inherited mappings need.

        If there are such mappings, the child keeps the connection open, so that they stay protected
        even if the parent dies first; and it keeps its end of the pipe open, so that the parent
        sees when the child ends.
        """
        self._held.clear()
        self._watched.clear()
        self._wake_nobody()
        while self._guards:
            guard = self._guards.pop()
            if guard.fd >= 0:
                os.close(guard.fd)
        if self._childs_end is not None:
            _inherited.append((self._connection, self._childs_end))
            self._childs_end = None
        elif not lost and self._connection not in [connection for connection, _ in _inherited]:
            self._connection.close()
        self.holder.after_fork_in_child()


def _cancel(waiting: list[Waiting]) -> None:
    for future in waiting:
        done = future()
        if done is not None:  # otherwise its caller no longer waits
            call_from_thread(done.get_loop(), done.cancel)


# Sockets and pipe ends that a forked child keeps open until it ends.
_inherited: list[tuple[socket.socket, int]] = []
