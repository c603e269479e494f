"""Server halves in processes of their own, beside the volume.

``python -m torchstore_core.server.memory.isolated`` is such a process. It gets the descriptors of
the segments when it is started, answers requests on a socket pair, and ends with its other end.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

import msgspec

from torchstore_core.contracts.transport import Segment, ServerContext, TransportServer
from torchstore_core.errors import (
    ProtocolError,
    TorchStoreError,
    TransportError,
    TransportNotReadyError,
    TransportUnavailableError,
    from_wire,
)
from torchstore_core.plugins.registry import load_class
from torchstore_core.wire.framing import HEADER, FrameReader

__all__ = ["IsolatedServer"]

log = logging.getLogger(__name__)

_MAX_FRAME = 4 << 20
_RECEIVE = 1 << 16
_START_S = 60.0
_CLOSE_S = 2.0


class _Order(msgspec.Struct, frozen=True):
    """What the process is started with, as its argument.

    Args:
        half: ``"module:Class"``.
        sock: descriptor of its end of the socket pair.
    """

    half: str
    sock: int
    context: ServerContext
    segments: list[Segment]


class _Ask(msgspec.Struct, frozen=True, array_like=True):
    """A call of the half's method; of ``start``, ``handshake``, ``disconnect`` or ``close``."""

    id: int
    method: str
    peer: bytes = b""
    data: bytes = b""


class _Answer(msgspec.Struct, frozen=True, array_like=True):
    """What it returned, or the code and message of what it raised; what is registered now."""

    id: int
    data: bytes = b""
    code: str = ""
    message: str = ""
    registered: tuple[int, ...] = ()


def _frame(message: _Ask | _Answer) -> bytes:
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(HEADER, "little") + body


# ---- in the volume's process --------------------------------------------------------------


class IsolatedServer(TransportServer):
    """A server half in a process of its own. It is started again when it is needed and has died.

    Args:
        half: ``"module:Class"`` of the :class:`TransportServer`.
    """

    def __init__(self, half: str) -> None:
        self._half = half
        self._context: ServerContext | None = None
        self._segments: Sequence[Segment] = ()
        self._offer = b""
        self._process: _HalfProcess | None = None
        self._starting = asyncio.Lock()
        self._peers: set[bytes] = set()
        self._closed = False

    async def start(self, context: ServerContext, segments: Sequence[Segment]) -> bytes:
        self._context, self._segments = context, segments
        await self._running()
        return self._offer

    async def handshake(self, peer: bytes, request: bytes) -> bytes:
        process = await self._running()
        self._peers.add(peer)
        return await process.ask("handshake", peer, request)

    async def disconnect(self, peer: bytes) -> None:
        process = self._process
        if process is None or peer not in self._peers:
            return
        self._peers.discard(peer)
        try:
            await process.ask("disconnect", peer)
        except TransportError:
            await process.kill()  # what has no process moves no byte

    def registered(self, segment: int) -> int:
        process = self._process
        if process is None or process.ended:
            return 0
        if process.is_asked:  # it may register some at this moment
            return max([one.nbytes for one in self._segments if one.id == segment], default=0)
        known = process.registered
        return known[segment] if segment < len(known) else 0

    async def close(self) -> None:
        self._closed = True
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(TransportError, TimeoutError):
                await asyncio.wait_for(process.ask("close"), _CLOSE_S)
            await process.kill()

    async def _running(self) -> _HalfProcess:
        """The process; a new one if it has died."""
        async with self._starting:
            if self._closed or self._context is None:
                raise TransportUnavailableError("this volume has closed")
            if self._process is not None and not self._process.ended:
                return self._process
            if self._process is not None:
                log.warning("the process of %s has died; it is started again", self._half)
                await self._process.kill()
                self._peers.clear()
            process = _HalfProcess(self._half, self._context, self._segments)
            try:
                self._offer = await asyncio.wait_for(process.ask("start"), _START_S)
            except BaseException as error:
                await process.kill()
                if isinstance(error, TimeoutError):
                    raise TransportNotReadyError(
                        f"the process of {self._half} did not start within {_START_S:g} s"
                    ) from error
                raise
            self._process = process
            return process


