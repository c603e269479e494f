"""A connection of a client: an agent that has met an agent of the server half."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import secrets
import time
import weakref
from concurrent.futures import Future

import msgspec

from torchstore_core.contracts.transport import Copy, LinkContext
from torchstore_core.errors import (
    ConfigurationError,
    StoreClosedError,
    TransportError,
    TransportNotReadyError,
    TransportUnavailableError,
)
from torchstore_core.machine.tasks import retrieve
from torchstore_rdma import fabric
from torchstore_rdma.engine import Engine, Job
from torchstore_rdma.library.agent import EVERYTHING, Agent
from torchstore_rdma.protocol import Goodbye, Hello, Met, Request, Wake, Welcome
from torchstore_transports.listeners import refuse_all

__all__ = ["Connection"]

log = logging.getLogger(__name__)

_CONNECT_S = 10.0
# Of a cancelled batch: how long its bytes may take to arrive by themselves; how long the server
# half has to answer; how long the library's current call may take.
_ARRIVE_S, _GOODBYE_S, _STOP_S = 0.3, 0.35, 0.25
# After how long without a transfer the server half may be late to notice one, and how long it gets.
_QUIET_S, _WAKE_S = 10e-3, 1e-3

# The connections of this process, by name.
_alive: weakref.WeakValueDictionary[str, Connection] = weakref.WeakValueDictionary()
# What must never be freed: a parent's engines in a forked child, memory that bytes may still reach.
_leaked: list[object] = []


class Connection:
    """See the module.

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
            TransportUnavailableError: a variable of the environment is wrong.
            TransportError: the server half refuses.
        """
        devices = self._context.client.rdma_devices
        try:
            place, keep = fabric.here(devices), fabric.kept()
        except ConfigurationError as error:
            raise TransportUnavailableError(error.message) from error
        alive = [name for name, one in _alive.copy().items() if not one.is_gone()]
        answer = await self._ask(Hello(self.name, alive, place, need))
        welcome = msgspec.msgpack.decode(answer, type=Welcome)

        listening: list[int] = []

        def make() -> tuple[Agent, str]:
            agent = Agent(f"client-{self.name}", fabric.options(place, welcome.place))
            listening.extend(agent.listening)
            if not self._pins:
                agent.register([EVERYTHING])
            return agent, agent.meet(welcome.metadata)

        exposed = {one.segment: one for one in welcome.exposed}
        self._one_sided = bool(place.rdma_devices and welcome.place.rdma_devices)
        slow = not (self._one_sided or self._context.same_host)
        self._engine = Engine(make, exposed, pins=self._pins, keep=keep, slow=slow)
        try:
            async with asyncio.timeout(_CONNECT_S):
                await asyncio.wrap_future(self._engine.started)
                await self._try(min(exposed))
                await asyncio.to_thread(refuse_all, listening)
                await self._ask(Met(self.name))
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
                _leaked.append(memory)

    def is_gone(self) -> bool:
        """Whether the server half may end its side."""
        return self.gone or (self._engine is not None and self._engine.ended.done())

    def kept(self) -> tuple[int, int, int]:
        """See :meth:`RdmaLink.kept`."""
        return self._engine.kept if self._engine is not None else (0, 0, 0)

    def route(self) -> str:
        """See ``Link.route``."""
        return self._engine.route if self._engine is not None else ""

    def moved(self) -> int:
        """How many parts of batches have arrived."""
        return self._engine.moved if self._engine is not None else 0

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
            waiting.add_done_callback(retrieve)  # a call that is cancelled waits for it no more
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
            _leaked.append(self._engine)

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
