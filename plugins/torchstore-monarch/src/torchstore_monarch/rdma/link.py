"""Client half of ``monarch-rdma``, for processes of a Monarch job."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from monarch.rdma import RDMABuffer

from torchstore_core.contracts.transport import Copy, Link, LinkContext
from torchstore_core.errors import TorchStoreError, TransportError, TransportUnavailableError
from torchstore_core.machine.tasks import wait_ended
from torchstore_monarch import job
from torchstore_monarch.chunks import ChunkSize
from torchstore_monarch.protocol import result
from torchstore_monarch.rdma.bouncing import is_direct, keep
from torchstore_monarch.rpc.wire import Place

__all__ = ["RdmaLink"]

log = logging.getLogger(__name__)

#: Largest number of bytes in one endpoint call.
CHUNK = 64 << 20
_LEAST = 4 << 20  # bytes of the first call, and of each where the network is slow
# Smaller pieces are gathered in a buffer, because registering each one costs more than a copy.
_SMALL = 256 << 10
_PIECES = 4096
# A call to a host that has died may never return.
_CALL_S = 60.0
_DROP_S = 3.0


class RdmaLink(Link):
    """Registers local memory and asks the volume's actor to move the bytes."""

    def __init__(self, volume_id: str, actor: Any) -> None:
        self._volume_id = volume_id
        self._actor = actor
        self._broken = ""
        self._size = ChunkSize(_LEAST, CHUNK)
        self._moved = 0

    @classmethod
    async def connect(cls, offer: bytes, context: LinkContext) -> RdmaLink:
        try:
            volume_id = offer.decode()
        except UnicodeDecodeError as error:
            raise TransportUnavailableError("that is no offer of monarch-rdma") from error
        actor = await job.volume_actor(context.control, volume_id)
        if actor is None:
            raise TransportUnavailableError(
                f"this process does not know the actor of volume {volume_id}: it did not find the "
                "store through its Monarch job"
            )
        return cls(volume_id, actor)

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
            await wait_ended(work, timeout=2 * _DROP_S)
            raise

    async def _transfer(self, copies: Sequence[Copy], *, write: bool) -> None:
        for chunk in _chunks(copies, lambda: self._size.nbytes):
            if self._broken:
                raise TransportError(f"the link is broken: {self._broken}")
            began = time.perf_counter()
            try:
                await self._move(chunk, write=write)
            except TorchStoreError as error:
                self._broken = error.message
                raise TransportError(error.message) from error
            except Exception as error:
                self._broken = f"{type(error).__name__}: {str(error)[:500]}"
                raise TransportError(f"the volume's actor failed: {self._broken}") from error
            nbytes = sum([copy.nbytes for copy in chunk])
            self._size.record(nbytes, time.perf_counter() - began)
            self._moved += nbytes

    async def _move(self, chunk: list[Copy], *, write: bool) -> None:
        direct = [copy for copy in chunk if copy.nbytes >= _SMALL and is_direct()]
        others = [copy for copy in chunk if copy.nbytes < _SMALL or not is_direct()]
        groups: list[list[Place]] = [[_place(copy)] for copy in direct]
        views = [_memory(copy) for copy in direct]
        gathered = bytearray()
        if others:
            groups.append([_place(copy) for copy in others])
            if write:
                gathered = bytearray().join(_memory(copy) for copy in others)
            else:
                gathered = bytearray(sum(copy.nbytes for copy in others))
            views.append(memoryview(gathered))

        async def work() -> None:
            buffers = await asyncio.to_thread(_registered, views)
            call = asyncio.ensure_future(self._ask(groups, buffers, write=write))
            done = False
            try:
                result(await asyncio.shield(call))
                done = True
            finally:
                if not done:
                    keep(gathered)
                await _drop(buffers)
                # The memory that a cancelled put was writing will be given to others, so the volume
                # must have answered that the transfer is over.
                if not call.done():
                    await asyncio.wait([call], timeout=_DROP_S)
                if call.done() and not call.cancelled():
                    call.exception()  # otherwise Python would report it as never retrieved

        await job.as_store_actor(work, None)
        if others and not write:
            rest = memoryview(gathered)
            for copy in others:
                _memory(copy)[:], rest = rest[: copy.nbytes], rest[copy.nbytes :]

    async def _ask(
        self, groups: list[list[Place]], buffers: list[RDMABuffer], *, write: bool
    ) -> tuple[bytes, int | None]:
        call = self._actor.move.call_one(self._volume_id, groups, buffers, write)
        answer: tuple[bytes, int | None] = await asyncio.wait_for(call, _CALL_S)
        return answer


def _registered(views: list[memoryview]) -> list[RDMABuffer]:
    """Register memory; blocks.

    Raises:
        TransportError: the engine's RDMA part in this process has ended.
    """
    try:
        return [RDMABuffer(view) for view in views]
    except (Exception, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the engine panics
        raise TransportError(f"the engine cannot register memory: {error}") from error


async def _drop(buffers: Sequence[RDMABuffer]) -> None:
    for buffer in buffers:
        try:
            await asyncio.wait_for(buffer.drop(), _DROP_S)
        except TimeoutError:
            log.warning("the engine does not drop a buffer")
            return


def _place(copy: Copy) -> Place:
    return copy.segment, copy.offset, copy.nbytes


def _chunks(copies: Sequence[Copy], limit: Callable[[], int]) -> Iterator[list[Copy]]:
    """Yield batches of at most ``_PIECES`` pieces, and of as many bytes as ``limit`` returns for
    each of them.
    """
    chunk: list[Copy] = []
    total, most = 0, limit()
    for copy in copies:
        at = 0
        while at < copy.nbytes:
            size = min(copy.nbytes - at, most - total)
            chunk.append(Copy(copy.address + at, copy.segment, copy.offset + at, size))
            at += size
            total += size
            if total == most or len(chunk) == _PIECES:
                yield chunk
                chunk, total, most = [], 0, limit()
    if chunk:
        yield chunk


def _memory(copy: Copy) -> memoryview:
    return memoryview((ctypes.c_char * copy.nbytes).from_address(copy.address)).cast("B")
