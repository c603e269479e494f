"""A lane: one event loop's pipe to the server. Torch-free.

Built on ``loop.add_reader`` and plain non-blocking sends: a reply costs one wake-up of the user's
own loop and no thread hop, and a lane can be dropped when its loop has closed already.

The loop holds its lane, through the reader, and the lane the loop; nothing else may hold either, so
that a loop that is never closed goes with whoever made it, and takes its lane along.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
import struct
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

import msgspec

from torchstore_core.errors import (
    ProtocolError,
    StoreClosedError,
    StoreTimeoutError,
    TorchStoreError,
    from_wire,
)
from torchstore_core.wire import messages as m
from torchstore_core.wire.framing import FrameReader, decode_reply, encode
from torchstore_core.wire.paging import joined

__all__ = ["Lane", "MessageTooLargeError"]

_RECEIVE = 1 << 18
_DONT_WAIT = socket.MSG_DONTWAIT
# Direct receives in a row before the event loop gets its turn, and calls to sit out after a miss.
_DIRECT_IN_A_ROW = 16
_DIRECT_PAUSE = 16
R = TypeVar("R", bound=m.Message)


class MessageTooLargeError(ProtocolError):
    """A request that no server would take; the lane is as it was."""


class Lane:
    """Requests and replies on one connection, for one event loop.

    Args:
        sock: connected, greeted, non-blocking.
        loop: the running loop.
        gone: what to say when the server is gone.
    """

    def __init__(
        self,
        sock: socket.socket,
        loop: asyncio.AbstractEventLoop,
        gone: str,
    ) -> None:
        self._sock = sock
        self.loop = loop
        self._thread = weakref.ref(threading.current_thread())
        self._gone = gone
        self._reader = FrameReader(m.MAX_FRAME)
        self._pending: dict[int, tuple[asyncio.Future[m.Message], float | None]] = {}
        self._pages: dict[int, list[m.Message]] = {}  # of replies that are still coming
        self._limits: set[asyncio.Timeout] = set()
        self._unsent = bytearray()
        self._buffer = memoryview(bytearray(_RECEIVE))
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._ids = itertools.count(2)
        self._lost: TorchStoreError | None = None
        self._closed = False
        self._direct = _DIRECT_IN_A_ROW
        # Blocking, but never for long; everything but the direct receive says MSG_DONTWAIT.
        sock.setblocking(True)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 1000))
        loop.add_reader(sock.fileno(), self._readable)
        # In a cycle `__del__` is too late: the collector may have called the socket's own before,
        # which warns.
        weakref.finalize(self, sock.close).atexit = False

    def __del__(self) -> None:
        self._sock.close()

    @property
    def usable(self) -> bool:
        """Whether requests can be sent (from its own, running loop)."""
        return self._lost is None

    @property
    def deserted(self) -> bool:
        """Whether nobody seems to be left who could use it: its loop is closed, or stands still,
        with nothing under way here, and the thread that ran it has ended.
        """
        if self.loop.is_closed():
            return True
        thread = self._thread()
        return not (
            self.loop.is_running()
            or (thread is not None and thread.is_alive())
            or self._pending
            or self._limits
            or self._unsent
        )

    def next_id(self) -> int:
        """A fresh request id."""
        return next(self._ids)

    async def call(
        self, message: m.Message, expect: type[R], timeout: float | None, *, quick: bool = False
    ) -> R:
        """Send a request and return its reply.

        Args:
            timeout: seconds; None waits for ever.
            quick: the server answers in microseconds; see :meth:`_receive_directly`.

        Raises:
            StoreTimeoutError: no reply in time; its operation's clock completes it.
            StoreClosedError: the server is gone.
            TorchStoreError: what the server answered.
        """
        request_id: int = message.id  # type: ignore[attr-defined]
        if quick and not self._pending and not self._unsent and self._direct > 0:
            self.send(message)
            direct = self._receive_directly(request_id)
            if type(direct) is expect:
                return direct
            reply = direct if direct is not None else await self._wait(request_id, timeout)
        else:
            self._direct = min(self._direct + 1, 0) if self._direct < 0 else _DIRECT_IN_A_ROW
            reply = await self._wait(request_id, timeout, message)
        if type(reply) is expect:
            return reply
        if isinstance(reply, m.Failure):
            raise from_wire(reply.code, reply.message, reply.key, reply.details)
        raise ProtocolError(f"expected {expect.__name__}, the server sent {type(reply).__name__}")

    async def _wait(
        self, request_id: int, timeout: float | None, message: m.Message | None = None
    ) -> m.Message:
        """Wait on the event loop for the reply, having sent ``message`` if it is given."""
        loop = self.loop
        future: asyncio.Future[m.Message] = loop.create_future()
        deadline = None
        if timeout is not None:
            deadline = loop.time() + timeout
            if self._timer is None or deadline < self._timer_at:
                self._arm(deadline)
        self._pending[request_id] = (future, deadline)
        try:
            if message is not None:
                self.send(message)
            return await future
        except BaseException:
            if future.done() and not future.cancelled():
                future.exception()  # it was lost while this was sent: nobody else asks
            raise
        finally:
            self._pending.pop(request_id, None)
            if request_id in self._pages:
                del self._pages[request_id]
                self.cancel(request_id)

    async def until(self, done: asyncio.Future[m.Message], timeout: float | None) -> bool:
        """Wait until something else than a reply has cancelled ``done``; whether it has, after
        ``timeout`` seconds. Whoever does it need not hold the future: the lane does.

        Raises:
            StoreClosedError: the server is gone.
        """
        number = self.next_id()
        self._pending[number] = (done, None)
        try:
            await asyncio.wait([done], timeout=timeout)
        finally:
            self._pending.pop(number, None)
        if done.done() and not done.cancelled():
            done.result()
        return done.done()

    def _receive_directly(self, request_id: int) -> m.Message | None:
        """Wait for the reply in ``recv`` itself, for at most a scheduler tick.

        The kernel then switches straight to the server and back, which takes a fraction of what
        a trip through the event loop costs. So that the loop's other tasks keep running, only a
        few calls in a row may do it; after one whose reply did not come at once, many may not.
        """
        self._direct -= 1
        try:
            while True:
                data = self._received(0)
                if not data:
                    self._lose(StoreClosedError(self._gone))
                    raise self._lost_error()
                found: m.Message | None = None
                for body in self._reader.feed(data):
                    reply = decode_reply(body)
                    if getattr(reply, "id", 0) != request_id:
                        self._dispatch(reply)
                    elif self._pages or getattr(reply, "continued", False):
                        found = self._whole(request_id, reply)
                    else:
                        found = reply
                if self._lost is not None:
                    raise self._lost_error()
                if found is not None:
                    return found
        except BlockingIOError:
            self._direct = -_DIRECT_PAUSE
            return None
        except OSError as error:
            self._lose(StoreClosedError(f"{self._gone}: {error}"))
            raise self._lost_error() from error
        except (ProtocolError, msgspec.DecodeError) as error:
            self._lose(ProtocolError(f"the server sent something unreadable: {error}"))
            raise self._lost_error() from error

    def send(self, message: m.Message) -> None:
        """Send without waiting for anything.

        Raises:
            StoreClosedError: the server is gone.
            MessageTooLargeError: it does not fit a frame; nothing was sent.
        """
        if self._lost is not None:
            raise self._lost_error()
        try:
            frame = encode(message)
        except UnicodeEncodeError as error:
            raise ProtocolError(f"a key is not valid Unicode: {error}") from error
        if len(frame) > m.MAX_FRAME:
            raise MessageTooLargeError(
                f"a message of {len(frame)} bytes is over the limit of {m.MAX_FRAME}; "
                "put or get fewer keys at once, a state dict in several parts (partial=True)"
            )
        if self._unsent:
            self._unsent += frame
            return
        try:
            sent = self._sock.send(frame, _DONT_WAIT)
        except BlockingIOError:
            sent = 0
        except OSError as error:
            # Replies that came before the end (a refusal, say) are worth more than this error.
            self._readable()
            if self._lost is None:
                self._lose(StoreClosedError(f"{self._gone}: {error}"))
            raise self._lost_error() from error
        if sent < len(frame):
            self._unsent += memoryview(frame)[sent:]
            self.loop.add_writer(self._sock.fileno(), self._writable)

    def cancel(self, request_id: int) -> None:
        """Say that nobody waits for a reply, or for the rest of it, any more."""
        with suppress(TorchStoreError):  # the server is gone, and the reply with it
            self.send(m.Cancel(request_id))

    @contextmanager
    def ending(self, limit: asyncio.Timeout) -> Iterator[None]:
        """End what runs under ``limit``, with the lane's error, when the server is gone."""
        self._limits.add(limit)
        try:
            yield
        except TimeoutError:
            if self._lost is not None and limit.expired():
                raise self._lost_error() from None
            raise
        finally:
            self._limits.discard(limit)

    def close(self) -> None:
        """Close now; what waits gets StoreClosedError."""
        self._lose(StoreClosedError("this client was closed"))

    def desert(self) -> None:
        """From any thread: the server sees the end now. The descriptor goes with the loop, which
        may still watch it.
        """
        self._lost = self._lost or StoreClosedError("this client was closed")
        if not self._closed:
            with suppress(OSError):  # the server was faster
                self._sock.shutdown(socket.SHUT_RDWR)

    def abandon(self) -> None:
        """In a forked child: let go of the parent's socket without a word."""
        self._lost = StoreClosedError("this connection belongs to the parent process")
        self._closed = True
        self._sock.close()

    # ---- inside ---------------------------------------------------------------------------

    def _lost_error(self) -> TorchStoreError:
        lost = self._lost or StoreClosedError(self._gone)
        return type(lost)(lost.message)

    def _received(self, flags: int) -> bytes:
        """What has arrived; b"" at the end. Into a buffer that is there already: allocating one
        of this size costs more than the whole trip to the server.
        """
        view = self._buffer
        return bytes(view[: self._sock.recv_into(view, 0, flags)])

    def _readable(self) -> None:
        try:
            data = self._received(_DONT_WAIT)
        except BlockingIOError:
            return
        except OSError as error:
            self._lose(StoreClosedError(f"{self._gone}: {error}"))
            return
        if not data:
            self._lose(StoreClosedError(self._gone))
            return
        try:
            for body in self._reader.feed(data):
                self._dispatch(decode_reply(body))
        except (ProtocolError, msgspec.DecodeError) as error:
            self._lose(ProtocolError(f"the server sent something unreadable: {error}"))

    def _dispatch(self, reply: m.Message) -> None:
        request_id: int = getattr(reply, "id", 0)
        if request_id == 0:
            if isinstance(reply, m.Failure):
                self._lose(from_wire(reply.code, reply.message, reply.key, reply.details))
            return
        waiting = self._pending.get(request_id)
        if waiting is None or waiting[0].done():
            return
        whole = self._whole(request_id, reply)
        if whole is not None:
            waiting[0].set_result(whole)

    def _whole(self, request_id: int, reply: m.Message) -> m.Message | None:
        """The reply that ends with this page; None if there are more to come."""
        if getattr(reply, "continued", False):
            self._pages.setdefault(request_id, []).append(reply)
            return None
        pages = self._pages.pop(request_id, None) if self._pages else None
        if pages is None or isinstance(reply, m.Failure):
            return reply
        return joined([*pages, reply])

    def _writable(self) -> None:
        try:
            sent = self._sock.send(self._unsent, _DONT_WAIT)
        except BlockingIOError:
            return
        except OSError as error:
            self._lose(StoreClosedError(f"{self._gone}: {error}"))
            return
        del self._unsent[:sent]
        if not self._unsent:
            self.loop.remove_writer(self._sock.fileno())

    def _lose(self, error: TorchStoreError) -> None:
        if self._closed:
            return
        self._closed = True
        self._lost = self._lost or error
        if not (self.loop.is_closed() or self._sock.fileno() < 0):  # else collected with its loop
            self.loop.remove_reader(self._sock.fileno())
            self.loop.remove_writer(self._sock.fileno())
            for future, _ in list(self._pending.values()):
                if not future.done():
                    future.set_exception(type(error)(error.message))
            for limit in self._limits:
                if not limit.expired():
                    limit.reschedule(0.0)
            if self._timer is not None:
                self._timer.cancel()
        self._sock.close()

    def _arm(self, deadline: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = deadline
        self._timer = self.loop.call_at(deadline, self._expire)

    def _expire(self) -> None:
        self._timer = None
        now = self.loop.time()
        soonest: float | None = None
        for future, deadline in list(self._pending.values()):
            if deadline is None or future.done():
                continue
            if deadline <= now:
                future.set_exception(
                    StoreTimeoutError(
                        "the server did not answer in time", details={"answered": False}
                    )
                )
            elif soonest is None or deadline < soonest:
                soonest = deadline
        if soonest is not None:
            self._arm(soonest)
