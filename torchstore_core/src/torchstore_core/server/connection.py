"""The pipe of one conversation on a Unix socket."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import struct
from collections import deque
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, cast

from torchstore_core.errors import ProtocolError
from torchstore_core.server.conversation import Conversation
from torchstore_core.wire import messages as m
from torchstore_core.wire.framing import FrameReader

if TYPE_CHECKING:
    from torchstore_core.server.app import Server

__all__ = ["Connection", "peer"]

log = logging.getLogger(__name__)

_HELLO_TIMEOUT_S = 10.0


class Connection(asyncio.Protocol):
    """Frames in, frames out; and who is at the other end, which only the kernel can tell."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._reader = FrameReader(m.MAX_HELLO_FRAME)
        self._transport: asyncio.Transport | None = None
        self._conversation = Conversation(server, self._write, self.close)
        self._pid = 0
        self._pidfd = -1
        self._ending: asyncio.Task[None] | None = None
        self._backlog: deque[bytes] = deque()
        self._paused = False
        self._hello_timer: asyncio.TimerHandle | None = None

    # ---- asyncio.Protocol -----------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._server.connections.add(self)
        self._pid, uid = peer(transport)
        if uid is not None and uid != os.getuid():
            log.warning("refused a connection of uid %d", uid)
            self._transport.abort()
            return
        loop = asyncio.get_running_loop()
        self._hello_timer = loop.call_later(_HELLO_TIMEOUT_S, self._transport.abort)

    def data_received(self, data: bytes) -> None:
        self._work(data)

    def _work(self, data: bytes) -> None:
        """Answer what came, as long as the client takes the answers."""
        if self._transport is None or self._transport.is_closing():
            return
        conversation = self._conversation
        try:
            self._backlog.extend(self._reader.feed(data))
        except ProtocolError as error:
            conversation.refuse(str(error))
        while self._backlog and not self._paused and not self._transport.is_closing():
            conversation.hear(self._backlog.popleft())
            if self._hello_timer is not None and conversation.greeted:
                self._greeted()

    def _greeted(self) -> None:
        self._reader.limit = m.MAX_FRAME
        if self._hello_timer is not None:
            self._hello_timer.cancel()
            self._hello_timer = None
        if self._conversation.is_anchor:
            self._watch_process()

    def pause_writing(self) -> None:
        # The client does not read its replies: answer no more requests, and read no more.
        self._paused = True
        self._conversation.pause()
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._paused = False
        self._conversation.resume()
        self._work(b"")
        if self._transport is not None and not (self._paused or self._transport.is_closing()):
            self._transport.resume_reading()

    def _watch_process(self) -> None:
        """See ``Conversation.process_died``."""
        if not self._pid:
            return
        try:
            self._pidfd = os.pidfd_open(self._pid)
        except (OSError, AttributeError):  # an old kernel, or another pid namespace
            return
        asyncio.get_running_loop().add_reader(self._pidfd, self._process_died)

    def _process_died(self) -> None:
        self._unwatch()
        self._conversation.process_died()

    def _unwatch(self) -> None:
        if self._pidfd >= 0:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1

    def connection_lost(self, exc: Exception | None) -> None:
        self._unwatch()
        if self._hello_timer is not None:
            self._hello_timer.cancel()
        self._transport = None
        before = self._server.before_close
        if before is None or not self._pid:
            self._conversation.ended()
            self._server.disconnected(self)
        else:
            self._ending = asyncio.get_running_loop().create_task(self._end_after(before))

    async def _end_after(self, before: Callable[[int], Awaitable[None]]) -> None:
        try:
            await before(self._pid)
        finally:
            self._conversation.ended()
            self._server.disconnected(self)

    # ---- the conversation's side ----------------------------------------------------------

    def _write(self, frame: bytearray) -> None:
        """Send unless the connection is gone."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame)

    def close(self) -> None:
        """Send what is buffered, then close."""
        if self._transport is not None:
            self._transport.close()


def peer(transport: asyncio.BaseTransport | None) -> tuple[int, int | None]:
    """Pid and uid at the other end; (0, None) where the platform cannot tell (the directory's mode
    guards).
    """
    if transport is None or not hasattr(socket, "SO_PEERCRED"):
        return 0, None
    size = struct.calcsize("3i")
    sock = transport.get_extra_info("socket")
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    pid, uid, _ = struct.unpack("3i", credentials)
    return int(pid), int(uid)
