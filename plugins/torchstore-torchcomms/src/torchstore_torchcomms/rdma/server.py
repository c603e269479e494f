"""The server half: it alone moves bytes, in both directions, and can be killed while it does.

A segment is registered in blocks, when they are needed first, until the last client has gone.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from torchstore_core.contracts.transport import Segment, ServerContext, TransportServer
from torchstore_core.errors import TransportError, TransportNotReadyError
from torchstore_core.machine.tasks import wait_ended
from torchstore_core.machine.virtual_memory import map_shared, unmap
from torchstore_torchcomms.rdma.protocol import (
    Hello,
    Move,
    Region,
    Welcome,
    decode_request,
    encode,
)

if TYPE_CHECKING:
    from torchstore_torchcomms.rdma.library import Registered, Transport

__all__ = ["BLOCK", "PIECE", "RdmaServer"]

#: Bytes of a segment that are registered together.
BLOCK = 256 << 20
#: Bytes that are moved by one call of the library, during which this process does nothing else.
PIECE = 8 << 20


class _Connection:
    """Of one link."""

    def __init__(self, transport: Transport) -> None:
        self.transport: Transport | None = transport
        self.ended = False
        self.lock = asyncio.Lock()


class RdmaServer(TransportServer):
    """Reads and writes the registered memory of clients that have said :class:`Hello`."""

    def __init__(self) -> None:
        self._segments: dict[int, Segment] = {}
        self._mapped: dict[int, int] = {}
        self._blocks: dict[tuple[int, int], Registered] = {}
        self._connections: dict[tuple[bytes, bytes], _Connection] = {}
        # What begins or ends connections of a client takes turns, so that none of it returns before
        # what another one has ended has stopped. A lock lives as long as it is used.
        self._locks: weakref.WeakValueDictionary[bytes, asyncio.Lock] = (
            weakref.WeakValueDictionary()
        )
        self._closed = False

    async def start(self, context: ServerContext, segments: Sequence[Segment]) -> bytes:
        self._segments = {segment.id: segment for segment in segments}
        return b""  # torch and torchcomms are imported for the first client

    async def handshake(self, peer: bytes, request: bytes) -> bytes:
        asked = decode_request(request)
        if isinstance(asked, Move):
            await self._move(peer, asked)
            return b""
        async with self._lock(peer):
            if isinstance(asked, Hello):
                return encode(await self._welcome(peer, asked))
            await self._end([(peer, asked.link)])
            return b""

    def _lock(self, peer: bytes) -> asyncio.Lock:
        return self._locks.setdefault(peer, asyncio.Lock())

    async def disconnect(self, peer: bytes) -> None:
        async with self._lock(peer):
            await self._end([at for at in self._connections if at[0] == peer])

    def registered(self, segment: int) -> int:
        ends = [(block + 1) * BLOCK for of, block in self._blocks if of == segment]
        return min(max(ends, default=0), self._segments[segment].nbytes)

    async def close(self) -> None:
        self._closed = True
        for peer in {*self._locks, *(peer for peer, _ in self._connections)}:
            await self.disconnect(peer)
        while self._mapped:
            segment, address = self._mapped.popitem()
            unmap(address, self._segments[segment].nbytes)

    async def _welcome(self, peer: bytes, hello: Hello) -> Welcome:
        if self._closed:
            raise TransportError("this volume has closed")
        await self._end([(peer, hello.link)])
        made = await asyncio.to_thread(_connected, hello.address)
        self._connections[peer, hello.link] = _Connection(made)
        return Welcome(made.address)

    async def _move(self, peer: bytes, move: Move) -> None:
        connection = self._connections.get((peer, move.link))
        if connection is None:
            raise TransportError("the connection of this link has ended")
        async with connection.lock:
            for copy in move.copies:
                for piece in self._pieces(move, copy):
                    transport = connection.transport
                    if connection.ended or transport is None:
                        raise TransportError("the connection of this link has ended")
                    # In a thread, so that what comes in the meantime is seen between two pieces.
                    moving = asyncio.ensure_future(
                        asyncio.to_thread(transport.move, *piece, into=move.into)
                    )
                    del transport, piece
                    if await wait_ended(moving):
                        raise asyncio.CancelledError
                    moving.result()

    def _pieces(
        self, move: Move, copy: tuple[int, int, int, int, int]
    ) -> Iterator[tuple[Registered, int, Region, int, int]]:
        """The parts of a copy that one call of the library moves.

        Raises:
            TransportError: it is not inside of its region and of its segment.
        """
        which, inside, number, offset, nbytes = copy
        segment = self._segments.get(number)
        region = move.regions[which] if 0 <= which < len(move.regions) else None
        if (
            segment is None
            or region is None
            or min(inside, offset, nbytes) < 0
            or offset + nbytes > segment.nbytes
            or inside + nbytes > region.nbytes
        ):
            raise TransportError(f"[{offset}, +{nbytes}) is outside of segment {number}")
        while nbytes:
            block, start = divmod(offset, BLOCK)
            some = min(nbytes, BLOCK - start, PIECE)
            yield self._block(segment, block), start, region, inside, some
            inside, offset, nbytes = inside + some, offset + some, nbytes - some

    def _block(self, segment: Segment, block: int) -> Registered:
        from torchstore_torchcomms.rdma.library import Registered

        found = self._blocks.get((segment.id, block))
        if found is None:
            address = self._mapped.get(segment.id)
            if address is None:
                try:
                    address = self._mapped[segment.id] = map_shared(segment.fd, segment.nbytes)
                except OSError as error:
                    raise TransportNotReadyError(f"a segment cannot be mapped: {error}") from error
            start = block * BLOCK
            nbytes = min(BLOCK, segment.nbytes - start)
            found = self._blocks[segment.id, block] = Registered(address + start, nbytes)
        return found

    async def _end(self, which: Sequence[tuple[bytes, bytes]]) -> None:
        gone = [one for at in which if (one := self._connections.pop(at, None)) is not None]
        for one in gone:
            one.ended = True
        for one in gone:
            async with one.lock:  # the piece under way has ended
                one.transport = None
        if not self._connections:
            self._blocks.clear()


def _connected(address: bytes) -> Transport:
    from torchstore_torchcomms.rdma.library import Transport, check_supported

    check_supported()
    transport = Transport()
    transport.connect(address)
    return transport
