"""Requests about holds (``index.references``), and the sessions that are there for holds alone.

A process that receives a reference before it has joined the store, or that was forked while it had
some, opens such a session: it needs no event loop and no thread, and reads nothing. It ends with
its connection, not with the process that has opened it: that may be the parent of the one that has
it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from torchstore_core.errors import ConfigurationError
from torchstore_core.server.index.records import SessionRecord
from torchstore_core.server.index.references.holds import DEFAULT_GRACE_S
from torchstore_core.wire import messages as m

if TYPE_CHECKING:
    from torchstore_core.server.controller import Controller

#: The requests that :func:`answer_holds` answers.
HOLD_REQUESTS = (
    *(m.Hold, m.Unhold, m.Lend, m.LendAll, m.Adopt, m.Claim, m.TakeBack),
    *(m.Free, m.Refs),
)

#: The environment variable that sets the grace of references in flight, in seconds.
GRACE = "TORCHSTORE_REF_GRACE"


def is_holder(session: SessionRecord) -> bool:
    """Whether a session is there for holds alone."""
    return session.facts.role == m.HOLDER_ROLE


def grace_s(environment: Mapping[str, str]) -> float:
    """How long a reference in flight is kept when it may have been forgotten, in seconds.

    Raises:
        ConfigurationError: the environment gives no number that is at least 0.
    """
    text = environment.get(GRACE, "")
    if not text:
        return DEFAULT_GRACE_S
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise ConfigurationError(f"{GRACE} is a number of seconds, at least 0, not {text!r}")
    return seconds


def answer_holds(
    controller: Controller, session: SessionRecord, request: m.Request
) -> m.Reply | None:
    """Answer a request about holds; None if it has no reply."""
    holds = controller.holds
    if type(request) is m.Hold:
        held = holds.hold(session, request)
        return m.CommittedIn(request.id, [held.version], [held.timeline])
    elif type(request) is m.Unhold:
        holds.unhold(session, request.holds)
    elif type(request) is m.Lend:
        holds.lend(session, request.hold, request.ticket)
    elif type(request) is m.LendAll:
        holds.lend_all(session, request.ticket)
    elif type(request) is m.Adopt:
        holds.adopt(session, request.ticket, request.pid)
    elif type(request) is m.Claim:
        holds.claim(session, request)
    elif type(request) is m.TakeBack:
        holds.take_back(session, request.tickets)
    elif type(request) is m.Free:
        return m.Deleted(request.id, holds.free(request.refs, (session, request.txn)))
    elif type(request) is m.Refs:
        everyone = [*controller.sessions.values(), *controller.detached.sessions.values()]
        return m.RefsReply(request.id, holds.report(everyone, set(controller.detached.sessions)))
    return None
