"""Client half: connections to a volume, made when they are needed, and batches over them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

from torchstore_core.contracts.transport import Copy, Link, LinkContext, Memory
from torchstore_core.errors import TransportError, TransportUnavailableError
from torchstore_core.machine.tasks import wait_ended
from torchstore_rdma import fabric
from torchstore_rdma.connection import Connection
from torchstore_rdma.engine import Job, NotExposedError
from torchstore_rdma.library.agent import check_not_forked

__all__ = ["RdmaLink"]

# How often a connection that breaks is made anew within one batch, counting the first.
_TRIES = 3
_AGAIN_S = 0.1


class RdmaLink(Link):
    """Moves batches over a connection. One that breaks is made anew, once for each batch."""

    rows = True

    def __init__(self, context: LinkContext) -> None:
        self._context = context
        self._connection: Connection | None = None
        self._made = 0
        self._lock = threading.Lock()
        self._closed = False

    @classmethod
    async def connect(cls, offer: bytes, context: LinkContext) -> RdmaLink:
        check_not_forked()
        here = context.client
        link = (
            RegisteringLink(context)
            if fabric.pins(here.rdma_devices, here.cuda_devices)
            else cls(context)
        )
        await link._connected(0)
        return link

    async def write(self, copies: Sequence[Copy]) -> None:
        await self._move(copies, (), write=True)

    async def read(self, copies: Sequence[Copy]) -> None:
        await self._move(copies, (), write=False)

    @property
    def route(self) -> str:
        """See ``Link.route``."""
        connection = self._connection
        return connection.route() if connection is not None else ""

    def kept(self) -> tuple[int, int, int]:
        """Bytes and pieces of user memory that are registered now, and how often any has been."""
        connection = self._connection
        return connection.kept() if connection is not None else (0, 0, 0)

    def progress(self) -> int:
        """See ``SupportsProgress``."""
        connection = self._connection
        return self._made << 48 | (connection.moved() if connection is not None else 0)

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
                died = self._made and not isinstance(error, TransportUnavailableError)
                if self._closed or not died or broken >= _TRIES - 1:
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

    async def _connected(self, need: int) -> Connection:
        """A connection that reaches the first ``need`` bytes of a segment."""
        found = self._usable()
        if found is not None:
            return found
        made = Connection(self._context)
        await made.open(need)
        # By now the server half has ended all that have broken before.
        self.unsettled = False
        try:
            with self._lock:
                found = self._usable()
                if found is None:
                    self._connection = made
                    self._made += 1
                    return made
        except TransportError:
            made.close()
            raise
        made.retire()  # another call was faster
        return found

    def _usable(self) -> Connection | None:
        if self._closed:
            raise TransportError("this link was closed")
        connection = self._connection
        return connection if connection is not None and connection.usable else None


class RegisteringLink(RdmaLink):
    """Where registering memory pins it: what belongs to somebody stays registered."""

    async def write_from(self, copies: Sequence[Copy], memory: Sequence[Memory]) -> None:
        """See ``SupportsRegistration``."""
        await self._move(copies, memory, write=True)

    async def read_into(self, copies: Sequence[Copy], memory: Sequence[Memory]) -> None:
        """See ``SupportsRegistration``."""
        await self._move(copies, memory, write=False)
