"""Server halves of transports in processes of their own, next to the volume's process.

``python -m torchstore_core.server.memory.isolated`` is such a process. It inherits the descriptors
of the segments, answers requests on a socket pair, and ends when the pair's other end is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import msgspec

from torchstore_core.contracts.transport import Segment, ServerContext, TransportServer
from torchstore_core.errors import (
    PluginError,
    ProtocolError,
    TorchStoreError,
    TransportError,
    TransportNotReadyError,
    TransportUnavailableError,
)
from torchstore_core.machine.tasks import begin
from torchstore_core.plugins.registry import load_class
from torchstore_core.wire.calls import Calls
from torchstore_core.wire.framing import FrameReader, framed, portable
from torchstore_core.wire.messages import HANDSHAKE_S

log = logging.getLogger(__name__)

_MAX_FRAME = 4 << 20
_MAX_DATA = 2 << 20
_RECEIVE = 1 << 16
_START_S = 60.0
_CLOSE_S = 2.0
_DISCONNECT_S = 5.0
# How often a process is asked whether it is alive, and for how many such pauses it may say nothing.
# Counted by the pauses of this process: if both were stopped, the other one has time to answer.
_PAUSE_S = 5.0
_SILENT_PAUSES = 4


def failure_of_half(error: BaseException) -> TransportError:
    """What a client is told when a server half has raised what its contract does not allow:
    ``details["raised"]`` is the name of that exception's class.
    """
    raised = type(error).__qualname__
    return TransportError(f"its server half failed: {error!r}", details={"raised": raised})


class _Order(msgspec.Struct, frozen=True):
    """The configuration of the process, passed as its command-line argument.

    Args:
        half: ``"module:Class"`` of the server half.
        sock: the descriptor of the process's end of the socket pair.
    """

    half: str
    sock: int
    context: ServerContext
    segments: list[Segment]


class _Ask(msgspec.Struct, frozen=True, array_like=True):
    """A call of a method of the half: ``start``, ``handshake``, ``disconnect`` or ``close``; or
    ``alive``, which only asks it for what is ``stuck``.
    """

    id: int
    method: str
    peer: bytes = b""
    data: bytes = b""


class _Answer(msgspec.Struct, frozen=True, array_like=True):
    """The answer to an ``_Ask``: the returned data, or the code, message and details of the error;
    and ``registered``, the bytes that the half has registered of each segment.
    """

    id: int
    data: bytes = b""
    code: str = ""
    message: str = ""
    registered: tuple[int, ...] = ()
    details: dict[str, Any] = {}


# ---- in the volume's process --------------------------------------------------------------


class IsolatedServer(TransportServer):
    """A server half in a process of its own. The process is started by the first handshake; if it
    has died, the next handshake starts a new one. A process that hangs is killed, whatever it was
    doing: when its event loop is silent, or when it cannot disconnect a client. A client whose
    handshake is not answered in time is disconnected.

    Args:
        half: ``"module:Class"`` of the :class:`TransportServer`.
        offer: see ``TransportSpec.offer``.
    """

    def __init__(self, half: str, offer: Callable[[], bytes] | None = None) -> None:
        self._half = half
        self._offer = offer
        self._context: ServerContext | None = None
        self._segments: Sequence[Segment] = ()
        self._process: _HalfProcess | None = None
        self._starting = asyncio.Lock()
        self._peers: set[bytes] = set()
        self._ending: dict[bytes, asyncio.Future[None]] = {}  # clients that are being disconnected
        # Handshakes that wait for the process to start, each with its client.
        self._waiting: dict[object, bytes] = {}
        self._closed = False

    async def start(self, context: ServerContext, segments: Sequence[Segment]) -> bytes:
        self._context, self._segments = context, segments
        return b"" if self._offer is None else self._offer()

    async def handshake(self, peer: bytes, request: bytes) -> bytes:
        waiting = object()
        self._waiting[waiting] = peer
        try:
            if (ending := self._ending.get(peer)) is not None:
                await asyncio.wait([ending])
            process = await self._running()
        finally:
            wanted = self._waiting.pop(waiting, None)
        if wanted is None:
            raise TransportError("this client has disconnected")
        self._peers.add(peer)
        try:
            async with asyncio.timeout(HANDSHAKE_S) as limit:
                return await process.ask("handshake", peer, request)
        except TimeoutError:
            if not limit.expired():
                raise
        error = f"the process of {self._half} did not answer a handshake within {HANDSHAKE_S:g} s"
        log.warning("%s: its client is disconnected", error)
        await self.disconnect(peer)
        raise TransportNotReadyError(error)

    async def disconnect(self, peer: bytes) -> None:
        for waiting in [one for one, whose in self._waiting.items() if whose == peer]:
            del self._waiting[waiting]
        process, ending = self._process, self._ending.get(peer)
        if process is not None and ending is None and peer in self._peers:
            self._peers.discard(peer)
            ending = self._ending[peer] = asyncio.ensure_future(self._end(process, peer))
            ending.add_done_callback(lambda _: self._ending.pop(peer))
        if ending is not None:
            await asyncio.shield(ending)

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

    async def _end(self, process: _HalfProcess, peer: bytes) -> None:
        """Return once no byte of a client moves: the process has disconnected it, or is killed."""
        try:
            async with asyncio.timeout(_DISCONNECT_S):
                await process.ask("disconnect", peer)
        except (TransportError, TimeoutError) as error:
            # Of a volume that closes, or of a process that has died, all clients end.
            if not (self._closed or process.ended):
                late = f"it took more than {_DISCONNECT_S:g} s"
                why = error.message if isinstance(error, TransportError) else late
                log.warning(
                    "the process of %s is killed, as it cannot end a client: %s", self._half, why
                )
            await process.kill()

    async def _running(self) -> _HalfProcess:
        """Return the running process; start one if there is none or it has died."""
        async with self._starting:
            if self._closed or self._context is None:
                raise TransportUnavailableError("this volume has closed")
            if self._process is not None and not self._process.ended:
                return self._process
            if self._process is not None:
                log.warning("the process of %s has died; it is started again", self._half)
                await self._process.kill()
                self._peers.clear()
            self._process = None
            process = self._process = _HalfProcess(self._half, self._context, self._segments)
            try:
                await process.connect()
                await asyncio.wait_for(process.ask("start"), _START_S)
            except BaseException as error:
                if self._process is process:
                    self._process = None
                await process.kill()
                if isinstance(error, TimeoutError):
                    raise TransportNotReadyError(
                        f"the process of {self._half} did not start within {_START_S:g} s"
                    ) from error
                raise
            process.watch()
            return process


class _HalfProcess(asyncio.Protocol):
    """One process of a server half, with the requests that it has not answered yet."""

    def __init__(self, half: str, context: ServerContext, segments: Sequence[Segment]) -> None:
        self._half = half
        self._reader = FrameReader(_MAX_FRAME)
        self._transport: asyncio.Transport | None = None
        self._calls: Calls[_Answer] = Calls()
        self._unanswered: set[int] = set()
        self.registered: tuple[int, ...] = ()
        self.ended = False
        self._killing: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._heard = 0  # how often the process has said something
        self._sock, theirs = socket.socketpair()
        order = _Order(half, theirs.fileno(), context, list(segments))
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", __name__, msgspec.json.encode(order).decode()],
                    pass_fds=[theirs.fileno(), *(segment.fd for segment in segments)],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    start_new_session=True,  # an interrupt at the terminal is not for it
                )
        except BaseException:
            self._sock.close()
            raise

    async def connect(self) -> None:
        """Connect to the process. Must be called before :meth:`ask`."""
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.create_unix_connection(lambda: self, sock=self._sock)

    def watch(self) -> None:
        """From now on, kill the process if its event loop hangs. Must be called once."""
        self._watching = asyncio.get_running_loop().create_task(self._watch())

    @property
    def is_asked(self) -> bool:
        """Whether a method of the half has been called that has not returned yet."""
        return bool(self._unanswered)

    async def ask(self, method: str, peer: bytes = b"", data: bytes = b"") -> bytes:
        """Call a method of the half. Calls are begun in the order in which they are made.

        Raises:
            TransportError: the half raised it, or the process has died.
        """
        transport = self._transport
        if transport is None:
            raise self._died()

        def send(number: int) -> None:
            self._unanswered.add(number)
            transport.write(framed(_Ask(number, method, peer, data)))

        return (await self._calls.make(send)).data

    async def kill(self) -> None:
        """Kill the process, and wait until it has ended. Idempotent."""
        self._process.kill()
        if self._transport is None:
            self._sock.close()
        else:
            self._transport.abort()
        self._end()
        await asyncio.to_thread(self._process.wait)

    # ---- asyncio.Protocol -----------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        self._heard += 1
        try:
            for body in self._reader.feed(data):
                self._answered(msgspec.msgpack.decode(body, type=_Answer))
        except (ProtocolError, msgspec.DecodeError) as error:
            log.warning("the process of %s cannot be understood: %s", self._half, error)
            self._fail()

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail()

    # ---- inside ---------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Ask the process again and again whether it is alive, and kill it if it says nothing."""
        silent, heard = 0, -1
        while silent < _SILENT_PAUSES and self._transport is not None:
            if heard != self._heard:
                silent, heard = 0, self._heard
                self._transport.write(framed(_Ask(self._calls.next_id(), "alive")))
            await asyncio.sleep(_PAUSE_S)
            silent += 1
        log.warning("the process of %s hangs: it is killed", self._half)
        self._fail()

    def _answered(self, answer: _Answer) -> None:
        self.registered = answer.registered
        self._unanswered.discard(answer.id)
        self._calls.answered(answer)

    def _fail(self) -> None:
        if not self.ended:
            self._end()
            self._killing = asyncio.get_running_loop().create_task(self.kill())

    def _end(self) -> None:
        if self.ended:
            return
        self.ended = True
        if self._watching is not None:
            self._watching.cancel()
        self._calls.fail(self._died)

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
    handshakes: dict[bytes, set[asyncio.Task[None]]] = {}  # by their client, until it is gone
    stuck: frozenset[Hashable] = frozenset()  # calls of the library, as the half said last

    async def call(ask: _Ask) -> object:
        nonlocal stuck
        match ask.method:
            case "alive":
                before, stuck = stuck, frozenset(half.stuck())
                if before & stuck:
                    log.critical("a call of the library of %s hangs: its process ends", order.half)
                    os._exit(1)
            case "start":
                return await half.start(order.context, order.segments)
            case "handshake":
                return await half.handshake(ask.peer, ask.data)
            case "disconnect":
                under_way = list(handshakes.pop(ask.peer, ()))
                await half.disconnect(ask.peer)
                for task in under_way:
                    task.cancel()  # nothing waits for its answer any more
            case "close":
                await half.close()
        return b""

    async def answer(ask: _Ask) -> None:
        data, code, message = b"", "", ""
        details: dict[str, Any] = {}
        try:
            data = _checked(ask.method, await call(ask))
        except TorchStoreError as error:
            code, (message, details) = error.code, portable(error)
        except asyncio.CancelledError:
            code, message = TransportError.code, "this client has disconnected"
        except Exception as error:
            log.warning("%s failed in %s", order.half, ask.method, exc_info=True)
            code, (message, details) = TransportError.code, portable(failure_of_half(error))
        registered = tuple(_registered(half, segment) for segment in order.segments)
        async with sending:
            with contextlib.suppress(OSError):
                reply = _Answer(ask.id, data, code, message, registered, details)
                await loop.sock_sendall(sock, framed(reply))

    with contextlib.suppress(OSError):
        while data := await loop.sock_recv(sock, _RECEIVE):
            for body in reader.feed(data):
                ask = msgspec.msgpack.decode(body, type=_Ask)
                kept = tasks
                if ask.method == "handshake":
                    kept = handshakes.setdefault(ask.peer, set())
                begin(answer(ask), kept)


