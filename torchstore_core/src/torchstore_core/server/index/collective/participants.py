"""The participants that put to a key: what each of them contributes, and how far each has got."""

from __future__ import annotations

import bisect
from collections.abc import Collection

import msgspec

from torchstore_core.boxes import Box
from torchstore_core.server.index.records import SessionRecord, Value
from torchstore_core.values import ValueMeta

# Limits on what a sequence remembers: its latest versions, its participants, and the latest
# sessions of each participant.
_MAX_VERSIONS = 1024
_MAX_PARTICIPANTS = 1 << 16
_MAX_SESSIONS = 8


class Contribution(msgspec.Struct, eq=False):
    """What one participant puts into a generation. A contribution holds its values.

    Attributes:
        before: the last version that the participant had put to before; 0 if there is none.
        names, values: the names of the entries of which it stores something, and what it stores. An
            entry of which it stores several shards comes as often.
        whole: the values are whole, and nothing else was in the generation when it began.
        others: entries that it puts but does not store: replicas of values that other participants
            store, and empty shards.
        paths, aliases: see ``messages.PutItem``; by the name of the entry.
        tied_boxes: the boxes that it puts of those entries to which it ties others.
        order: the names of the entries in the order of the put; only if there are aliases.
        partial: see ``messages.Publication``.
    """

    participant: str
    session: SessionRecord
    before: int
    names: list[str] = []
    values: list[Value] = []
    others: dict[str, ValueMeta] = {}
    paths: dict[str, bytes] = {}
    aliases: dict[str, str] = {}
    tied_boxes: dict[str, list[Box]] = {}
    order: dict[str, None] = {}
    partial: bool = False
    committed: bool = False
    whole: bool = False


class Participant(msgspec.Struct, eq=False):
    """The progress of one participant of a sequence.

    Attributes:
        version: the last version that it has put to, finished or not; 0 if there is none.
        sessions: the latest sessions that have put for it, the newest at the end.
    """

    version: int = 0
    sessions: list[SessionRecord] = []

    def puts(self, version: int, session: SessionRecord) -> None:
        """Record that this participant has begun a put to ``version``."""
        self.version = max(self.version, version)
        if not self.sessions or self.sessions[-1] is not session:
            self.sessions.append(session)
            del self.sessions[:-_MAX_SESSIONS]


class PutSequence(msgspec.Struct, eq=False):
    """The puts of one layout to one key, in the order in which they make versions: the n-th put of
    each participant belongs to the n-th version.

    Attributes:
        versions: the latest versions of the sequence, ascending.
        whole: those that became whole without a fixed number of participants, so that a participant
            may still be late for them.
        lost: those that were lost with a volume before they were whole, with the reason.
        participants: the participants by name, in the order of their last puts.
    """

    versions: list[int] = []
    whole: set[int] = set()
    lost: dict[int, str] = {}
    participants: dict[str, Participant] = {}

    def announce(self, version: int, pending: Collection[int]) -> None:
        """Add a version that begins. Surplus old versions are forgotten unless ``pending``."""
        if self.lost.pop(version, None) is not None:  # a put has named the lost version again
            self.versions.remove(version)
        bisect.insort(self.versions, version)
        while len(self.versions) > _MAX_VERSIONS and self.versions[0] not in pending:
            oldest = self.versions.pop(0)
            self.whole.discard(oldest)
            self.lost.pop(oldest, None)

    def participant(self, name: str) -> Participant:
        """Return the participant of that name, which is putting now; create it if it is new."""
        one = self.participants.pop(name, None) or Participant()
        self.participants[name] = one
        if len(self.participants) > _MAX_PARTICIPANTS:
            del self.participants[next(iter(self.participants))]
        return one

    def next_version(self) -> int:
        """Return the lowest version above all that any participant has put to, so that a version
        number means the same to all of them.
        """
        return max([one.version for one in self.participants.values()], default=0) + 1

    def last_of(self, name: str) -> int:
        """Return the last version that a participant has put to; 0 if there is none."""
        one = self.participants.get(name)
        return 0 if one is None else one.version
