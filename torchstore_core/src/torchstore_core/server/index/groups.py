"""Everything about a key that several puts make, or that keeps old versions: which versions are on
their way, which are kept, and which of them the next put of a participant belongs to.
"""

from __future__ import annotations

import bisect
from collections.abc import Collection, Hashable, Iterable, Sequence
from typing import NamedTuple

from torchstore_core.errors import ConfigurationError, VersionGoneError
from torchstore_core.server.index.generations import Generation
from torchstore_core.server.index.participants import Contribution, Line
from torchstore_core.server.index.records import SessionRecord, Stored, Value, all_values, release

__all__ = ["Group", "Slot"]

# Layouts of one key that are remembered.
_MAX_LINES = 16
# Generations of one line that wait for others.
_MAX_PENDING = 16


class Slot(NamedTuple):
    """Where a put of a participant belongs.

    Attributes:
        generation: on its way, or about to begin. None: that version is there already, or was
            overtaken, and nothing is to be written.
        left_over: generations that an earlier run left behind, and that do not count any more.
        behind: generations that wait so far behind that nobody will finish them.
        replaced: contributions to ``generation`` that this one takes the place of.
    """

    key: str
    who: str
    layout: Hashable
    line: Line
    version: int
    generation: Generation | None
    left_over: Sequence[Generation] = ()
    behind: Sequence[Generation] = ()
    replaced: Sequence[Contribution] = ()


class Group:
    """Everything about a key whose versions are made, or kept, by several puts."""

    __slots__ = ("history", "keep", "lines", "pending")

    def __init__(self) -> None:
        self.lines: dict[Hashable, Line] = {}
        self.pending: dict[int, Generation] = {}
        self.history: dict[int, Stored] = {}
        self.keep = 1

    # ---- decisions, which change nothing --------------------------------------------------

    def next_of(
        self,
        line: Line,
        who: str,
        session: SessionRecord,
        *,
        replica: bool,
        living: Collection[SessionRecord],
    ) -> tuple[int, Generation | None, list[Generation]]:
        """The version that the next put of ``who`` belongs to without saying so, and its
        generation if that is on its way; 0 if it begins a new one. And what is left over.

        Args:
            replica: versions may become whole without it.
            living: sessions of processes that live.
        """
        one = line.participants.get(who)
        earlier = session if one is None else one.sessions[-1]
        came_back = earlier is not session and earlier.closed is not None
        left_over: list[Generation] = []
        for version in line.versions[bisect.bisect_right(line.versions, line.last_of(who)) :]:
            generation = self.pending.get(version)
            if generation is None:
                if came_back or (version in line.whole and not replica):
                    continue  # it did not miss its turn: it was not there
                return version, None, left_over
            if who in generation.contributions:
                continue
            if _left_over(generation, who, session, living):
                left_over.append(generation)
                continue
            return version, generation, left_over
        return 0, None, left_over

    def rejoin(
        self,
        generation: Generation,
        key: str,
        line: Line,
        who: str,
        session: SessionRecord,
        living: Collection[SessionRecord],
    ) -> tuple[Generation | None, list[Contribution]]:
        """A participant puts an explicit version, maybe again: the new put counts, and nothing
        that is left over from an earlier run.

        Returns:
            The generation, None if all of it is left over; and the contributions that are.

        Raises:
            ConfigurationError: its other put of that version is still under way.
            VersionGoneError: others that live put that version with another layout.
        """
        if generation.line is not line:
            if generation.is_alive:
                raise VersionGoneError(
                    f"version {generation.version} of {key!r} is on its way with another layout or "
                    "another number of participants",
                    key=key,
                )
            return None, []
        earlier = generation.contributions.get(who)
        replaced = _left_over(generation, who, session, living)
        if earlier is not None:
            if not earlier.committed:
                raise ConfigurationError(
                    f"participant {who} is putting version {generation.version} at this moment"
                )
            replaced.append(earlier)
        if len(replaced) == len(generation.contributions):
            return None, []
        return generation, replaced

    def far_behind(self, line: Line, without: Collection[Generation]) -> list[Generation]:
        """A participant that is far ahead begins one more generation of a line: the oldest that
        nobody is writing, of very many, will not be waited for. Partial ones that are complete
        stay for what they alone bring.
        """
        pending = [g for g in self.pending.values() if g.line is line and g not in without]
        waiting = [g for g in pending if not g.is_written]
        oldest = waiting[: -_MAX_PENDING + 1]
        return [old for at, old in enumerate(oldest, 1) if not _brings_more(old, waiting[at:])]

    # ---- transitions, which return the values that nobody holds any more ------------------

    def clear(self, slot: Slot) -> list[Value]:
        """Drop what is not to be waited for any more when the put of a slot comes."""
        freed: list[Value] = []
        for generation in slot.left_over:  # as if it had never begun
            freed += generation.discard()
            del self.pending[generation.version]
            generation.line.versions.remove(generation.version)
        for generation in slot.behind:
            freed += self.pending.pop(generation.version).discard()
        if slot.generation is not None:
            for contribution in slot.replaced:
                freed += slot.generation.remove(contribution)
        return freed

    def join(self, slot: Slot, session: SessionRecord) -> Contribution:
        """Begin the contribution of a slot."""
        self._remember(slot.layout, slot.line)
        one = slot.line.participant(slot.who)
        contribution = Contribution(slot.who, session, one.version)
        one.puts(slot.version, session)
        generation = slot.generation
        if generation is not None:
            if generation.version not in self.pending:
                self.pending[generation.version] = generation
                self.pending = dict(sorted(self.pending.items()))
                slot.line.announce(generation.version, self.pending)
            generation.contributions[slot.who] = contribution
        return contribution

    def _remember(self, layout: Hashable, line: Line) -> None:
        """The line of a layout; the least recently begun one is forgotten."""
        if layout in self.lines:
            return
        busy = {id(generation.line) for generation in self.pending.values()}
        idle = [key for key, old in self.lines.items() if id(old) not in busy]
        if len(self.lines) >= _MAX_LINES and idle:
            del self.lines[idle[0]]
        self.lines[layout] = line

    def overtake(self, version: int) -> list[Value]:
        """``version`` is there: older ones on their way are not wanted any more."""
        older = [self.pending.pop(v) for v in list(self.pending) if v < version]
        return [value for generation in older for value in generation.discard()]

    def shelve(self, old: Stored | None) -> list[Value]:
        """Put the version that was the newest aside, as far as ``keep`` goes."""
        if old is not None:
            self.history[old.version] = old
        freed: list[Value] = []
        while len(self.history) > self.keep - 1:
            freed += release(all_values(self.history.pop(min(self.history))))
        return freed


