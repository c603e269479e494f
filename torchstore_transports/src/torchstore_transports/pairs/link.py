"""The client half of a transport over pairs."""

from __future__ import annotations

import asyncio
import functools
import os
import pkgutil
import secrets
import time
from bisect import bisect_right
from collections.abc import Awaitable, Callable, Sequence
from itertools import accumulate
from typing import Any, ClassVar

from torchstore_core.contracts.transport import Copy, Link, LinkContext
from torchstore_core.errors import (
    ConfigurationError,
    TransportError,
    TransportNotReadyError,
    TransportUnavailableError,
)
from torchstore_core.machine.networks import namespace_id
from torchstore_core.machine.tasks import retrieve, wait_ended
from torchstore_transports.pairs.addresses import addresses_here
from torchstore_transports.pairs.batches import parts
from torchstore_transports.pairs.connection import PairConnection
from torchstore_transports.pairs.meeting import meet
from torchstore_transports.pairs.protocol import (
    GOES_ON,
    VERSION,
    Hello,
    Stop,
    Transfer,
    Watch,
    decode_welcome,
    encode,
)
from torchstore_transports.pairs.rendezvous import RemoteStore
from torchstore_transports.pairs.threads import Turns, in_thread, kill_made

__all__ = ["PairLink"]

# A batch is announced in parts of at most this many copies and bytes. A handshake has room for
# about 50,000 copies.
_PART_COPIES = 8192
_PART_BYTES = 1 << 30
# How long a cancelled call may settle; it has to end within a second.
_SETTLE_S = 0.6
# How long each handshake may take after a batch has failed: a new process may have to be started to
# answer it.
_FAILED_S = 5.0
# An idle pair may have died unnoticed. A batch that fails within this time, over a pair that was
# not new, is moved over a new pair, unless the server half has begun it: if that has died only now,
# another transport is there sooner than its new process.
_STALE_S = 5.0
# After this long, a link asks how the batch ends at the other end. Libraries do not always notice
# that a peer has died in the middle of a message; the store does.
_WATCH_AFTER_S = 0.05


