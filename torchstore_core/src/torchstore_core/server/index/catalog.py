"""The catalog of keys and their versions, both finished and unfinished.

This is pure bookkeeping that knows nothing about memory: every transition returns the values that
nothing holds any more, so that the caller can free them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence

from torchstore_core.errors import KeyNotFoundError, VersionGoneError
from torchstore_core.reports.stat import Pending
from torchstore_core.server.index.errors import (
    entry_error,
    gone_error,
    missing_error,
    no_base_error,
    partial_error,
    used_error,
    version_lost_error,
)
from torchstore_core.server.index.evictions import Evictions
from torchstore_core.server.index.generations import Generation
from torchstore_core.server.index.key_history import KeyHistory, PutTarget
from torchstore_core.server.index.key_names import KeyNames, splits
from torchstore_core.server.index.participants import Contribution, PutSequence
from torchstore_core.server.index.records import (
    Change,
    Manifest,
    SessionRecord,
    Stored,
    Value,
    all_values,
    release,
)
from torchstore_core.wire import messages as m

__all__ = ["Catalog"]

# Maximum number of deleted keys whose last version is remembered.
_MAX_DELETED = 4096


class Catalog:
    """All keys of a store and their versions.

    Args:
        sessions: the open sessions of the store, by token.

    Attributes:
        newest: the newest complete version of every key.
        histories: the other versions of keys that are put by several participants or that keep
            old versions.
        unsettled: keys that have lost an unfinished version, for example to make way for a put;
            :meth:`settle` finishes the partial versions that waited for it.
    """

    def __init__(self, sessions: Mapping[bytes, SessionRecord]) -> None:
        self._sessions = sessions
        self.newest: dict[str, Stored] = {}
        self.names = KeyNames(self.newest)
        self.histories: dict[str, KeyHistory] = {}
        self.unsettled: set[str] = set()
        self.evictions = Evictions(self)
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
            entry = self._entry(key, version)
            if entry is None and version:
                raise self._gone_error(key, version)
            return entry
        if not version or stored.version == version:
            return stored, stored.version
        history = self.histories.get(key)
        old = None if history is None else history.kept.get(version)
        if old is None:
            raise self._gone_error(key, version)
        return old, version

    def _gone_error(self, key: str, version: int) -> VersionGoneError:
        there = self.versions(key)
        return self.evictions.gone_error(key, version, there) or gone_error(key, version, there)

    def _entry(self, key: str, version: int) -> tuple[Stored, int] | None:
        """Return the state dict entry that a key names, and its version; None if there is none."""
        for base, name in splits(key):
            stored = self.newest.get(base)
            if version and stored is not None and stored.version != version:
                history = self.histories.get(base)
                stored = None if history is None else history.kept.get(version)
            if type(stored) is Manifest and name in stored.entries:
                return stored.entries[name], stored.version
        return None

    def missing_error(self, keys: list[str]) -> KeyNotFoundError:
        """Return the error for keys that have no complete version or only name an entry."""
        for key in keys:
            for base in (key, *(base for base, _ in splits(key))):
                pending = self.pending(base)
                if base not in self.newest and pending:
                    return partial_error(key, base, pending[0])
            if self._entry(key, 0) is not None:
                return entry_error(key, keys)
        return self.evictions.missing_error(keys) or missing_error(keys)

    def newest_version(self, key: str) -> int:
        """Return the newest version of a key or entry; 0 if there is none."""
        found = self.find(key)
        return 0 if found is None else found[1]

    def versions(self, key: str) -> list[int]:
        """Return the readable versions of a key or entry, in ascending order."""
        found = [v for v, _ in self._all_versions(key)]
        if not found:
            for base, name in splits(key):
                there = self._all_versions(base)
                found = [v for v, s in there if type(s) is Manifest and name in s.entries]
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
        return [g.state(key, brief=brief) for g in history.pending.values()]

    def unfinished(self, prefix: str = "") -> list[str]:
        """Return the keys that start with ``prefix`` and have unfinished versions."""
        histories = self.histories.items()
        return [key for key, history in histories if history.pending and key.startswith(prefix)]

    # ---- plain versions -------------------------------------------------------------------

    def flip(self, values: Sequence[Value]) -> list[Value]:
        """Make each value the newest version of its key, all in one step. Returns the values of the
        replaced versions that nothing holds any more.
        """
        now = time.time()
        newest, histories = self.newest, self.histories
        fresh: list[str] = []
        freed: list[Value] = []
        for value in values:
            value.created = now
            key = value.key
            old = newest.get(key)
            if histories and key in histories:
                freed += self._replace(key, value, self._next_version(key))
                continue
            if old is None:
                value.version = self._deleted.pop(key, self._version_floor) + 1
                fresh.append(key)
            else:
                value.version = old.version + 1
                if type(old) is Value:  # the usual case
                    old.uses -= 1
                    if not (old.uses or old.pins):
                        freed.append(old)
                else:
                    freed += release(all_values(old))
            newest[key] = value
        if fresh:
            self.names.add(fresh)
        return freed

    def _next_version(self, key: str) -> int:
        """Return the lowest version of a key above all present, past and unfinished ones."""
        history = self.histories.get(key)
        pending = 0 if history is None else max(history.pending, default=0)
        return max(pending + 1, self._lowest_version(key))

    def _lowest_version(self, key: str) -> int:
        """Return the lowest version of a key that a put may name."""
        stored = self.newest.get(key)
        if stored is not None:
            return stored.version + 1
        return self._deleted.get(key, self._version_floor) + 1

    def _replace(self, key: str, stored: Stored, version: int) -> list[Value]:
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

    # ---- generations ----------------------------------------------------------------------

    def target(
        self,
        session: SessionRecord,
        key: str,
        participant: str,
        layout: Hashable,
        version: int,
        participants: int,
        publication: m.Publication | None,
        *,
        replica: bool = False,
    ) -> PutTarget:
        """Determine which version a participant's put belongs to. The put has no effect until
        :meth:`clear` makes way for it and :meth:`join` makes it part of its generation.

        Args:
            version: the version that the put names; 0 if it names none.
            replica: see ``KeyHistory.next_of``.

        Raises:
            VersionGoneError: that version, or a newer one, exists already.
            ConfigurationError: another put of the participant to that version is still under way.
            KeyNotFoundError: the put is partial, but there is no version to take the other entries
                from.
            ObjectLostError: that version was lost before it was complete; this uses up the
                participant's turn.
        """
        history = self.histories.get(key) or KeyHistory()
        sequence = history.sequences.get(layout) or PutSequence()
        living = self._sessions.values()
        generation: Generation | None = None
        left_over: list[Generation] = []
        replaced: list[Contribution] = []
        if not version:
            version, generation, left_over = history.next_of(
                sequence, participant, session, replica=replica, living=living
            )
            if version and generation is None:
                if version in sequence.lost:
                    sequence.participant(participant).puts(version, session)
                    raise version_lost_error(key, version, sequence.lost[version])
                return PutTarget(
                    key, participant, layout, sequence, version, None, left_over
                )  # the version was completed, or overtaken, without this participant
        elif (there := history.pending.get(version)) is not None:
            generation, replaced = history.rejoin(
                there, key, sequence, participant, session, living
            )
            left_over = [there] if generation is None else []
        elif version < self._lowest_version(key):
            if version in sequence.versions and sequence.last_of(participant) < version:
                return PutTarget(key, participant, layout, sequence, version, None)
            used = self._lowest_version(key) - 1
            raise used_error(key, version, used, self.newest_version(key))
        behind: list[Generation] = []
        if generation is None:
            version = version or max(self._next_version(key), sequence.next_version())
            generation = Generation(sequence, version, participants, publication)
            behind = history.far_behind(sequence, without=left_over)
        partial = publication is not None and publication.partial
        if partial and not self._has_base(key, version, without=left_over + behind):
            raise no_base_error(key)
        return PutTarget(
            key, participant, layout, sequence, version, generation, left_over, behind, replaced
        )

    def _has_base(self, key: str, version: int, without: Collection[Generation] = ()) -> bool:
        """Return whether there is a state dict, finished or not, that a partial version can build
        on.
        """
        if type(self.newest.get(key)) is Manifest:
            return True
        history = self.histories.get(key)
        earlier = [] if history is None else [g for v, g in history.pending.items() if v < version]
        return any(
            g.publication is not None and not g.is_partial for g in earlier if g not in without
        )

    def clear(self, target: PutTarget) -> list[Value]:
        """Drop the generations and contributions that must make way for a put. Returns the values
        that nothing holds any more.
        """
        if target.left_over or target.behind:
            self.unsettled.add(target.key)
        history = self.histories.get(target.key)
        return [] if history is None else history.clear(target)

    def join(self, target: PutTarget, session: SessionRecord) -> Contribution:
        """Begin the contribution of a put to its generation."""
        history = self.histories.get(target.key)
        if history is None:
            history = self.histories[target.key] = KeyHistory()
        return history.join(target, session)

    def commit(self, target: PutTarget, contribution: Contribution) -> Change:
        """Mark a contribution as committed, and publish every version that this completes."""
        generation = target.generation
        if generation is None:
            return Change()
        contribution.committed = True
        if generation.dropped:
            return Change(release(contribution.values))
        now = time.time()
        for value in contribution.values:
            value.created = now
        changes: list[Change] = []
        if self._is_ready(target.key, generation):
            changes.append(self._finish(target.key, generation))
        return Change.of(changes + self._settle(target.key))

    def _is_ready(self, key: str, generation: Generation) -> bool:
        """Return whether a generation is complete and, if it is partial, whether the version that
        it builds on is certain.
        """
        if not generation.is_complete:
            return False
        if not generation.is_partial:
            return True
        if type(self.newest.get(key)) is not Manifest:
            return False
        pending = self.histories[key].pending.items()
        return not any(older.is_alive for v, older in pending if v < generation.version)

    def _finish(self, key: str, generation: Generation) -> Change:
        """Make a complete generation the newest version of its key."""
        history = self.histories[key]
        if generation.publication is not None and generation.publication.keep:
            history.keep = generation.publication.keep
        stored = generation.seal(key, self.newest.get(key), inherit=history.keep == 1)
        del history.pending[generation.version]
        if generation.participants:  # all have contributed: none can be late for it
            generation.sequence.versions.remove(generation.version)
        else:
            generation.sequence.whole.add(generation.version)
        freed = generation.discard()
        return Change(freed + self._replace(key, stored, generation.version), [key])

    def settle(self, *, all_keys: bool = False) -> Change:
        """Finish the partial versions that waited only for older ones that have been dropped.

        Args:
            all_keys: check every key, because a process has ended: partial versions no longer wait
                for versions that only this process was putting.
        """
        keys = list(self.histories) if all_keys else list(self.unsettled)
        self.unsettled.clear()
        return Change.of([change for key in keys for change in self._settle(key)])

    def _settle(self, key: str) -> list[Change]:
        history = self.histories.get(key)
        if history is None:
            return []
        return [
            self._finish(key, later)
            for later in list(history.pending.values())
            if not later.dropped and later.is_partial and self._is_ready(key, later)
        ]

    def reclaim(self, keys: Collection[str], kept: Collection[Generation]) -> list[Value] | None:
        """Make room for a put to ``keys`` by dropping one stalled generation: one whose writers
        have all died, or one of ``keys``, where the participant that is putting is ahead of others.

        Args:
            kept: generations that the put itself belongs to, which are not dropped.

        Returns:
            The values that nothing holds any more; None if there is no such generation.
        """
        for key, history in self.histories.items():
            for version, old in history.pending.items():
                if old in kept or old.is_written or (old.is_alive and key not in keys):
                    continue
                if old.is_complete and self._has_base(key, version):  # it will become visible
                    continue
                del history.pending[version]
                self.unsettled.add(key)
                return old.discard()
        return None

    def lose(self, reason: Callable[[Iterable[Value]], str]) -> Change:
        """Drop the unfinished versions that can never be completed because committed parts of them
        were lost with a volume.

        Args:
            reason: returns why any of the given values is lost, or "" if none is.
        """
        freed: list[Value] = []
        for key, history in self.histories.items():
            for version, generation in list(history.pending.items()):
                if why := reason(generation.stored_values()):
                    del history.pending[version]
                    freed += generation.discard()
                    generation.lost = generation.sequence.lost[version] = why
                    self.unsettled.add(key)
        return Change.of([Change(freed), self.settle()])

    def waiting_bytes(self) -> dict[str, int]:
        """Return the bytes that unfinished versions hold, by key."""
        found: dict[str, int] = {}
        for key, history in self.histories.items():
            nbytes = sum([g.nbytes for g in history.pending.values()])
            if nbytes:
                found[key] = nbytes
        return found

    def abort(self, target: PutTarget, contribution: Contribution) -> Change:
        """Undo a contribution, for example of an aborted put."""
        one = target.sequence.participants.get(target.participant)
        generation = target.generation
        turn = generation is None or not generation.lost  # a lost one uses up every turn
        same = one and one.version == target.version and one.sessions[-1] is contribution.session
        if one and same and turn:
            one.version = contribution.before
        if generation is None:
            return Change()
        if generation.dropped:
            return Change(release(contribution.values))
        freed = generation.remove(contribution)
        history = self.histories[target.key]
        if not generation.contributions:
            history.pending.pop(generation.version, None)
            target.sequence.versions.remove(generation.version)
            generation.dropped = True
            if target.key not in self.newest and not history.pending:
                del self.histories[target.key]
        return Change.of([Change(freed), *self._settle(target.key)])

    # ---- deleting -------------------------------------------------------------------------

    def delete(self, key: str) -> list[Value] | None:
        """Remove a key with all its versions, old and unfinished ones included. Returns the values
        that nothing holds any more; None if there is no such key.
        """
        stored = self.newest.get(key)
        history = self.histories.get(key)
        if stored is None and (history is None or not history.pending):
            return None
        freed: list[Value] = []
        self.evictions.forget(key)
        last = self._lowest_version(key) - 1
        if stored is not None:
            del self.newest[key]
            self.names.remove(key)
            freed += release(all_values(stored))
        if history is not None:
            del self.histories[key]
            last = max([last, *history.pending])
            for generation in history.pending.values():
                freed += generation.discard()
            for old in history.kept.values():
                freed += release(all_values(old))
        self._bury(key, last)
        return freed

    def hide(self, key: str) -> None:
        """Forget the newest version of a key, but not which versions there were."""
        last = self._lowest_version(key) - 1
        del self.newest[key]
        self.names.remove(key)
        self._bury(key, last)

    def _bury(self, key: str, version: int) -> None:
        self._deleted[key] = version
        if len(self._deleted) > _MAX_DELETED:
            forgotten = next(iter(self._deleted))
            self._version_floor = max(self._version_floor, self._deleted.pop(forgotten))
