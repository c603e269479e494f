"""A session: this process at one store. It owns leases and unfinished puts until the process dies.
Torch-free.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import socket
import time
import weakref

from torchstore_core.clients.session.handshake import Ranks, client_facts, handshake, socket_path
from torchstore_core.clients.session.lane import Lane
from torchstore_core.clients.session.reclaimer import Reclaimer
from torchstore_core.clients.session.volume_links import VolumeLinks
from torchstore_core.contracts.strategy import ClientFacts
from torchstore_core.errors import StoreClosedError, TorchStoreError
from torchstore_core.machine import topology
from torchstore_core.plugins.ranking import Policy
from torchstore_core.plugins.registry import Registry
from torchstore_core.wire import messages as m

__all__ = ["Session"]

log = logging.getLogger(__name__)


class Session:
    """This process's membership of one store; made by :meth:`open`."""

    def __init__(
        self,
        address: str,
        liveness: socket.socket,
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
        # It is reached by a Unix socket, so what answers is here if its host id is ours: proven.
        server_host = (welcome.via or welcome.server).host_id
        policy = policy.with_transport(welcome.transport)
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
        advice = f". {what_to_do}"
        if welcome.via is not None:
            advice = ", or the process of this host that led to it; try again"
        self._gone = (
            f"the server of store {welcome.store_name!r} (pid {welcome.server.pid}, "
            f"{address}) is gone{advice}"
        )
        # Atomic operations only: finalizers touch them, in any thread, at any moment.
        self._uses: set[int] = set()  # calls under way, by their id()
        self._unfinished: set[int] = set()  # puts that go on without a call
        self._keeps_memory = False
        self._closing = False
        self._warm: list[tuple[int, int, int]] = list(welcome.warm)
        self._reclaimer = Reclaimer(self, liveness)
        self._reclaimer.start()

    @classmethod
    async def open(
        cls,
        address: str,
        policy: Policy,
        timeout: float | None,
        ranks: Ranks | None,
        what_to_do: str,
    ) -> Session:
        """Connect to the server at ``address``. ``ranks``: see ``handshake.client_facts``;
        ``what_to_do``: for errors, when the server is gone.

        Raises:
            StoreClosedError, StoreTimeoutError, ProtocolError: see ``handshake.handshake``.
            PluginError: two distributions claim one transport.
        """
        here = topology.probe()
        facts = client_facts(os.environ, here, ranks)
        begun = time.monotonic()
        liveness, welcome = await handshake(address, b"", facts, here, timeout)
        try:
            session = cls(address, liveness, welcome, policy, facts, what_to_do)
        except BaseException:
            liveness.close()
            raise
        try:
            for volume in session.volumes:
                used = time.monotonic() - begun
                await volume.connect_best(None if timeout is None else max(0.0, timeout - used))
        except BaseException:
            session.close()
            raise
        session._reclaimer.wake()
        return session

    @property
    def usable(self) -> bool:
        """Whether it still has a server and belongs to this process (a fork loses it)."""
        return not self.lost and not self._closing

    @property
    def closing(self) -> bool:
        """Whether this process has turned away from it: what begins now takes another."""
        return self._closing

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
        if self._closing:  # looked at only now: the reclaimer may not have seen the call
            self.leave(call)
            return False
        return True

    def leave(self, call: object) -> None:
        """The call is over."""
        self._uses.discard(id(call))
        if self._closing:
            self._reclaimer.wake()

    def begin(self) -> int:
        """A fresh id for a put that may go on when its call is over, until its :meth:`end`."""
        ident = next(self._ids)
        self._unfinished.add(ident)
        return ident

    def end(self, ident: int) -> None:
        """The put is over."""
        self._unfinished.discard(ident)
        if self._closing:
            self._reclaimer.wake()

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
            self.lost or self._closing
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

    def hold(self, tensors: object, lease: int, positions: list[int] | None) -> None:
        """Release ``positions`` of ``lease`` (None: all of it) when ``tensors`` die."""
        self._reclaimer.hold(tensors, lease, positions)

    def release(self, lease: int, positions: list[int] | None = None) -> None:
        """Give a lease back; safe in any thread and in finalizers."""
        self._reclaimer.release(lease, positions)

    def abort(self, txn: int) -> None:
        """Abort a put; safe in any thread and in finalizers."""
        self._reclaimer.abort(txn)

    def abort_if_unfinished(self, txn: int) -> None:
        """Abort a put that nobody will end any more; safe in any thread and in finalizers."""
        if txn in self._unfinished:
            self.abort(txn)
            self.end(txn)

    async def wait_released(self, lane: Lane, timeout: float | None) -> bool:
        """Wait, on the running loop's ``lane``, until the server has back the leases of tensors
        that have died so far; whether it has, after ``timeout`` seconds.

        Raises:
            StoreClosedError: the server is gone.
        """
        done: asyncio.Future[m.Message] = lane.loop.create_future()
        self._reclaimer.cancel_when_released(done)
        if self.lost:  # looked at only now: the thread may have ended before it saw this
            return False
        return await lane.until(done, timeout)

    def keep_memory(self) -> None:
        """Before page-locking pool memory: see ``messages.Keep``."""
        if not self._keeps_memory:
            self._keeps_memory = True
            self._reclaimer.send(m.Keep())

    # ---- called by the reclaimer ----------------------------------------------------------

    def told(self, message: m.Message) -> None:
        """What is warm now, or which volume is lost."""
        if isinstance(message, m.Warmed):
            self._warm = list(message.warm)
        elif isinstance(message, m.Lost) and message.volume < len(self.volumes):
            self.volumes[message.volume].lose(message.reason)

    def tidy(self) -> None:
        """Fill page tables for what has become warm."""
        warm, self._warm = self._warm, []
        for volume, segment, nbytes in warm:
            if nbytes and volume < len(self.volumes) and not self.volumes[volume].lost:
                try:
                    self.volumes[volume].warm(segment, nbytes)
                except TorchStoreError as error:
                    log.debug("page tables of volume %d: %s", volume, error)

    def may_end(self) -> bool:
        """Whether it was closed, and no call is under way any more; then its channels close."""
        if not self._closing or self._unfinished or self._uses:
            return False
        self._close_connections()
        return True

    def ended(self) -> None:
        """The server is gone, or has seen this session's end."""
        self.lost = True
        for volume in self.volumes:  # or memory of a store that has ended would stay taken
            volume.close()

    # ---- ending ---------------------------------------------------------------------------

    def close(self, *, now: bool = True) -> None:
        """Close lanes and links: calls under way end with StoreClosedError, or, if it is not to be
        ``now``, come to their end first. The liveness connection stays until the last of them has
        ended, and the last zero-copy tensor has died.
        """
        self._closing = True
        if now or not (self._uses or self._unfinished):
            self._close_connections()
        self._reclaimer.wake()

    def _close_connections(self) -> None:
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
        if not self.lost:
            self._reclaimer.before_fork()

    def after_fork_in_parent(self) -> None:
        """Watch for the end of the child."""
        self._reclaimer.after_fork_in_parent()

    def after_fork_in_child(self) -> None:
        """Let go of everything that is the parent's, except what inherited mappings need."""
        for lane in self._open_lanes():
            lane.abandon()
        for volume in self.volumes:
            volume.abandon()
        self._reclaimer.after_fork_in_child(lost=self.lost)
        self.lost = True


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