class _HalfProcess:
    """One such process, and what is asked of it."""

    def __init__(self, half: str, context: ServerContext, segments: Sequence[Segment]) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            order = _Order(half, theirs.fileno(), context, list(segments))
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, msgspec.json.encode(order).decode()],
                pass_fds=[theirs.fileno(), *(segment.fd for segment in segments)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
        ours.setblocking(False)
        self._sock = ours
        self._half = half
        self._ids = itertools.count(1)
        self._pending: dict[int, asyncio.Future[bytes]] = {}
        self._sending = asyncio.Lock()
        self.registered: tuple[int, ...] = ()
        self.ended = False
        self._reading = asyncio.get_running_loop().create_task(self._read())

    @property
    def is_asked(self) -> bool:
        """Whether it has not answered everything yet."""
        return bool(self._pending)

    async def ask(self, method: str, peer: bytes = b"", data: bytes = b"") -> bytes:
        """Call a method of the half.

        Raises:
            TransportError: what it raises, or that the process has died.
        """
        if self.ended:
            raise self._died()
        loop = asyncio.get_running_loop()
        number = next(self._ids)
        pending: asyncio.Future[bytes] = loop.create_future()
        self._pending[number] = pending
        try:
            async with self._sending:
                await loop.sock_sendall(self._sock, _frame(_Ask(number, method, peer, data)))
            return await pending
        except OSError as error:
            raise self._died() from error
        finally:
            del self._pending[number]

    async def kill(self) -> None:
        """End it, and wait for that. Idempotent."""
        self._process.kill()
        await asyncio.to_thread(self._process.wait)
        self._reading.cancel()
        self._end()

    async def _read(self) -> None:
        loop = asyncio.get_running_loop()
        reader = FrameReader(_MAX_FRAME)
        try:
            while data := await loop.sock_recv(self._sock, _RECEIVE):
                for body in reader.feed(data):
                    self._answered(msgspec.msgpack.decode(body, type=_Answer))
        except (OSError, ProtocolError, msgspec.DecodeError) as error:
            log.warning("the process of %s cannot be understood: %s", self._half, error)
        finally:
            self._end()

    def _answered(self, answer: _Answer) -> None:
        self.registered = answer.registered
        pending = self._pending.get(answer.id)
        if pending is None or pending.done():
            return
        if answer.code:
            pending.set_exception(from_wire(answer.code, answer.message, None, {}))
        else:
            pending.set_result(answer.data)

    def _end(self) -> None:
        if self.ended:
            return
        self.ended = True
        self._sock.close()
        for pending in self._pending.values():
            if not pending.done():
                pending.set_exception(self._died())

    def _died(self) -> TransportError:
        return TransportError(f"the process of the server half {self._half} has died")


# ---- the process --------------------------------------------------------------------------


async def _serve(order: _Order) -> None:
    loop = asyncio.get_running_loop()
    sock = socket.socket(fileno=order.sock)
    sock.setblocking(False)
    half: TransportServer = load_class(order.half)()
    reader = FrameReader(_MAX_FRAME)
    sending = asyncio.Lock()
    tasks: set[asyncio.Task[None]] = set()

    async def call(ask: _Ask) -> bytes:
        match ask.method:
            case "start":
                return await half.start(order.context, order.segments)
            case "handshake":
                return await half.handshake(ask.peer, ask.data)
            case "disconnect":
                await half.disconnect(ask.peer)
            case "close":
                await half.close()
        return b""

    async def answer(ask: _Ask) -> None:
        data, code, message = b"", "", ""
        try:
            data = await call(ask)
        except TorchStoreError as error:
            code, message = error.code, error.message
        except Exception as error:
            log.warning("%s failed in %s", order.half, ask.method, exc_info=True)
            code, message = TransportError.code, f"its server half failed: {error!r}"
        registered = tuple(half.registered(segment.id) for segment in order.segments)
        async with sending:
            with contextlib.suppress(OSError):
                reply = _Answer(ask.id, data, code, message, registered)
                await loop.sock_sendall(sock, _frame(reply))

    with contextlib.suppress(OSError):
        while data := await loop.sock_recv(sock, _RECEIVE):
            for body in reader.feed(data):
                task = loop.create_task(answer(msgspec.msgpack.decode(body, type=_Ask)))
                tasks.add(task)
                task.add_done_callback(tasks.discard)


def _end_with(sock: int) -> None:
    """End this process when the other end of the socket pair has closed, even if the library keeps
    the event loop from noticing.
    """
    poll = select.poll()
    poll.register(sock, select.POLLRDHUP)
    poll.poll()
    time.sleep(_CLOSE_S)
    os._exit(1)


def main() -> None:
    """Serve until the volume's process has closed its end of the socket pair, or has died."""
    order = msgspec.json.decode(sys.argv[1], type=_Order)
    threading.Thread(target=_end_with, args=(order.sock,), daemon=True).start()
    asyncio.run(_serve(order))
    os._exit(0)  # a library's threads may be blocked for ever


if __name__ == "__main__":
    main()
