"""Client half of ``monarch-rpc``. It does not use Monarch itself: the agent of its host makes the
calls, so it works in any process, thread and event loop.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from torchstore_core.contracts.transport import Copy, Link, LinkContext
from torchstore_core.errors import (
    TransportError,
    TransportNotReadyError,
    TransportUnavailableError,
)
from torchstore_core.machine.sockets.unix import connect, unix_socket
from torchstore_core.machine.tasks import wait_ended
from torchstore_core.wire.framing import HEADER, framed
from torchstore_monarch.chunks import ChunkSize, chunks, memory_of
from torchstore_monarch.protocol import Offer
from torchstore_monarch.rpc.wire import (
    CHUNK,
    GREETING,
    Admission,
    RpcRequest,
    RpcResponse,
)

_IN_FLIGHT = 2
_LEAST = 1 << 20  # bytes of the first call, and of each where the network is slow
_CONNECT_S = 10.0
# How long a cancelled write waits for requests in flight, so that its outcome is certain.
_SETTLE_S = 0.5


class _Asked(NamedTuple):
    """A request that was sent: what its answer fills, its size in bytes, when it was sent, and how
    many copies of the batch have arrived when it has, too.
    """

    views: list[memoryview]
    nbytes: int
    at: float
    done: int


class RpcLink(Link):
    """Asks the agent of its host, of which the volume tells, a few chunks at a time."""

    def __init__(self, volume: str, admission: Admission) -> None:
        self._path = admission.agent
        self._volume = volume
        self._ticket = admission.ticket
        self._sock: socket.socket | None = None
        self._lock = asyncio.Lock()
        self._transfers = 0
        self._broken = ""
        self._size = ChunkSize(_LEAST, CHUNK)
        self._moved = 0

    @classmethod
    async def connect(cls, offer: bytes, context: LinkContext) -> RpcLink:
        volume = Offer.of(offer).volume_id
        if context.handshake is None:
            raise TransportUnavailableError("monarch-rpc needs a store that carries handshakes")
        answer = await context.handshake(GREETING)
        try:
            admission = msgspec.msgpack.decode(answer, type=Admission)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise TransportUnavailableError("the volume's answer cannot be understood") from error
        made = cls(volume, admission)
        await made._connected()
        return made

    async def _connected(self) -> socket.socket:
        """Return the connection, which is made anew if the last transfer was cancelled."""
        if self._sock is not None:
            return self._sock
        try:
            with unix_socket() as sock:
                try:
                    async with asyncio.timeout(_CONNECT_S):
                        await connect(sock, self._path)
                except TimeoutError as error:
                    raise TransportNotReadyError(
                        f"the agent at {self._path} did not accept within {_CONNECT_S:g} s"
                    ) from error
        except OSError as error:
            raise TransportUnavailableError(f"no agent at {self._path}: {error}") from error
        self._sock = sock
        return sock

    def __del__(self) -> None:
        self._disconnect()  # because its event loop may have gone without closing it

    def _disconnect(self) -> None:
        sock, self._sock = self._sock, None
        if sock is not None:
            sock.close()

    async def write(self, copies: Sequence[Copy]) -> None:
        await self._do(copies, write=True)

    async def read(self, copies: Sequence[Copy]) -> None:
        await self._do(copies, write=False)

    def progress(self) -> int:
        """See ``contracts.transport.SupportsProgress``: what the volume has answered."""
        return self._moved

    def close(self) -> None:
        self._broken = self._broken or "it was closed"
        self._disconnect()

    # ---- inside ---------------------------------------------------------------------------

    async def _do(self, copies: Sequence[Copy], *, write: bool) -> None:
        """Move all copies. A cancelled read ends at once, with its connection. A cancelled write
        sends no more requests, and waits a moment for those that it has sent; if they take longer,
        the volume must disconnect this client before the memory is used again.
        """
        stop, began = asyncio.Event(), asyncio.Event()
        work = asyncio.ensure_future(self._transfer(copies, stop, began, write=write))
        self._transfers += 1
        try:
            await asyncio.shield(work)
        except asyncio.CancelledError:
            stop.set()
            if write and began.is_set():
                await wait_ended(work, _SETTLE_S)
                self.unsettled |= not work.done()
            work.cancel()
            await wait_ended(work)
            if not work.cancelled() and work.exception() is not None and write:
                self.unsettled |= began.is_set()
            raise
        except TransportError:
            # A request that was not answered may still be carried out.
            self.unsettled |= write and began.is_set()
            raise
        finally:
            self._transfers -= 1
            if not self._transfers:  # a lock that was waited for stays bound to its event loop
                self._lock = asyncio.Lock()

    async def _transfer(
        self, copies: Sequence[Copy], stop: asyncio.Event, began: asyncio.Event, *, write: bool
    ) -> None:
        async with self._lock:
            if self._broken:
                raise TransportError(f"the link to the agent is broken: {self._broken}")
            sock = await self._connected()
            waiting: deque[_Asked] = deque()
            errors: list[str] = []
            done = 0

            async def take() -> None:
                nonlocal done
                asked = waiting.popleft()
                if error := await self._take(sock, asked):
                    errors.append(error)
                elif not errors:
                    done = asked.done

            try:
                for chunk in chunks(copies, self._next_bytes):
                    if stop.is_set() or errors:
                        break
                    began.set()
                    views = [memory_of(copy) for copy in chunk.pieces]
                    places = [(copy.segment, copy.offset, copy.nbytes) for copy in chunk.pieces]
                    request = RpcRequest(self._volume, places, chunk.nbytes, write, self._ticket)
                    await _ask(sock, request, views)
                    into = [] if write else views
                    waiting.append(_Asked(into, chunk.nbytes, time.perf_counter(), chunk.done))
                    if len(waiting) >= _IN_FLIGHT:
                        await take()
                while waiting:
                    await take()
            except (OSError, msgspec.DecodeError) as error:
                self._broken = str(error) or type(error).__name__
                self._disconnect()
                raise TransportError(
                    f"the agent of this host is gone: {error}", details={"done": done}
                ) from error
            except asyncio.CancelledError:
                self._disconnect()
                raise
            if errors:
                raise TransportError(errors[0], details={"done": done})

    def _next_bytes(self) -> int:
        return self._size.nbytes

    async def _take(self, sock: socket.socket, asked: _Asked) -> str:
        """Receive the answer to the oldest request, with its bytes if it was a read. Return its
        error.
        """
        body = await _filled(sock, int.from_bytes(await _filled(sock, HEADER), "little"))
        self._size.record(asked.nbytes, time.perf_counter() - asked.at)
        self._moved += asked.nbytes
        response = msgspec.msgpack.decode(body, type=RpcResponse)
        if not response.error:
            for view in asked.views:
                await _fill(sock, view)
        return response.error


async def _ask(sock: socket.socket, request: RpcRequest, views: list[memoryview]) -> None:
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(sock, framed(request))
    if request.write:
        for view in views:
            await loop.sock_sendall(sock, view)


async def _filled(sock: socket.socket, nbytes: int) -> bytearray:
    data = bytearray(nbytes)
    await _fill(sock, memoryview(data))
    return data


async def _fill(sock: socket.socket, view: memoryview) -> None:
    loop = asyncio.get_running_loop()
    while view:
        got = await loop.sock_recv_into(sock, view)
        if not got:
            raise ConnectionResetError("the agent has closed the connection")
        view = view[got:]
