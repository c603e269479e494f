"""The history of a key that several participants put, or that keeps old versions: which versions
are unfinished, which older ones can be read, and which one a participant's next put belongs to.
"""

from __future__ import annotations

import bisect
from collections.abc import Collection, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from torchstore_core.errors import ConfigurationError, VersionGoneError
from torchstore_core.server.index.collective.generations import Generation
from torchstore_core.server.index.collective.participants import Contribution, PutSequence
from torchstore_core.server.index.records import SessionRecord, Stored, Value, release_version

if TYPE_CHECKING:
    from torchstore_core.server.index.timelines import Branch

# Maximum number of layouts (put sequences) of one key that are remembered.
_MAX_SEQUENCES = 16
# Maximum number of generations of one sequence that wait for other participants.
_MAX_PENDING = 16


class PutTarget(NamedTuple):
    """The version that a participant's put belongs to, and what must make way for the put.

    Attributes:
        generation: the generation of that version, which may be new. None: the version is complete
            already or was overtaken, so there is nothing to write.
        left_over: generations that an earlier run left unfinished, which no longer count.
        behind: generations so far behind that they are no longer waited for.
        replaced: contributions to ``generation`` that this put replaces.
        partial: whether it takes the entries that it does not contain from the previous version.
        branch: the branch that the put belongs to, if it goes back.
        overruled: an earlier branch that ``branch`` replaces.
        present: the timeline of ``version`` without ``branch``.
    """

    key: str
    participant: str
    layout: Hashable
    sequence: PutSequence
    version: int
    generation: Generation | None
    left_over: Sequence[Generation] = ()
    behind: Sequence[Generation] = ()
    replaced: Sequence[Contribution] = ()
    partial: bool = False
    branch: Branch | None = None
    overruled: Branch | None = None
    present: int = 0

    @property
    def timeline(self) -> int:
        """That of the version."""
        return self.present if self.branch is None else self.branch.timeline