def _checked(method: str, data: object) -> bytes:
    """Return the result of a half's method; raise an error if it cannot be sent."""
    if not isinstance(data, bytes):
        raise PluginError(f"its {method} returned a {type(data).__qualname__}, not bytes")
    if len(data) > _MAX_DATA:
        raise TransportError(f"its {method} returned {len(data)} bytes; {_MAX_DATA} are the limit")
    return data


def _registered(half: TransportServer, segment: Segment) -> int:
    """Return how many bytes of a segment a half has registered; all of them if it fails to say."""
    try:
        return int(half.registered(segment.id))
    except Exception:
        log.warning("it does not say what is registered", exc_info=True)
        return segment.nbytes


def _end_with(sock: int) -> None:
    """End this process after the other end of the socket pair has closed, even if the transport's
    library blocks the event loop.
    """
    poll = select.poll()
    poll.register(sock, select.POLLRDHUP)
    poll.poll()
    time.sleep(_CLOSE_S)
    os._exit(1)


def main() -> None:
    """Serve until the volume's process closes its end of the socket pair or dies."""
    # Libraries of transports import torch, which imports numpy, which starts a thread for each
    # core: they spin for a while, and then wait for matrices that never come.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    order = msgspec.json.decode(sys.argv[1], type=_Order)
    threading.Thread(target=_end_with, args=(order.sock,), daemon=True).start()
    asyncio.run(_serve(order))
    os._exit(0)  # a library's threads may be blocked for ever


if __name__ == "__main__":
    main()
