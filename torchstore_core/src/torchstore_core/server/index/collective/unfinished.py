"""The unfinished versions of all keys: which of them a put contributes to, and what becomes visible
when it commits, is undone, or is lost with a volume.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping

from torchstore_core import moments
from torchstore_core.server.index.catalog import Catalog
from torchstore_core.server.index.collective.generations import Generation
from torchstore_core.server.index.collective.participants import Contribution, PutSequence
from torchstore_core.server.index.errors import (
    fenced_error,
    no_base_error,
    used_error,
    version_lost_error,
)
from torchstore_core.server.index.key_history import KeyHistory, PutTarget
from torchstore_core.server.index.records import (
    Change,
    Manifest,
    SessionRecord,
    Stored,
    Value,
    release,
    retain_version,
)
from torchstore_core.server.index.timelines import Branch
from torchstore_core.wire import messages as m


class UnfinishedVersions:
    """The transitions of versions that several puts make together, up to their place in a catalog.

    Args:
        catalog: has the histories of the keys, in which they are kept.
        sessions: the open sessions of the store, by token.
    """

    def __init__(self, catalog: Catalog, sessions: Mapping[bytes, SessionRecord]) -> None:
        self._catalog = catalog
        self._sessions = sessions

    # ---- puts -----------------------------------------------------------------------------

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
                from; an EvictedError if there was one.
            ObjectLostError: that version was lost before it was complete; this uses up the
                participant's turn.
        """
        catalog, timelines = self._catalog, self._catalog.timelines
        history = catalog.histories.get(key) or KeyHistory()
        sequence = history.sequences.get(layout) or PutSequence()
        living = self._sessions.values()
        generation: Generation | None = None
        left_over: list[Generation] = []
        replaced: list[Contribution] = []
        branch = overruled = None
        present = timelines.of(key, version)
        late = version in sequence.versions and sequence.last_of(participant) < version
        if rewind and version not in history.branches:
            if late and version == timelines.began_with(key):  # others were faster
                return PutTarget(key, participant, layout, sequence, version, None, present=present)
            branch = Branch(version)
        elif history.branches:
            branch = history.branch_of(layout, participant, session)
            branch = history.branches[version] if rewind else branch
        lowest = catalog.lowest_version(key)
        if branch is not None:
            late = False
            lowest, history = branch.version, branch.history
            sequence = history.sequences.get(layout) or PutSequence()
        elif not rewind and session in history.fenced:
            raise fenced_error(key, catalog.newest_version(key))
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
                present = timelines.of(key, version)
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
            raise used_error(key, version, lowest - 1, catalog.newest_version(key))
        behind: list[Generation] = []
        if generation is None:
            above = max(lowest, max(history.pending, default=0) + 1)
            version = version or max(above, sequence.next_version())
            generation = Generation(sequence, version, participants, publication)
            behind = history.far_behind(sequence, without=left_over)
        partial = publication is not None and publication.partial
        if partial and not self._has_base(key, version, branch, without=left_over + behind):
            raise self._catalog.evictions.missing_error([key]) or no_base_error(key)
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
            timelines.of(key, version),
        )

    def _base(self, key: str, branch: Branch | None) -> Stored | None:
        """The newest version that there is for a put to build on."""
        newest = self._catalog.newest.get(key)
        if branch is None:
            return newest
        if branch.base is not None or newest is None or newest.version < branch.version:
            return branch.base or newest
        histories = self._catalog.histories
        kept = histories[key].kept if key in histories else {}
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
        history = self._catalog.histories.get(key) if branch is None else branch.history
        earlier = [] if history is None else [g for v, g in history.pending.items() if v < version]
        return any(
            g.publication is not None and not g.is_partial for g in earlier if g not in without
        )

    def keep_of(self, key: str) -> int:
        """How many versions of a key stay readable, the newest included."""
        history = self._catalog.histories.get(key)
        return 1 if history is None else history.keep

    def clear(self, target: PutTarget) -> list[Value]:
        """Drop the generations and contributions that must make way for a put. Returns the values
        that nothing holds any more.
        """
        if target.left_over or target.behind or target.replaced:
            self._catalog.keys_to_settle.add(target.key)
        history = self._catalog.histories.get(target.key)
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
        histories = self._catalog.histories
        history = histories.get(target.key)
        if history is None:
            history = histories[target.key] = KeyHistory()
        branch = target.branch
        if branch is None:
            history.fenced.discard(session)
            return history.join(target, session)
        if not branch.timeline:
            branch.timeline = self._catalog.timelines.begin()
            history.branches[branch.version] = branch
        base = self._base(target.key, branch)
        if target.partial and branch.base is None and type(base) is Manifest:
            # The run before may go on for a while, and drop it.
            branch.base = base
            retain_version(base)
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
        if branch is None:
            return None
        there = self._catalog.histories[target.key].branches
        return branch if there.get(branch.version) is branch else None

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
        history = self._catalog.histories[key] if branch is None else branch.history
        pending = history.pending.items()
        return not any(older.is_alive for v, older in pending if v < generation.version)

    def _finish(self, key: str, generation: Generation, branch: Branch | None) -> Change:
        """Make a complete generation the newest version of its key."""
        catalog = self._catalog
        back = Change() if branch is None else self._go_back(key, branch)
        history = catalog.histories[key]
        if generation.publication is not None and generation.publication.keep:
            history.keep = generation.publication.keep
        stored = generation.seal(key, catalog.newest.get(key))
        del history.pending[generation.version]
        if generation.participants:  # all have contributed: none can be late for it
            generation.sequence.versions.remove(generation.version)
        else:
            generation.sequence.whole.add(generation.version)
        freed = [*back.freed, *generation.discard()]
        freed += catalog.replace(key, stored, generation.version)
        return Change(freed, [key], back.rewound)

    def _go_back(self, key: str, branch: Branch) -> Change:
        """Make a key what it was before the version that a branch goes back to, and the branch its
        history from there on.
        """
        catalog, version = self._catalog, branch.version
        old = catalog.histories[key]
        newest = catalog.newest.pop(key, None)
        highest = newest.version if newest is not None else catalog.lowest_version(key) - 1
        used = max([highest, version, old.dropped, *old.pending])
        before, freed = branch.take_over(old, newest)
        if before is not None:
            catalog.newest[key] = before
        if (newest is None) != (before is None):
            catalog.names.add((key,)) if newest is None else catalog.names.remove(key)
        catalog.histories[key] = branch.history
        catalog.timelines.rewound(key, version, branch.timeline, used)
        back = newest is not None and newest.version >= version
        return Change(freed, rewound=[(key, back)])

    def settle(self, *, all_keys: bool = False) -> Change:
        """Finish the partial versions that waited only for older ones that have been dropped.

        Args:
            all_keys: check every key, because a process has ended: partial versions no longer wait
                for versions that only this process was putting.
        """
        catalog = self._catalog
        keys = list(catalog.histories) if all_keys else list(catalog.keys_to_settle)
        catalog.keys_to_settle.clear()
        return Change.of([change for key in keys for change in self._settle(key)])

    def _settle(self, key: str) -> list[Change]:
        history = self._catalog.histories.get(key)
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
        for key, history in self._catalog.histories.items():
            for branch in (None, *history.branches.values()):
                there = history if branch is None else branch.history
                for version, old in there.pending.items():
                    if old in kept or old.is_written or (old.is_alive and key not in keys):
                        continue
                    if old.is_complete and self._has_base(key, version, branch):
                        continue  # it will become visible
                    self._catalog.keys_to_settle.add(key)
                    return there.drop(old) + history.drop_empty()
        return None

    def lose(self, reason: Callable[[Iterable[Value]], str]) -> Change:
        """Drop the unfinished versions that can never be completed because committed parts of them
        were lost with a volume.

        Args:
            reason: returns why any of the given values is lost, or "" if none is.
        """
        freed: list[Value] = []
        for key, history in self._catalog.histories.items():
            for branch in (None, *history.branches.values()):
                there = history if branch is None else branch.history
                for version, generation in there.pending.copy().items():
                    if why := reason(generation.stored_values()):
                        freed += there.drop(generation)
                        generation.lost = generation.sequence.lost[version] = why
                        self._catalog.keys_to_settle.add(key)
            freed += history.drop_empty()
        return Change.of([Change(freed), self.settle()])

    def waiting_bytes(self) -> dict[str, int]:
        """Return the bytes that unfinished versions hold, by key."""
        found: dict[str, int] = {}
        for key, history in self._catalog.histories.items():
            nbytes = sum([g.nbytes for g in history.generations()])
            if nbytes:
                found[key] = nbytes
        return found

    def abort(self, target: PutTarget, contribution: Contribution) -> Change:
        """Undo a contribution, for example of an aborted put."""
        catalog = self._catalog
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
        history = catalog.histories[target.key]
        if not generation.contributions:
            branch = self._branch_of(target)
            pending = history.pending if branch is None else branch.history.pending
            pending.pop(generation.version, None)
            target.sequence.versions.remove(generation.version)
            generation.dropped = True
            freed += history.drop_empty()
            catalog.forget_history(target.key)
        return Change.of([Change(freed), *self._settle(target.key)])
