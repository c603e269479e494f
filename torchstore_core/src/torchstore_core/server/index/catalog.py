"""The catalog of keys and their versions, both finished and unfinished.

This is pure bookkeeping that knows nothing about memory: every transition returns the values that
nothing holds any more, so that the caller can free them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence

import msgspec

from torchstore_core import moments
from torchstore_core.errors import KeyNotFoundError, VersionGoneError
from torchstore_core.reports.stat import Pending
from torchstore_core.server.index.collective.generations import Generation
from torchstore_core.server.index.collective.participants import Contribution, PutSequence
from torchstore_core.server.index.errors import (
    entry_error,
    fenced_error,
    gone_error,
    missing_error,
    no_base_error,
    partial_error,
    rewound_error,
    used_error,
    version_lost_error,
)
from torchstore_core.server.index.gone.evictions import Evictions
from torchstore_core.server.index.key_history import KeyHistory, PutTarget
from torchstore_core.server.index.key_names import KeyNames, splits
from torchstore_core.server.index.records import (
    Change,
    HeldVersion,
    Manifest,
    SessionRecord,
    Stored,
    Value,
    all_values,
    release,
    retain,
)
from torchstore_core.server.index.timelines import Branch, Timelines
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
        held: versions that references hold, whatever becomes of their keys; see
            ``index.references``.
        unsettled: keys that have lost an unfinished version, for example to make way for a put;
            :meth:`settle` finishes the partial versions that waited for it.
    """

    def __init__(self, sessions: Mapping[bytes, SessionRecord]) -> None:
        self._sessions = sessions
        self.newest: dict[str, Stored] = {}
        self.names = KeyNames(self.newest)
        self.histories: dict[str, KeyHistory] = {}
        self.held: dict[tuple[str, int, int], HeldVersion] = {}  # by key, version, timeline
        self.unsettled: set[str] = set()
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
        return self.evictions.gone_error(key, version, there) or gone_error(key, version, there)

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
                    if type(stored) is Manifest and name in stored.entries:
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
        return [g.state(key, brief=brief) for g in history.generations()]

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
                freed += self._replace(key, value, self._next_version(key))
                continue
            if type(old) is Value:  # the usual case
                value.version = old.version + 1
                old.uses -= 1
                if not (old.uses or old.pins):
                    freed.append(old)
            elif old is None:
                value.version = self._deleted.pop(key, self._version_floor) + 1
                fresh.append(key)
            else:
                value.version = old.version + 1
                freed += release(all_values(old))
            newest[key] = value
        if fresh:
            self.names.add(fresh)
        return freed

    def _next_version(self, key: str) -> int:
        """Return the lowest version of a key above all present, past and unfinished ones."""
        history = self.histories.get(key)
        known = 0 if history is None else max([history.dropped, *history.pending])
        return max(known + 1, self._lowest_version(key))

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
        rewind: bool = False,
    ) -> PutTarget:
        """Determine which version a participant's put belongs to. The put has no effect until
        :meth:`clear` makes way for it and :meth:`join` makes it part of its generation.

        Args:
            version: the version that the put names; 0 if it names none.
            replica: see ``KeyHistory.next_of``.
            rewind: the put goes back to ``version``.

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
        branch = overruled = None
        present = self.timelines.of(key, version)
        late = version in sequence.versions and sequence.last_of(participant) < version
        if rewind and version not in history.branches:
            if late and version == self.timelines.began_with(key):  # others were faster
                return PutTarget(key, participant, layout, sequence, version, None, present=present)
            branch = Branch(version)
        elif history.branches:
            branch = history.branch_of(layout, participant, session)
            branch = history.branches[version] if rewind else branch
        lowest = self._lowest_version(key)
        if branch is not None:
            late = False
            lowest, history = branch.version, branch.history
            sequence = history.sequences.get(layout) or PutSequence()
        elif not rewind and session in history.fenced:
            raise fenced_error(key, self.newest_version(key))
        if rewind and branch is not None:
            alone = True
            if (there := history.pending.get(version)) is not None:
                generation, replaced = history.rejoin(
                    there, key, sequence, participant, session, living, rewind=True
                )
                alone = generation is None
            elif branch.timeline:
                alone = not branch.is_put_by_others(session)
            if branch.timeline and alone:  # nothing of it counts: this is another run
                overruled, branch = branch, Branch(version)
                history, sequence = branch.history, PutSequence()
        elif not version:
            version, generation, left_over = history.next_of(
                sequence, participant, session, replica=replica, living=living
            )
            if version and generation is None:
                if version in sequence.lost:
                    sequence.participant(participant).puts(version, session)
                    raise version_lost_error(key, version, sequence.lost[version])
                present = self.timelines.of(key, version)
                return PutTarget(
                    key,
                    participant,
                    layout,
                    sequence,
                    version,
                    None,
                    left_over,
                    branch=branch,
                    present=present,
                )  # the version was completed, or overtaken, without this participant
        elif (there := history.pending.get(version)) is not None:
            generation, replaced = history.rejoin(
                there, key, sequence, participant, session, living
            )
            left_over = [there] if generation is None else []
        elif version < lowest:
            if late:
                return PutTarget(key, participant, layout, sequence, version, None, present=present)
            raise used_error(key, version, lowest - 1, self.newest_version(key))
        behind: list[Generation] = []
        if generation is None:
            above = max(lowest, max(history.pending, default=0) + 1)
            version = version or max(above, sequence.next_version())
            generation = Generation(sequence, version, participants, publication)
            behind = history.far_behind(sequence, without=left_over)
        partial = publication is not None and publication.partial
        if partial and not self._has_base(key, version, branch, without=left_over + behind):
            raise no_base_error(key)
        return PutTarget(
            key,
            participant,
            layout,
            sequence,
            version,
            generation,
            left_over,
            behind,
            replaced,
            partial,
            branch,
            overruled,
            self.timelines.of(key, version),
        )

    def _base(self, key: str, branch: Branch | None) -> Stored | None:
        """The newest version that there is for a put to build on."""
        newest = self.newest.get(key)
        if branch is None:
            return newest
        if branch.base is not None or newest is None or newest.version < branch.version:
            return branch.base or newest
        kept = self.histories[key].kept if key in self.histories else {}
        return kept.get(max((v for v in kept if v < branch.version), default=0))

    def _has_base(
        self,
        key: str,
        version: int,
        branch: Branch | None,
        without: Collection[Generation] = (),
    ) -> bool:
        """Return whether there is a state dict, finished or not, that a partial version can build
        on.
        """
        if type(self._base(key, branch)) is Manifest:
            return True
        history = self.histories.get(key) if branch is None else branch.history
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
        if history is None:
            return []
        freed: list[Value] = []
        if target.overruled is not None:
            freed = target.overruled.drop_from(history)
        if target.branch is not None:
            history = target.branch.history
        return freed + history.clear(target)

    def join(self, target: PutTarget, session: SessionRecord) -> Contribution:
        """Begin the contribution of a put to its generation."""
        history = self.histories.get(target.key)
        if history is None:
            history = self.histories[target.key] = KeyHistory()
        branch = target.branch
        if branch is None:
            history.fenced.discard(session)
            return history.join(target, session)
        if not branch.timeline:
            branch.timeline = self.timelines.begin()
            history.branches[branch.version] = branch
        base = self._base(target.key, branch)
        if target.partial and branch.base is None and type(base) is Manifest:
            # The run before may go on for a while, and drop it.
            branch.base = msgspec.structs.replace(base, entries=dict(base.entries))
            retain(all_values(branch.base))
        return branch.history.join(target, session)

    def commit(self, target: PutTarget, contribution: Contribution) -> Change:
        """Mark a contribution as committed, and publish every version that this completes."""
        generation = target.generation
        if generation is None:
            return Change()
        contribution.committed = True
        if generation.dropped:
            return Change(release(contribution.values))
        now = moments.wall()
        for value in contribution.values:
            value.created = now
        changes: list[Change] = []
        branch = self._branch_of(target)
        if self._is_ready(target.key, generation, branch):
            changes.append(self._finish(target.key, generation, branch))
        return Change.of(changes + self._settle(target.key))

    def _branch_of(self, target: PutTarget) -> Branch | None:
        """Return the branch of a put, unless it has become the history of its key."""
        branch = target.branch
        if branch is None or self.histories[target.key].branches.get(branch.version) is not branch:
            return None
        return branch

    def _is_ready(self, key: str, generation: Generation, branch: Branch | None) -> bool:
        """Return whether a generation is complete and, if it is partial, whether the version that
        it builds on is certain.
        """
        if not generation.is_complete:
            return False
        if not generation.is_partial:
            return True
        if type(self._base(key, branch)) is not Manifest:
            return False
        history = self.histories[key] if branch is None else branch.history
        pending = history.pending.items()
        return not any(older.is_alive for v, older in pending if v < generation.version)

    def _finish(self, key: str, generation: Generation, branch: Branch | None) -> Change:
        """Make a complete generation the newest version of its key."""
        back = Change() if branch is None else self._go_back(key, branch)
        history = self.histories[key]
        if generation.publication is not None and generation.publication.keep:
            history.keep = generation.publication.keep
        stored = generation.seal(key, self.newest.get(key), inherit=history.keep == 1)
        del history.pending[generation.version]
        if generation.participants:  # all have contributed: none can be late for it
            generation.sequence.versions.remove(generation.version)
        else:
            generation.sequence.whole.add(generation.version)
        freed = [*back.freed, *generation.discard()]
        freed += self._replace(key, stored, generation.version)
        return Change(freed, [key], back.rewound)

    def _go_back(self, key: str, branch: Branch) -> Change:
        """Make a key what it was before the version that a branch goes back to, and the branch its
        history from there on.
        """
        old, version = self.histories[key], branch.version
        newest = self.newest.pop(key, None)
        used = max(
            [newest.version if newest is not None else self._lowest_version(key) - 1, version]
        )
        used = max([used, old.dropped, *old.pending])
        before, freed = branch.take_over(old, newest)
        if before is not None:
            self.newest[key] = before
        if (newest is None) != (before is None):
            self.names.add((key,)) if newest is None else self.names.remove(key)
        self.histories[key] = branch.history
        self.timelines.rewound(key, version, branch.timeline, used)
        back = newest is not None and newest.version >= version
        return Change(freed, rewound=[(key, back)])

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
        changes: list[Change] = []
        for branch in (None, *history.branches.values()):
            pending = history.pending if branch is None else branch.history.pending
            for later in list(pending.values()):
                if later.dropped or not later.is_partial or not self._is_ready(key, later, branch):
                    continue
                changes.append(self._finish(key, later, branch))
                if branch is not None:  # it is the history now
                    return changes + self._settle(key)
        return changes

    def reclaim(self, keys: Collection[str], kept: Collection[Generation]) -> list[Value] | None:
        """Make room for a put to ``keys`` by dropping one stalled generation: one whose writers
        have all died, or one of ``keys``, where the participant that is putting is ahead of others.

        Args:
            kept: generations that the put itself belongs to, which are not dropped.

        Returns:
            The values that nothing holds any more; None if there is no such generation.
        """
        for key, history in self.histories.items():
            for branch in (None, *history.branches.values()):
                there = history if branch is None else branch.history
                for version, old in there.pending.items():
                    if old in kept or old.is_written or (old.is_alive and key not in keys):
                        continue
                    if old.is_complete and self._has_base(key, version, branch):
                        continue  # it will become visible
                    self.unsettled.add(key)
                    return there.drop(old) + history.drop_empty()
        return None

    def lose(self, reason: Callable[[Iterable[Value]], str]) -> Change:
        """Drop the unfinished versions that can never be completed because committed parts of them
        were lost with a volume.

        Args:
            reason: returns why any of the given values is lost, or "" if none is.
        """
        freed: list[Value] = []
        for key, history in self.histories.items():
            for branch in (None, *history.branches.values()):
                there = history if branch is None else branch.history
                for version, generation in list(there.pending.items()):
                    if why := reason(generation.stored_values()):
                        freed += there.drop(generation)
                        generation.lost = generation.sequence.lost[version] = why
                        self.unsettled.add(key)
            freed += history.drop_empty()
        return Change.of([Change(freed), self.settle()])

    def waiting_bytes(self) -> dict[str, int]:
        """Return the bytes that unfinished versions hold, by key."""
        found: dict[str, int] = {}
        for key, history in self.histories.items():
            nbytes = sum([g.nbytes for g in history.generations()])
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
            branch = self._branch_of(target)
            pending = history.pending if branch is None else branch.history.pending
            pending.pop(generation.version, None)
            target.sequence.versions.remove(generation.version)
            generation.dropped = True
            freed += history.drop_empty()
            known = history.pending or history.branches or history.dropped
            if target.key not in self.newest and not known:
                del self.histories[target.key]
        return Change.of([Change(freed), *self._settle(target.key)])

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
        last = self._lowest_version(key) - 1
        if stored is not None:
            del self.newest[key]
            self.names.remove(key)
            freed += release(all_values(stored))
        if history is not None:
            del self.histories[key]
            last = max([last, history.dropped, *history.pending, self.timelines.forget(key)])
            for branch in list(history.branches.values()):
                freed += branch.drop_from(history)
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
