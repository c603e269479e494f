"""The versions of one key that several puts make, or of which old ones are kept: which are on their
way, which are readable besides the newest, and which one a participant's next put belongs to.
"""

from __future__ import annotations

import bisect
from collections.abc import Collection, Hashable, Iterable, Sequence
from typing import NamedTuple

import msgspec

from torchstore_core.errors import ConfigurationError, VersionGoneError
from torchstore_core.server.index.generations import Generation
from torchstore_core.server.index.participants import Contribution, PutSequence
from torchstore_core.server.index.records import SessionRecord, Stored, Value, all_values, release

__all__ = ["KeyHistory", "PutTarget"]

# Layouts of one key that are remembered.
_MAX_SEQUENCES = 16
# Generations of one sequence that wait for others.
_MAX_PENDING = 16


class PutTarget(NamedTuple):
    """The version that a participant's put belongs to, and what has to make way for it.

    Attributes:
        generation: the version, on its way or about to begin. None: it is there already, or was
            overtaken, so that nothing is to be written.
        left_over: generations that an earlier run left unfinished, which do not count any more.
        behind: generations that are so far behind that nobody will finish them.
        replaced: contributions to ``generation`` whose place this one takes.
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


class KeyHistory(msgspec.Struct, eq=False):
    """What there is of a key besides its newest version.

    Attributes:
        sequences: its puts, by their layout.
        pending: versions on their way, by number, ascending.
        kept: older versions that can still be read, by number.
        keep: how many versions can be read, the newest included.
    """

    sequences: dict[Hashable, PutSequence] = {}
    pending: dict[int, Generation] = {}
    kept: dict[int, Stored] = {}
    keep: int = 1

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
        """Where the next put of a participant belongs that names no version.

        Args:
            replica: versions may become whole without this participant.
            living: sessions of processes that live.

        Returns:
            The version, 0 if a new one begins; its generation, None if it is not on its way; and
            the generations before it that an earlier run left unfinished.
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
                    continue  # it did not miss its turn: it was not there
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
    ) -> tuple[Generation | None, list[Contribution]]:
        """A participant names a version that is on its way, and may have put to it before: then
        the new put counts, and nothing that an earlier run left.

        Returns:
            The generation, None if nothing of it counts any more; and the contributions to it that
            do not count.

        Raises:
            ConfigurationError: its other put to that version is still under way.
            VersionGoneError: living participants put that version with another layout.
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
        if earlier is not None:
            if not earlier.committed:
                raise ConfigurationError(
                    f"participant {participant} is putting version {generation.version} at this "
                    "moment"
                )
            replaced.append(earlier)
        if len(replaced) == len(generation.contributions):
            return None, []
        return generation, replaced

    def far_behind(
        self, sequence: PutSequence, without: Collection[Generation]
    ) -> list[Generation]:
        """The generations that will not be waited for when a sequence begins one more: of very many
        the oldest, unless somebody is writing them, or they are partial and complete and bring what
        no later one brings.
        """
        pending = [g for g in self.pending.values() if g.sequence is sequence and g not in without]
        waiting = [g for g in pending if not g.is_written]
        oldest = waiting[: -_MAX_PENDING + 1]
        return [old for at, old in enumerate(oldest, 1) if not _brings_more(old, waiting[at:])]

    # ---- transitions, which return the values that nobody holds any more ------------------

    def clear(self, target: PutTarget) -> list[Value]:
        """Drop what has to make way for a put."""
        freed: list[Value] = []
        for generation in target.left_over:  # as if they had never begun
            freed += generation.discard()
            del self.pending[generation.version]
            generation.sequence.versions.remove(generation.version)
        for generation in target.behind:
            freed += self.pending.pop(generation.version).discard()
        if target.generation is not None:
            for contribution in target.replaced:
                freed += target.generation.remove(contribution)
        return freed

    def join(self, target: PutTarget, session: SessionRecord) -> Contribution:
        """Begin the contribution of a put."""
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
        """Keep the sequence of a layout, and forget the one that began first if there are many."""
        if layout in self.sequences:
            return
        busy = {id(generation.sequence) for generation in self.pending.values()}
        idle = [key for key, old in self.sequences.items() if id(old) not in busy]
        if len(self.sequences) >= _MAX_SEQUENCES and idle:
            del self.sequences[idle[0]]
        self.sequences[layout] = sequence

    def overtake(self, version: int) -> list[Value]:
        """``version`` is the newest: nobody wants older ones any more that are on their way."""
        older = [self.pending.pop(v) for v in list(self.pending) if v < version]
        return [value for generation in older for value in generation.discard()]

    def shelve(self, old: Stored | None) -> list[Value]:
        """Keep the version that was the newest until now, and drop the oldest beyond ``keep``."""
        if old is not None:
            self.kept[old.version] = old
        freed: list[Value] = []
        while len(self.kept) > self.keep - 1:
            freed += release(all_values(self.kept.pop(min(self.kept))))
        return freed


def _brings_more(old: Generation, later: Iterable[Generation]) -> bool:
    """Whether dropping ``old`` would lose something: no later one brings all that it does."""
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
    """The contributions of an earlier run to a generation that ``participant`` is about to join.

    They were put by processes that had ended before this one began, and joining them would make a
    version out of two runs. That is so if the participant itself has died and come back, and the
    other process lived beside its earlier one; and, if the participant is new, when the other one
    has come back, too: it has put since, or a process of its rank lives.
    (Processes that come one after the other, and never live at the same time, do make one version.)
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
