"""The catalog of keys and their versions: what can be read, and what plain puts and deletes make of
it. For versions that several puts make together, see ``index.collective``.

This is pure bookkeeping that knows nothing about memory: every transition returns the values that
nothing holds any more, so that the caller can free them.
"""

from __future__ import annotations

from collections.abc import Sequence

from torchstore_core import moments
from torchstore_core.errors import KeyNotFoundError, VersionGoneError
from torchstore_core.reports.stat import Pending
from torchstore_core.server.index.collective.generations import Generation
from torchstore_core.server.index.errors import (
    entry_error,
    gone_error,
    missing_error,
    partial_error,
    rewound_error,
)
from torchstore_core.server.index.gone.evictions import Evictions
from torchstore_core.server.index.key_history import KeyHistory
from torchstore_core.server.index.key_names import KeyNames, splits
from torchstore_core.server.index.records import (
    HeldVersion,
    Manifest,
    Stored,
    Value,
    release_version,
)
from torchstore_core.server.index.similar_names import SimilarNames
from torchstore_core.server.index.timelines import Timelines

# Maximum number of deleted keys whose last version is remembered.
_MAX_DELETED = 4096


class Catalog:
    """All keys of a store and their versions.

    Attributes:
        newest: the newest complete version of every key.
        histories: the other versions of keys that are put by several participants or that keep
            old versions.
        held: versions that references hold, whatever becomes of their keys; see
            ``index.references``.
        keys_to_settle: keys that have lost an unfinished version, for example to make way for a
            put; see ``UnfinishedVersions.settle``.
    """

    def __init__(self) -> None:
        self.newest: dict[str, Stored] = {}
        self.names = KeyNames(self.newest)
        self.histories: dict[str, KeyHistory] = {}
        self.held: dict[tuple[str, int, int], HeldVersion] = {}  # by key, version, timeline
        self.keys_to_settle: set[str] = set()
        self._similar = SimilarNames(self.names, self.newest)
        self.evictions = Evictions(self)
        self.timelines = Timelines()
        # A key that is put again after a delete continues above its last version, so that no (key,
        # version) is ever used twice. The last versions of the most recently deleted keys are
        # remembered; all other keys start above the highest version that was forgotten.
        self._deleted: dict[str, int] = {}
        self._version_floor = 0

    # ---- finding --------------------------------------------------------------------------

    def find(self, key: str, version: int = 0) -> tuple[Stored, int] | None:
        """Return what is stored under a key, or under ``<state dict>/<entry>``, and its version.

        Returns None if there is no such key; ``version`` 0 means the newest version.

        Raises:
            VersionGoneError: the requested version cannot be read.
        """
        stored = self.newest.get(key)
        if stored is None:
            if version and (held := self.held_version(key, version)) is not None:
                return held.stored, version
            entry = self._entry(key, version)
            if entry is None and version:
                raise self._gone_error(key, version)
            return entry
        if not version or stored.version == version:
            return stored, stored.version
        history = self.histories.get(key)
        old = None if history is None else history.kept.get(version)
        if old is None:
            if (held := self.held_version(key, version)) is not None:
                return held.stored, version
            raise self._gone_error(key, version)
        return old, version

    def _gone_error(self, key: str, version: int) -> VersionGoneError:
        there = self.versions(key)
        evicted = self.evictions.gone_error(key, version, there)
        return evicted or gone_error(key, version, there, self._rewound(key))

    def _rewound(self, key: str) -> tuple[int, int]:
        """Which version a key, or the state dict of an entry, went back to the last time, and the
        highest that it had before; 0 if it never did.
        """
        for name in (key, *(base for base, _ in splits(key))):
            if name in self.timelines:
                return self.timelines.began_with(name), self.timelines.used(name)
        return 0, 0

    def held_version(
        self, key: str, version: int, timeline: int | None = None
    ) -> HeldVersion | None:
        """What references hold of a key at that version. ``timeline`` None: that of the version
        with this number now.
        """
        if not self.held:
            return None
        if timeline is None:
            timeline = self.timeline(key, version)
        return self.held.get((key, version, timeline))

    def is_kept(self, key: str, version: int, timeline: int) -> bool:
        """Whether a version of a key, or of an entry, stays although nothing holds it."""
        return version in self.versions(key) and self.timeline(key, version) == timeline

    def timeline(self, key: str, version: int) -> int:
        """The timeline of a version of a key, or of an entry of a state dict."""
        if not self.timelines.last:
            return 0
        found = 0
        if key not in self.newest and key not in self.timelines:
            for base, name in splits(key):
                if base in self.timelines:
                    stored = self.newest.get(base)
                    of = self.timelines.of(base, version)
                    if type(stored) is Manifest and stored.entry(name) is not None:
                        return of
                    found = found or of
            return found
        return self.timelines.of(key, version)

    def check_timeline(self, key: str, version: int, timeline: int) -> None:
        """Raise VersionGoneError unless the version that there is belongs to this timeline."""
        if self.timeline(key, version) != timeline:
            newest = self.newest_version(key)
            raise rewound_error(key, version, newest) if newest else gone_error(key, version, [])

    def _entry(self, key: str, version: int) -> tuple[Stored, int] | None:
        """Return the state dict entry that a key names, and its version; None if there is none."""
        for base, name in splits(key):
            stored = self.newest.get(base)
            if version and stored is not None and stored.version != version:
                history = self.histories.get(base)
                stored = None if history is None else history.kept.get(version)
            if version and stored is None and (held := self.held_version(base, version)):
                stored = held.stored
            if type(stored) is Manifest and (entry := stored.entry(name)) is not None:
                return entry, stored.version
        return None

    def missing_error(self, keys: list[str]) -> KeyNotFoundError:
        """Return the error for keys that have no complete version or only name an entry."""
        for key in keys:
            for base in (key, *(base for base, _ in splits(key))):
                if base not in self.newest and (first := self._first_unfinished(base)) is not None:
                    return partial_error(key, base, first.state(base))
            if self._entry(key, 0) is not None:
                return entry_error(key, keys)
        return self.evictions.missing_error(keys) or missing_error(keys, self._similar.of(keys[0]))

    def newest_version(self, key: str) -> int:
        """Return the newest version of a key or entry; 0 if there is none."""
        found = self.find(key)
        return 0 if found is None else found[1]

    def versions(self, key: str) -> list[int]:
        """Return the readable versions of a key or entry, in ascending order."""
        found = [v for v, _ in self._all_versions(key)]
        if not found:
            for base, name in splits(key):
                found = _having(name, self._all_versions(base))
                if found:
                    break
        return found

    def _all_versions(self, key: str) -> list[tuple[int, Stored]]:
        history = self.histories.get(key)
        found = sorted(history.kept.items()) if history is not None else []
        stored = self.newest.get(key)
        return found if stored is None else [*found, (stored.version, stored)]

    def pending(self, key: str, *, brief: bool = False) -> list[Pending]:
        """Return the unfinished versions of a key; for ``brief`` see ``Generation.state``."""
        history = self.histories.get(key)
        if history is None:
            return []
        return [g.state(key, brief=brief) for g in history.generations()]

    def is_pending(self, key: str) -> bool:
        """Whether a key has unfinished versions."""
        return self._first_unfinished(key) is not None

    def _first_unfinished(self, key: str) -> Generation | None:
        history = self.histories.get(key)
        return None if history is None else next(iter(history.generations()), None)

    def unfinished(self, prefix: str = "") -> list[str]:
        """Return the keys that start with ``prefix`` and have unfinished versions."""
        histories = self.histories.items()
        return [
            key
            for key, history in histories
            if (history.pending or history.branches) and key.startswith(prefix)
        ]

    # ---- plain versions -------------------------------------------------------------------

    def flip(self, values: Sequence[Value]) -> list[Value]:
        """Make each value the newest version of its key, all in one step. Returns the values of the
        replaced versions that nothing holds any more.
        """
        now = moments.wall()
        newest, histories = self.newest, self.histories
        fresh: list[str] = []
        freed: list[Value] = []
        for value in values:
            value.created = now
            key = value.key
            old = newest.get(key)
            if histories and key in histories:
                freed += self.replace(key, value, self._next_version(key))
                continue
            if type(old) is Value:  # the usual case
                value.version = old.version + 1
                old.uses = uses = old.uses - 1
                if not (uses or old.pins):
                    freed.append(old)
            elif old is None:
                value.version = self._deleted.pop(key, self._version_floor) + 1
                fresh.append(key)
            else:
                value.version = old.version + 1
                freed += release_version(old)
            newest[key] = value
        if fresh:
            self.names.add(fresh)
        return freed

    def _next_version(self, key: str) -> int:
        """Return the lowest version of a key above all present, past and unfinished ones."""
        history = self.histories.get(key)
        known = 0 if history is None else max([history.dropped, *history.pending])
        return max(known + 1, self.lowest_version(key))

    def lowest_version(self, key: str) -> int:
        """Return the lowest version of a key that a put may name."""
        stored = self.newest.get(key)
        if stored is not None:
            return stored.version + 1
        return self._deleted.get(key, self._version_floor) + 1

    def was_there(self, key: str, version: int) -> bool:
        """Whether a version of a key, or of an entry, that does not exist now did, or never can."""
        if version < self.lowest_version(key):
            return True
        for base, _ in splits(key):
            stored = self.newest.get(base)
            if stored is None:
                used = self._deleted.get(base, 0)
            else:
                used = stored.version if type(stored) is Manifest else 0
            if version <= used:
                return True
        return False

    def replace(self, key: str, stored: Stored, version: int) -> list[Value]:
        """Make ``stored`` the newest version of a key that has a history. Returns the values that
        nothing holds any more.
        """
        stored.version = version
        history = self.histories[key]
        freed = history.overtake(version)
        old = self.newest.get(key)
        self.newest[key] = stored
        if old is None:
            self.names.add((key,))
        self._deleted.pop(key, None)
        return freed + history.shelve(old)

    # ---- deleting -------------------------------------------------------------------------

    def delete(self, key: str) -> list[Value] | None:
        """Remove a key with all its versions, old and unfinished ones included. Returns the values
        that nothing holds any more; None if there is no such key.
        """
        stored = self.newest.get(key)
        history = self.histories.get(key)
        if stored is None and (history is None or not (history.pending or history.branches)):
            return None
        freed: list[Value] = []
        self.evictions.forget(key)
        last = self.lowest_version(key) - 1
        if stored is not None:
            del self.newest[key]
            self.names.remove(key)
            freed += release_version(stored)
        if history is not None:
            del self.histories[key]
            last = max([last, history.dropped, *history.pending, self.timelines.forget(key)])
            for branch in list(history.branches.values()):
                freed += branch.drop_from(history)
            for generation in history.pending.values():
                freed += generation.discard()
            for old in history.kept.values():
                freed += release_version(old)
        self._bury(key, last)
        return freed

    def hide(self, key: str) -> None:
        """Forget the newest version of a key, but not which versions there were."""
        last = self.lowest_version(key) - 1
        del self.newest[key]
        self.names.remove(key)
        self._bury(key, last)

    def forget_history(self, key: str) -> None:
        """Forget the history of a key without a version, unless one is on its way, or participants
        may have been told the number of one that was dropped.
        """
        history = self.histories.get(key)
        if history is None or key in self.newest:
            return
        if not (history.pending or history.branches or history.dropped):
            del self.histories[key]

    def _bury(self, key: str, version: int) -> None:
        self._deleted[key] = version
        if len(self._deleted) > _MAX_DELETED:
            forgotten = next(iter(self._deleted))
            self._version_floor = max(self._version_floor, self._deleted.pop(forgotten))


def _having(name: str, there: Sequence[tuple[int, Stored]]) -> list[int]:
    """Of the versions of a key, in ascending order, those that are state dicts with that entry.
    Each is looked at once, however many make a chain.
    """
    found: list[int] = []
    newer: Stored | None = None
    has = False
    for version, stored in reversed(there):
        if type(stored) is not Manifest:
            has = False
        elif stored.newer is None or stored.newer is not newer:
            has = stored.entry(name) is not None
        elif name in stored.replaced:
            has = stored.replaced[name][0] is not None
        if has:
            found.append(version)
        newer = stored
    return found[::-1]
