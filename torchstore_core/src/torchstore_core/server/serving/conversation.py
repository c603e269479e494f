"""The requests and replies of one connection, whether a socket or a relay carries them.

Nothing that a client sends can end more than its own conversation: neither the server nor another
conversation.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from torchstore_core.errors import (
    ProtocolError,
    StoreClosedError,
    StoreFullError,
    TorchStoreError,
)
from torchstore_core.machine.sockets.unix import check_descriptors
from torchstore_core.server.index.records import SessionRecord, Versions, Waiter
from torchstore_core.server.serving import inspection
from torchstore_core.server.serving.answers import ANSWERS, committed
from torchstore_core.server.serving.members import is_member
from torchstore_core.server.serving.sending import Sender
from torchstore_core.server.spilling.delays import Delayed
from torchstore_core.wire import messages as m
from torchstore_core.wire.framing import asked_protocol, decode_request, portable
from torchstore_core.wire.repeating import number_of

if TYPE_CHECKING:
    from torchstore_core.server.controller import Controller
    from torchstore_core.server.remote.attached_volume import AttachedVolume
    from torchstore_core.server.server import Server

log = logging.getLogger(__name__)

# Requests that are handled although their sender has gone: they concern others, or free memory.
_LAST_WORDS = frozenset((m.Abort, m.Release, m.Unhold, m.Lend, m.LendAll, m.Claim, m.Adopt))
_LAST_WORDS |= {m.TakeBack, m.ClientDied, m.RelayLost}
# How many Waits one conversation may have open; a client has one per awaiting task.
_MAX_WAITERS = 100_000


class Conversation:
    """The server's side of a liveness connection, of a channel, or of a volume's connection.

    Args:
        write: sends a frame.
        end: closes the connection once everything has been sent.
        via: the relay that carries the conversation; None if there is none, or if the first message
            says it.
        pid: of the process at the other end, as the kernel tells it; 0: unknown.
        keep: called with a session of which this is the liveness connection, before its client
            knows of it.
    """

    def __init__(
        self,
        server: Server,
        write: Callable[[bytearray], None],
        end: Callable[[], None],
        via: m.Via | None = None,
        pid: int = 0,
        keep: Callable[[SessionRecord], None] | None = None,
    ) -> None:
        self._server = server
        self._pid = pid
        self._keep = keep or _keep_nothing
        self._sender = Sender(write)
        self.send = self._sender.send
        self.pause = self._sender.pause
        self.resume = self._sender.resume
        self.when_sent = self._sender.when_sent
        self.end = end
        self._via = via
        self._session: SessionRecord | None = None
        self._controller: Controller  # that has the session
        self._volume: AttachedVolume | None = None
        self._liveness = False
        self._waiters: dict[int, Waiter] = {}
        # By their ids, each with why.
        self._delayed: dict[int, tuple[m.Put | m.PutObject | m.Locate | m.Fetch, str]] = {}
        server.conversations.add(self)

    @property
    def greeted(self) -> bool:
        """Whether the other end has identified itself as a client or a volume."""
        return self._session is not None or self._volume is not None

    @property
    def is_relayed(self) -> bool:
        """Whether it comes through a relay."""
        return self._via is not None

    @property
    def is_liveness(self) -> bool:
        """Whether this is a session's liveness connection, which the client's reclaimer thread
        reads.
        """
        return self._liveness

    @property
    def is_deaf(self) -> bool:
        """Whether the session is one that reads no messages that it has not requested."""
        session = self._session
        return session is not None and (is_member(session) or session.is_holder)

    def handle(self, body: bytes) -> None:
        """Answer one message. An invalid message ends the conversation."""
        try:
            self._handle(decode_request(body), body)
        except (ProtocolError, msgspec.DecodeError, UnicodeDecodeError) as error:
            asked = None if self.greeted else asked_protocol(body)
            if asked is None or asked[1] == m.PROTOCOL_VERSION:
                self.refuse(str(error))
            else:  # its messages have other fields
                self.refuse(_mismatch(*asked))
        except StoreClosedError as error:
            self.refuse(error.message, error.code)
        except RecursionError:
            self.refuse("message is nested too deeply")

    def handle_first(self, body: bytes, *, is_last: bool = False) -> None:
        """Handle the first message that has come since the server is back, on a connection that it
        had before. The life before may have recorded it and died before it took it out of the
        kernel's buffer. ``is_last``: the client has closed the connection, see :meth:`hear_last`.
        """
        returning, session = self._server.returning, self._session
        if returning is None or session is None or not returning.was_recorded(session, body):
            (self.hear_last if is_last else self.handle)(body)

    def hear_last(self, body: bytes) -> None:
        """Handle a message of a client that closed its connection before the message was answered:
        what it gives back, lends or has received takes effect, other requests are ignored.
        """
        try:
            request = decode_request(body)
            if type(request) in _LAST_WORDS:
                self._handle(request)
        except (TorchStoreError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            log.debug("the last words of a client: %s", error)

    def refuse(self, why: str, code: str = ProtocolError.code) -> None:
        """Send a failure with the reason, and end the conversation."""
        self.send(m.Failure(0, code, f"{why}; closing this connection"))
        self.end()

    def process_died(self) -> None:
        """Undo the unfinished puts of the client's process, which has died. A forked child of it
        may keep the connection open and still read the memory that it has inherited, so leases
        stay.
        """
        session = self._session
        if session is not None and not session.is_holder:
            self._server.died(session)
            controller = self._server.controller
            # A process with a role reads no mapped memory, so neither do its forked children.
            end = controller.close_session if session.facts.role else controller.end_session
            self._server.handshakes.ended(session, lambda: end(session))

    def ended(self, why: str = "its connection has closed") -> None:
        """Undo what was held through the connection, which has closed. Idempotent."""
        self._end(why, lambda session: self._server.controller.close_session(session))

    def relay_lost(self, why: str) -> None:
        """End the conversation because its relay is gone. The client may still run and read mapped
        memory, so its session is detached. Idempotent.
        """
        detached = self._server.controller.detached

        def detach(session: SessionRecord) -> None:
            # A holder's connection may have passed from the process that is known to a child of it.
            process = None if self._via is None or session.is_holder else self._via.process
            detached.detach(session, process)

        self._end(why, detach)

    def _end(self, why: str, close_session: Callable[[SessionRecord], None]) -> None:
        if self not in self._server.conversations:
            return
        self._server.conversations.discard(self)
        # The connection and this object refer to each other. Breaking the cycle frees both at once,
        # instead of when the garbage collector runs.
        self._sender.close()
        self.end = _nothing
        self._keep = _keep_nothing
        for waiter in self._waiters.values():
            self._server.controller.waiting.forget(waiter)
        self._waiters.clear()
        self._delayed.clear()
        if self._volume is not None:
            self._server.volume_ended(self._volume, why)
        if self._session is not None:
            if self._liveness:
                session = self._session
                session.ending = True
                self._server.left(session, why)

                def close() -> None:
                    close_session(session)
                    # Only now: if the server dies before, the next life sees the same end.
                    drop = functools.partial(self._server.drop_connection, session)
                    if not self._server.controller.when_recorded(drop):
                        drop()

                self._server.handshakes.ended(session, close)
            else:
                self._session.channels -= 1

    # ---- messages -------------------------------------------------------------------------

    def _handle(self, request: m.Request, body: bytes = b"") -> None:
        """Answer a request; ``body``: it as it has arrived, if it is handled at once."""
        session = self._session
        if session is None or type(request) is m.Hello or type(request) is m.Attach:
            self._handle_other(request)
            return
        if session.ending or session.token not in self._controller.sessions:
            # The liveness connection is gone and what the session held was undone, so that the
            # session must not acquire anything new.
            raise StoreClosedError("this session has ended")
        try:
            reply = self._answer(request, session, body)
        except Delayed as delayed:
            self._delay(request, delayed)
            return
        except StoreFullError as error:
            if self._server.when_trimmed(functools.partial(self._again, request)):
                return
            self._server.refusals.refused(session, error)
            reply = _failure(request, error)
        except TorchStoreError as error:
            reply = _failure(request, error)
        except Exception:
            log.exception("request failed: %s", type(request).__name__)
            text = f"the server failed on {type(request).__name__}; its log has the traceback"
            reply = _failure(request, TorchStoreError(text))
        if self._delayed:
            self._delayed.pop(getattr(request, "id", 0), None)
        if reply is not None:
            self.send(reply)
            if self._sender.is_behind:
                self._note_unsent(request, reply)

    def _note_unsent(self, request: m.Request, reply: m.Reply) -> None:
        """Its client may ask for this again, though the log may lack the request by then."""
        if type(request) is m.Again:
            request = request.request
        if number := number_of(request):
            if isinstance(reply, m.Failure):  # its details may be those of a plug-in
                error = TorchStoreError(reply.message, details=reply.details)
                reply = msgspec.structs.replace(reply, details=portable(error)[1])
            self._sender.unsent[type(request).__name__, number] = reply

    @property
    def unsent(self) -> tuple[bytes, Mapping[tuple[str, int], m.Reply]]:
        """The token of its session, and answers to requests with numbers (see ``wire.repeating``)
        of which some may not have been given to the kernel yet. There are few: while that has no
        room for an answer, no other request is read from the client.
        """
        token = b"" if self._session is None else self._session.token
        return token, self._sender.unsent

    def _handle_other(self, request: m.Request) -> None:
        """Handle what is no request of a session: a first message, or what a volume tells."""
        if isinstance(request, (m.Hello, m.Attach)):
            self._begin(request)
            return
        if isinstance(request, m.Via) and not (self.greeted or self._via):
            self._via = request
            return
        if isinstance(request, m.ClientDied | m.RelayLost):
            self._of_line(request)
            return
        if self._volume is None:
            raise ProtocolError("the first message must be a Hello")
        self._of_volume(request, self._volume)

    def _of_volume(self, request: m.Request, volume: AttachedVolume) -> None:
        """Handle what a volume in another process reports."""
        match request:
            case m.Warm():
                self._server.volume_warmed(volume, request)
            case m.Grown():
                volume.memory.grown(request)
                self._server.controller.grown(volume.index, request.usable)
            case m.SpillDone():
                if volume.spilled is not None:
                    volume.spilled.done(request)
            case m.ProcessDied():
                self._server.process_ended(request)
            case m.PeerReply():
                volume.halves.replied(request)
            case m.CopierEnded():
                self._server.controller.repairs.copiers.ended(volume.index)
            case _:
                raise ProtocolError(f"a volume does not send {type(request).__name__}")

    def _of_line(self, request: m.ClientDied | m.RelayLost) -> None:
        """Handle what is not the client's message, but a message about it."""
        if self._via is None:
            raise ProtocolError(f"a client does not send {type(request).__name__}")
        if isinstance(request, m.ClientDied):
            self.process_died()
        else:
            self.relay_lost(request.why)

    def _delay(self, request: m.Request, delayed: Delayed) -> None:
        """Answer a request later, unless its client gives it up."""
        if type(request) is m.Again:  # it has changed nothing in an earlier life either
            request = request.request
        if isinstance(request, m.Put | m.PutObject | m.Locate | m.Fetch):
            delay = request, delayed.why
            if self._delayed.get(request.id) != delay:
                self._delayed[request.id] = delay
                self.send(m.Delayed(request.id, delayed.why))
            delayed.then(lambda: self._retry(request))

    def _retry(self, request: m.Put | m.PutObject | m.Locate | m.Fetch) -> None:
        if request.id in self._delayed and self._delayed[request.id][0] is request:
            self._server.controller.operations[type(request)] -= 1  # it was counted already
            self._again(request)

    def _give_up(self, puts: Iterable[int], leases: Iterable[int]) -> None:
        """Forget delayed requests: their client has given back what they would get."""
        txns, given_back = set(puts), set(leases)
        for number, (request, _) in self._delayed.copy().items():
            if (
                (request.txn in txns)
                if isinstance(request, m.Put | m.PutObject)
                else request.lease in given_back
            ):
                del self._delayed[number]

    def _again(self, request: m.Request) -> None:
        """Answer a request that had to wait for memory, unless the conversation has ended."""
        if self in self._server.conversations:
            try:
                self._handle(request)
            except StoreClosedError as error:
                self.refuse(error.message, error.code)

    def _begin(self, first: m.Hello | m.Attach) -> None:
        """Answer the first message, by which a client or a volume identifies itself."""
        if self.greeted:
            raise ProtocolError("a connection has one Hello")
        if first.protocol != m.PROTOCOL_VERSION:
            peer = "client" if isinstance(first, m.Hello) else "volume"
            raise ProtocolError(_mismatch(peer, first.protocol))
        if isinstance(first, m.Hello):
            controller = self._server.controller  # there is none while the store is starting
            begin = functools.partial(self._hello, first, controller)
        else:
            begin = functools.partial(self._attach, first)
        try:
            begin()
        except TorchStoreError as error:
            self.send(_failure(first, error))
            self.end()

    def _attach(self, attach: m.Attach) -> None:
        pid = self._pid if self._via is None else 0
        self._volume = self._server.volume_attached(attach, self.send, pid)
        self.send(m.Attached(attach.id, self._server.life))

    def _hello(self, hello: m.Hello, controller: Controller) -> None:
        returning = self._server.returning
        if hello.session and hello.returns:
            if returning is None:
                raise StoreClosedError("this server has no sessions of an earlier one")
            session = returning.take(hello.session)
            self._liveness = True
            self._keep(session)
        elif hello.session:
            if hello.life not in (0, self._server.life):
                self.end()  # its client finds that this is another life
                return
            if returning is not None and returning.hold_back(
                hello.session, lambda: self._held_back(hello, controller)
            ):
                return
            session = controller.join_session(hello.session)
            session.channels += 1
        else:
            if self._server.life:  # for the process of the client, and to read what is kept
                check_descriptors("another session", 2)
            pid = self._pid if self._via is None else 0
            session = controller.open_session(hello.facts, hello.topology, pid, self._via)
            self._liveness = True
            self._keep(session)
            self._server.joined(session)
        self._session, self._controller = session, controller
        self.send(self._server.welcome(hello.id, session.token, self._via))

    def keep_again(self, serials: Collection[int]) -> None:
        """Have the keeper hold this connection, if it is the liveness connection of one of these
        sessions.
        """
        if self._liveness and self._session is not None and self._session.serial in serials:
            self._keep(self._session)

    def go_on(self, session: SessionRecord) -> None:
        """This is the liveness connection of a session, and the client does not know yet that the
        server has died and is back. One that reads nothing may still wait for the answer to its
        hello, as long as it has asked for nothing.
        """
        self._session, self._controller = session, self._server.controller
        self._liveness = True
        if not self.is_deaf or not (session.holds or session.tickets):
            self.send(self._server.welcome(0, session.token, self._via))

    def _held_back(self, hello: m.Hello, controller: Controller) -> None:
        """Let a channel in whose session has come back."""
        if self not in self._server.conversations:
            return
        try:
            self._hello(hello, controller)
        except TorchStoreError as error:
            self.send(_failure(hello, error))
            self.end()

    def _answer_again(self, request: m.Repeatable, session: SessionRecord) -> m.Reply | None:
        """Answer a request that an earlier life of the server may have executed."""
        returning = self._server.returning
        before = None if returning is None else returning.again(session, request)
        return self._answer(request, session) if before is None else before

    def _answer(
        self, request: m.Request, session: SessionRecord, body: bytes = b""
    ) -> m.Reply | None:
        kind = type(request)
        self._controller.operations[kind] += 1
        answer = ANSWERS.get(kind)
        if answer is not None:
            return answer(self._controller, session, request, body)
        own = _OWN_ANSWERS.get(kind)
        if own is not None:
            own(self, request, session)
            return None
        return self._answer_seldom(request, session)

    def _release(self, request: m.Release, session: SessionRecord) -> None:
        if self._delayed:
            self._give_up((), request.leases)
        remember = self._liveness
        self._controller.release(session, request.leases, request.parts, remember=remember)

    def _answer_seldom(self, request: m.Request, session: SessionRecord) -> m.Reply | None:
        """Answer what is not asked so often that it matters how long it takes to find its case."""
        controller = self._server.controller
        if type(request) is m.Abort:
            if self._delayed:
                self._give_up(request.txns, ())
            self._abort(session, request)
        elif type(request) is m.Keep:
            session.keeps_memory = True
        elif type(request) is m.Keys:
            return m.KeyList(request.id, controller.keys(request.prefix))
        elif type(request) is m.Cancel:
            self._sender.cancel(request.request)
            waiter = self._waiters.pop(request.request, None)
            if waiter is not None:
                controller.waiting.forget(waiter)
        elif type(request) is m.Unmet:
            unmet = controller.waiting.unmet(request.keys, request.min_version)
            return m.UnmetKeys(request.id, unmet)
        elif type(request) is m.Versions:
            return m.Committed(request.id, controller.catalog.versions(request.key))
        elif type(request) is m.Stat:
            asked = request.key, request.version
            found = inspection.stat(controller.catalog, controller.volumes, *asked)
            return m.StatReply(request.id, found)
        elif type(request) is m.List:
            listed, pending, more = inspection.listing(
                controller.catalog, controller.volumes, request.prefix, request.after
            )
            return m.Listing(request.id, listed, more, pending)
        elif type(request) is m.Handshake:
            self._server.handshakes.answer(session, request, self.send)
        elif type(request) is m.Settle:
            done = m.Done(request.id)
            uncertain = [(request.volume, request.transport)]
            self._server.handshakes.settle(session, uncertain, lambda: self.send(done))
        elif type(request) is m.Status:
            return m.StatusReply(request.id, self._server.status())
        elif type(request) is m.Shutdown:
            return self._server.shutdown(request.id, session)
        elif type(request) is m.Again:
            return self._answer_again(request.request, session)
        elif type(request) is m.Resume:
            self._server.resumed(session, request)
        elif type(request) is m.TakeCopies:
            controller.repairs.take(session, request, self.send)
        elif type(request) is m.Drain:
            return m.DrainReply(request.id, controller.drains.drain(request))
        elif type(request) is m.ClientDied or type(request) is m.RelayLost:
            self._of_line(request)
        return None

    def _abort(self, session: SessionRecord, request: m.Abort) -> None:
        def abort() -> None:
            self._server.controller.abort(session, request.txns, remember=self._liveness)

        # Of a process that was found dead before this was read, writes may still be under way.
        self._server.handshakes.settle(session, request.unsettled, abort)

    def _check_room_for_wait(self, ident: int) -> None:
        if len(self._waiters) >= _MAX_WAITERS or ident in self._waiters:
            raise ProtocolError("too many waits on one connection, or their ids repeat")

    def _wait_any(self, request: m.WaitAny, _: SessionRecord) -> None:
        self._check_room_for_wait(request.id)

        def reply(flags: list[bool]) -> None:
            self._waiters.pop(request.id, None)
            self.send(m.Flags(request.id, flags))

        waiter = self._server.controller.waiting.add_any(request.refs, request.count, reply)
        if waiter is not None:
            self._waiters[request.id] = waiter

    def _wait(self, request: m.Wait, _: SessionRecord) -> None:
        self._check_room_for_wait(request.id)
        controller = self._server.controller

        def reply(versions: list[int]) -> None:
            self._waiters.pop(request.id, None)
            if controller.catalog.timelines.last:
                timelines = map(controller.catalog.timeline, request.keys, versions)
                versions = Versions(versions, timelines)
            self.send(committed(request.id, versions))

        def fail(error: TorchStoreError) -> None:
            self._waiters.pop(request.id, None)
            self.send(_failure(request, error))

        timeline = request.timeline if isinstance(request, m.WaitAfter) else -1
        what = request.keys, request.min_version
        waiter = controller.waiting.add(*what, reply, timeline, fail)
        if waiter is not None:
            self._waiters[request.id] = waiter


# How requests are answered that ``answers.ANSWERS`` has not, of those that are frequent.
_OWN_ANSWERS: dict[type[m.Message], Callable[[Conversation, Any, SessionRecord], None]] = {
    m.Release: Conversation._release,
    m.Wait: Conversation._wait,
    m.WaitAfter: Conversation._wait,
    m.WaitAny: Conversation._wait_any,
}


def _keep_nothing(session: SessionRecord) -> None:
    """Do nothing: what is no connection of this process does not outlive it."""


def _nothing() -> None:
    """Do nothing; this replaces ``end`` when the connection has closed."""


def _mismatch(peer: str, protocol: int) -> str:
    older = f"the {peer}'s" if protocol < m.PROTOCOL_VERSION else "the server's"
    return (
        f"{peer} speaks protocol {protocol}, this server {m.PROTOCOL_VERSION}; "
        f"install the same torchstore-core on both sides: {older} is the older one"
    )


def _failure(request: m.Request, error: TorchStoreError) -> m.Failure:
    number: int = getattr(request, "id", 0)
    return m.Failure(number, error.code, error.message, error.key, error.details)
