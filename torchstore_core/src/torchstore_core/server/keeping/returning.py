"""Sessions of an earlier life of the server, until their clients have come back.

Nothing of such a session is given up before it is certain that nobody uses it: its client connects
again and says what it still has, or its process has ended.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable, Collection

import msgspec

from torchstore_core.errors import StoreClosedError, StoreFullError, TorchStoreError
from torchstore_core.machine.processes import ProcessWatch, started
from torchstore_core.server.index.records import SessionRecord
from torchstore_core.server.keeping.recorded import Opened, RecordedController
from torchstore_core.wire import messages as m
from torchstore_core.wire.repeating import number_of

log = logging.getLogger(__name__)


class Returning:
    """The sessions that a controller has restored.

    Args:
        controller: of this server.
        life: of this server.
        dead: called with each of them whose process has ended.
        settle: calls something when nothing can write any more for a session.
    """

    def __init__(
        self,
        controller: RecordedController,
        life: int,
        dead: Callable[[SessionRecord], None],
        settle: Callable[[SessionRecord, Callable[[], None]], None],
    ) -> None:
        self._controller = controller
        self._life = life
        self._dead = dead
        self._settle = settle
        self._watches: dict[bytes, ProcessWatch] = {}
        self._connected: dict[int, SessionRecord] = {}
        # Channels whose session has not come back yet, by its token.
        self._waiting: dict[bytes, list[Callable[[], None]]] = {}
        self._told: dict[bytes, list[m.Resume]] = {}  # by those that have not told all yet

    def begin(self, connected: Collection[int]) -> None:
        """Wait for all of them. On the running event loop.

        Args:
            connected: the serial numbers of those whose liveness connection is still there.
        """
        self._connected = {
            session.serial: session
            for session in self._controller.sessions.values()
            if session.serial in connected
        }
        for token, opened in self._controller.opened.copy().items():
            session = self._controller.sessions[token]
            if session.facts.role == m.COPIER_ROLE and opened.pid and _is_there(opened):
                # It belongs to the server that has died, and does not say what it is copying: that
                # is given up when it has ended.
                os.kill(opened.pid, signal.SIGKILL)
            if session.serial in self._connected:
                if not session.is_holder:  # which has nothing that it could say
                    self._waiting[token] = []
                continue
            self._waiting[token] = []
            ended = self._ended_of(token)
            # 0 is a process that this one cannot see: it may live as long as the store.
            if not _is_there(opened):
                asyncio.get_running_loop().call_soon(ended)
            else:
                self._watches[token] = ProcessWatch(opened.pid, ended)

    def _ended_of(self, token: bytes) -> Callable[[], None]:
        def ended() -> None:
            session = self._controller.sessions.get(token)
            self._no_longer(token)
            if session is not None:
                self._dead(session)

        return ended

    def of(self, serial: int) -> tuple[SessionRecord, Opened, bool] | None:
        """The session of that number, if it waits for what comes on its liveness connection; how it
        was opened, and whether its process still runs.
        """
        session = self._connected.pop(serial, None)
        if session is None:
            return None
        opened = self._controller.opened[session.token]
        return session, opened, _is_there(opened)

    def gone(self, session: SessionRecord) -> None:
        """A session has ended."""
        self._no_longer(session.token)

    def take(self, token: bytes) -> SessionRecord:
        """The session of a client that has come back; it still has to say what it has.

        Raises:
            StoreClosedError: there is no such session that waits for its client.
        """
        if token not in self._waiting:
            raise StoreClosedError("this session has ended; connect again")
        self._told.pop(token, None)  # on a connection that was lost meanwhile
        watch = self._watches.pop(token, None)
        if watch is not None:
            watch.close()
        return self._controller.join_session(token)

    def resume(self, session: SessionRecord, resume: m.Resume) -> None:
        """The client says what it has. When it has said all: give the rest up, and let its channels
        in.
        """
        if resume.life != self._life or session.token not in self._waiting:
            return
        told = self._told.setdefault(session.token, [])
        told.append(resume)
        if not resume.last:
            return
        txns = {txn for one in told for txn in one.txns}
        if session.txns.keys() - txns:
            self._settle(session, lambda: self._give_up_rest(session, told))
        else:
            self._give_up_rest(session, told)

    def _give_up_rest(self, session: SessionRecord, told: list[m.Resume]) -> None:
        """Give up what a session had, but for what its client has told."""
        controller = self._controller
        if self._told.get(session.token) is not told:  # it has ended, or came back once more
            return
        txns = {txn for one in told for txn in one.txns}
        controller.abort(session, [txn for txn in session.txns if txn not in txns])
        held: dict[int, set[int] | None] = {}
        for lease, at in [lease for one in told for lease in one.leases]:
            known = held.setdefault(lease, set())
            held[lease] = None if at is None or known is None else known.union(at)
        gone = [lease for lease in session.leases if lease not in held]
        parts: list[tuple[int, list[int]]] = []
        for lease, positions in held.items():
            there = session.leases.get(lease)
            if there is None or positions is None:
                continue
            rest = [i for i, one in enumerate(there) if one is not None and i not in positions]
            if rest:
                parts.append((lease, rest))
        if gone or parts:
            controller.release(session, gone, parts)
        asks = {number for one in told for number in one.asks}
        results = controller.results.pop(session.token, {})
        if kept := {what: done for what, done in results.items() if what[1] in asks}:
            controller.results[session.token] = kept
        self._no_longer(session.token)

    def _no_longer(self, token: bytes) -> None:
        watch = self._watches.pop(token, None)
        if watch is not None:
            watch.close()
        self._told.pop(token, None)
        for call in self._waiting.pop(token, ()):
            try:
                call()
            except TorchStoreError as error:
                log.debug("a channel of a session that has ended: %s", error)

    def was_recorded(self, session: SessionRecord, body: bytes) -> bool:
        """Whether the first message on a connection that has outlived the server is the last one
        that the life before has recorded, and has therefore been repeated already. Only messages
        without a reply are compared, and of these only such as would count twice. It does no harm
        to ignore one that its client has sent twice, because the second changes nothing.
        """
        return self._controller.last_sent.pop(session.serial, b"") == body

    def hold_back(self, token: bytes, call: Callable[[], None]) -> bool:
        """Call something when the session with this token has come back, or has ended. False, and
        it is not called, if that has happened.
        """
        waiting = self._waiting.get(token)
        if waiting is None:
            return False
        waiting.append(call)
        return True

    def again(self, session: SessionRecord, request: m.Repeatable) -> m.Reply | None:
        """The answer to a request of an earlier life, which its client asks for again; None if it
        was not executed then, or does not change anything.
        """
        controller = self._controller
        if isinstance(request, m.Locate | m.Fetch):
            if request.lease in session.leases:  # the client never learned what it holds
                controller.release(session, [request.lease], [])
                if request.lease in session.leases:
                    raise StoreFullError("the server's log is full; get this again later")
            return None
        number = number_of(request)
        known = controller.results.get(session.token, {})
        found = known.get((type(request).__name__, number)) if number else None
        return None if found is None else msgspec.structs.replace(found, id=request.id)

    def close(self) -> None:
        """Watch no process any more."""
        for watch in self._watches.values():
            watch.close()
        self._watches.clear()


def _is_there(opened: Opened) -> bool:
    """Whether the process of a session still runs, as far as can be seen."""
    return not opened.pid or opened.started == started(opened.pid)
