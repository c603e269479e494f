"""A controller of which another process can make a copy: it records what changes its state.

The controller is a state machine, so its requests are enough: a server that comes back repeats them
and has the same state, whatever that consists of. A request is recorded before it is executed. What
others may have seen of its effects is therefore always in the log, and one that was recorded but
not answered has been executed as far as anybody can tell; its client asks again (``messages.Again``)
and is told what the repetition gave.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

from torchstore_core.contracts.strategy import ClientFacts
from torchstore_core.errors import TorchStoreError
from torchstore_core.machine.processes import started
from torchstore_core.machine.topology import Topology
from torchstore_core.server.controller import Controller
from torchstore_core.server.index import moments
from torchstore_core.server.index.records import SessionRecord
from torchstore_core.server.keeping.log import Log, Record
from torchstore_core.wire import messages as m

__all__ = ["Opened", "RecordedController", "Repeated"]

# Kinds of records. Their numbers must stay what they are only as long as a store lives.
_OPEN, _CLOSE, _END, _REQUEST, _ABORT, _ABORT_EARLY, _RELEASE, _RELEASE_EARLY = range(8)
_SERIALS = struct.Struct("<I")
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(m.Put | m.Commit | m.Delete | m.Locate | m.Fetch).decode
_decode_ids = msgspec.msgpack.Decoder(list[int]).decode
_decode_release = msgspec.msgpack.Decoder(tuple[list[int], list[tuple[int, list[int]]]]).decode


class Opened(msgspec.Struct, array_like=True):
    """A session that was opened.

    Args:
        pid, started: of its process, see ``machine.processes``; 0: unknown.
    """

    token: bytes
    peer: bytes
    facts: ClientFacts
    topology: Topology
    opened: float
    pid: int
    started: int


_decode_opened = msgspec.msgpack.Decoder(Opened).decode


class Repeated(NamedTuple):
    """What repeating a request has given: a result, or an error."""

    result: Any
    error: TorchStoreError | None = None


class RecordedController(Controller):
    """A :class:`Controller` that writes a log.

    Args:
        log: new, or that of an earlier life, which :meth:`restore` then repeats.
        args, options: of the controller.

    Attributes:
        opened: the sessions that are open, by token, with their processes.
        results: of requests that were repeated, by token and by the id of the put (``Put``), of the
            put (``Commit``), or of the deletion.
    """

    def __init__(self, log: Log, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._log = log
        self._serials: dict[bytes, int] = {}
        self._next_serial = 1
        self._silent = False  # what happens now is part of something that is recorded
        self.opened: dict[bytes, Opened] = {}
        self.results: dict[tuple[bytes, type[m.Message], int], Repeated] = {}

    def _record(self, kind: int, session: SessionRecord | None, body: bytes) -> None:
        serial = 0 if session is None else self._serials.get(session.token, 0)
        self._log.append(kind, serial, moments.wall(), moments.monotonic(), body)

    # ---- what is recorded -----------------------------------------------------------------

    def open_session(
        self, facts: ClientFacts, topology: Topology, pid: int = 0
    ) -> SessionRecord:
        session = super().open_session(facts, topology, pid)
        opened = Opened(
            session.token, session.peer, facts, topology, session.opened, pid, started(pid)
        )
        self._enter(opened)
        self._record(_OPEN, session, _encode(opened))
        return session

    def _enter(self, opened: Opened) -> None:
        self.opened[opened.token] = opened
        self._serials[opened.token] = self._next_serial
        self._next_serial += 1

    def close_session(self, session: SessionRecord) -> None:
        if session.token in self.sessions:
            self._record(_CLOSE, session, b"")
            self._silently(super().close_session, session)
            del self._serials[session.token], self.opened[session.token]

    def end_session(self, session: SessionRecord) -> None:
        if self._silent:
            super().end_session(session)
        else:
            self._record(_END, session, b"")
            self._silently(super().end_session, session)

    def _silently(self, change: Any, session: SessionRecord) -> None:
        self._silent = True
        try:
            change(session)
        finally:
            self._silent = False

    def put(
        self, session: SessionRecord, request: m.Put
    ) -> tuple[list[int], list[m.Grant | None] | None]:
        self._record(_REQUEST, session, _encode(request))
        return super().put(session, request)

    def commit(self, session: SessionRecord, txn_id: int) -> list[int]:
        self._record(_REQUEST, session, _encode(m.Commit(0, txn_id)))
        self._silent = True  # it may abort
        try:
            return super().commit(session, txn_id)
        finally:
            self._silent = False

    def abort(
        self, session: SessionRecord, txn_ids: Iterable[int], *, remember: bool = False
    ) -> None:
        if not self._silent:
            txn_ids = list(txn_ids)
            self._record(_ABORT_EARLY if remember else _ABORT, session, _encode(txn_ids))
        super().abort(session, txn_ids, remember=remember)

    def locate(self, session: SessionRecord, request: m.Locate) -> tuple[list[m.Entry], bool]:
        entries, leased = super().locate(session, request)
        if leased:  # nobody knows of the lease before it is answered
            self._record(_REQUEST, session, _encode(request))
        return entries, leased

    def fetch(self, session: SessionRecord, request: m.Fetch) -> m.Fetched:
        fetched = super().fetch(session, request)
        if fetched.leased:
            self._record(_REQUEST, session, _encode(request))
        return fetched

    def release(
        self,
        session: SessionRecord,
        leases: Iterable[int],
        parts: Iterable[tuple[int, list[int]]],
        *,
        remember: bool = False,
    ) -> None:
        if not self._silent:
            leases, parts = list(leases), list(parts)
            kind = _RELEASE_EARLY if remember else _RELEASE
            self._record(kind, session, _encode((leases, parts)))
        super().release(session, leases, parts, remember=remember)

    def delete(
        self, keys: Sequence[str], strict: bool, by: tuple[SessionRecord, int] | None = None
    ) -> int:
        session, number = by or (None, 0)
        self._record(_REQUEST, session, _encode(m.Delete(0, list(keys), strict, number)))
        return super().delete(keys, strict)

    # ---- coming back ----------------------------------------------------------------------

    def restore(self) -> None:
        """Repeat what an earlier life has recorded."""
        sessions: dict[int, SessionRecord] = {}
        prefault, self._prefault = self._prefault, False
        self._silent = True
        try:
            with moments.then() as show:
                for record in self._log:
                    show(record.wall, record.monotonic)
                    self._repeat(record, sessions)
        finally:
            self._silent = False
            self._prefault = prefault

    def _repeat(self, record: Record, sessions: dict[int, SessionRecord]) -> None:
        if record.kind == _OPEN:
            opened = _decode_opened(record.body)
            session = SessionRecord(
                opened.token, opened.facts, opened.topology, peer=opened.peer, opened=opened.opened
            )
            sessions[record.session] = self.sessions[opened.token] = session
            self._next_serial = record.session
            self._enter(opened)
            return
        if record.kind == _REQUEST:
            request = _decode(record.body)
            if isinstance(request, m.Delete):
                whose = sessions.get(record.session)
                token = b"" if whose is None else whose.token
                work = lambda: Controller.delete(self, request.keys, request.strict)  # noqa: E731
                self.results[token, m.Delete, request.txn] = _tried(work)
                return
        known = sessions.get(record.session)
        if known is None:
            return
        session = known
        match record.kind:
            case 1:
                Controller.close_session(self, session)
                del sessions[record.session]
                del self._serials[session.token], self.opened[session.token]
            case 2:
                Controller.end_session(self, session)
            case 3:
                self._repeat_request(session, request)
            case 4 | 5:
                ids = _decode_ids(record.body)
                Controller.abort(self, session, ids, remember=record.kind == _ABORT_EARLY)
            case _:
                leases, parts = _decode_release(record.body)
                early = record.kind == _RELEASE_EARLY
                Controller.release(self, session, leases, parts, remember=early)

    def _repeat_request(
        self, session: SessionRecord, request: m.Put | m.Commit | m.Locate | m.Fetch | m.Delete
    ) -> None:
        token = session.token
        match request:
            case m.Put():
                put = _tried(lambda: Controller.put(self, session, request))
                self.results[token, m.Put, request.txn] = put
            case m.Commit():
                done = _tried(lambda: Controller.commit(self, session, request.txn))
                self.results[token, m.Commit, request.txn] = done
            case m.Locate():
                _tried(lambda: Controller.locate(self, session, request))
            case m.Fetch():
                _tried(lambda: Controller.fetch(self, session, request))


def _tried(work: Any) -> Repeated:
    """What a request gives; an error is part of that, as it was the first time."""
    try:
        return Repeated(work())
    except TorchStoreError as error:
        return Repeated(None, error)
