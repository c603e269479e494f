"""A session: this process at one store. It owns leases and unfinished puts until the process dies.

The *anchor* is a connection that belongs to no event loop; the server undoes everything when it
closes. A janitor thread gives leases back over it when tensors die, whatever thread they die in.
Torch-free.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import select
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator

import msgspec

from torchstore_core.clients.session.lane import Lane, Ranks, client_facts, handshake, socket_path
from torchstore_core.clients.session.volume_links import VolumeLinks
from torchstore_core.contracts.strategy import ClientFacts
from torchstore_core.errors import (
    ProtocolError,
    StoreClosedError,
    TorchStoreError,
)
from torchstore_core.machine import topology
from torchstore_core.plugins.ranking import Policy
from torchstore_core.plugins.registry import Registry
from torchstore_core.wire import messages as m
from torchstore_core.wire.framing import FrameReader, decode_reply, encode

__all__ = ["Session"]

log = logging.getLogger(__name__)

# Leases and positions of one Release: at most 9 bytes each, so twice as many fit a frame.
_MAX_RELEASED = 1 << 20

Held = tuple[int, list[int] | None]  # a lease, and which of its entries (None: all)
Asking = weakref.ref[asyncio.Future[m.Message]]


class _ForkGuard:
    """A forked child that may still read the mappings it inherited."""

    __slots__ = ("fd", "marks")

    def __init__(self, fd: int, marks: frozenset[int]) -> None:
        self.fd = fd  # reads end-of-file when the child and its own children are gone
        self.marks = marks


class Session:
    """This process's membership of one store; made by :meth:`open`."""

    def __init__(
        self,
        address: str,
        anchor: socket.socket,
        welcome: m.Welcome,
        policy: Policy,
        facts: ClientFacts,
        what_to_do: str,
    ) -> None:
        self.address = address
        self.welcome = welcome
        self.pid = os.getpid()
        self.here = topology.probe()
        self.facts = facts
        self.registry = Registry(block=policy.block)
        # The anchor is a Unix socket, so what answers is here if its host id is ours: proven.
        server_host = (welcome.via or welcome.server).host_id
        policy = policy.of_store(welcome.transport)
        self.volumes = [
            VolumeLinks(
                info,
                self.here,
                info.topology.host_id == server_host == self.here.host_id,
                self.registry,
                policy,
                socket_path(address),
            )
            for info in welcome.volumes
        ]
        self.lost = False
        self._ids = itertools.count(1)
        # By the id of their loop, which holds them; see the module's text in ``lane``.
        self._lanes: dict[int, weakref.ref[Lane]] = {}
        self._anchor = anchor
        self._anchor.setblocking(True)
        self._unread = FrameReader(m.MAX_FRAME)
        advice = f". {what_to_do}"
        if welcome.via is not None:
            advice = ", or the process of this host that led to it; try again"
        self._gone = (
            f"the server of store {welcome.store_name!r} (pid {welcome.server.pid}, "
            f"{address}) is gone{advice}"
        )
        # Touched by finalizers, in any thread, at any moment: atomic operations only, no lock.
        self._uses: set[int] = set()  # calls under way, by their id()
        self._busy: set[int] = set()  # puts that go on without a call
        self._held: dict[int, Held] = {}
        self._dead: deque[tuple[int, Held]] = deque()
        self._aborted: deque[int] = deque()
        self._anchor_says: deque[m.Message] = deque()
        self._keeps_memory = False
        self._waking = False
        self._asking: deque[Asking] = deque()
        self._asked: dict[int, list[Asking]] = {}  # by the id of the request that was sent
        self._deferred: list[tuple[int, Held]] = []
        self._guards: list[_ForkGuard] = []
        self._fork_pipe: tuple[int, int, frozenset[int]] | None = None
        self._retiring = False
        self._warm: list[tuple[int, int, int]] = list(welcome.warm)
        # Socket objects, not raw descriptors: a late finalizer cannot write into a reused number.
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        threading.Thread(target=self._clean, name="torchstore-janitor", daemon=True).start()

    @classmethod
    async def open(
        cls,
        address: str,
        policy: Policy,
        timeout: float | None,
        ranks: Ranks | None,
        what_to_do: str,
    ) -> Session:
        """Connect to the server at ``address``. ``ranks``: see ``lane.client_facts``;
        ``what_to_do``: for errors, when the server is gone.

        Raises:
            StoreClosedError, StoreTimeoutError, ProtocolError: see ``lane.handshake``.
            PluginError: two distributions claim one transport.
        """
        here = topology.probe()
        facts = client_facts(os.environ, here, ranks)
        begun = time.monotonic()
        anchor, welcome = await handshake(address, b"", facts, here, timeout)
        try:
            session = cls(address, anchor, welcome, policy, facts, what_to_do)
        except BaseException:
            anchor.close()
            raise
        try:
            for volume in session.volumes:
                used = time.monotonic() - begun
                await volume.connect_best(None if timeout is None else max(0.0, timeout - used))
        except BaseException:
            session.retire()
            raise
        session._wake()
        return session

    @property
    def usable(self) -> bool:
        """Whether it still has a server and belongs to this process (a fork loses it)."""
        return not self.lost and not self._retiring

    @property
    def retired(self) -> bool:
        """Whether this process has turned away from it: what begins now takes another."""
        return self._retiring

    @property
    def anonymous(self) -> str:
        """A name for this process among participants that have none."""
        return f"pid {self.pid} {self.welcome.session.hex()[:8]}"

    def next_id(self) -> int:
        """A fresh id, unique in the session."""
        return next(self._ids)

    def use(self, call: object) -> bool:
        """Begin a call. Until it leaves, the session keeps what it holds, so that no memory is
        given to others while a thread still copies. False: this process has turned away from it.
        """
        self._uses.add(id(call))
        if self._retiring:  # looked at only now: the janitor may not have seen the call
            self.leave(call)
            return False
        return True

    def leave(self, call: object) -> None:
        """The call is over."""
        self._uses.discard(id(call))
        if self._retiring:
            self._wake()

    def begin(self) -> int:
        """A fresh id for a put that may go on when its call is over, until its :meth:`end`."""
        ident = next(self._ids)
        self._busy.add(ident)
        return ident

    def end(self, ident: int) -> None:
        """The put is over."""
        self._busy.discard(ident)
        if self._retiring:
            self._wake()

    def lane_here(self) -> Lane | None:
        """The running loop's lane, if it is open."""
        loop = asyncio.get_running_loop()
        known = self._lanes.get(id(loop))
        lane = None if known is None else known()
        # Another loop may have had that id.
        return lane if lane is not None and lane.usable and lane.loop is loop else None

    async def lane(self, timeout: float | None) -> Lane:
        """The running loop's lane, opened on first use."""
        loop = asyncio.get_running_loop()
        lane = self.lane_here()
        if lane is not None:
            return lane
        if not self.usable:
            raise StoreClosedError(self._gone)
        self._sweep()
        try:
            sock, _ = await handshake(
                self.address, self.welcome.session, self.facts, self.here, timeout
            )
        except StoreClosedError as error:
            if isinstance(error.__cause__, OSError):  # nobody there; else the server says why not
                raise StoreClosedError(self._gone) from error
            raise
        raced = self.lane_here()
        if raced is not None:
            sock.close()
            return raced
        lane = Lane(sock, loop, self._gone)
        self._lanes[id(loop)] = weakref.ref(lane)
        if (
            self.lost or self._retiring
        ):  # looked at only now: whoever closes the lanes may not have seen it
            lane.close()
            raise StoreClosedError(self._gone)
        return lane

    def _open_lanes(self) -> list[Lane]:
        lanes = [known() for known in list(self._lanes.values())]
        return [lane for lane in lanes if lane is not None]

    def _sweep(self) -> None:
        """Forget the lanes of loops that are gone, and end those that nobody can use any more:
        not all loops are closed, and the collector may take its time.
        """
        for number, known in list(self._lanes.items()):
            lane = known()
            if lane is None or not lane.usable or lane.deserted:
                if self._lanes.get(number) is known:  # else its id is another loop's already
                    self._lanes.pop(number, None)
                if lane is not None and lane.loop.is_closed():
                    lane.close()
                elif lane is not None and lane.usable:
                    lane.desert()

    def inline_max(self) -> int:
        """Largest batch, in bytes, that rides in the message whatever volume it goes to; -1: none.

        The controller chooses the volume, so the smallest of all volumes' limits counts.
        """
        if len(self.volumes) == 1:
            return self.volumes[0].inline_max()
        living = [volume.inline_max() for volume in self.volumes if not volume.lost]
        return min(living, default=-1)

    # ---- giving back ----------------------------------------------------------------------

    def hold(self, owner: object, lease: int, positions: list[int] | None) -> None:
        """Give ``positions`` of ``lease`` (None: all of it) back when ``owner`` dies."""
        mark = self.next_id()
        self._held[mark] = (lease, positions)
        weakref.finalize(owner, self._died, mark).atexit = False

    def _died(self, mark: int) -> None:
        held = self._held.pop(mark, None)
        if held is not None and self.pid == os.getpid():
            self._dead.append((mark, held))
            self._wake()

    def give_back(self, lease: int, positions: list[int] | None = None) -> None:
        """Give a lease back over the anchor; safe in any thread and in finalizers."""
        self._dead.append((0, (lease, positions)))
        self._wake()

    def abort(self, txn: int) -> None:
        """Abort a put over the anchor; safe in any thread and in finalizers."""
        self._aborted.append(txn)
        self._wake()

    def forsake(self, txn: int) -> None:
        """Abort a put that nobody will end any more; safe in any thread and in finalizers."""
        if txn in self._busy:
            self.abort(txn)
            self.end(txn)

    async def let_go(self, lane: Lane, timeout: float | None) -> bool:
        """Wait, on the running loop's ``lane``, until the server has back the leases of tensors
        that have died so far; whether it has, after ``timeout`` seconds.

        Raises:
            StoreClosedError: the server is gone.
        """
        done: asyncio.Future[m.Message] = lane.loop.create_future()
        self._asking.append(weakref.ref(done))
        self._wake()
        if self.lost:  # looked at only now: the janitor may have ended before it saw this
            return False
        return await lane.until(done, timeout)

    def keep_memory(self) -> None:
        """Before page-locking pool memory: see ``messages.Keep``."""
        if not self._keeps_memory:
            self._keeps_memory = True
            self._anchor_says.append(m.Keep())
            self._wake()

    def _wake(self) -> None:
        if self._waking:
            return
        self._waking = True
        try:
            self._wake_write.send(b"x")
        except OSError:
            return  # full or closed: a wake-up is under way, or none is needed

    # ---- the janitor ----------------------------------------------------------------------

    def _clean(self) -> None:
        try:
            while self._clean_once():
                continue
        except (OSError, ProtocolError, msgspec.DecodeError) as error:
            log.debug("anchor: %s", error)
        self.lost = True
        _tell([*self._asking, *itertools.chain(*self._asked.values())])
        for volume in self.volumes:  # or memory of a store that has ended would stay taken
            volume.close()
        for sock in (self._anchor, self._wake_read, self._wake_write):
            sock.close()

    def _clean_once(self) -> bool:
        """Wait for something to do and do it; False when the session is over."""
        wake, anchor = self._wake_read.fileno(), self._anchor.fileno()
        watched = {wake, anchor} | {g.fd for g in self._guards}
        poll = select.poll()
        for fd in watched:
            poll.register(fd, select.POLLIN)
        ready = {fd for fd, _ in poll.poll()}
        if wake in ready:
            self._wake_read.recv(4096)
        # Before draining: a finalizer that comes later writes to the pipe again.
        self._waking = False
        if anchor in ready and not self._hear():
            return False
        for guard in [g for g in self._guards if g.fd in ready]:
            self._guards.remove(guard)
            os.close(guard.fd)
            self._dead.extend(self._deferred)
            self._deferred.clear()
        asking = [self._asking.popleft() for _ in range(len(self._asking))]
        self._send_dead()
        if asking:  # the server answers in order: when it has said this, it has what came before
            asked = m.Exists(self.next_id(), [])
            self._asked[asked.id] = asking
            self._anchor.sendall(encode(asked))
        self._fill_page_tables()
        if not self._retiring:
            return True
        if self._busy or self._uses:
            return True
        self._part()
        return bool(self._held or self._deferred or self._dead)

    def _hear(self) -> bool:
        """Take in what the server says unasked; False when it has closed the connection."""
        data = self._anchor.recv(1 << 16)
        if not data:
            return False
        for body in self._unread.feed(data):
            message = decode_reply(body)
            if isinstance(message, m.Failure):
                log.warning("the server ends this session: %s", message.message)
                return False
            if isinstance(message, m.Warmed):
                self._warm = list(message.warm)
            elif isinstance(message, m.Lost) and message.volume < len(self.volumes):
                self.volumes[message.volume].lose(message.reason)
            elif isinstance(message, m.Flags):
                _tell(self._asked.pop(message.id, []))
        return True

    def _send_dead(self) -> None:
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
            self._anchor.sendall(encode(release))
        while self._anchor_says:
            self._anchor.sendall(encode(self._anchor_says.popleft()))
        aborted: list[int] = []
        while self._aborted:
            aborted.append(self._aborted.popleft())
        if aborted:
            self._anchor.sendall(encode(m.Abort(aborted)))

    def _fill_page_tables(self) -> None:
        warm, self._warm = self._warm, []
        for volume, segment, nbytes in warm:
            if nbytes and volume < len(self.volumes) and not self.volumes[volume].lost:
                try:
                    self.volumes[volume].warm(segment, nbytes)
                except TorchStoreError as error:
                    log.debug("page tables of volume %d: %s", volume, error)

    # ---- ending ---------------------------------------------------------------------------

    def retire(self, *, now: bool = True) -> None:
        """Close lanes and links: calls under way end with StoreClosedError, or, if it is not to be
        ``now``, come to their end first. The anchor stays until the last of them has ended, and the
        last zero-copy tensor has died.
        """
        self._retiring = True
        if now or not (self._uses or self._busy):
            self._part()
        self._wake()

    def _part(self) -> None:
        here = _running_loop()
        for lane in self._open_lanes():
            if lane.loop is here:
                lane.close()
                continue
            try:  # a lane is touched by its own loop's thread alone
                lane.loop.call_soon_threadsafe(lane.close)
            except RuntimeError:  # that loop is closed
                lane.abandon()
            if lane.deserted:
                lane.desert()
        self._lanes.clear()
        for volume in self.volumes:
            volume.close()

    # ---- fork -----------------------------------------------------------------------------

    def before_fork(self) -> None:
        """In the parent: what is mapped now must stay until the child is gone too."""
        if self._held and not self.lost:
            self._fork_pipe = (*os.pipe(), frozenset(self._held))

    def after_fork_in_parent(self) -> None:
        """Watch the child's end of the pipe."""
        if self._fork_pipe is not None:
            read, write, marks = self._fork_pipe
            os.close(write)
            self._fork_pipe = None
            self._guards.append(_ForkGuard(read, marks))
            self._waking = False
            self._wake()

    def after_fork_in_child(self) -> None:
        """Let go of everything that is the parent's, except what inherited mappings need.

        With such mappings the child keeps the anchor open, so that they are protected even when
        the parent dies first, and its end of the pipe, so that the parent knows.
        """
        self._wake_read.close()
        self._wake_write.close()
        for lane in self._open_lanes():
            lane.abandon()
        for volume in self.volumes:
            volume.abandon()
        for guard in self._guards:
            os.close(guard.fd)
        if self._fork_pipe is not None:
            os.close(self._fork_pipe[0])
            _inherited.append((self._anchor, self._fork_pipe[1]))
        elif not self.lost:
            self._anchor.close()
        self.lost = True


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


def _tell(asking: list[Asking]) -> None:
    for future in asking:
        done = future()
        if done is not None:  # else nobody waits any more
            with contextlib.suppress(RuntimeError):  # that loop is closed
                done.get_loop().call_soon_threadsafe(done.cancel)


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


# Sockets and pipe ends that a forked child holds until it ends.
_inherited: list[tuple[socket.socket, int]] = []
