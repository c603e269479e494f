"""The thread that gives memory back to the server when tensors die, in whatever thread they die.

It owns the session's *liveness connection*, which belongs to no event loop: when that closes, the
server undoes everything that the session has open. Torch-free.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import select
import socket
import threading
import weakref
from asyncio import Future
from collections import deque
from collections.abc import Iterator
from typing import Protocol

import msgspec

from torchstore_core.errors import ProtocolError
from torchstore_core.wire import messages as m
from torchstore_core.wire.framing import FrameReader, decode_reply, encode

__all__ = ["Reclaimer"]

log = logging.getLogger(__name__)

# Leases and positions of one Release: at most 9 bytes each, so twice as many fit a frame.
_MAX_RELEASED = 1 << 20

Held = tuple[int, list[int] | None]  # a lease, and which of its entries (None: all)
Waiting = weakref.ref[Future[m.Message]]


class Owner(Protocol):
    """What the thread needs of its session. Called by the thread."""

    def next_id(self) -> int:
        """A fresh id, unique in the session."""

    def told(self, message: m.Message) -> None:
        """The server has said this unasked."""

    def tidy(self) -> None:
        """What is better done here than by whoever uses the session: called after every wake-up."""

    def may_end(self) -> bool:
        """Whether the session is to end, and nothing is under way any more."""

    def ended(self) -> None:
        """The session is over."""


class _ForkGuard:
    """A forked child that may still read the mappings it inherited."""

    __slots__ = ("fd", "marks")

    def __init__(self, fd: int, marks: frozenset[int]) -> None:
        self.fd = fd  # reads end-of-file when the child and its own children are gone
        self.marks = marks


class Reclaimer:
    """Holds the leases of mapped tensors, and gives them back.

    Args:
        connection: the liveness connection, greeted.
    """

    def __init__(self, owner: Owner, connection: socket.socket) -> None:
        self._owner = owner
        self._pid = os.getpid()
        self._connection = connection
        self._connection.setblocking(True)
        self._unread = FrameReader(m.MAX_FRAME)
        # Touched by finalizers, in any thread, at any moment: atomic operations only, no lock.
        self._held: dict[int, Held] = {}
        self._dead: deque[tuple[int, Held]] = deque()
        self._aborted: deque[int] = deque()
        self._messages: deque[m.Message] = deque()
        self._waking = False
        self._waiting: deque[Waiting] = deque()
        self._asked: dict[int, list[Waiting]] = {}  # by the id of the request that was sent
        self._deferred: list[tuple[int, Held]] = []
        self._guards: list[_ForkGuard] = []
        self._fork_pipe: tuple[int, int, frozenset[int]] | None = None
        # Socket objects, not raw descriptors: a late finalizer cannot write into a reused number.
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)

    def start(self) -> None:
        """Start the thread."""
        threading.Thread(target=self._run, name="torchstore-reclaimer", daemon=True).start()

    def hold(self, tensors: object, lease: int, positions: list[int] | None) -> None:
        """Release ``positions`` of ``lease`` (None: all of it) when ``tensors`` die: the memory
        that they lie on.
        """
        mark = self._owner.next_id()
        self._held[mark] = (lease, positions)
        weakref.finalize(tensors, self._died, mark).atexit = False

    def _died(self, mark: int) -> None:
        held = self._held.pop(mark, None)
        if held is not None and self._pid == os.getpid():
            self._dead.append((mark, held))
            self.wake()

    def release(self, lease: int, positions: list[int] | None = None) -> None:
        """Give a lease back; safe in any thread and in finalizers."""
        self._dead.append((0, (lease, positions)))
        self.wake()

    def abort(self, txn: int) -> None:
        """Abort a put; safe in any thread and in finalizers."""
        self._aborted.append(txn)
        self.wake()

    def send(self, message: m.Message) -> None:
        """Have a message sent that has no reply."""
        self._messages.append(message)
        self.wake()

    def cancel_when_released(self, done: Future[m.Message]) -> None:
        """Cancel ``done``, which the caller keeps alive, when the server has back the leases of
        tensors that have died so far, or when the session is over.
        """
        self._waiting.append(weakref.ref(done))
        self.wake()

    def wake(self) -> None:
        """Have the thread look at what there is to do; safe in any thread and in finalizers."""
        if self._waking:
            return
        self._waking = True
        try:
            self._wake_write.send(b"x")
        except OSError:
            return  # full or closed: a wake-up is under way, or none is needed

    # ---- the thread -----------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._step():
                continue
        except (OSError, ProtocolError, msgspec.DecodeError) as error:
            log.debug("liveness connection: %s", error)
        self._owner.ended()
        _cancel([*self._waiting, *itertools.chain(*self._asked.values())])
        for sock in (self._connection, self._wake_read, self._wake_write):
            sock.close()

    def _step(self) -> bool:
        """Wait for something to do and do it; False when the session is over."""
        wake, connection = self._wake_read.fileno(), self._connection.fileno()
        watched = {wake, connection} | {guard.fd for guard in self._guards}
        poll = select.poll()
        for fd in watched:
            poll.register(fd, select.POLLIN)
        ready = {fd for fd, _ in poll.poll()}
        if wake in ready:
            self._wake_read.recv(4096)
        # Before draining: a finalizer that comes later writes to the pipe again.
        self._waking = False
        if connection in ready and not self._receive():
            return False
        for guard in [g for g in self._guards if g.fd in ready]:
            self._guards.remove(guard)
            os.close(guard.fd)
            self._dead.extend(self._deferred)
            self._deferred.clear()
        waiting = [self._waiting.popleft() for _ in range(len(self._waiting))]
        self._send_all()
        if waiting:  # the server answers in order: when it has said this, it has what came before
            asked = m.Exists(self._owner.next_id(), [])
            self._asked[asked.id] = waiting
            self._connection.sendall(encode(asked))
        self._owner.tidy()
        return not self._owner.may_end() or bool(self._held or self._deferred or self._dead)

    def _receive(self) -> bool:
        """Take in what the server says unasked; False when it has closed the connection."""
        data = self._connection.recv(1 << 16)
        if not data:
            return False
        for body in self._unread.feed(data):
            message = decode_reply(body)
            if isinstance(message, m.Failure):
                log.warning("the server ends this session: %s", message.message)
                return False
            if isinstance(message, m.Flags):
                _cancel(self._asked.pop(message.id, []))
            else:
                self._owner.told(message)
        return True

    def _send_all(self) -> None:
        whole: list[int] = []
        parts: list[tuple[int, list[int]]] = []
        while self._dead:
            mark, (lease, positions) = self._dead.popleft()
            if mark and any(mark in guard.marks for guard in self._guards):
                self._deferred.append((mark, (lease, positions)))
            elif positions is None:
                whole.append(lease)
            else:
                parts.append((lease, positions))
        for release in _releases(whole, parts):
            self._connection.sendall(encode(release))
        while self._messages:
            self._connection.sendall(encode(self._messages.popleft()))
        aborted: list[int] = []
        while self._aborted:
            aborted.append(self._aborted.popleft())
        if aborted:
            self._connection.sendall(encode(m.Abort(aborted)))

    # ---- fork -----------------------------------------------------------------------------

    def before_fork(self) -> None:
        """In the parent: what is mapped now must stay until the child is gone too."""
        if self._held:
            self._fork_pipe = (*os.pipe(), frozenset(self._held))

    def after_fork_in_parent(self) -> None:
        """Watch the child's end of the pipe."""
        if self._fork_pipe is not None:
            read, write, marks = self._fork_pipe
            os.close(write)
            self._fork_pipe = None
            self._guards.append(_ForkGuard(read, marks))
            self._waking = False
            self.wake()

    def after_fork_in_child(self, *, lost: bool) -> None:
        """Let go of everything that is the parent's, except what inherited mappings need.

        With such mappings the child keeps the connection open, so that they are protected even
        when the parent dies first, and its end of the pipe, so that the parent knows.
        """
        self._wake_read.close()
        self._wake_write.close()
        for guard in self._guards:
            os.close(guard.fd)
        if self._fork_pipe is not None:
            os.close(self._fork_pipe[0])
            _inherited.append((self._connection, self._fork_pipe[1]))
        elif not lost:
            self._connection.close()


def _releases(whole: list[int], parts: list[tuple[int, list[int]]]) -> Iterator[m.Release]:
    """What has died, in messages that are no longer than a frame, however much it is."""
    for start in range(0, len(whole), _MAX_RELEASED):
        yield m.Release(whole[start : start + _MAX_RELEASED])
    some: list[tuple[int, list[int]]] = []
    count = 0
    for lease, positions in parts:
        for start in range(0, len(positions), _MAX_RELEASED):
            run = positions[start : start + _MAX_RELEASED]
            some.append((lease, run))
            count += 1 + len(run)
            if count >= _MAX_RELEASED:
                yield m.Release([], some)
                some, count = [], 0
    if some:
        yield m.Release([], some)


def _cancel(waiting: list[Waiting]) -> None:
    for future in waiting:
        done = future()
        if done is not None:  # else nobody waits any more
            with contextlib.suppress(RuntimeError):  # that loop is closed
                done.get_loop().call_soon_threadsafe(done.cancel)


# Sockets and pipe ends that a forked child holds until it ends.
_inherited: list[tuple[socket.socket, int]] = []
