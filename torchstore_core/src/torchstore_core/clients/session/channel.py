"""A channel: one event loop's connection to the server. Torch-free.

It is built on ``loop.add_reader`` and plain non-blocking sends. A reply therefore costs one wake-up
of the user's own loop and no switch between threads, and a channel can still be dropped after its
loop has been closed.

The loop references its channel, through the registered reader, and the channel references its loop.
Nothing else may hold a strong reference to either, so that a loop that is never closed can be
collected as soon as the user drops it, and its channel with it.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import socket
import struct
import threading
import weakref
from collections.abc import Callable, Iterator
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
from torchstore_core.wire import framing
from torchstore_core.wire import messages as m
from torchstore_core.wire.framing import FrameReader, encode
from torchstore_core.wire.paging import joined
from torchstore_core.wire.repeating import number_of

#: The server answers requests on up to this many entries faster than a task switch takes.
QUICK_ENTRIES = 32

_RECEIVE = 1 << 18
_DONT_WAIT = socket.MSG_DONTWAIT
# A program may have brought back what SIGPIPE does by default, which is to end it without a word.
_SEND = _DONT_WAIT | socket.MSG_NOSIGNAL
# How many direct receives may follow each other before the event loop runs again, and how many
# calls must go through the event loop after a direct receive that found no reply.
_DIRECT_IN_A_ROW = 16
_DIRECT_PAUSE = 16
# What has come before the end of a connection is read in at most so many steps.
_MOST_READS = 1 << 12
R = TypeVar("R", bound=m.Message)


class MessageTooLargeError(ProtocolError):
    """A request that every server would reject; it was not sent, and the channel remains usable."""


class Channel:
    """Sends requests and receives replies on one connection, for one event loop.

    Args:
        sock: a non-blocking socket, connected, whose handshake is complete.
        loop: the running loop.
        gone: the error message for when the server is gone.
        life: which life of the server it is connected to; 0: that does not come back.
        lost: called when the connection is lost to a server that comes back; whether somebody sees
            to a new one, and calls :meth:`adopt`. None: nobody does.
    """

    def __init__(
        self,
        sock: socket.socket,
        loop: asyncio.AbstractEventLoop,
        gone: str,
        life: int = 0,
        lost: Callable[[], bool] | None = None,
    ) -> None:
        self._sock = sock
        self.loop = loop
        self._thread = weakref.ref(threading.current_thread())
        self._gone_message = gone
        self._reader = FrameReader(m.MAX_FRAME)
        self._pending: dict[
            int, tuple[asyncio.Future[m.Message], float | None, m.Message | None]
        ] = {}
        # The request whose reply is waited for in ``recv``, and not in ``_pending`` yet.
        self._direct: m.Message | None = None
        self.life = life
        #: The life to which a connection is on its way to :meth:`adopt`.
        self.next_life = life
        self._on_loss = lost
        self._is_down = False
        # Messages without a reply that were sent while it was down.
        self._postponed: list[m.Message] = []
        self._pages: dict[int, list[m.Message]] = {}  # of replies that are not complete yet
        self._delays: dict[int, str] = {}  # why the replies to these requests come later
        self._limits: set[asyncio.Timeout] = set()
        self._unsent = bytearray()
        # To allocate one of this size takes longer than the whole round trip to the server.
        self._buffer = memoryview(bytearray(_RECEIVE))
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        #: Returns a new request id.
        self.next_id: Callable[[], int] = itertools.count(2).__next__
        #: Why nothing can be sent any more; None: it can, from within its own loop.
        self.lost: TorchStoreError | None = None
        self._closed = False
        self._direct_calls_left = _DIRECT_IN_A_ROW
        self._use(sock)

    def _use(self, sock: socket.socket) -> None:
        self._sock = sock
        # Blocking, with a short time-out. Everything but the direct receive passes MSG_DONTWAIT.
        sock.setblocking(True)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 1000))
        self.loop.add_reader(sock.fileno(), self._readable)
        # In a reference cycle `__del__` runs too late: the collector may already have called the
        # finalizer of the socket, which warns.
        weakref.finalize(self, sock.close).atexit = False

    def __del__(self) -> None:
        self._sock.close()

    @property
    def is_down(self) -> bool:
        """Whether it waits for a new connection to a server that comes back."""
        return self._is_down

    @property
    def unreachable(self) -> bool:
        """Whether apparently nothing can use it any more: its loop is closed; or the loop does not
        run, the thread that ran it has ended, and nothing is in progress on this channel.
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

    async def call(
        self, message: m.Message, expect: type[R], timeout: float | None, *, quick: bool = False
    ) -> R:
        """Send a request and return its reply.

        Args:
            timeout: in seconds; None waits for ever.
            quick: the server replies within microseconds; see :meth:`_receive_directly`.

        Raises:
            StoreTimeoutError: there was no reply in time; the clock of the operation adds the
                details.
            StoreClosedError: the server is gone.
            TorchStoreError: the error with which the server replied.
        """
        request_id: int = message.id  # type: ignore[attr-defined]
        if quick and not self._pending and not self._unsent and self._direct_calls_left > 0:
            self._direct = message
            try:
                self.send(message)
                direct = self._receive_directly(request_id)
                if type(direct) is expect:
                    return direct
                if type(direct) is m.Delayed:
                    self._delays[request_id] = direct.why
                    direct = None
                reply = direct
                if reply is None:
                    reply = await self._wait(message, timeout, sent=True)
            finally:
                self._direct = None
        else:
            self._direct_calls_left = (
                min(self._direct_calls_left + 1, 0)
                if self._direct_calls_left < 0
                else _DIRECT_IN_A_ROW
            )
            reply = await self._wait(message, timeout)
        return reply if type(reply) is expect else _expected(reply, expect)

    def begin(self, message: m.Message, timeout: float | None) -> asyncio.Future[m.Message]:
        """Send a request now, and return the future of its reply, for :meth:`finish`."""
        reply = self._expect(message, timeout)
        try:
            self.send(message)
        except TorchStoreError as error:
            _settle(reply, error)  # unless the loss of the connection has ended all calls
        return reply

    async def finish(
        self, message: m.Message, reply: asyncio.Future[m.Message], expect: type[R]
    ) -> R:
        """Return the reply to a request that has begun; raises what :meth:`call` does."""
        try:
            return _expected(await reply, expect)
        finally:
            self.forget(message)

    def forget(self, message: m.Message) -> None:
        """Nobody waits any more for the reply to a request that has begun, or will do so."""
        request_id: int = message.id  # type: ignore[attr-defined]
        future, *_ = self._pending.pop(request_id, (None,))
        if future is not None and future.done() and not future.cancelled():
            future.exception()  # retrieve it, or asyncio logs that nobody did
        if self._delays:
            self._delays.pop(request_id, None)
        if request_id in self._pages:
            del self._pages[request_id]
            self.cancel(request_id)

    async def _wait(
        self, message: m.Message, timeout: float | None, *, sent: bool = False
    ) -> m.Message:
        """Send ``message``, unless it is ``sent``, and wait on the event loop for the reply."""
        future = self._expect(message, timeout)
        try:
            if not sent:
                self.send(message)
            return await future
        finally:
            self.forget(message)

    def _expect(self, message: m.Message, timeout: float | None) -> asyncio.Future[m.Message]:
        """The reply to a request, from now on."""
        request_id: int = message.id  # type: ignore[attr-defined]
        loop = self.loop
        future: asyncio.Future[m.Message] = loop.create_future()
        deadline = None
        if timeout is not None:
            deadline = loop.time() + timeout
            if self._timer is None or deadline < self._timer_at:
                self._arm(deadline)
        self._pending[request_id] = (future, deadline, message)
        return future

    async def wait_cancelled(self, done: asyncio.Future[m.Message], timeout: float | None) -> bool:
        """Wait at most ``timeout`` seconds until ``done`` is cancelled, and return whether it was.

        Something other than a reply cancels it. The channel keeps the future alive, so that what
        cancels it need not.

        Raises:
            StoreClosedError: the server is gone.
        """
        number = self.next_id()
        self._pending[number] = (done, None, None)
        try:
            await asyncio.wait([done], timeout=timeout)
        finally:
            self._pending.pop(number, None)
        if done.done() and not done.cancelled():
            done.result()
        return done.done()

    def _receive_directly(self, request_id: int) -> m.Message | None:
        """Wait for the reply in ``recv`` itself, for at most a scheduler tick.

        The kernel then switches straight to the server and back, which takes a fraction of the time
        that a trip through the event loop takes. To keep the loop's other tasks running, only a few
        calls in a row may do this; after a call whose reply did not arrive at once, the next calls
        must use the event loop.
        """
        self._direct_calls_left -= 1
        if self._is_down:
            return None
        buffer = self._buffer
        try:
            while True:
                nbytes = self._sock.recv_into(buffer)
                if not nbytes:
                    if self._lose(StoreClosedError(self._gone_message)):
                        return None
                    raise self._lost_error()
                found: m.Message | None = None
                for body in self._reader.feed(buffer[:nbytes]):
                    reply = framing.decode_reply(body)
                    if getattr(reply, "id", 0) != request_id:
                        self._dispatch(reply)
                    elif self._pages or getattr(reply, "continued", False):
                        found = self._assembled(request_id, reply)
                    else:
                        found = reply
                if self.lost is not None:
                    raise self._lost_error()
                if found is not None:
                    return found
        except BlockingIOError:
            self._direct_calls_left = -_DIRECT_PAUSE
            return None
        except OSError as error:
            if self._lose(StoreClosedError(f"{self._gone_message}: {error}")):
                return None
            raise self._lost_error() from error
        except (ProtocolError, msgspec.DecodeError) as error:
            self._fail(ProtocolError(f"the server sent something unreadable: {error}"))
            raise self._lost_error() from error

    def send(self, message: m.Message) -> None:
        """Send a message without waiting.

        Raises:
            StoreClosedError: the server is gone.
            MessageTooLargeError: the message does not fit into a frame; nothing was sent.
        """
        if self.lost is not None:
            raise self._lost_error()
        if self._is_down:  # requests are sent again in any case
            if not isinstance(message, m.Cancel) and getattr(message, "id", 0) == 0:
                self._postponed.append(message)
            return
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
            sent = self._sock.send(frame, _SEND)
        except BlockingIOError:
            sent = 0
        except OSError as error:
            # A reply that arrived before the end, such as a refusal, explains more than this error.
            if self._lose_when_read(StoreClosedError(f"{self._gone_message}: {error}")):
                self.send(message)
                return
            raise self._lost_error() from error
        if sent < len(frame):
            self._unsent += memoryview(frame)[sent:]
            self.loop.add_writer(self._sock.fileno(), self._writable)

    def cancel(self, request_id: int) -> None:
        """Tell the server that the reply, or the rest of it, is no longer needed."""
        with suppress(TorchStoreError):  # the server is gone, so no reply will come
            self.send(m.Cancel(request_id))

    @contextmanager
    def expire_on_loss(self, limit: asyncio.Timeout) -> Iterator[None]:
        """Expire ``limit`` when the server is gone, and then raise the channel's error instead."""
        self._limits.add(limit)
        try:
            yield
        except TimeoutError:
            if self.lost is not None and limit.expired():
                raise self._lost_error() from None
            raise
        finally:
            self._limits.discard(limit)

    def close(self) -> None:
        """Close now. Calls that wait for a reply raise StoreClosedError."""
        self._fail(StoreClosedError("this client was closed"))

    def shut_down(self) -> None:
        """Shut the connection down, so that the server sees its end now. Safe in any thread.

        The descriptor stays open until the loop is collected, because the loop may still watch it.
        """
        self.lost = self.lost or StoreClosedError("this client was closed")
        if not self._closed:
            with suppress(OSError):  # the server has already closed it
                self._sock.shutdown(socket.SHUT_RDWR)

    def discard(self) -> None:
        """Close this process's copy of the socket, without telling the server or the loop."""
        self.lost = StoreClosedError("this connection belongs to the parent process")
        self._closed = True
        self._sock.close()

    # ---- inside ---------------------------------------------------------------------------

    def _lost_error(self) -> TorchStoreError:
        lost = self.lost or StoreClosedError(self._gone_message)
        return type(lost)(lost.message)

    def _readable(self) -> None:
        try:
            nbytes = self._sock.recv_into(self._buffer, 0, _DONT_WAIT)
        except BlockingIOError:
            return
        except OSError as error:
            self._lose(StoreClosedError(f"{self._gone_message}: {error}"))
            return
        if not nbytes:
            self._lose(StoreClosedError(self._gone_message))
            return
        try:
            for body in self._reader.feed(self._buffer[:nbytes]):
                self._dispatch(framing.decode_reply(body))
        except (ProtocolError, msgspec.DecodeError) as error:
            self._fail(ProtocolError(f"the server sent something unreadable: {error}"))

    def _dispatch(self, reply: m.Message) -> None:
        request_id: int = getattr(reply, "id", 0)
        if request_id == 0:
            if isinstance(reply, m.Failure):
                self._fail(from_wire(reply.code, reply.message, reply.key, reply.details))
            return
        waiting = self._pending.get(request_id)
        if waiting is None or waiting[0].done():
            return
        if type(reply) is m.Delayed:
            self._delays[request_id] = reply.why
            return
        whole = self._assembled(request_id, reply)
        if whole is not None:
            _settle(waiting[0], whole)

    def _assembled(self, request_id: int, reply: m.Message) -> m.Message | None:
        """Return the reply that this page completes; None if more pages follow."""
        if getattr(reply, "continued", False):
            self._pages.setdefault(request_id, []).append(reply)
            return None
        pages = self._pages.pop(request_id, None) if self._pages else None
        if pages is None or isinstance(reply, m.Failure):
            return reply
        return joined([*pages, reply])

    def _writable(self) -> None:
        try:
            sent = self._sock.send(self._unsent, _SEND)
        except BlockingIOError:
            return
        except OSError as error:
            self._lose_when_read(StoreClosedError(f"{self._gone_message}: {error}"))
            return
        del self._unsent[:sent]
        if not self._unsent:
            self.loop.remove_writer(self._sock.fileno())

    # ---- a server that comes back ---------------------------------------------------------

    def _lose(self, error: TorchStoreError) -> bool:
        """The connection is lost. If the server comes back, which is returned, calls go on waiting;
        else they fail.
        """
        if self._closed or self._is_down:
            return self._is_down
        if self._on_loss is None or self.loop.is_closed() or self._sock.fileno() < 0:
            self._fail(error)
            return False
        self._disconnect()
        self._is_down = True
        if self._timer is not None:  # which keeps the channel, now that its loop reads no socket
            self._arm(self._timer_at)
        if not self._on_loss():
            self._fail(error)
        return self.is_down

    def _lose_when_read(self, error: TorchStoreError) -> bool:
        """The server has closed the connection: handle what it sent before that. See _lose."""
        for _ in range(_MOST_READS):
            if self.lost is not None or self._is_down:
                break
            self._readable()
        return self.lost is None and self._lose(error)

    def _disconnect(self) -> None:
        self.loop.remove_reader(self._sock.fileno())
        self.loop.remove_writer(self._sock.fileno())
        self._sock.close()
        self._reader = FrameReader(m.MAX_FRAME)
        self._unsent.clear()
        self._pages.clear()

    def adopt(self, sock: socket.socket, life: int) -> None:
        """Go on with a new connection, to a later life of the server, and send again what has not
        been answered. In the thread of the loop.
        """
        if self.lost is not None or life <= self.life:
            sock.close()
            return
        self.life = life
        if not self._is_down:  # replies that came before the end count
            self._lose_when_read(StoreClosedError(self._gone_message))
            if not self.is_down:
                sock.close()
                return
        self._is_down = False
        self._use(sock)
        postponed, self._postponed = self._postponed, []
        for message in postponed:
            self.send(message)
        for future, _, request in list(self._pending.values()):
            if request is not None and not future.done():
                with suppress(TorchStoreError):  # then it has failed with the channel
                    number: int = request.id  # type: ignore[attr-defined]
                    self.send(m.Again(number, request))  # type: ignore[arg-type]

    def unanswered(self) -> list[int]:
        """The numbers of the requests that :meth:`adopt` sends again, see ``wire.repeating``. Safe
        in any thread.
        """
        waiting = [one for future, _, one in self._pending.copy().values() if not future.done()]
        numbers = {number_of(one) for one in (*waiting, self._direct) if one}
        return sorted(numbers - {0})

    def give_up(self) -> None:
        """The server does not come back. In the thread of the loop."""
        if self._is_down:
            self._fail(StoreClosedError(self._gone_message))

    # ---- ending ---------------------------------------------------------------------------

    def _fail(self, error: TorchStoreError) -> None:
        if self._closed:
            return
        self._closed = True
        self.lost = self.lost or error
        # A closed loop, or a closed socket, means that the channel is collected along with its
        # loop.
        was_down, self._is_down = self._is_down, False
        if was_down or not (self.loop.is_closed() or self._sock.fileno() < 0):
            if not was_down:
                self.loop.remove_reader(self._sock.fileno())
                self.loop.remove_writer(self._sock.fileno())
            for future, _, _ in list(self._pending.values()):
                _settle(future, type(error)(error.message))
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
        # The handle would make a cycle of the channel, which only the collector would free after
        # its loop is closed: with a socket that the server serves.
        expire = self._expire if self._is_down else functools.partial(_expire, weakref.ref(self))
        self._timer = self.loop.call_at(deadline, expire)

    def _expire(self) -> None:
        self._timer = None
        now = self.loop.time()
        soonest: float | None = None
        for request_id, (future, deadline, _) in self._pending.copy().items():
            if deadline is None or future.done():
                continue
            if deadline <= now:
                details: dict[str, object] = {"answered": False}
                if why := self._delays.get(request_id):
                    details = {"waiting_for": why}
                _settle(
                    future, StoreTimeoutError("the server did not answer in time", details=details)
                )
            elif soonest is None or deadline < soonest:
                soonest = deadline
        if soonest is not None:
            self._arm(soonest)


def _expected(reply: m.Message, expect: type[R]) -> R:
    if isinstance(reply, m.Failure):
        raise from_wire(reply.code, reply.message, reply.key, reply.details)
    if isinstance(reply, expect):
        return reply
    raise ProtocolError(f"expected {expect.__name__}, the server sent {type(reply).__name__}")


def _settle(reply: asyncio.Future[m.Message], outcome: m.Message | TorchStoreError) -> None:
    """End a call that may have ended: whoever waits may be cancelled between any two lines, since
    asyncio.run cancels its main task in the handler of Ctrl-C.
    """
    if reply.done():
        return
    try:
        if isinstance(outcome, TorchStoreError):
            reply.set_exception(outcome)
        else:
            reply.set_result(outcome)
    except asyncio.InvalidStateError:
        return


def _expire(channel: weakref.ref[Channel]) -> None:
    here = channel()
    if here is not None:
        here._expire()
