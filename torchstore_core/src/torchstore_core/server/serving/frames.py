"""Sockets that carry frames: the common part of all connections to a server or a relay."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from typing import Protocol, cast

from torchstore_core.errors import ProtocolError
from torchstore_core.machine.processes import ProcessWatch
from torchstore_core.wire.framing import FrameReader


class FrameProtocol(asyncio.Protocol):
    """Splits received data into frames, and sends frames as long as the socket is open.

    Args:
        limit: the size of the largest frame that is accepted, in bytes.
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
        """Handle received frames; the socket is open. Called without frames when the socket has
        become writable again.
        """

    def unreadable(self, error: ProtocolError) -> None:
        """Handle received data that is not a valid frame. By default, close the socket."""
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
        """Return the frames that had arrived but were not read when writing to the socket failed.
        Must be called before the base class's ``connection_lost``, after which the socket closes.
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
    """The server or relay that accepts client connections.

    Attributes:
        before_close: awaited with a client's pid before what the client held through a socket is
            undone, because an agent on this host may still be writing on its behalf.
    """

    before_close: Callable[[int], Awaitable[None]] | None


class ClientSocket(FrameProtocol):
    """The socket of a client on this host.

    Args:
        limit: see :class:`FrameProtocol`.
        pid: the id of the process at the other end, as the kernel reports it; 0: unknown.
        host: the server or relay that has accepted the connection.
    """

    def __init__(self, limit: int, pid: int, host: Host) -> None:
        super().__init__(limit)
        self.pid = pid
        self._host = host
        self._watch: ProcessWatch | None = None
        self._ending: asyncio.Task[None] | None = None

    def watch(self) -> None:
        """Start watching the client's process; :meth:`process_died` is called when it dies."""
        self._watch = ProcessWatch(self.pid, self.process_died)

    def process_died(self) -> None:
        """Handle the death of the process; a forked child of it may keep the socket open."""

    def left_behind(self, bodies: list[bytes]) -> None:
        """Handle frames that arrived before the socket closed; the client reads no replies."""

    def ended(self) -> None:
        """Undo what was held through the socket: it is closed, and nothing writes for the process
        any more.
        """

    def connection_lost(self, exc: Exception | None) -> None:
        bodies = [] if exc is None else self.unread()
        super().connection_lost(exc)
        self.left_behind(bodies)
        if self._watch is not None:
            self._watch.close()
            self._watch = None  # breaks a reference cycle, so that this object is freed at once
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
