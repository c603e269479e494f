"""The client half: it registers memory and describes what is to be moved; the volume moves it."""

from __future__ import annotations

import asyncio
import os
import secrets
from bisect import bisect_right
from collections.abc import Awaitable, Callable, Sequence

from torchstore_core.contracts.transport import Copy, Link, LinkContext, Memory
from torchstore_core.errors import TransportError, TransportUnavailableError
from torchstore_core.machine.tasks import wait_ended
from torchstore_torchcomms.rdma.library import Registered, Transport, check_supported
from torchstore_torchcomms.rdma.protocol import (
    VERSION,
    Goodbye,
    Hello,
    Move,
    Region,
    decode_welcome,
    encode,
)
from torchstore_transports.pairs.batches import parts
from torchstore_transports.pairs.threads import Turns
from torchstore_transports.registered.registrations import Held, Registrations

__all__ = ["RdmaLink"]

# A batch is described in parts of at most so many copies and bytes: only whole parts are known to
# have arrived when a later one fails, and a message has room for about 50,000 copies.
_PART_COPIES = 8192
_PART_BYTES = 256 << 20
# A cancelled call has to end within a second.
_GOODBYE_S = 0.6
# Locks on memory that stays registered divide mappings, of which a process may have some 65,000.
_KEPT_COUNT = 8192

# A parent's connections in a forked child, which must not end there.
_leaked: list[object] = []


class RdmaLink(Link):
    """Describes each part of a batch in a handshake, whose answer says that it has arrived.

    Batches take turns. Memory of tensors stays registered as long as they live, within half of this
    host's memory; that of dead ones is deregistered by the next batch.
    """

    def __init__(
        self, handshake: Callable[[bytes], Awaitable[bytes]], transport: Transport
    ) -> None:
        self._handshake = handshake
        self._transport: Transport | None = transport
        self._id = secrets.token_bytes(16)
        self._turns = Turns()
        self._pid = os.getpid()
        most = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
        self._kept: Registrations[Registered] = Registrations(
            lambda memory: [Registered(address, nbytes) for address, nbytes, _ in memory],
            lambda registered: None,  # the objects are all there is
            max_bytes=most,
            max_count=_KEPT_COUNT,
        )

    @classmethod
    async def connect(cls, offer: bytes, context: LinkContext) -> RdmaLink:
        """See ``contracts.transport``."""
        if context.handshake is None:
            raise TransportUnavailableError("there is no way to ask the volume")
        transport = await asyncio.to_thread(_begin)
        link = cls(context.handshake, transport)
        hello = Hello(VERSION, link._id, transport.address)
        welcome = decode_welcome(await context.handshake(encode(hello)))
        await asyncio.to_thread(transport.connect, welcome.address)
        return link

    async def write(self, copies: Sequence[Copy]) -> None:
        """See ``contracts.transport``."""
        await self._move(copies, (), into=True)

    async def read(self, copies: Sequence[Copy]) -> None:
        """See ``contracts.transport``."""
        await self._move(copies, (), into=False)

    async def write_from(self, copies: Sequence[Copy], memory: Sequence[Memory]) -> None:
        """See ``SupportsRegistration``."""
        await self._move(copies, memory, into=True)

    async def read_into(self, copies: Sequence[Copy], memory: Sequence[Memory]) -> None:
        """See ``SupportsRegistration``."""
        await self._move(copies, memory, into=False)

    def close(self) -> None:
        """See ``contracts.transport``."""
        transport, self._transport = self._transport, None
        if os.getpid() != self._pid:
            _leaked.append((transport, self._kept))
        else:
            self._kept.close()

    async def _move(self, copies: Sequence[Copy], memory: Sequence[Memory], *, into: bool) -> None:
        if any(copy.nbytes < 0 for copy in copies):
            raise TransportError("a copy has a negative number of bytes")
        done = 0
        async with self._turns:
            for part in parts(copies, _PART_COPIES, _PART_BYTES):
                try:
                    await self._move_part(part, memory, into=into)
                except TransportError as error:
                    raise TransportError(error.message, details={"done": done}) from error
                done += len(part)

    async def _move_part(
        self, part: Sequence[Copy], memory: Sequence[Memory], *, into: bool
    ) -> None:
        if self._transport is None:
            raise TransportError("this link was closed")
        held = self._kept.hold([(one.address, one.address + one.nbytes) for one in part], memory)
        try:
            regions, copies, once = _described(part, held)
            asking = asyncio.ensure_future(
                self._handshake(encode(Move(self._id, into, regions, copies)))
            )
            try:
                await asyncio.wait([asking])
                asking.result()
            except BaseException:
                await self._give_up(asking, into=into)
                raise
            finally:
                del once, asking
        finally:
            self._kept.release(held)

    async def _give_up(self, asking: asyncio.Future[bytes], *, into: bool) -> None:
        """End the link: the volume's side first, then this one, after which nothing reaches memory
        of this process, whatever the volume does.
        """
        goodbye = asyncio.ensure_future(self._handshake(encode(Goodbye(self._id))))
        cancelled = await wait_ended(goodbye, _GOODBYE_S)
        sure = goodbye.done() and not goodbye.cancelled() and goodbye.exception() is None
        goodbye.cancel()
        asking.cancel()
        self._transport = None
        self.unsettled = self.unsettled or (into and not sure)
        if cancelled:
            raise asyncio.CancelledError


def _begin() -> Transport:
    check_supported()
    return Transport()


def _described(
    part: Sequence[Copy], held: Held[Registered]
) -> tuple[list[Region], list[tuple[int, int, int, int, int]], list[Registered]]:
    """The registered memory of a part, its copies in it, and what is registered for it alone."""
    kept = list(held.registrations.values())
    once = [Registered(start, end - start) for start, end in _spans(part, held.missing)]
    every = sorted([*kept, *once], key=lambda one: one.address)
    starts = [one.address for one in every]
    missing = set(held.missing)
    own = {id(one) for one in once}
    copies = []
    for at, copy in enumerate(part):
        if not copy.nbytes:
            continue
        which = bisect_right(starts, copy.address) - 1
        # What is registered for this part alone may overlap what is kept.
        while (id(every[which]) in own) != (at in missing):
            which -= 1
        inside = copy.address - every[which].address
        copies.append((which, inside, copy.segment, copy.offset, copy.nbytes))
    return [one.region() for one in every], copies, once


def _spans(part: Sequence[Copy], which: Sequence[int]) -> list[tuple[int, int]]:
    """Contiguous memory of these copies, as first address and end; neighbours are merged."""
    found: list[tuple[int, int]] = []
    for copy in sorted([part[at] for at in which], key=lambda one: one.address):
        end = copy.address + copy.nbytes
        if found and copy.address <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        elif copy.nbytes:
            found.append((copy.address, end))
    return found