class PairLink(Link):
    """Announces each part of a batch in a handshake, and moves it over a pair at the same time.

    Batches of all event loops take turns. The pair is made when the link connects, and made anew
    after it was lost. A batch that takes longer is watched at the server half, so that it fails as
    soon as that has died. A cancelled call ends the pair, because nothing else interrupts it. Then
    the server half is asked to end its side, so that a cancelled write usually has a certain
    outcome, and later calls use a new pair.

    Attributes:
        factory: the library's :data:`~.pair.PairFactory`, as ``"module:function"``.
    """

    factory: ClassVar[str]

    def __init__(self, handshake: Callable[[bytes], Awaitable[bytes]]) -> None:
        self._handshake = handshake
        self._id = secrets.token_bytes(16)
        self._turns = Turns()
        self._connection: tuple[PairConnection, int] | None = None
        self._pairs = 0
        self._stale = False  # the server half did not begin the batch that failed last
        self._arrived = 0  # copies of the part that failed last
        self._closed = False
        self._pid = os.getpid()

    @classmethod
    async def connect(cls, offer: bytes, context: LinkContext) -> PairLink:
        """See ``contracts.transport``."""
        if context.handshake is None:
            raise TransportUnavailableError("there is no way to ask the volume for a pair")
        link = cls(context.handshake)
        await link._ready()
        return link

    async def write(self, copies: Sequence[Copy]) -> None:
        """See ``contracts.transport``."""
        await self._move(copies, into=True)

    async def read(self, copies: Sequence[Copy]) -> None:
        """See ``contracts.transport``."""
        await self._move(copies, into=False)

    def progress(self) -> int:
        """See ``contracts.transport.SupportsProgress``."""
        connection = self._connection
        return self._pairs << 48 | (connection[0].moved if connection is not None else 0)

    def close(self) -> None:
        """See ``contracts.transport``."""
        self._closed = True
        connection, self._connection = self._connection, None
        if connection is not None and os.getpid() != self._pid:
            connection[0].leak()

    async def _move(self, copies: Sequence[Copy], *, into: bool) -> None:
        if any(copy.nbytes < 0 for copy in copies):
            raise TransportError("a copy has a negative number of bytes")
        done = 0
        async with self._turns:
            for part in parts(copies, _PART_COPIES, _PART_BYTES):
                try:
                    await self._move_part(part, into=into)
                except TransportError as error:
                    done += self._arrived
                    raise TransportError(error.message, details={"done": done}) from error
                done += len(part)

    async def _move_part(self, part: Sequence[Copy], *, into: bool) -> None:
        fresh = self._connection is None
        begun = time.monotonic()
        try:
            await self._attempt(part, into=into)
        except TransportError:
            late = time.monotonic() - begun > _STALE_S
            if fresh or late or self.unsettled or self._arrived or not self._stale:
                raise
            await self._attempt(part, into=into)

    async def _attempt(self, part: Sequence[Copy], *, into: bool) -> None:
        self._arrived = 0
        connection, pair = await self._ready()
        runs = [(copy.address, copy.nbytes) for copy in part]
        extents = [(copy.segment, copy.offset, copy.nbytes) for copy in part]

        moving = in_thread(
            functools.partial(connection.upload if into else connection.download, runs)
        )
        asking = asyncio.ensure_future(self._handshake(encode(Transfer(pair, into, extents))))
        asking.add_done_callback(retrieve)
        both: list[asyncio.Future[Any]] = [asking, moving]
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_EXCEPTION, timeout=_WATCH_AFTER_S)
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if not (moving.done() or asking.cancelled() or asking.exception()):
                await self._watch(pair, moving)
            await asyncio.wait(both, return_when=asyncio.FIRST_EXCEPTION)
            for one in both:
                if one.done():
                    one.result()
        except BaseException as error:
            self._connection = None
            self._stale = not asking.done() or asking.cancelled() or bool(asking.exception())
            is_cancelled = isinstance(error, asyncio.CancelledError)
            if is_cancelled:
                asking.cancel()
            patience_s = _SETTLE_S if is_cancelled else _FAILED_S
            await self._give_up(connection, pair, asking, patience_s, into=into)
            self._arrived = _arrived(part, connection.arrived)
            raise
        finally:
            # Otherwise an error would keep these alive, and they the error.
            del moving, asking, both, connection

    async def _watch(self, pair: int, moving: asyncio.Future[None]) -> None:
        """Wait until a batch has ended here, or has ended well at the server half.

        Raises:
            TransportError: it has not ended well there, or the server half has died.
            StoreClosedError: the store is gone, and the server half with it.
        """
        watching = asyncio.ensure_future(self._until_ended(pair))
        watching.add_done_callback(retrieve)
        both: list[asyncio.Future[Any]] = [watching, moving]
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if not moving.done():
                watching.result()
        finally:
            watching.cancel()
            del watching, moving, both  # otherwise an error would keep these alive

    async def _until_ended(self, pair: int) -> None:
        while await self._handshake(encode(Watch(pair))) == GOES_ON:
            pass

    async def _give_up(
        self,
        connection: PairConnection,
        pair: int,
        asking: asyncio.Future[bytes],
        patience_s: float,
        *,
        into: bool,
    ) -> None:
        """End a pair. When this returns, nothing of it moves at this end, nor, if it wrote, at the
        other end, unless ``unsettled`` is set.

        Args:
            patience_s: how long each handshake may take.
        """
        cancelled = await wait_ended(in_thread(connection.kill))
        cancelled |= await _wait(asking, patience_s)
        asking.cancel()
        if into:
            stopping = asyncio.ensure_future(self._handshake(encode(Stop(pair))))
            cancelled |= await _wait(stopping, _SETTLE_S if cancelled else patience_s)
            if not stopping.done() or stopping.exception() is not None:
                stopping.cancel()
                self.unsettled = True
        if cancelled:
            raise asyncio.CancelledError

    async def _ready(self) -> tuple[PairConnection, int]:
        """Return the pair and its number; make one if there is none.

        Raises:
            TransportNotReadyError: the two ends have not met in time.
            TransportError: the server half refuses, or the link is closed.
        """
        if self._closed:
            raise TransportError("this link was closed")
        if self._connection is not None:
            return self._connection
        try:
            here, bound = addresses_here()
        except (OSError, ConfigurationError) as error:
            raise TransportUnavailableError(f"no address to be reached at: {error}") from error
        hello = Hello(VERSION, self._id, namespace_id(), here, bound)
        welcome = decode_welcome(await self._handshake(encode(hello)))
        store = RemoteStore(welcome.pair, self._handshake)

        def make() -> PairConnection:
            return meet(pkgutil.resolve_name(self.factory), store, 1, welcome.address)

        making = in_thread(make)
        try:
            connection = await asyncio.shield(making)
        except RuntimeError as error:
            await self._stop(welcome.pair)
            raise TransportNotReadyError(f"the two ends do not meet: {error}") from error
        except BaseException as error:
            store.close()
            making.add_done_callback(kill_made)
            if isinstance(error, asyncio.CancelledError):
                await self._stop(welcome.pair)
            raise
        if self._closed:
            raise TransportError("this link was closed")
        self._pairs += 1
        self._connection = connection, welcome.pair
        return self._connection

    async def _stop(self, pair: int) -> bool:
        """Ask the server half to end its side of a pair, and return whether it has done so in time.

        Raises:
            CancelledError: the caller was cancelled meanwhile; the outcome is unknown.
        """
        stopping = asyncio.ensure_future(self._handshake(encode(Stop(pair))))
        cancelled = await wait_ended(stopping, _SETTLE_S)
        stopped = stopping.done() and not stopping.cancelled() and stopping.exception() is None
        stopping.cancel()
        if cancelled:
            raise asyncio.CancelledError
        return stopped


async def _wait(work: asyncio.Future[bytes], most_s: float) -> bool:
    """Wait until a handshake has ended, but not longer than a cancelled call may take once the
    caller has been cancelled; whether it has been.
    """
    end = time.monotonic() + most_s
    cancelled = False
    while not (work.done() or cancelled or time.monotonic() > end):
        cancelled = await wait_ended(work, _SETTLE_S)
    return cancelled


def _arrived(copies: Sequence[Copy], nbytes: int) -> int:
    """How many copies are whole if the first ``nbytes`` bytes of all have arrived.

    >>> [_arrived([Copy(0, 0, 0, 4), Copy(0, 0, 8, 4)], nbytes) for nbytes in (3, 4, 7, 8)]
    [0, 1, 1, 2]
    """
    return bisect_right(list(accumulate(copy.nbytes for copy in copies)), nbytes)
