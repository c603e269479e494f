"""Holds that are recorded: every request about them is in the log before it takes effect."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

from torchstore_core.server.index.catalog import Catalog
from torchstore_core.server.index.records import HeldVersion, SessionRecord, Value
from torchstore_core.server.index.references.holds import READ_REST_S, Holds
from torchstore_core.wire import messages as m

#: The attributes of holds that are state, besides the catalog's ``held``.
HOLDS = (
    "_tickets",
    "containers",
    "_contained_early",
    "_early",
    "_dying",
    "_adopting",
    "_deadlines",
    "_counter",
    "_number",
)


class RecordedHolds(Holds):
    """:class:`Holds` that write to a log.

    Args:
        record: writes a request of the session with this serial number.
        sooner_or_later: writes one that has no reply, and so cannot be refused, and does it.
        record_due: writes what has ended because its time was over: the serial numbers of
            sessions, and tickets; and ends it.
        catalog, free, later, grace_s: of the holds.
    """

    def __init__(
        self,
        record: Callable[[int, m.Message], None],
        sooner_or_later: Callable[[int, m.Message, Callable[[], None]], None],
        record_due: Callable[[list[int], list[int], Callable[[], None]], None],
        catalog: Catalog,
        free: Callable[[Iterable[Value]], None],
        later: Callable[[float, Callable[[], None]], object],
        grace_s: float,
    ) -> None:
        self._is_repeating = False
        super().__init__(catalog, free, self._later_unless_repeating, grace_s)
        self._really_later = later
        self._record = record
        self._sooner_or_later = sooner_or_later
        self._record_due = record_due

    def _later_unless_repeating(self, delay: float, call: Callable[[], None]) -> object:
        return None if self._is_repeating else self._really_later(delay, call)

    @contextmanager
    def repeating(self) -> Iterator[None]:
        """While this lasts, time ends nothing. Then what was to end gets its time anew: nobody
        could claim anything while there was no server.
        """
        self._is_repeating = True
        try:
            yield
        finally:
            self._is_repeating = False
        pending, self._deadlines, self._armed_for = self._deadlines, [], math.inf
        now = self._clock()
        for _, _, what in pending:
            if isinstance(what, SessionRecord):
                self._push(now + READ_REST_S, what)
        for number, ticket in self._tickets.items():
            if ticket.due is not None:
                ticket.is_hurried = False
                self._set_due(number, ticket, max(ticket.due, now + self._grace_s))

    def begin_at(self, number: int) -> None:
        """The first life of the server has begun its objects with this number."""
        self._number = number

    # ---- requests -------------------------------------------------------------------------

    def hold(self, session: SessionRecord, request: m.Hold) -> HeldVersion:
        self._record(session.serial, request)
        return super().hold(session, request)

    def unhold(self, session: SessionRecord, idents: Iterable[int]) -> None:
        idents = list(idents)
        unhold = partial(super().unhold, session, idents)
        self._sooner_or_later(session.serial, m.Unhold(idents), unhold)

    def free(
        self, refs: Iterable[tuple[str, int, int]], by: tuple[SessionRecord, int] | None = None
    ) -> int:
        serial, number = asked_by(by)
        refs = list(refs)
        self._record(serial, m.Free(0, refs, number))
        return super().free(refs)

    def lend(self, session: SessionRecord, ident: int, number: int) -> None:
        lend = partial(super().lend, session, ident, number)
        self._sooner_or_later(session.serial, m.Lend(ident, number), lend)

    def lend_all(self, session: SessionRecord, number: int) -> None:
        lend = partial(super().lend_all, session, number)
        self._sooner_or_later(session.serial, m.LendAll(number), lend)

    def claim(self, session: SessionRecord, request: m.Claim) -> None:
        self._sooner_or_later(session.serial, request, partial(super().claim, session, request))

    def take_back(self, session: SessionRecord, numbers: list[int]) -> None:
        take_back = partial(super().take_back, session, numbers)
        self._sooner_or_later(session.serial, m.TakeBack(numbers), take_back)

    def adopt(self, session: SessionRecord, number: int, pid: int = 0) -> None:
        adopt = partial(super().adopt, session, number, pid)
        self._sooner_or_later(session.serial, m.Adopt(number, pid), adopt)

    def end_due(self, sessions: Iterable[SessionRecord], tickets: Iterable[int]) -> None:
        sessions, tickets = list(sessions), list(tickets)
        end = partial(super().end_due, sessions, tickets)
        self._record_due([session.serial for session in sessions], tickets, end)


def asked_by(by: tuple[SessionRecord | None, int] | None) -> tuple[int, int]:
    """The serial number of the session that asks for something, and the number of the request; 0
    for what is not known.
    """
    session, number = (None, 0) if by is None else by
    return 0 if session is None else session.serial, number
