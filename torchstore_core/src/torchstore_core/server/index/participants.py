"""Who puts to the generations of a key, what each of them brings, and how far each is."""

from __future__ import annotations

import bisect
from collections.abc import Collection

from torchstore_core.server.index.records import SessionRecord, Value
from torchstore_core.values import ValueMeta

__all__ = ["Contribution", "Line", "Participant"]

# Of one layout: versions that are remembered, and participants, and the processes that were one
# of them, one after the other.
_MAX_VERSIONS = 1024
_MAX_PARTICIPANTS = 1 << 16
_MAX_SESSIONS = 8


class Contribution:
    """What one participant put into a generation. It holds its values.

    Attributes:
        before: the version that the participant was at; 0 at first.
        items: the values that it stores, by name of their entry.
        others: entries that it puts too, but that others store: replicas, and empty shards.
        paths, aliases: see ``messages.PutItem``; by name.
        order: names of entries as they came; only if there are aliases.
        partial: see ``messages.Publication``.
    """

    __slots__ = (
        "aliases",
        "before",
        "committed",
        "items",
        "order",
        "others",
        "partial",
        "paths",
        "session",
        "who",
    )

    def __init__(self, who: str, session: SessionRecord, before: int) -> None:
        self.who = who
        self.session = session
        self.before = before
        self.items: list[tuple[str, Value]] = []
        self.others: dict[str, ValueMeta] = {}
        self.paths: dict[str, bytes] = {}
        self.aliases: dict[str, str] = {}
        self.order: dict[str, None] = {}
        self.partial = False
        self.committed = False

    @property
    def values(self) -> list[Value]:
        """The values that it stores."""
        return [value for _, value in self.items]


class Participant:
    """Who puts to a line: its last version, and the last sessions that put for it, finished or not;
    the newest at the end.
    """

    __slots__ = ("sessions", "version")

    def __init__(self) -> None:
        self.version = 0
        self.sessions: list[SessionRecord] = []

    def puts(self, version: int, session: SessionRecord) -> None:
        """It begins a put."""
        self.version = max(self.version, version)
        if not self.sessions or self.sessions[-1] is not session:
            self.sessions.append(session)
            del self.sessions[:-_MAX_SESSIONS]


class Line:
    """The generations of one layout, and those of its participants that put last, by name.

    Attributes:
        whole: those of ``versions`` that became whole, as opposed to overtaken.
        lost: those of ``versions`` that were lost with a volume before they were whole, and why.
    """

    __slots__ = ("lost", "participants", "versions", "whole")

    def __init__(self) -> None:
        self.versions: list[int] = []
        self.whole: set[int] = set()
        self.lost: dict[int, str] = {}
        self.participants: dict[str, Participant] = {}

    def announce(self, version: int, pending: Collection[int]) -> None:
        """A version of this line begins. Old ones that are not ``pending`` are forgotten."""
        if self.lost.pop(version, None) is not None:  # it is put again, explicitly
            self.versions.remove(version)
        bisect.insort(self.versions, version)
        while len(self.versions) > _MAX_VERSIONS and self.versions[0] not in pending:
            oldest = self.versions.pop(0)
            self.whole.discard(oldest)
            self.lost.pop(oldest, None)

    def participant(self, who: str) -> Participant:
        """One that puts now."""
        one = self.participants.pop(who) if who in self.participants else Participant()
        self.participants[who] = one
        if len(self.participants) > _MAX_PARTICIPANTS:
            del self.participants[next(iter(self.participants))]
        return one

    def next_version(self) -> int:
        """Above all that any participant ever put to: a number means one thing to all of them."""
        return max([one.version for one in self.participants.values()], default=0) + 1

    def last_of(self, who: str) -> int:
        """The last version of a participant; 0 if there is none."""
        one = self.participants.get(who)
        return 0 if one is None else one.version
