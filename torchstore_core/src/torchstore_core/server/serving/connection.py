"""The pipe of one conversation on a Unix socket."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, cast

from torchstore_core.errors import ProtocolError
from torchstore_core.machine.processes import DeathWatch
from torchstore_core.server.serving.conversation import Conversation
from torchstore_core.wire import messages as m
from torchstore_core.wire.framing import FrameReader

if TYPE_CHECKING:
    from torchstore_core.server.server import Server

__all__ = ["Connection"]

_HELLO_TIMEOUT_S = 10.0


class Connection(asyncio.Protocol):
    """Frames in, frames out; ``pid`` is at the other end, which only the kernel can tell."""

    def __init__(self, server: Server, pid: int) -> None:
        self._server = server
        self._reader = FrameReader(m.MAX_HELLO_FRAME)
        self._transport: asyncio.Transport | None = None
        self._conversation = Conversation(server, self._write, self.close)
        self._pid = pid
        self._watch: DeathWatch | None = None
        self._ending: asyncio.Task[None] | None = None
        self._backlog: deque[bytes] = deque()
        self._paused = False
        self._hello_timer: asyncio.TimerHandle | None = None

    # ---- asyncio.Protocol -----------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._server.connections.add(self)
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
            self._watch = DeathWatch(self._pid, self._conversation.process_died)

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

    def connection_lost(self, exc: Exception | None) -> None:
        if self._watch is not None:
            self._watch.close()
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