class KeyHistory(msgspec.Struct, eq=False):
    """The versions of a key other than its newest, and the progress of its participants.

    Attributes:
        sequences: the put sequences of the key, by layout.
        pending: its unfinished versions, by number, ascending.
        kept: its older versions that can still be read, by number.
        keep: how many of its versions stay readable, the newest included.
        branches: the runs that are about to go back, by the version that they go back to.
        fenced: processes that put to the key before it was rewound, and had no part in that.
        dropped: the highest unfinished version that was ever dropped. Participants may have been
            told its number, so no other value is given it.
    """

    sequences: dict[Hashable, PutSequence] = {}
    pending: dict[int, Generation] = {}
    kept: dict[int, Stored] = {}
    keep: int = 1
    branches: dict[int, Branch] = {}
    fenced: set[SessionRecord] = set()
    dropped: int = 0

    def generations(self) -> Iterable[Generation]:
        """All versions that are on their way."""
        yield from self.pending.values()
        for branch in self.branches.values():
            yield from branch.history.pending.values()

    def drop_empty(self) -> list[Value]:
        """Drop the branches of which nothing is on its way; the values that nobody holds now."""
        empty = [branch for branch in self.branches.values() if not branch.history.pending]
        return [value for branch in empty for value in branch.drop_from(self)]

    def sessions(self) -> set[SessionRecord]:
        """The living processes that have put to it."""
        every = [one for some in self.sequences.values() for one in some.participants.values()]
        return {s for one in every for s in one.sessions if s.closed is None}

    def branch_of(
        self, layout: Hashable, participant: str, session: SessionRecord
    ) -> Branch | None:
        """The branch that this process has put to as this participant."""
        for branch in reversed(self.branches.values()):
            sequence = branch.history.sequences.get(layout)
            one = None if sequence is None else sequence.participants.get(participant)
            if one is not None and one.sessions[-1] is session:
                return branch
        return None

    # ---- decisions, which change nothing --------------------------------------------------

    def next_of(
        self,
        sequence: PutSequence,
        participant: str,
        session: SessionRecord,
        *,
        replica: bool,
        living: Collection[SessionRecord],
    ) -> tuple[int, Generation | None, list[Generation]]:
        """Determine where a participant's next put belongs if it names no version.

        Args:
            replica: whether versions may become whole without this participant.
            living: the sessions of running processes.

        Returns:
            The version (0: a new one begins), its generation (None if it is not unfinished), and
            the earlier generations that a previous run left unfinished.
        """
        one = sequence.participants.get(participant)
        earlier = session if one is None else one.sessions[-1]
        came_back = earlier is not session and earlier.closed is not None
        left_over: list[Generation] = []
        for version in sequence.versions[
            bisect.bisect_right(sequence.versions, sequence.last_of(participant)) :
        ]:
            generation = self.pending.get(version)
            if generation is None:
                if came_back or (version in sequence.whole and not replica):
                    continue  # the participant was not there, so it has missed no turn
                return version, None, left_over
            if participant in generation.contributions:
                continue
            if _left_over(generation, participant, session, living):
                left_over.append(generation)
                continue
            return version, generation, left_over
        return 0, None, left_over

    def rejoin(
        self,
        generation: Generation,
        key: str,
        sequence: PutSequence,
        participant: str,
        session: SessionRecord,
        living: Collection[SessionRecord],
        *,
        rewind: bool = False,
    ) -> tuple[Generation | None, list[Contribution]]:
        """Determine what a put that names an unfinished version replaces: the participant's own
        earlier contribution, and contributions that an earlier run left. A ``rewind`` begins a
        run: contributions of processes that had ended before this one began are not part of it.

        Returns:
            The generation (None if all of it is replaced), and the contributions to it that are
            replaced.

        Raises:
            ConfigurationError: the participant's other put to that version is still under way.
            VersionGoneError: running processes put that version with another layout.
        """
        if generation.sequence is not sequence:
            if generation.is_alive:
                raise VersionGoneError(
                    f"version {generation.version} of {key!r} is on its way with another layout or "
                    "another number of participants",
                    key=key,
                )
            return None, []
        earlier = generation.contributions.get(participant)
        replaced = _left_over(generation, participant, session, living)
        if rewind:
            others = [c for p, c in generation.contributions.items() if p != participant]
            ended = [c for c in others if c.session.closed is not None]
            replaced = [c for c in ended if (c.session.closed or 0) <= session.opened]
        if earlier is not None:
            if not earlier.committed:
                who = f"participant {participant}" if participant else "another call"
                own = "pass participants= to put_state_dict"
                if participant:
                    own = "each have a participant= of their own"
                raise ConfigurationError(
                    f"{who} is putting version {generation.version} of {key!r} at this moment; "
                    f"several that put it together {own}",
                    key=key,
                )
            replaced.append(earlier)
        if len(replaced) == len(generation.contributions):
            return None, []
        return generation, replaced

    def far_behind(
        self, sequence: PutSequence, without: Collection[Generation]
    ) -> list[Generation]:
        """Return the generations to give up when a sequence begins another one: the oldest if too
        many are waiting. Those being written are kept, and so are complete partial ones that have
        entries found in no later one.
        """
        pending = [g for g in self.pending.values() if g.sequence is sequence and g not in without]
        waiting = [g for g in pending if not g.is_written]
        oldest = waiting[: -_MAX_PENDING + 1]
        return [old for at, old in enumerate(oldest, 1) if not _brings_more(old, waiting[at:])]

    # ---- transitions, which return the values that nothing holds any more -----------------

    def clear(self, target: PutTarget) -> list[Value]:
        """Drop the generations and contributions that must make way for a put."""
        freed: list[Value] = []
        for generation in target.left_over:  # as if they had never begun
            freed += self.drop(generation)
            generation.sequence.versions.remove(generation.version)
        for generation in target.behind:
            freed += self.drop(generation)
        if target.generation is not None:
            for contribution in target.replaced:
                freed += target.generation.remove(contribution)
        return freed

    def drop(self, generation: Generation) -> list[Value]:
        """Drop a generation, and never give its number to another value."""
        del self.pending[generation.version]
        self.dropped = max(self.dropped, generation.version)
        return generation.discard()

    def join(self, target: PutTarget, session: SessionRecord) -> Contribution:
        """Begin the contribution of a put, and its generation if it is new."""
        self._remember(target.layout, target.sequence)
        one = target.sequence.participant(target.participant)
        contribution = Contribution(target.participant, session, one.version)
        one.puts(target.version, session)
        generation = target.generation
        if generation is not None:
            if generation.version not in self.pending:
                self.pending[generation.version] = generation
                self.pending = dict(sorted(self.pending.items()))
                target.sequence.announce(generation.version, self.pending)
            generation.contributions[target.participant] = contribution
        return contribution

    def _remember(self, layout: Hashable, sequence: PutSequence) -> None:
        """Keep the sequence of a layout. If there are too many, forget the oldest one that has no
        unfinished versions.
        """
        if layout in self.sequences:
            return
        busy = {id(generation.sequence) for generation in self.pending.values()}
        idle = [key for key, old in self.sequences.items() if id(old) not in busy]
        if len(self.sequences) >= _MAX_SEQUENCES and idle:
            del self.sequences[idle[0]]
        self.sequences[layout] = sequence

    def overtake(self, version: int) -> list[Value]:
        """Drop all unfinished versions older than ``version``, which is now the newest."""
        older = [self.pending.pop(v) for v in list(self.pending) if v < version]
        return [value for generation in older for value in generation.discard()]

    def shelve(self, old: Stored | None) -> list[Value]:
        """Keep ``old``, the newest version until now, and drop the oldest ones beyond ``keep``."""
        if old is not None:
            self.kept[old.version] = old
        freed: list[Value] = []
        while len(self.kept) > self.keep - 1:
            freed += release_version(self.kept.pop(min(self.kept)))
        return freed


def _brings_more(old: Generation, later: Iterable[Generation]) -> bool:
    """Return whether dropping ``old`` would lose entries: it is a complete partial generation, and
    the complete later ones do not contain all of its entries.
    """
    if not old.is_partial or not old.is_complete:
        return False
    later_names = {name for one in later if one.is_complete for name in one.names}
    return not later_names.issuperset(old.names)


def _left_over(
    generation: Generation,
    participant: str,
    session: SessionRecord,
    living: Collection[SessionRecord],
) -> list[Contribution]:
    """Return the contributions of an earlier run to a generation that ``participant`` will join.

    They come from processes that ended before this one began; joining them would mix two runs in
    one version. A contribution counts as such if its process ran at the same time as an earlier
    process of ``participant``, or if its own participant has been restarted: it has put from
    another session since, or a process of the same rank has started since and is still running.
    (Processes that run one after the other, and never at the same time, do make one version.)
    """
    participants = generation.sequence.participants
    one = participants.get(participant)
    earlier = [] if one is None else [s for s in one.sessions if s is not session]
    found: list[Contribution] = []
    for c in generation.contributions.values():
        closed = c.session.closed
        if c.participant == participant or closed is None or closed > session.opened:
            continue
        beside = any(
            s.closed is not None and c.session.opened < s.closed and s.opened < closed
            for s in earlier
        )
        newest = participants.get(c.participant)
        again = newest is not None and newest.sessions[-1] is not c.session
        rank = c.session.facts.rank
        again = again or any(
            rank is not None and s.facts.rank == rank and s.opened > closed for s in living
        )
        if beside or again:
            found.append(c)
    return found
