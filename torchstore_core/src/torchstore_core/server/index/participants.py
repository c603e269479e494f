"""The participants that put to a key: what each of them brings, and how far each of them is."""

from __future__ import annotations

import bisect
from collections.abc import Collection

import msgspec

from torchstore_core.server.index.records import SessionRecord, Value
from torchstore_core.values import ValueMeta

__all__ = ["Contribution", "Participant", "PutSequence"]

# What is remembered of a sequence: its latest versions, its participants, and of each of these the
# latest processes.
_MAX_VERSIONS = 1024
_MAX_PARTICIPANTS = 1 << 16
_MAX_SESSIONS = 8


class Contribution(msgspec.Struct, eq=False):
    """What one participant puts into a generation. It holds its values.

    Attributes:
        before: the version that the participant was at before; 0 if this is its first put.
        items: the values that it stores, with the names of their entries.
        others: entries that it puts but does not store: replicas of what others store, and empty
            shards.
        paths, aliases: see ``messages.PutItem``; by the name of the entry.
        order: names of the entries as they came; only if there are aliases.
        partial: see ``messages.Publication``.
    """

    participant: str
    session: SessionRecord
    before: int
    items: list[tuple[str, Value]] = []
    others: dict[str, ValueMeta] = {}
    paths: dict[str, bytes] = {}
    aliases: dict[str, str] = {}
    order: dict[str, None] = {}
    partial: bool = False
    committed: bool = False

    @property
    def values(self) -> list[Value]:
        """The values that it stores."""
        return [value for _, value in self.items]


class Participant(msgspec.Struct, eq=False):
    """How far one participant of a sequence is.

    Attributes:
        version: the last that it has put to, finished or not; 0 if there is none.
        sessions: the last ones that put for it; the newest at the end.
    """

    version: int = 0
    sessions: list[SessionRecord] = []

    def puts(self, version: int, session: SessionRecord) -> None:
        """It begins a put to a version."""
        self.version = max(self.version, version)
        if not self.sessions or self.sessions[-1] is not session:
            self.sessions.append(session)
            del self.sessions[:-_MAX_SESSIONS]


class PutSequence(msgspec.Struct, eq=False):
    """The puts of one layout to one key, in the order in which they make versions: the n-th put of
    each participant belongs to the n-th version.

    Attributes:
        versions: the latest ones, ascending.
        whole: those of them that became whole and were not overtaken.
        lost: those of them that were lost with a volume before they were whole, and why.
        participants: by name, in the order of their last puts.
    """

    versions: list[int] = []
    whole: set[int] = set()
    lost: dict[int, str] = {}
    participants: dict[str, Participant] = {}

    def announce(self, version: int, pending: Collection[int]) -> None:
        """A version of this sequence begins. Old ones are forgotten unless they are ``pending``."""
        if self.lost.pop(version, None) is not None:  # it is put again, by its number
            self.versions.remove(version)
        bisect.insort(self.versions, version)
        while len(self.versions) > _MAX_VERSIONS and self.versions[0] not in pending:
            oldest = self.versions.pop(0)
            self.whole.discard(oldest)
            self.lost.pop(oldest, None)

    def participant(self, name: str) -> Participant:
        """The participant of that name, which puts now."""
        one = self.participants.pop(name, None) or Participant()
        self.participants[name] = one
        if len(self.participants) > _MAX_PARTICIPANTS:
            del self.participants[next(iter(self.participants))]
        return one

    def next_version(self) -> int:
        """Above all that any participant has put to: a number means one thing to all of them."""
        return max([one.version for one in self.participants.values()], default=0) + 1

    def last_of(self, name: str) -> int:
        """The last version of a participant; 0 if there is none."""
        one = self.participants.get(name)
        return 0 if one is None else one.version
