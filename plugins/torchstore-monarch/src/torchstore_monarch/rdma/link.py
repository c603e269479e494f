"""Client half of ``monarch-rdma``, for processes of a Monarch job."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Sequence
from typing import Any

from monarch.rdma import RDMABuffer

from torchstore_core.contracts.transport import Copy, Link, LinkContext
from torchstore_core.errors import TorchStoreError, TransportError, TransportUnavailableError
from torchstore_core.machine.tasks import retrieve, wait_ended
from torchstore_monarch import job
from torchstore_monarch.chunks import ChunkSize, chunks, memory_of
from torchstore_monarch.protocol import Offer, result
from torchstore_monarch.rdma.bouncing import buffer, copy, is_direct, keep
from torchstore_monarch.rdma.wire import GREETING
from torchstore_monarch.rpc.wire import Place
from torchstore_monarch.threads import finish_torch, in_thread

log = logging.getLogger(__name__)

#: Largest number of bytes in one endpoint call.
CHUNK = 64 << 20
_LEAST = 4 << 20  # bytes of the first call, and of each where the network is slow
# Smaller pieces are gathered in a buffer, because registering each one costs more than a copy.
_SMALL = 256 << 10
# A call to a host that has died may never return.
_CALL_S = 60.0
_DROP_S = 3.0
# A cancelled call has to end within a second: how long it waits for what is under way, and then for
# the buffers to be dropped.
_CANCELLED_S = 0.4


class RdmaLink(Link):
    """Registers local memory and asks the volume's actor to move the bytes."""

    def __init__(self, volume_id: str, actor: Any, ticket: bytes) -> None:
        self._volume_id = volume_id
        self._actor = actor
        self._ticket = ticket
        self._broken = ""
        self._size = ChunkSize(_LEAST, CHUNK)
        self._moved = 0

    @classmethod
    async def connect(cls, offer: bytes, context: LinkContext) -> RdmaLink:
        volume = Offer.of(offer)
        actor = job.volume_actor(volume)
        if actor is None:
            raise TransportUnavailableError(
                f"this process does not know the actor of volume {volume.volume_id}: it did not "
                "find the store through its Monarch job"
            )
        if context.handshake is None:
            raise TransportUnavailableError("monarch-rdma needs a store that carries handshakes")
        return cls(volume.volume_id, actor, await context.handshake(GREETING))

    async def write(self, copies: Sequence[Copy]) -> None:
        await self._do(copies, write=True)

    async def read(self, copies: Sequence[Copy]) -> None:
        await self._do(copies, write=False)

    def progress(self) -> int:
        """See ``contracts.transport.SupportsProgress``: what the volume has answered."""
        return self._moved

    def close(self) -> None:
        self._broken = self._broken or "it was closed"

    async def _do(self, copies: Sequence[Copy], *, write: bool) -> None:
        """Move all copies. If cancelled, drop the registered buffers before raising."""
        work = asyncio.ensure_future(self._transfer(copies, write=write))
        try:
            await asyncio.shield(work)
        except asyncio.CancelledError:
            work.cancel()
            await wait_ended(work)
            retrieve(work)
            raise

    async def _transfer(self, copies: Sequence[Copy], *, write: bool) -> None:
        done = 0
        for chunk in chunks(copies, lambda: self._size.nbytes):
            if self._broken:
                raise TransportError(f"the link is broken: {self._broken}", details={"done": done})
            began = time.perf_counter()
            try:
                await self._move(chunk.pieces, write=write)
            except TorchStoreError as error:
                self._broken = error.message
                raise TransportError(error.message, details={"done": done}) from error
            except Exception as error:
                self._broken = f"{type(error).__name__}: {str(error)[:500]}"
                raise TransportError(
                    f"the volume's actor failed: {self._broken}", details={"done": done}
                ) from error
            done = chunk.done
            self._size.record(chunk.nbytes, time.perf_counter() - began)
            self._moved += chunk.nbytes

    async def _move(self, pieces: Sequence[Copy], *, write: bool) -> None:
        direct = [one for one in pieces if one.nbytes >= _SMALL and is_direct()]
        others = [one for one in pieces if one.nbytes < _SMALL or not is_direct()]
        groups = [[_place(one)] for one in direct]
        views = [memory_of(one) for one in direct]
        if others:
            groups.append([_place(one) for one in others])
            gathered = buffer(sum([one.nbytes for one in others]))
            views.append(gathered)
            places = [(one.address, one.nbytes) for one in others]
            if write:
                await in_thread(functools.partial(copy, places, gathered, into=True))

        async def work() -> None:
            registering = asyncio.ensure_future(asyncio.to_thread(_registered, views))
            limit = _DROP_S
            try:
                await asyncio.wait([registering])
                await self._ask(groups, registering.result(), write=write)
            except BaseException as error:
                if others:
                    keep(gathered)
                if isinstance(error, asyncio.CancelledError):
                    limit = _CANCELLED_S
                    await wait_ended(registering, limit)
                raise
            finally:
                if registering.done() and registering.exception() is None:
                    await _drop(registering.result(), limit)

        await (await job.store_actor()).run(work)
        if others and not write:
            await in_thread(functools.partial(copy, places, gathered, into=False))

    async def _ask(
        self, groups: list[list[Place]], buffers: list[RDMABuffer], *, write: bool
    ) -> None:
        """Have the volume move the bytes. A write that it has not answered is unsettled."""
        calling = self._actor.move.call_one(self._volume_id, self._ticket, groups, buffers, write)
        call = asyncio.ensure_future(asyncio.wait_for(calling, _CALL_S))
        try:
            await asyncio.wait([call])
        except asyncio.CancelledError:
            if write:
                await wait_ended(call, _CANCELLED_S)
                answered = call.done() and not call.cancelled() and call.exception() is None
                self.unsettled |= not answered
            call.add_done_callback(retrieve)
            call.cancel()
            raise
        try:
            answer: tuple[bytes, int | None] = call.result()
        except (Exception, asyncio.CancelledError) as error:
            self.unsettled |= write
            raise TransportError(
                f"the volume's actor failed: {type(error).__name__}: {str(error)[:500]}"
            ) from error
        result(answer)


def _registered(views: list[memoryview]) -> list[RDMABuffer]:
    """Register memory; blocks.

    Raises:
        TransportError: the engine's RDMA part in this process has ended.
    """
    finish_torch()
    try:
        return [RDMABuffer(view) for view in views]
    except (Exception, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the engine panics
        raise TransportError(f"the engine cannot register memory: {error}") from error


async def _drop(buffers: Sequence[RDMABuffer], limit: float) -> None:
    dropping = [asyncio.wait_for(one.drop(), limit) for one in buffers]
    for failed in await asyncio.gather(*dropping, return_exceptions=True):
        if isinstance(failed, BaseException):
            log.warning("the engine does not drop a buffer: %r", failed)


def _place(copy: Copy) -> Place:
    return copy.segment, copy.offset, copy.nbytes
