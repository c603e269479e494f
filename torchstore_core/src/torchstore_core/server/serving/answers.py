"""What requests are answered: each class of them, and how the controller executes it.

It is the same whether a client asks, or a server that comes back repeats what was asked of an
earlier life. What takes more than the controller is for the conversation to answer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torchstore_core.server.index.records import SessionRecord, Versions
from torchstore_core.wire import messages as m

if TYPE_CHECKING:
    from torchstore_core.server.controller import Controller


def committed(number: int, versions: list[int]) -> m.Committed:
    """The answer that says which versions were made."""
    if type(versions) is Versions:
        return m.CommittedIn(number, list(versions), versions.timelines)
    return m.Committed(number, versions)


def _put(controller: Controller, session: SessionRecord, request: m.Put, body: bytes) -> m.Reply:
    versions, grants = controller.put(session, request, body)
    if grants is not None:
        return m.Granted(request.id, grants)
    if type(versions) is list:  # the usual case, very often
        return m.Committed(request.id, versions)
    return committed(request.id, versions)


def _put_object(
    controller: Controller, session: SessionRecord, request: m.PutObject, body: bytes
) -> m.Reply:
    numbers, grants = controller.put_object(session, request, body)
    if grants is not None:
        return m.Granted(request.id, grants)
    return m.Committed(request.id, numbers)


def _commit(
    controller: Controller, session: SessionRecord, request: m.Commit, body: bytes
) -> m.Reply:
    return committed(request.id, controller.commit(session, request.txn, body))


def _seal(controller: Controller, session: SessionRecord, request: m.Seal, body: bytes) -> m.Reply:
    return committed(request.id, controller.seal(session, request, body))


def _locate(
    controller: Controller, session: SessionRecord, request: m.Locate, body: bytes
) -> m.Reply:
    entries, leased = controller.locate(session, request)
    if type(entries) is m.EntryColumns:
        return m.Located(request.id, [], leased, columns=entries)
    return m.Located(request.id, entries, leased)


def _fetch(
    controller: Controller, session: SessionRecord, request: m.Fetch, body: bytes
) -> m.Reply:
    return controller.fetch(session, request)


def _delete(
    controller: Controller, session: SessionRecord, request: m.Delete, body: bytes
) -> m.Reply:
    by = session, request.txn
    return m.Deleted(request.id, controller.delete(request.keys, request.strict, by))


def _exists(
    controller: Controller, session: SessionRecord, request: m.Exists, body: bytes
) -> m.Reply:
    return m.Flags(request.id, controller.exists(request.keys))


def _hold(controller: Controller, session: SessionRecord, request: m.Hold, body: bytes) -> m.Reply:
    held = controller.holds.hold(session, request)
    return m.CommittedIn(request.id, [held.version], [held.timeline])


def _free(controller: Controller, session: SessionRecord, request: m.Free, body: bytes) -> m.Reply:
    return m.Deleted(request.id, controller.holds.free(request.refs, (session, request.txn)))


def _refs(controller: Controller, session: SessionRecord, request: m.Refs, body: bytes) -> m.Reply:
    detached = controller.detached.sessions
    everyone = [*controller.sessions.values(), *detached.values()]
    return m.RefsReply(request.id, controller.holds.report(everyone, set(detached)))


Answer = Callable[["Controller", SessionRecord, Any, bytes], m.Reply | None]
#: How requests of each class are answered; None is no reply. A ``match`` with their classes would
#: compare them one by one, which takes a thousand instructions for each that it is not: for a small
#: get, a tenth of all. Each is also given the request as it has arrived, if it is at hand.
ANSWERS: dict[type[m.Message], Answer] = {
    m.Put: _put,
    m.Rewind: _put,
    m.PutObject: _put_object,
    m.Commit: _commit,
    m.Seal: _seal,
    m.Locate: _locate,
    m.LocateRefs: _locate,
    m.LocateKeys: _locate,
    m.Fetch: _fetch,
    m.FetchRef: _fetch,
    m.FetchKeys: _fetch,
    m.Delete: _delete,
    m.Exists: _exists,
    m.Hold: _hold,
    m.Unhold: lambda it, session, asked, _: it.holds.unhold(session, asked.holds),
    m.Lend: lambda it, session, asked, _: it.holds.lend(session, asked.hold, asked.ticket),
    m.LendAll: lambda it, session, asked, _: it.holds.lend_all(session, asked.ticket),
    m.Adopt: lambda it, session, asked, _: it.holds.adopt(session, asked.ticket, asked.pid),
    m.Claim: lambda it, session, asked, _: it.holds.claim(session, asked),
    m.TakeBack: lambda it, session, asked, _: it.holds.take_back(session, asked.tickets),
    m.Free: _free,
    m.Refs: _refs,
}
