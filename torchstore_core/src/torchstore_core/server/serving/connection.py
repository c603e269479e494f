"""A connection of a client or a volume to the server's Unix socket."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from torchstore_core.errors import ProtocolError
from torchstore_core.server.index.records import SessionRecord
from torchstore_core.server.serving.conversation import Conversation
from torchstore_core.server.serving.frames import ClientSocket
from torchstore_core.server.serving.kept_reader import KeptReader
from torchstore_core.wire import messages as m

if TYPE_CHECKING:
    from torchstore_core.server.server import Server

_HELLO_TIMEOUT_S = 10.0


class Connection(ClientSocket):
    """A connection that carries one conversation.

    Args:
        server: whose it is.
        pid: see ``ClientSocket``.
        returned: the session of which this has been the liveness connection in an earlier life of
            the server; None: it is new.
        is_there: whether the process of that session still runs.
        via: how that session has come, if a relay carries it.
    """

    def __init__(
        self,
        server: Server,
        pid: int,
        returned: SessionRecord | None = None,
        is_there: bool = True,
        via: m.Via | None = None,
    ) -> None:
        super().__init__(m.MAX_HELLO_FRAME, pid, server)
        self._server = server
        self._conversation = Conversation(
            server, self.write, self.close, via, pid=pid, keep=self._keep
        )
        self._returned = returned
        self._is_there = is_there
        self._kept: KeptReader | None = None
        self._is_kept = False
        self._backlog: deque[bytes] = deque()
        self._paused = False
        self._hello_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        # Read nothing more while the kernel has no room for an answer: see Conversation.unsent.
        cast(asyncio.Transport, transport).set_write_buffer_limits(0)
        self._server.connections.add(self)
        if self._returned is not None:
            self._keep(self._returned)
            self._conversation.go_on(self._returned)
            if self._is_there:
                self.watch()
            else:
                asyncio.get_running_loop().call_soon(self.process_died)
            return
        loop = asyncio.get_running_loop()
        self._hello_timer = loop.call_later(_HELLO_TIMEOUT_S, self.abort)

    def received(self, bodies: list[bytes]) -> None:
        """Answer the messages in ``bodies``, as long as the client reads the replies."""
        backlog = self._backlog
        backlog.extend(bodies)
        while backlog and not self._paused:
            self._conversation.handle(backlog.popleft())
            if self._hello_timer is not None and self._conversation.greeted:
                self._greeted(self._hello_timer)
            if backlog and not self.is_open:
                break

    def unreadable(self, error: ProtocolError) -> None:
        """Report the error to the other end, and close."""
        self._conversation.refuse(str(error))

    def _greeted(self, hello_timer: asyncio.TimerHandle) -> None:
        self.reader.limit = m.MAX_FRAME
        hello_timer.cancel()
        self._hello_timer = None
        if self._conversation.is_relayed:
            self.pid = 0  # that of whoever carries the relay's connections
        elif self._conversation.is_liveness:
            self.watch()
        self.read_as_kept()

    def _keep(self, session: SessionRecord) -> None:
        """This is the liveness connection of a session, which is to outlive the server."""
        sock = None if self._transport is None else self._transport.get_extra_info("socket")
        self._is_kept = sock is not None and self._server.keep_connection(session, sock.fileno())

    def read_as_kept(self) -> None:
        """Read with a ``KeptReader`` from now on, if this connection outlives the server, and not
        in ``connection_made``: behind that, uvloop begins to read whatever was said there.
        """
        if not self._is_kept or self._transport is None:
            return
        self._transport.pause_reading()
        sock = self._transport.get_extra_info("socket")
        what = self._heard, self._closed_by_client, self.unreadable, self._when_recorded
        self._kept = KeptReader(sock, *what)
        if not self._paused:
            self._kept.read()

    def _heard(self, body: bytes) -> bool:
        if self._returned is not None:  # in this life it is the first one
            self._returned = None
            self._conversation.handle_first(body)
        else:
            self.received([body])
        return self.is_open and not self._paused

    def _when_recorded(self, call: Callable[[], None]) -> bool:
        return self._server.controller.when_recorded(call)

    def _closed_by_client(self) -> None:
        if not self.eof_received():
            self.close()

    def process_died(self) -> None:
        """Undo the unfinished puts of the client's process, which can no longer commit them."""
        self._conversation.process_died()

    def pause_writing(self) -> None:
        # The client does not read its replies: stop reading and answering requests.
        self._paused = True
        self._conversation.pause()
        if self._kept is not None:
            self._kept.pause()
        elif self._transport is not None and self.is_open:
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._paused = False
        self._conversation.resume()
        if self.is_open:
            self.received([])
        if self._kept is not None:
            if self.is_open and not self._paused:
                self._kept.read()
        elif self._transport is not None and self.is_open and not self._paused:
            self._transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._hello_timer is not None:
            self._hello_timer.cancel()
        super().connection_lost(exc)
        if self._kept is not None:
            self._kept.close()

    def unread(self) -> list[bytes]:
        if self._kept is None:
            return super().unread()
        self._kept.read_rest(self._heard_last)
        return []

    def _heard_last(self, body: bytes) -> None:
        if self._returned is not None:
            self._returned = None
            self._conversation.handle_first(body, is_last=True)
        else:
            self._conversation.hear_last(body)

    def eof_received(self) -> bool:
        """Finish sending long replies: the client sends nothing more, but may still read them."""
        return self._conversation.when_sent(self.close)

    def left_behind(self, bodies: list[bytes]) -> None:
        """Handle the aborts and releases that the client sent before it left."""
        for body in [*self._backlog, *bodies]:
            self._conversation.hear_last(body)
        self._backlog.clear()

    def ended(self) -> None:
        """Undo everything that was held through this connection."""
        self._conversation.ended()
        self._server.disconnected(self)
