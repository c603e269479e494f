"""What clients have asked, and what they were answered: all that the checker knows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.simulation.plans import Operation

from torchstore_core.wire import messages as m

__all__ = ["Call", "History", "plain"]


class Call:
    """One operation of one client.

    Attributes:
        started, ended: steps of the simulation; ``ended`` is None if the client never heard.
        begun, at: the points in the server's order of messages at which its first and its last
            request came; 0: never. Of a wait ``at`` is the point at which it was answered.
        code: of the error that it ended with; empty if it was answered.
        result: the answer: versions, contents, or whatever the operation is for.
        about: of references: what it refers to, and whether that is there for sure.
        known: whether it is known what became of it: False if a request under way was lost, or if
            it was given up after it might have had an effect.
    """

    __slots__ = (
        "about",
        "at",
        "begun",
        "client",
        "code",
        "ended",
        "known",
        "operation",
        "result",
        "sent",
        "started",
        "unanswered",
    )

    def __init__(self, operation: Operation, client: int, started: int) -> None:
        self.operation = operation
        self.client = client
        self.started = started
        self.ended: int | None = None
        self.begun = 0.0
        self.at = 0.0
        self.code = ""
        self.result: Any = None
        self.known = False
        self.unanswered = 0
        self.about: tuple[tuple[str, int, int], bool] | None = None
        self.sent = False  # the request that decides, so that the rest is up to the server

    @property
    def is_refused_late(self) -> bool:
        """Whether a put was refused when it was to be committed: what it had begun is given up."""
        return self.code == "store-full" and self.begun < self.at

    def reached(self, point: int) -> None:
        """The server has a request of it."""
        self.begun = self.begun or point
        self.at = point

    def happened(self, point: float) -> None:
        """The server has delayed its last request until now."""
        if self.begun == self.at:
            self.begun = point
        self.at = point

    def answered_at(self, point: float) -> None:
        """The server has sent the last answer; that of a wait just after what it has waited for."""
        if self.operation.kind == "wait":
            self.at = point + 0.5

    def returned(self, result: Any, step: int) -> None:
        """It was answered."""
        self.result, self.ended, self.known = result, step, True

    def failed(self, code: str, step: int) -> None:
        """It was refused, or given up before it could have an effect."""
        self.code, self.ended, self.known = code, step, True

    def never_heard(self, reply: m.Message, point: float) -> None:
        """The server has answered the last request, but the client does not listen any more."""
        if self.known or not self.sent:
            return
        if type(reply) is m.Committed or type(reply) is m.CommittedIn:
            self.result = reply.versions
        elif type(reply) is m.Failure:
            self.code = reply.code
        elif type(reply) is m.Deleted:
            self.result = reply.count
        else:
            return
        self.known = True
        self.answered_at(point)

    def __repr__(self) -> str:
        if self.ended is None:
            answer = self.code or plain(self.result)
            what = f"never heard of, {answer}" if self.known else "never ended"
        else:
            what = f"{self.code or plain(self.result)} ({self.started}-{self.ended})"
        return f"client {self.client}: {self.operation} -> {what}"


class History:
    """All calls of one run, in the order in which they started."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.lost = 0  # the point at which a volume was lost
        self.unread = 0  # that at which a disk has failed to read for the first time

    def in_order(self) -> Sequence[Call]:
        """Those of which it is known what became of them, in the order of the server's answers."""
        return sorted([call for call in self.calls if call.at and call.known], key=_point)


def plain(thing: Any) -> str:
    """An answer for people: marks as the operations that have put them."""
    match thing:
        case bytes():
            return f"#{int.from_bytes(thing[:4], 'little')}"
        case list() | tuple() | set():
            return f"({', '.join(map(plain, thing))})"
    return str(thing)


def _point(call: Call) -> float:
    return call.at
