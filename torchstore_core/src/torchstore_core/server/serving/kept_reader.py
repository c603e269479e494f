"""Reading a connection that outlives the server, so that nothing that was sent on it is lost.

The keeper has a copy of the descriptor, so the connection stays open when the server dies, and the
client notices nothing. What the server had not read yet, the next life reads. For this a message is
taken out of the kernel's buffer only after it has been handled, and so after it was recorded. If
the server dies between the two, the next life reads it again; see ``Conversation.handle_first``.
What waits for room in the log is taken out when it is recorded, and nothing is read until then.
"""

from __future__ import annotations

import asyncio
import functools
import socket
from collections.abc import Callable

from torchstore_core.errors import ProtocolError
from torchstore_core.wire.framing import HEADER
from torchstore_core.wire.messages import MAX_LIVENESS_FRAME

_PEEK = MAX_LIVENESS_FRAME + HEADER
_PEEKS = socket.MSG_PEEK | socket.MSG_DONTWAIT
# How soon to look for the rest of a frame of which only the beginning has arrived.
_REST_S = 0.001


class KeptReader:
    """Reads the frames of one connection.

    Args:
        sock: the connection; this uses a copy of its descriptor.
        handle: called with the body of each frame; returns whether it can take another one now.
        ended: called once, when the client has closed the connection.
        unreadable: called, also once, when it has sent what is no frame.
        when_recorded: calls something when what was handled is recorded; or returns False if it is,
            see ``Controller.when_recorded``.
    """

    def __init__(
        self,
        sock: socket.socket,
        handle: Callable[[bytes], bool],
        ended: Callable[[], None],
        unreadable: Callable[[ProtocolError], None],
        when_recorded: Callable[[Callable[[], None]], bool] = lambda call: False,
    ) -> None:
        self._sock = sock.dup()
        self._handle = handle
        self._ended = ended
        self._unreadable = unreadable
        self._when_recorded = when_recorded
        self._untaken = 0  # bytes that were handled, and wait until that is recorded
        self._is_wanted = False
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._is_reading = self._is_closed = False

    def read(self) -> None:
        """Begin to read, or go on."""
        self._is_wanted = True
        if not (self._is_reading or self._is_closed or self._untaken):
            self._is_reading = True
            self._loop.add_reader(self._sock.fileno(), self._readable)

    def pause(self) -> None:
        """Read nothing until :meth:`read`."""
        self._is_wanted = False
        self._stop()

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._is_reading:
            self._is_reading = False
            self._loop.remove_reader(self._sock.fileno())

    def close(self) -> None:
        """Read nothing any more. Idempotent."""
        self.pause()
        if not self._is_closed:
            self._is_closed = True
            if not (self._untaken and self._when_recorded(self._sock.close)):
                self._sock.close()

    def _readable(self) -> None:
        data = self._receive()
        if data is None:
            return
        start = 0
        while len(data) - start >= HEADER and self._is_reading:
            size = int.from_bytes(data[start : start + HEADER], "little")
            end = start + HEADER + size
            if end > len(data):
                break
            goes_on = self._handle(data[end - size : end])
            self._take_when_recorded(end - start)
            start = end
            if not goes_on or self._untaken:
                break
        if not start and self._is_reading:
            self._incomplete(data)

    def _take_when_recorded(self, nbytes: int) -> None:
        """Take a message out of the kernel's buffer that was handled."""
        if self._when_recorded(functools.partial(self._take_late, nbytes)):
            self._untaken += nbytes
            self._stop()
        else:
            self._take(nbytes)

    def _take(self, nbytes: int) -> None:
        if self._sock.fileno() >= 0:
            self._sock.recv(nbytes, socket.MSG_DONTWAIT)

    def _take_late(self, nbytes: int) -> None:
        self._take(nbytes)
        self._untaken -= nbytes
        if self._is_wanted:
            self.read()

    def read_rest(self, handle: Callable[[bytes], None]) -> None:
        """Read what is left, because the connection has closed."""
        try:
            while data := self._peek(self._untaken + _PEEK)[self._untaken :]:
                end = HEADER + int.from_bytes(data[:HEADER], "little")
                if end > len(data):
                    return
                handle(data[HEADER:end])
                self._take_when_recorded(end)
        except OSError:  # there is nothing
            return

    def _peek(self, nbytes: int) -> bytes:
        return self._sock.recv(nbytes, _PEEKS)

    def _receive(self) -> bytes | None:
        """What has come; None if nothing has, or nothing ever will."""
        try:
            data = self._peek(_PEEK)
        except BlockingIOError:
            return None
        except OSError:
            data = b""
        if data:
            return data
        self.close()
        self._ended()
        return None

    def _incomplete(self, data: bytes) -> None:
        """There is no complete frame."""
        size = int.from_bytes(data[:HEADER], "little") if len(data) >= HEADER else 0
        if size > MAX_LIVENESS_FRAME:
            self.close()
            why = f"frame of {size} bytes is over the limit of {MAX_LIVENESS_FRAME} of a liveness"
            self._unreadable(ProtocolError(f"{why} connection"))
        else:
            self._stop()
            self._timer = self._loop.call_later(_REST_S, self.read)
