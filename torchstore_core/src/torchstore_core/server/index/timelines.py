"""Keys that went back to an older version: the histories that they have left, and the runs that are
about to go back.
"""

from __future__ import annotations

import bisect

import msgspec

from torchstore_core.server.index.key_history import KeyHistory
from torchstore_core.server.index.records import (
    Manifest,
    SessionRecord,
    Stored,
    Value,
    release_version,
)

# Rewinds of one key that are told apart.
_MAX_REWINDS = 1024


class Branch(msgspec.Struct, eq=False):
    """A run that goes back to ``version`` of a key, until a version of it is whole. Its puts are
    kept apart from those of the run before, so that no version is made of both.

    Attributes:
        timeline: of its versions; 0 before it has begun.
        base: what a partial version of it takes the other entries from. The branch holds it.
    """

    version: int
    timeline: int = 0
    history: KeyHistory = msgspec.field(default_factory=KeyHistory)
    base: Manifest | None = None

    def is_put_by_others(self, session: SessionRecord) -> bool:
        """Whether other living processes have put what is on its way in it."""
        pending = self.history.pending.values()
        sessions = (one.session for g in pending for one in g.contributions.values())
        return any(other is not session and other.closed is None for other in sessions)

    # ---- transitions, which return the values that nobody holds any more ------------------

    def drop_from(self, history: KeyHistory) -> list[Value]:
        """Nothing will come of it."""
        del history.branches[self.version]
        freed = release_version(self.base) if self.base is not None else []
        for generation in self.history.pending.values():
            freed += generation.discard()
        self.history.pending.clear()
        return freed

    def take_over(
        self, old: KeyHistory, newest: Stored | None
    ) -> tuple[Stored | None, list[Value]]:
        """It becomes the history of its key, in the place of ``old``, with the versions that come
        before it.

        Args:
            newest: the newest version so far.

        Returns:
            The newest of the versions before it, and the values.
        """
        del old.branches[self.version]
        freed: list[Value] = []
        for other in list(old.branches.values()):
            freed += other.drop_from(old)
        for generation in old.pending.values():
            freed += generation.discard()
        fenced = {s for s in old.fenced if s.closed is None} | old.sessions()
        self.history.fenced = fenced - self.history.sessions()
        self.history.keep, kept = old.keep, dict(old.kept)
        if newest is not None:
            kept[newest.version] = newest
        for gone in [version for version in kept if version >= self.version]:
            freed += release_version(kept.pop(gone))
        if self.base is not None:
            if (same := kept.get(self.base.version)) is not None:
                freed += release_version(same)
            kept[self.base.version] = self.base
        self.history.kept = kept
        return kept.pop(max(kept)) if kept else None, freed


class Timelines:
    """Which history of its key a version belongs to, as far as the versions still count.

    A timeline has a number, above those of all timelines of the store that began before it, so that
    no two histories of a key have the same; 0 is the first of every key. Of a key only its rewinds
    are remembered: a version belongs to the last one that went back to it, or to below it.

    Attributes:
        last: the number of the last one; 0 if nothing was ever rewound.

    >>> timelines = Timelines()
    >>> timelines.rewound("w", 51, timelines.begin(), used=60)
    >>> timelines.rewound("w", 55, timelines.begin(), used=70)
    >>> [timelines.of("w", version) for version in (50, 51, 54, 55, 71)]
    [0, 1, 1, 2, 2]
    >>> timelines.rewound("w", 40, timelines.begin(), used=56)
    >>> timelines.of("w", 39), timelines.of("w", 55), timelines.forget("w")
    (0, 3, 70)
    """

    def __init__(self) -> None:
        self.last = 0
        self._rewinds: dict[str, list[tuple[int, int]]] = {}  # version and timeline, ascending
        self._used: dict[str, int] = {}

    def begin(self) -> int:
        """The number of a new timeline."""
        self.last += 1
        return self.last

    def __contains__(self, key: str) -> bool:
        return key in self._rewinds

    def of(self, key: str, version: int) -> int:
        """The timeline of a version that there is, or that would be the next."""
        rewinds = self._rewinds.get(key)
        if rewinds is None:
            return 0
        at = bisect.bisect_right(rewinds, version, key=lambda rewind: rewind[0])
        return rewinds[at - 1][1] if at else 0

    def began_with(self, key: str) -> int:
        """The version that the key went back to the last time; 0 if it never did."""
        rewinds = self._rewinds.get(key)
        return rewinds[-1][0] if rewinds else 0

    def used(self, key: str) -> int:
        """The highest version that a key had before it went back; 0 if it never did."""
        return self._used.get(key, 0)

    def rewound(self, key: str, version: int, timeline: int, used: int) -> None:
        """A key has gone back to a version. ``used``: the highest that it ever had."""
        rewinds = self._rewinds.setdefault(key, [])
        while rewinds and rewinds[-1][0] >= version:
            rewinds.pop()
        rewinds.append((version, timeline))
        if len(rewinds) > _MAX_REWINDS:  # refs to the oldest versions count as gone
            rewinds[:2] = [(rewinds[0][0], rewinds[1][1])]
        self._used[key] = max(used, self._used.get(key, 0))

    def forget(self, key: str) -> int:
        """A key is deleted. Returns the highest version that it had before it was rewound, above
        which it must go on; 0 if it was not.
        """
        self._rewinds.pop(key, None)
        return self._used.pop(key, 0)
