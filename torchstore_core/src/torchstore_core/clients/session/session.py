"""A session: what one process has open at one store. It owns leases and unfinished puts, at the
latest until the process dies. Torch-free.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
import os
import socket
import time
import weakref
from collections.abc import Callable, Collection
from typing import Protocol

from torchstore_core.clients.session.allocation import Allocation
from torchstore_core.clients.session.channel import Channel
from torchstore_core.clients.session.handshake import (
    Ranks,
    ask_volume,
    client_facts,
    handshake,
    running_loop,
    socket_path,
)
from torchstore_core.clients.session.held_ref import claim_waiting
from torchstore_core.clients.session.holder import Holder, StorePlace
from torchstore_core.clients.session.reclaimer import Reclaimer
from torchstore_core.clients.session.rejoining import has_ended, rejoin
from torchstore_core.clients.session.volume_links import VolumeLinks
from torchstore_core.contracts.strategy import ClientFacts
from torchstore_core.errors import StoreClosedError, StoreTimeoutError, TorchStoreError
from torchstore_core.machine import topology
from torchstore_core.machine.tasks import call_from_thread, together
from torchstore_core.plugins.ranking import Policy
from torchstore_core.plugins.registry import Registry
from torchstore_core.wire import messages as m
from torchstore_core.wire.batches import Held, resumes
from torchstore_core.wire.framing import FrameReader, encode

log = logging.getLogger(__name__)


class Call(Protocol):
    """A call, and the session that it uses; None: it uses none yet."""

    session: Session | None


class Session:
    """This process's session at one store; created by :meth:`open`."""

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
        # The server was reached through a Unix socket, so an equal host id proves the same host.
        server_host = (welcome.via or welcome.server).host_id
        policy = policy.with_transport(welcome.transport)
        self.volumes = [
            VolumeLinks(
                info,
                self.here,
                info.topology.host_id == server_host == self.here.host_id,
                self.registry,
                policy,
                functools.partial(_handshake, weakref.ref(self), info.index),
                comes_back=welcome.life > 0,
                directory=os.path.dirname(socket_path(address)),
            )
            for info in welcome.volumes
        ]
        self.lost = False
        #: Returns a new id, unique in the session.
        self.next_id: Callable[[], int] = itertools.count(1).__next__
        # By the id() of the event loop that keeps them alive; see the docstring of ``channel``.
        self._channels: dict[int, weakref.ref[Channel]] = {}
        if welcome.via is not None:
            gone, what_to_do = "is gone, or the process of this host that led to it", "Try again"
        elif welcome.life:
            gone = "is gone, and so is its keeper, which would start it again: what it had is lost"
        else:
            gone = "is gone, and what it had is lost"
        #: What an error says of the server once it is lost.
        self.gone = gone
        self._gone_message = (
            f"the server of store {welcome.store_name!r} (pid {welcome.server.pid}, "
            f"{address}) {gone}. {what_to_do}"
        )
        # Only atomic operations: finalizers change these in any thread and at any moment.
        self._uses: set[int] = set()  # calls in progress, by their id()
        self._unfinished: set[int] = set()  # puts that may outlast their call
        #: Memory that tensors of this process fill in place, by its address.
        self.allocations: dict[int, Allocation] = {}
        #: Leases of calls in progress.
        self.leases_in_use: set[int] = set()
        self._channels_lost = False
        self._keeps_memory = False
        self._memory_is_kept = False  # the server knows
        #: Whether this process has closed it. New calls use another session.
        self.closing = False
        self._warm: list[tuple[int, int, int]] = list(welcome.warm)
        self._reclaimer = Reclaimer(self, liveness, _place(address, welcome))
        #: What keeps versions alive for the references of this process.
        self.holder: Holder = self._reclaimer.holder
        if not welcome.id:  # not the answer: the server has died, is back, and asks what there is
            for message in self._resuming():
                self._reclaimer.send(message)
        self._reclaimer.start()

    @classmethod
    async def open(
        cls,
        address: str,
        policy: Policy,
        timeout: float | None,
        ranks: Ranks | None,
        what_to_do: str,
        *,
        role: str = "",
    ) -> Session:
        """Connect to the server at ``address``.

        ``ranks``: see ``handshake.client_facts``. ``what_to_do``: advice for the error that is
        raised when the server is gone. ``role``: see ``ClientFacts``.

        Raises:
            StoreClosedError, StoreTimeoutError, ProtocolError: see ``handshake.handshake``.
            PluginError: two distributions claim the same transport.
        """
        here = topology.probe()
        facts = client_facts(os.environ, here, ranks, role)
        begun = time.monotonic()
        liveness, welcome = await handshake(address, b"", facts, here, timeout)
        try:
            session = cls(address, liveness, welcome, policy, facts, what_to_do)
        except BaseException:
            liveness.close()
            raise
        try:
            left = None if timeout is None else max(0.0, timeout - (time.monotonic() - begun))
            await together([volume.connect_best(left) for volume in session.volumes])
        except BaseException:
            session.close()
            raise
        session._reclaimer.wake()
        claim_waiting()
        return session

    @property
    def usable(self) -> bool:
        """Whether the server is there and the session belongs to this process, not a parent."""
        return not self.lost and not self.closing

    @property
    def anonymous(self) -> str:
        """The participant name of this process, for puts that give none."""
        return f"pid {self.pid} {self.welcome.session.hex()[:8]}"

    def use(self, call: Call) -> Channel | None:
        """Register a call, and return the running loop's channel. None, and does not register it,
        if that has no open one, or this process has closed the session.

        Until the call leaves, the session keeps its leases and puts, so that no memory is reused
        while a thread still copies.
        """
        channel = self.channel_here()
        if channel is None:
            return None
        self._uses.add(id(call))
        if self.closing:  # checked last: the reclaimer may not have seen the call
            self.leave(call)
            return None
        before, call.session = call.session, self
        if before is not None and before is not self:
            before.leave(call)
        return channel

    def leave(self, call: Call) -> None:
        """Unregister a call that has ended."""
        self._uses.discard(id(call))
        if self.closing:
            self._reclaimer.wake()

    def begin(self) -> int:
        """Return a new id for a put that may outlast its call; it lasts until :meth:`end`."""
        ident = self.next_id()
        self._unfinished.add(ident)
        return ident

    def end(self, ident: int) -> None:
        """Record that the put with this id has ended."""
        self._unfinished.discard(ident)
        if self.closing:
            self._reclaimer.wake()

    def channel_here(self) -> Channel | None:
        """Return the running loop's channel; None if it has no open one."""
        loop = asyncio._get_running_loop()
        known = self._channels.get(id(loop))
        channel = None if known is None else known()
        # An earlier loop may have had the same id().
        if channel is None or channel.lost is not None or channel.loop is not loop:
            return None
        return channel

    async def channel(self, timeout: float | None) -> Channel:
        """Return the running loop's channel, which is opened on first use."""
        loop = running_loop()
        channel = self.channel_here()
        if channel is not None:
            return channel
        if not self.usable:
            raise StoreClosedError(self._gone_message)
        self._sweep()
        try:
            sock, welcome = await handshake(
                self.address, self.welcome.session, self.facts, self.here, timeout
            )
        except StoreClosedError as error:
            why = error.__cause__
            if not isinstance(why, OSError):  # the server gave a reason itself
                raise
            if isinstance(why, FileNotFoundError) and not self._reclaimer.has_ended:
                raise StoreClosedError(
                    f"somebody has removed the socket {self.address} of store "
                    f"{self.welcome.store_name!r}, whose server still runs. It makes the socket "
                    "again as soon as there is a place for it: try again"
                ) from error
            raise StoreClosedError(self._gone_message) from error
        raced = self.channel_here()
        if raced is not None:
            sock.close()
            return raced
        lost = functools.partial(_channel_lost, weakref.ref(self)) if welcome.life else None
        channel = Channel(sock, loop, self._gone_message, welcome.life, lost)
        self._channels[id(loop)] = weakref.ref(channel)
        # Checked only now: another thread that closes the session may not have seen this channel.
        if self.lost or self.closing:
            channel.close()
            raise StoreClosedError(self._gone_message)
        return channel

    def _open_channels(self) -> list[Channel]:
        channels = [known() for known in list(self._channels.values())]
        return [channel for channel in channels if channel is not None]

    def _sweep(self) -> None:
        """Forget the channels of loops that are gone, and shut down channels that nothing can use
        any more: not every loop gets closed, and the collector may find it only much later.
        """
        for number, known in self._channels.copy().items():
            channel = known()
            if channel is None or channel.lost is not None or channel.unreachable:
                if self._channels.get(number) is known:  # otherwise a new loop has the same id()
                    self._channels.pop(number, None)
                if channel is not None and channel.loop.is_closed():
                    channel.close()
                elif channel is not None and channel.lost is None:
                    channel.shut_down()

    def inline_max(self, count: int = 1, *, on_device: bool = False) -> int:
        """Return the largest batch, in bytes, to send inside a message to any volume; -1: none.
        ``count``: how many tensors of few kinds it has. ``on_device``: these are on devices.

        The controller chooses the volume, so this is the smallest of the limits of all volumes.
        """
        if len(self.volumes) == 1:
            return self.volumes[0].inline_max(count, on_device=on_device)
        living = [
            volume.inline_max(count, on_device=on_device)
            for volume in self.volumes
            if not volume.lost
        ]
        return min(living, default=-1)

    # ---- releasing ------------------------------------------------------------------------

    def hold(self, tensors: object, lease: int, positions: list[int] | None) -> None:
        """Release ``positions`` of ``lease`` (None: all) when ``tensors`` is collected."""
        self._reclaimer.hold(tensors, lease, positions)

    def watch(self, owner: object, died: Callable[[], None]) -> None:
        """Call ``died`` when ``owner`` is collected, in a thread where no signal handler raises."""
        self._reclaimer.watch(owner, died)

    def release(self, lease: int, positions: list[int] | None = None) -> None:
        """Release a lease. Safe in any thread and in finalizers."""
        self._reclaimer.release(lease, positions)

    def abort(self, txn: int, unsettled: Collection[tuple[int, str]] = ()) -> None:
        """Abort a put; see ``messages.Abort``. Safe in any thread and in finalizers."""
        self._reclaimer.abort(txn, unsettled)

    def abort_if_unfinished(self, txn: int) -> None:
        """Abort a put unless it has ended. Safe in any thread and in finalizers."""
        if txn in self._unfinished:
            self.abort(txn)
            self.end(txn)

    async def wait_released(self, channel: Channel, timeout: float | None) -> bool:
        """Wait, on the running loop's ``channel``, until the server has processed the releases of
        all tensors that have died so far. Returns whether it has within ``timeout`` seconds.

        Raises:
            StoreClosedError: the server is gone.
        """
        done: asyncio.Future[m.Message] = channel.loop.create_future()
        self._reclaimer.cancel_when_released(done)
        if self.lost:  # checked last: the thread may have ended before it saw the future
            return False
        return await channel.wait_cancelled(done, timeout)

    async def settle(self, volume: int, transport: str) -> None:
        """A write to that volume by that transport has an uncertain outcome: wait until the volume
        has ended it, so that the same memory can be written again.

        Raises:
            StoreClosedError: the server is gone.
            StoreTimeoutError: the volume does not answer.
        """
        channel = await self.channel(m.HANDSHAKE_S)
        await channel.call(m.Settle(channel.next_id(), volume, transport), m.Done, m.HANDSHAKE_S)

    async def check_server(self) -> None:
        """Ask the server for a sign of life. One that is only slow passes.

        Raises:
            StoreClosedError: the server is gone.
        """
        with contextlib.suppress(StoreTimeoutError):
            channel = await self.channel(m.HANDSHAKE_S)
            await channel.call(m.Exists(channel.next_id(), []), m.Flags, m.HANDSHAKE_S)

    async def keep_memory(self) -> None:
        """Must be awaited before memory of volumes is page-locked: see ``messages.Keep``.

        Raises:
            StoreClosedError: the server is gone.
            StoreTimeoutError: the server does not answer.
        """
        if self._memory_is_kept:
            return
        self._keeps_memory = True
        self._reclaimer.send(m.Keep())
        # Until the server has read it, it may return memory to the system.
        if not await self.wait_released(await self.channel(m.HANDSHAKE_S), m.HANDSHAKE_S):
            raise StoreTimeoutError(
                f"no answer from {self.address} within {m.HANDSHAKE_S:g} s, so its memory cannot "
                "be page-locked for a device: it is stopped, or busy",
                details={"operation": "keep", "timeout": m.HANDSHAKE_S, "address": self.address},
            )
        self._memory_is_kept = True

    # ---- called by the reclaimer ----------------------------------------------------------

    def on_notification(self, message: m.Message) -> None:
        """Record which memory became warm, or which volume was lost."""
        if isinstance(message, m.Warmed):
            self._warm = list(message.warm)
        elif isinstance(message, m.Lost) and message.volume < len(self.volumes):
            self.volumes[message.volume].mark_lost(message.reason)

    def after_wake_up(self) -> None:
        """Fill the page tables for memory that has become warm."""
        if self._channels_lost:
            self._channels_lost = False
            self._doubt_channels()
        warm, self._warm = self._warm, []
        for volume, segment, nbytes in warm:
            if nbytes and volume < len(self.volumes) and not self.volumes[volume].lost:
                try:
                    self.volumes[volume].warm(segment, nbytes)
                except Exception as error:  # noqa: BLE001 - of a transport, whatever it raises
                    log.debug("page tables of volume %d: %r", volume, error)

    def rejoin(self) -> tuple[socket.socket, FrameReader] | None:
        """The liveness connection is lost: a new one to a server that comes back, and what has come
        on it in part; None if there is none. Then the channels are given new connections, too.
        """
        if not self.welcome.life:
            return None
        path, hello = socket_path(self.address), self._hello(returns=True)
        try:
            found = rejoin(path, hello, lambda: not self._is_idle)
        except TorchStoreError as error:
            log.info("%s: %s", self._gone_message, error.message)
            return None
        if found is None:
            return None
        sock, welcome, unread = found
        self._renew(welcome)
        with contextlib.suppress(OSError):  # it is lost again, as the reclaimer will see
            sock.sendall(b"".join(map(encode, self._resuming())), socket.MSG_NOSIGNAL)
        self._reconnect_channels(sock)
        return sock, unread

    def came_back(self, welcome: m.Welcome, liveness: socket.socket) -> None:
        """The server has died and is back, with the liveness connection that it had: tell it what
        this client has. The channels are given new connections.
        """
        self._renew(welcome)
        for message in self._resuming():
            self.holder.write(encode(message))
        self._reconnect_channels(liveness)

    def _resuming(self) -> list[m.Message]:
        """What the server must know that has come back."""
        # In this order: what a call hands over to its tensors is in one of the two.
        in_use: list[Held] = [(x, None) for x in self.leases_in_use.copy()]
        asks = [number for channel in self._open_channels() for number in channel.unanswered()]
        unfinished = list(self._unfinished.copy())
        told = resumes(self.welcome.life, unfinished, self._reclaimer.leases() + in_use, asks)
        return [*told, m.Keep()] if self._keeps_memory else [*told]

    def _renew(self, welcome: m.Welcome) -> None:
        self.welcome = welcome
        for volume, info in zip(self.volumes, welcome.volumes, strict=True):
            volume.renew(info)

    def _hello(self, *, returns: bool = False) -> m.Hello:
        token, life = self.welcome.session, 0 if returns else self.welcome.life
        return m.Hello(1, m.PROTOCOL_VERSION, token, self.here, self.facts, returns, life)

    @property
    def _is_idle(self) -> bool:
        return self.closing and not (self._unfinished or self._uses)

    def _reconnect_channels(self, liveness: socket.socket) -> None:
        """Give every channel of an earlier life of the server a new connection, as long as this
        life lasts: in the next one the session has to come back first.
        """
        for channel in self._open_channels():
            if channel.life >= self.welcome.life or channel.unreachable:
                continue
            try:
                found = rejoin(
                    socket_path(self.address),
                    self._hello(),
                    lambda: not (self._is_idle or has_ended(liveness)),
                    once=True,
                )
            except TorchStoreError as error:
                log.debug("a channel is not connected again: %s", error.message)
                found = None
            if found is None:
                self._channels_lost = True
                continue
            sock, welcome, _ = found
            channel.next_life = welcome.life
            if not call_from_thread(channel.loop, channel.adopt, sock, welcome.life):
                sock.close()

    def _doubt_channels(self) -> None:
        """Channels are down. If the server still answers, it has not died, but has closed them, and
        closed they stay.
        """
        there = [weakref.ref(one) for one in self._open_channels() if _is_left_alone(one)]

        def alive() -> None:
            for known in there:
                channel = known()
                if channel is not None and _is_left_alone(channel):
                    call_from_thread(channel.loop, channel.give_up)

        self._reclaimer.probe(alive)

    def channel_lost(self) -> bool:
        """A channel has lost its connection to a server that comes back; whether this session sees
        to a new one, or to its end.
        """
        if self.lost:
            return False
        self._channels_lost = True
        self._reclaimer.wake()
        return True

    def finish_if_idle(self) -> bool:
        """If the session was closed and no call is in progress, close its connections; return
        whether that is so.
        """
        if not self.closing or self._unfinished or self._uses:
            return False
        self._close_connections()
        return True

    def on_end(self) -> None:
        """Called when the server is gone, or when it has ended this session."""
        self.lost = True
        for allocation in list(self.allocations.values()):
            allocation.leave()
        for channel in self._open_channels():
            call_from_thread(channel.loop, channel.give_up)
        for volume in self.volumes:  # or the memory of a store that has ended would never be freed
            volume.close()

    # ---- ending ---------------------------------------------------------------------------

    def close(self, *, now: bool = True) -> None:
        """Close channels and links. Calls in progress raise StoreClosedError; with ``now=False``
        they finish first. The liveness connection stays open until the last call has ended and the
        last zero-copy tensor has died.
        """
        self.closing = True
        self.holder.ends_when_unused = True
        if now or not (self._uses or self._unfinished):
            self._close_connections()
        self._reclaimer.wake()

    def _close_connections(self) -> None:
        here = asyncio._get_running_loop()
        for channel in self._open_channels():
            if channel.loop is here:
                channel.close()
                continue
            # Only the thread of its own loop may use a channel.
            if not call_from_thread(channel.loop, channel.close):
                channel.discard()
            if channel.unreachable:
                channel.shut_down()
        self._channels.clear()
        for volume in self.volumes:
            volume.close()

    # ---- fork -----------------------------------------------------------------------------

    def before_fork(self) -> None:
        """In the parent: keep everything mapped now leased until the child has ended, too."""
        if not self.lost:
            self._reclaimer.before_fork()

    def after_fork_in_parent(self) -> None:
        """In the parent: start to watch for the end of the child."""
        self._reclaimer.after_fork_in_parent()

    def after_fork_in_child(self) -> None:
        """Close everything that belongs to the parent, except what inherited mappings need. What is
        still the parent's to fill is copied.
        """
        while self.allocations:
            self.allocations.popitem()[1].leave_in_child()
        for channel in self._open_channels():
            channel.discard()
        for volume in self.volumes:
            volume.close_in_child()
        self._reclaimer.after_fork_in_child(lost=self.lost)
        self.lost = True


def _place(address: str, welcome: m.Welcome) -> StorePlace:
    """What references say of the store of a session."""
    host_id = topology.probe().host_id
    return StorePlace(welcome.store_name, welcome.incarnation, address, host_id, bool(welcome.life))


def _is_left_alone(channel: Channel) -> bool:
    """Whether a channel is down, and no new connection is on its way to it."""
    return channel.is_down and channel.next_life <= channel.life


def _channel_lost(session: weakref.ref[Session]) -> bool:
    here = session()
    return here is not None and here.channel_lost()


async def _handshake(
    session: weakref.ref[Session], volume: int, transport: str, data: bytes
) -> bytes:
    """See ``contracts.transport.LinkContext.handshake``."""
    here = session()
    if here is None:
        raise StoreClosedError("this client was closed")
    return await ask_volume(await here.channel(m.HANDSHAKE_S), volume, transport, data)
