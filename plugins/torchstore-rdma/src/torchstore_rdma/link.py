"""Client half: connections to a volume, made when they are needed, and batches over them."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import secrets
import threading
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import Future

import msgspec

from torchstore_core.contracts.transport import Copy, Link, LinkContext, Memory
from torchstore_core.errors import (
    StoreClosedError,
    TransportError,
    TransportNotReadyError,
    TransportUnavailableError,
)
from torchstore_core.machine.tasks import wait_ended
from torchstore_rdma import fabric, library
from torchstore_rdma.engine import Engine, Job, NotExposedError
from torchstore_rdma.protocol import Goodbye, Hello, Request, Wake, Welcome

__all__ = ["RdmaLink"]

log = logging.getLogger(__name__)

_CONNECT_S = 10.0
# Of a cancelled batch: how long its bytes may take to arrive by themselves; how long the server
# half has to answer; how long the library's current call may take.
_ARRIVE_S, _GOODBYE_S, _STOP_S = 0.3, 0.35, 0.25
# How often a connection that breaks is made anew within one batch, counting the first.
_TRIES = 3
_AGAIN_S = 0.1
# After how long without a transfer the server half may be late to notice one, and how long it gets.
_QUIET_S, _WAKE_S = 10e-3, 1e-3

# The connections of this process, by name.
_alive: weakref.WeakValueDictionary[str, _Connection] = weakref.WeakValueDictionary()
# What must never be freed: a parent's engines in a forked child, memory that bytes may still reach.
_kept: list[object] = []


class _Connection:
    """An agent that has met an agent of the server half.

    Attributes:
        usable: it takes batches.
        gone: the server half may end its side.
    """

    def __init__(self, context: LinkContext) -> None:
        self.name = secrets.token_hex(8)
        self.usable = False
        self.gone = False
        self._pid = os.getpid()
        self._engine: Engine | None = None
        self._context = context
        self._pins = fabric.pins(context.client.rdma_devices, context.client.cuda_devices)
        self._one_sided = False
        self._used = time.monotonic()
        _alive[self.name] = self

    async def open(self, need: int) -> None:
        """Meet the server half, and prove that bytes arrive.

        Raises:
            TransportNotReadyError: they do not, or not in time.
            TransportError: the server half refuses.
        """
        devices = self._context.client.rdma_devices
        place = fabric.here(devices)
        alive = [name for name, one in list(_alive.items()) if not one.is_gone()]
        answer = await self._ask(Hello(self.name, alive, place, need))
        welcome = msgspec.msgpack.decode(answer, type=Welcome)

        def make() -> tuple[library.Agent, str]:
            agent = library.Agent(f"client/{self.name}", fabric.options(place, welcome.place))
            if not self._pins:
                agent.register(*library.EVERYTHING)
            return agent, agent.meet(welcome.metadata)

        exposed = {one.segment: one for one in welcome.exposed}
        self._one_sided = bool(place.rdma_devices and welcome.place.rdma_devices)
        self._engine = Engine(make, exposed, pins=self._pins, keep=fabric.kept())
        try:
            async with asyncio.timeout(_CONNECT_S):
                await asyncio.wrap_future(self._engine.started)
                await self._try(min(exposed))
        except TimeoutError as error:
            await self.end()
            raise TransportNotReadyError(
                f"UCX did not reach the volume within {_CONNECT_S:g} s"
            ) from error
        except BaseException:
            try:
                await self.end()
            finally:
                self.close()
            raise
        self.usable = True

    async def _try(self, segment: int) -> None:
        """The first transfer connects, and fails if there is no way."""
        memory = ctypes.create_string_buffer(8)
        job = Job([Copy(ctypes.addressof(memory), segment, 0, len(memory))], write=False)
        try:
            await self.run(job)
        except TransportError as error:
            raise TransportNotReadyError(f"UCX cannot reach the volume: {error}") from error
        finally:
            if not job.done.done():
                _kept.append(memory)

    def is_gone(self) -> bool:
        """Whether the server half may end its side."""
        return self.gone or (self._engine is not None and self._engine.ended.done())

    def kept(self) -> tuple[int, int, int]:
        """See :meth:`RdmaLink.kept`."""
        return self._engine.kept if self._engine is not None else (0, 0, 0)

    async def run(self, job: Job) -> None:
        """Run a batch to its end.

        Raises:
            TransportError: it failed, or the connection has.
        """
        if self._engine is None:
            raise TransportError("the connection has ended")
        quiet = time.monotonic() - self._used
        self._engine.submit(job)
        try:
            waiting = asyncio.wrap_future(job.done)
            if quiet > _QUIET_S and not self._one_sided:
                await asyncio.wait([waiting], timeout=_WAKE_S)
                if not waiting.done():
                    await self._wake()
            await waiting
        finally:
            self._used = time.monotonic()
            if self._engine.stopping:
                self.usable, self.gone = False, True

    async def _wake(self) -> None:
        """Over TCP, the server half takes part in a transfer; it looks rarely after a pause."""
        with contextlib.suppress(TransportError):  # what is wrong, the transfer shows
            await self._ask(Wake())

    async def give_up(self, job: Job) -> bool:
        """Have a batch end: nothing of it reaches memory of this process when this returns. Returns
        whether nothing of it can reach the segment, either.
        """
        job.given_up = True
        if await _ended(job.done, _ARRIVE_S):
            return True
        return await self.end()

    async def end(self) -> bool:
        """End the connection; whether the server half has confirmed that.

        Its side goes first: it does not survive that a reader leaves in the middle of a read.
        """
        self.usable, self.gone = False, True
        confirmed = True
        try:
            async with asyncio.timeout(_GOODBYE_S):
                await self._ask(Goodbye(self.name))
        except (TransportError, StoreClosedError, TimeoutError) as error:
            log.debug("connection %s is not known to have ended: %r", self.name, error)
            confirmed = False
        if self._engine is not None:
            self._engine.stop()
            await _ended(self._engine.ended, _STOP_S)
        return confirmed

    def close(self) -> None:
        """End this side, without waiting."""
        self.usable, self.gone = False, True
        if self._engine is None:
            return
        if self._pid == os.getpid():
            self._engine.stop()
        else:
            _kept.append(self._engine)

    def retire(self) -> None:
        """Take no more batches, and end this side when none is under way."""
        self.usable = False
        if self._engine is not None:
            self._engine.drain()

    async def _ask(self, request: Request) -> bytes:
        handshake = self._context.handshake
        if handshake is None:
            raise TransportUnavailableError("there is no way to ask the volume")
        return await handshake(msgspec.msgpack.encode(request))


class RdmaLink(Link):
    """Moves batches over a connection. One that breaks is made anew, once for each batch."""

    rows = True

    def __init__(self, context: LinkContext) -> None:
        self._context = context
        self._connection: _Connection | None = None
        self._lock = threading.Lock()
        self._closed = False

    @classmethod
    async def connect(cls, offer: bytes, context: LinkContext) -> RdmaLink:
        library.check_not_forked()
        link = cls(context)
        await link._connected(0)
        return link

    async def write(self, copies: Sequence[Copy]) -> None:
        await self._move(copies, (), write=True)

    async def read(self, copies: Sequence[Copy]) -> None:
        await self._move(copies, (), write=False)

    async def write_from(self, copies: Sequence[Copy], memory: Sequence[Memory]) -> None:
        """See ``SupportsRegistration``: what is given as ``memory`` stays registered."""
        await self._move(copies, memory, write=True)

    async def read_into(self, copies: Sequence[Copy], memory: Sequence[Memory]) -> None:
        """See ``SupportsRegistration``."""
        await self._move(copies, memory, write=False)

    def kept(self) -> tuple[int, int, int]:
        """Bytes and pieces of user memory that are registered now, and how often any has been."""
        connection = self._connection
        return connection.kept() if connection is not None else (0, 0, 0)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    async def _move(self, copies: Sequence[Copy], memory: Sequence[Memory], *, write: bool) -> None:
        need, broken, done = 0, 0, 0
        while True:
            try:
                connection = await self._connected(need)
            except TransportError as error:
                # The server half's process may have died just now: a little later it is back.
                if not 0 < broken < _TRIES or isinstance(error, TransportUnavailableError):
                    raise
                broken += 1
                await asyncio.sleep(_AGAIN_S)
                continue
            job = Job(copies[done:], write=write, memory=memory)
            try:
                await connection.run(job)
                return
            except NotExposedError as error:
                need = error.need
                error.__traceback__ = None  # it would keep the user's memory alive, in a cycle
                connection.retire()
            except TransportError as error:
                done += error.details.get("done", 0)
                error.details["done"] = done
                if connection.usable or self._closed:
                    raise
                # Until the next connection is made, or the server half has been asked.
                self.unsettled = self.unsettled or write
                broken += 1
                if broken == _TRIES:
                    raise
                error.__traceback__ = None
            except asyncio.CancelledError:
                ending = asyncio.ensure_future(connection.give_up(job))
                await wait_ended(ending)
                self.unsettled = self.unsettled or (write and not ending.result())
                raise

    async def _connected(self, need: int) -> _Connection:
        """A connection that reaches the first ``need`` bytes of a segment."""
        found = self._usable()
        if found is not None:
            return found
        made = _Connection(self._context)
        await made.open(need)
        # By now the server half has ended all that have broken before.
        self.unsettled = False
        try:
            with self._lock:
                found = self._usable()
                if found is None:
                    self._connection = made
                    return made
        except TransportError:
            made.close()
            raise
        made.retire()  # another call was faster
        return found

    def _usable(self) -> _Connection | None:
        if self._closed:
            raise TransportError("this link was closed")
        connection = self._connection
        return connection if connection is not None and connection.usable else None


async def _ended(future: Future[None], timeout: float) -> bool:
    """Wait for a future of another thread, whatever its outcome; whether it is done."""
    loop, done = asyncio.get_running_loop(), asyncio.Event()

    def call(_: Future[None]) -> None:
        with contextlib.suppress(RuntimeError):  # its loop has closed
            loop.call_soon_threadsafe(done.set)

    future.add_done_callback(call)
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(done.wait(), timeout)
    return future.done()
