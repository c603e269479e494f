"""One client connection: frames in, the controller asked, frames out.

Whatever comes in can only end this connection, never the server or anybody else's.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import struct
from collections import deque
from typing import TYPE_CHECKING, cast

import msgspec

from torchstore_core.errors import ProtocolError, StoreClosedError, TorchStoreError
from torchstore_core.server import looking
from torchstore_core.server.records import SessionRecord, Waiter
from torchstore_core.wire import messages as m
from torchstore_core.wire.framing import FrameReader, decode_request, encode

if TYPE_CHECKING:
    from torchstore_core.server.app import Server

__all__ = ["Connection"]

log = logging.getLogger(__name__)

_HELLO_TIMEOUT_S = 10.0
# Waits that one connection may have open; a client has one per awaiting task.
_MAX_WAITERS = 100_000


class Connection(asyncio.Protocol):
    """Server side of an anchor or a lane."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._reader = FrameReader(m.MAX_HELLO_FRAME)
        self._transport: asyncio.Transport | None = None
        self._session: SessionRecord | None = None
        self._anchor = False
        self._pidfd = -1
        self._waiters: dict[int, Waiter] = {}
        self._backlog: deque[bytes] = deque()
        self._paused = False
        self._hello_timer: asyncio.TimerHandle | None = None

    # ---- asyncio.Protocol -----------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._server.connections.add(self)
        uid = _peer(transport)[1]
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
        try:
            self._backlog.extend(self._reader.feed(data))
            while self._backlog and not self._paused:
                self._handle(decode_request(self._backlog.popleft()))
        except (ProtocolError, msgspec.DecodeError, UnicodeDecodeError) as error:
            self._refuse(str(error))
        except StoreClosedError as error:
            self._refuse(error.message, error.code)
        except RecursionError:
            self._refuse("message is nested too deeply")

    def pause_writing(self) -> None:
        # The client does not read its replies: answer no more requests, and read no more.
        self._paused = True
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._paused = False
        self._work(b"")
        if self._transport is not None and not (self._paused or self._transport.is_closing()):
            self._transport.resume_reading()

    def _watch_process(self) -> None:
        """Give up a dead client's unfinished puts also while a forked child of it, which still
        reads what it inherited, keeps the anchor open: nobody is left to commit them.
        """
        pid = _peer(self._transport)[0]
        if not pid:
            return
        try:
            self._pidfd = os.pidfd_open(pid)
        except (OSError, AttributeError):  # an old kernel, or another pid namespace
            return
        asyncio.get_running_loop().add_reader(self._pidfd, self._process_died)

    def _process_died(self) -> None:
        self._unwatch()
        session = self._session
        if session is not None:
            session.end()
            self._server.controller.abort(session, list(session.txns))

    def _unwatch(self) -> None:
        if self._pidfd >= 0:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1

    def connection_lost(self, exc: Exception | None) -> None:
        self._unwatch()
        self._server.disconnected(self)
        if self._hello_timer is not None:
            self._hello_timer.cancel()
        for waiter in self._waiters.values():
            self._server.controller.waiting.forget(waiter)
        self._waiters.clear()
        if self._session is not None:
            if self._anchor:
                self._server.controller.close_session(self._session)
            else:
                self._session.lanes -= 1
        self._transport = None

    # ---- messages -------------------------------------------------------------------------

    def send(self, message: m.Message) -> None:
        """Send unless the connection is gone."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(encode(message))

    def close(self) -> None:
        """Send what is buffered, then close."""
        if self._transport is not None:
            self._transport.close()

    @property
    def is_anchor(self) -> bool:
        """Whether it is a session's anchor (its janitor thread reads it), not a lane."""
        return self._anchor

    def _refuse(self, why: str, code: str = ProtocolError.code) -> None:
        self.send(m.Failure(0, code, f"{why}; closing this connection"))
        self.close()

    def _handle(self, request: m.Request) -> None:
        if isinstance(request, m.Hello):
            self._hello(request)
            return
        if self._session is None:
            raise ProtocolError("the first message must be a Hello")
        if self._session.token not in self._server.controller.sessions:
            # The anchor is gone, and what the session held with it: nothing new may be held.
            raise StoreClosedError("this session has ended")
        try:
            reply = self._answer(request, self._session)
        except TorchStoreError as error:
            reply = m.Failure(
                getattr(request, "id", 0), error.code, error.message, error.key, error.details
            )
        except Exception:
            log.exception("request failed: %s", type(request).__name__)
            text = f"the server failed on {type(request).__name__}; its log has the traceback"
            reply = m.Failure(getattr(request, "id", 0), TorchStoreError.code, text)
        if reply is not None:
            self.send(reply)

    def _hello(self, hello: m.Hello) -> None:
        if self._session is not None:
            raise ProtocolError("a connection has one Hello")
        if hello.protocol != m.PROTOCOL_VERSION:
            raise ProtocolError(
                f"client speaks protocol {hello.protocol}, this server {m.PROTOCOL_VERSION}; "
                "install the same torchstore-core on both sides"
            )
        controller = self._server.controller
        try:
            if hello.session:
                session = controller.join_session(hello.session)
                session.lanes += 1
            else:
                session = controller.open_session(hello.facts, hello.topology)
                self._anchor = True
        except TorchStoreError as error:
            self.send(m.Failure(hello.id, error.code, error.message))
            self.close()
            return
        self._session = session
        if self._anchor:
            self._watch_process()
        self._reader.limit = m.MAX_FRAME
        if self._hello_timer is not None:
            self._hello_timer.cancel()
        self.send(self._server.welcome(hello.id, session.token))

    def _answer(self, request: m.Request, session: SessionRecord) -> m.Reply | None:
        controller = self._server.controller
        controller.operations[type(request)] += 1
        match request:
            case m.Put():
                versions, grants = controller.put(session, request)
                if grants is not None:
                    return m.Granted(request.id, grants)
                return m.Committed(request.id, versions)
            case m.Locate():
                entries, leased = controller.locate(session, request)
                return m.Located(request.id, entries, leased)
            case m.Fetch():
                return controller.fetch(session, request)
            case m.Commit():
                return m.Committed(request.id, controller.commit(session, request.txn))
            case m.Release():
                controller.release(session, request.leases, request.parts, remember=self._anchor)
            case m.Abort():
                controller.abort(session, request.txns, remember=self._anchor)
            case m.Keep():
                session.keeps_memory = True
            case m.Delete():
                return m.Deleted(request.id, controller.delete(request.keys, request.strict))
            case m.Exists():
                find = controller.catalog.find
                return m.Flags(request.id, [find(key) is not None for key in request.keys])
            case m.Keys():
                return m.KeyList(request.id, controller.keys(request.prefix))
            case m.Wait():
                self._wait(request)
            case m.Cancel():
                waiter = self._waiters.pop(request.wait, None)
                if waiter is not None:
                    controller.waiting.forget(waiter)
            case m.Versions():
                return m.Committed(request.id, controller.catalog.versions(request.key))
            case m.Stat():
                return looking.stat(controller.catalog, controller.volumes, request)
            case m.List():
                listed, more = looking.listing(
                    controller.catalog, controller.volumes, request.prefix, request.after
                )
                return m.Listing(request.id, listed, more)
            case m.Status():
                return self._server.status(request.id)
            case m.Shutdown():
                self._server.stop_soon()
                return m.Done(request.id)
        return None

    def _wait(self, request: m.Wait) -> None:
        if len(self._waiters) >= _MAX_WAITERS or request.id in self._waiters:
            raise ProtocolError("too many waits on one connection, or their ids repeat")

        def reply(versions: list[int]) -> None:
            self._waiters.pop(request.id, None)
            self.send(m.Committed(request.id, versions))

        waiter = self._server.controller.waiting.add(request.keys, request.min_version, reply)
        if waiter is not None:
            self._waiters[request.id] = waiter


def _peer(transport: asyncio.BaseTransport | None) -> tuple[int, int | None]:
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
