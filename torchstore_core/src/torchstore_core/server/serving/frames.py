"""Sockets that carry frames: what every connection to a server, or to a relay, does."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from typing import Protocol, cast

from torchstore_core.errors import ProtocolError
from torchstore_core.machine.processes import ProcessWatch
from torchstore_core.wire.framing import FrameReader

__all__ = ["ClientSocket", "FrameProtocol"]


class FrameProtocol(asyncio.Protocol):
    """Cuts what comes into frames, and sends frames as long as the socket is open.

    Args:
        limit: largest frame that may come, bytes.
    """

    def __init__(self, limit: int) -> None:
        self.reader = FrameReader(limit)
        self._transport: asyncio.Transport | None = None

    @property
    def is_open(self) -> bool:
        """Whether frames can be sent."""
        return self._transport is not None and not self._transport.is_closing()

    def write(self, frame: bytes | bytearray) -> None:
        """Send a frame, unless the socket is closed."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame)

    def close(self) -> None:
        """Send what is buffered, then close."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Close at once."""
        if self._transport is not None:
            self._transport.abort()

    # ---- for subclasses -------------------------------------------------------------------

    def received(self, bodies: list[bytes]) -> None:
        """These frames have come, and the socket is open; none if it can be written to again."""

    def unreadable(self, error: ProtocolError) -> None:
        """What has come is no frame. By default the socket is closed."""
        self.close()

    # ---- asyncio.Protocol -----------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        try:
            bodies = self.reader.feed(data)
        except ProtocolError as error:
            self.unreadable(error)
        else:
            self.received(bodies)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None

    def unread(self) -> list[bytes]:
        """The frames that had come, and were not read, when writing to the socket failed. Call it
        before ``connection_lost``, which closes the socket when it has returned.
        """
        sock = None if self._transport is None else self._transport.get_extra_info("socket")
        bodies: list[bytes] = []
        try:
            while sock is not None and (data := os.read(sock.fileno(), 1 << 18)):
                bodies += self.reader.feed(data)
        except (OSError, ProtocolError):
            return bodies
        return bodies


class Host(Protocol):
    """Whoever lets clients in.

    Attributes:
        before_close: awaited, with its pid, before what a client process held through a socket is
            undone: an agent of this host may still be writing for it.
    """

    before_close: Callable[[int], Awaitable[None]] | None


class ClientSocket(FrameProtocol):
    """The socket of a client of this host.

    Args:
        limit: see :class:`FrameProtocol`.
        pid: of the process at the other end, which only the kernel can tell; 0: unknown.
        host: of the socket.
    """

    def __init__(self, limit: int, pid: int, host: Host) -> None:
        super().__init__(limit)
        self.pid = pid
        self._host = host
        self._watch: ProcessWatch | None = None
        self._ending: asyncio.Task[None] | None = None

    def watch(self) -> None:
        """From now on :meth:`process_died` is called."""
        self._watch = ProcessWatch(self.pid, self.process_died)

    def process_died(self) -> None:
        """The process is dead, but a forked child of it may keep the socket open."""

    def left_behind(self, bodies: list[bytes]) -> None:
        """The socket is closed, and this came before its end: the client reads no reply to it."""

    def ended(self) -> None:
        """The socket is closed, and nobody writes any more for the process."""

    def connection_lost(self, exc: Exception | None) -> None:
        bodies = [] if exc is None else self.unread()
        super().connection_lost(exc)
        self.left_behind(bodies)
        if self._watch is not None:
            self._watch.close()
            self._watch = None  # it refers to this: what was held is free at once
        before_close = self._host.before_close
        if before_close is None or not self.pid:
            self.ended()
        else:
            self._ending = asyncio.get_running_loop().create_task(self._end_after(before_close))

    async def _end_after(self, before_close: Callable[[int], Awaitable[None]]) -> None:
        try:
            await before_close(self.pid)
        finally:
            self.ended()