def _brings_more(old: Generation, later: Iterable[Generation]) -> bool:
    """Whether what is put is lost if ``old`` is dropped: those after it do not bring all of it."""
    if not old.is_partial or not old.is_complete:
        return False
    later_names = {name for one in later if one.is_complete for name in one.names}
    return not later_names.issuperset(old.names)


def _left_over(
    generation: Generation, who: str, session: SessionRecord, living: Collection[SessionRecord]
) -> list[Contribution]:
    """What an earlier run put into a generation that ``who`` is about to join.

    It was put by a process that had ended before this one began. And a participant that died must
    not, when it comes back, complete what another one put that lived beside it; nor, if it is new,
    what another one put that has come back, too (it has put since, or a process of its rank
    lives): together they would be a mixture of two runs.
    (Processes that come one after the other, and never live at the same time, do make one version.)
    """
    participants = generation.line.participants
    one = participants.get(who)
    earlier = [] if one is None else [s for s in one.sessions if s is not session]
    found: list[Contribution] = []
    for c in generation.contributions.values():
        closed = c.session.closed
        if c.who == who or closed is None or closed > session.opened:
            continue
        beside = any(
            s.closed is not None and c.session.opened < s.closed and s.opened < closed
            for s in earlier
        )
        newest = participants.get(c.who)
        again = newest is not None and newest.sessions[-1] is not c.session
        rank = c.session.facts.rank
        again = again or any(
            rank is not None and s.facts.rank == rank and s.opened > closed for s in living
        )
        if beside or again:
            found.append(c)
    return found
