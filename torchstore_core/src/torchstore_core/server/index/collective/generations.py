"""Versions that several puts make together: the shards of a DTensor, the ranks of a state dict.

Each put of a participant contributes to one *generation* of a key. Puts with the same layout (mesh,
shape and dtype, or number of participants) form a *sequence*. A put that names no version belongs
to the next generation of its sequence: the n-th put of each participant to the n-th one. Once a
generation is whole, it becomes the newest version, and all older unfinished ones are dropped.

This is pure bookkeeping that knows nothing about memory: values that nothing holds are returned.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from functools import lru_cache

import msgspec

from torchstore_core import boxes, moments
from torchstore_core.boxes import Box
from torchstore_core.contracts.strategy import ClientFacts
from torchstore_core.errors import LayoutMismatchError
from torchstore_core.reports.stat import Pending
from torchstore_core.server.index.collective.participants import Contribution, PutSequence
from torchstore_core.server.index.records import (
    Manifest,
    Shards,
    Stored,
    Value,
    all_values,
    release,
    retain,
)
from torchstore_core.values import TensorMeta, ValueMeta
from torchstore_core.wire import messages as m

_MAX_SHOWN = 100


class Generation(msgspec.Struct, eq=False):
    """An unfinished version.

    Args:
        participants: how many participants it needs; 0: as many as it takes to cover its tensor.

    Attributes:
        entries: the stored entries, by name; "" is the name of a key's own value.
        contributions: the participants' contributions, by participant.
        relied: entries that are no longer stored because the put that stored them was removed,
            although other participants put them as well and relied on it.
        dropped: whether the generation was dropped and will never become a version.
        passed_on: the finished version has taken over the values' hold.
        lost: why, if committed parts of it were lost with a volume; empty otherwise.
    """

    sequence: PutSequence
    version: int
    participants: int
    publication: m.Publication | None
    entries: dict[str, Value | Shards] = {}
    contributions: dict[str, Contribution] = {}
    relied: dict[str, ValueMeta] = {}
    dropped: bool = False
    passed_on: bool = False
    lost: str = ""

    def holds(self, name: str, meta: ValueMeta, box: Box | None, nbytes: int) -> bool:
        """Return whether another participant stores this value, or this box of it, already.

        Raises:
            LayoutMismatchError: another participant puts the entry with a different shape, dtype
                or element size.
        """
        entry = self.entries.get(name)
        there = self.relied.get(name) if entry is None else entry.meta
        if there is None:
            return False
        if there != meta and (isinstance(meta, TensorMeta) or isinstance(there, TensorMeta)):
            raise self._disagreement(
                name,
                entry,
                f"comes as {_words(meta)}, but another participant puts it as {_words(there)}",
            )
        if entry is None:
            return False
        if type(entry) is Value:
            return True
        if box is None:
            box = boxes.whole(entry.meta.shape)
        if entry.parts:
            other, value = next(iter(entry.parts.items()))
            if value.nbytes * box.numel != nbytes * other.numel:
                raise self._disagreement(name, entry, "comes in elements of different sizes")
        return box in entry.parts

    def _disagreement(
        self, name: str, entry: Value | Shards | None, what: str
    ) -> LayoutMismatchError:
        """Return the error for an entry, or a key's own value, on which participants differ."""
        own = name if entry is None else name or entry.key
        whose = "" if self.publication is None else f" of {self.publication.key!r}"
        return LayoutMismatchError(f"version {self.version}{whose}: {own!r} {what}", key=own)

    def add(self, contribution: Contribution, name: str, key: str, value: Value) -> None:
        """Add a value to a contribution and to the entries; no other participant stores it."""
        contribution.names.append(name)
        contribution.values.append(value)
        entry = self.entries.get(name)
        if value.box is None and entry is None:
            self.entries[name] = value
            return
        shards = self.shards(name, key, value.meta, value.creator)
        box = value.box
        if box is None:
            box = value.box = boxes.whole(shards.meta.shape)
        shards.parts[box] = value

    def shards(self, name: str, key: str, meta: ValueMeta, creator: ClientFacts) -> Shards:
        """Return the entry ``name``, which comes in shards; create it if it does not exist yet."""
        entry = self.entries.get(name)
        if type(entry) is Shards:
            return entry
        if not isinstance(meta, TensorMeta) or entry is not None:
            raise LayoutMismatchError(f"{key!r} comes whole and in parts", key=key)
        made = self.entries[name] = Shards(key, meta, creator, {})
        return made

    def remove(self, contribution: Contribution) -> list[Value]:
        """Remove a contribution. Returns those of its values that nothing holds any more."""
        if self.contributions.get(contribution.participant) is contribution:
            del self.contributions[contribution.participant]
        names = dict.fromkeys([*contribution.others, *contribution.names])
        for name, value in zip(contribution.names, contribution.values, strict=True):
            entry = self.entries.get(name)
            if entry is value:
                del self.entries[name]
            elif type(entry) is Shards and value.box is not None:
                entry.parts.pop(value.box, None)
        freed = release(contribution.values)
        contribution.names.clear()
        contribution.values.clear()
        self._forget(names)
        return freed

    def _forget(self, names: Iterable[str]) -> None:
        """Update the entries ``names`` after a contribution to them was removed: forget those that
        no other participant puts, and note those that others had relied on.
        """
        others = [c.others for c in self.contributions.values() if c.others]
        for name in names:
            self.relied.pop(name, None)
            if name in self.entries and not self._is_bare(name):
                continue
            meta = next((some[name] for some in others if name in some), None)
            if meta is None:
                self.entries.pop(name, None)
            elif name not in self.entries:
                self.relied[name] = meta

    def discard(self) -> list[Value]:
        """Drop the generation. Returns the values that nothing holds any more; contributions that
        are still being written release theirs when they end.
        """
        self.dropped = True
        return [] if self.passed_on else release(self.stored_values())

    @property
    def is_complete(self) -> bool:
        """Whether all participants have committed and the committed boxes cover every tensor. (A
        partial generation also has to wait for the version that it builds on.)
        """
        if self._only() is not None:
            return True
        done = sum(c.committed for c in self.contributions.values())
        if done < self.participants:
            return False
        return next(iter(self._incomplete()), None) is None

    @property
    def is_written(self) -> bool:
        """Whether any participant has not committed its contribution yet."""
        return not all(c.committed for c in self.contributions.values())

    @property
    def nbytes(self) -> int:
        """The total size of its committed values, in bytes."""
        return sum([value.nbytes for value in self.stored_values()])

    def stored_values(self) -> list[Value]:
        """Return its committed values."""
        done = [c.values for c in self.contributions.values() if c.committed]
        return [value for values in done for value in values]

    def _only(self) -> Contribution | None:
        """The contribution that is all of the generation, if there is such a one, committed, and of
        whole values only: the usual case, often with many entries.
        """
        if self.participants != 1 or len(self.contributions) != 1 or self.relied:
            return None
        (only,) = self.contributions.values()
        return only if only.whole and only.committed else None

    @property
    def is_alive(self) -> bool:
        """Whether any of the processes that have put to it is still running."""
        return any(c.session.closed is None for c in self.contributions.values())

    @property
    def is_partial(self) -> bool:
        """Whether it takes the entries that it does not contain from the previous version."""
        return any(c.partial for c in self.contributions.values())

    @property
    def names(self) -> Iterable[str]:
        """The names of the entries that it contains, aliases included."""
        yield from self.entries
        for contribution in self.contributions.values():
            yield from contribution.aliases

    def missing(self) -> Iterable[tuple[str, Box]]:
        """Yield the boxes that are not committed yet, each with the name of its entry."""
        for name, meta, ready in self._incomplete():
            yield from ((name, box) for box in boxes.missing(_whole(meta), ready))

    def _incomplete(self) -> Iterable[tuple[str, ValueMeta, Sequence[Box]]]:
        """Yield the entries that are not fully committed: name, metadata, committed boxes."""
        tied, elsewhere = self._tied_and_empty(), self._tied_parts()
        for name, entry in self.entries.items():
            if type(entry) is Value and entry.created:  # the usual case
                continue
            if name in tied:
                continue
            if type(entry) is Shards:
                ready = tuple([box for box, value in entry.parts.items() if value.created])
                ready += tuple(elsewhere.get(name, ()))
                if not _covers(boxes.whole(entry.meta.shape), ready):
                    yield name, entry.meta, ready
            elif not entry.created:
                yield name, entry.meta, ()
        for name, meta in self.relied.items():
            if name not in self.entries:
                yield name, meta, ()

    def _tied_and_empty(self) -> dict[str, str]:
        """Return the entries of which only empty shards were put, but which another participant
        declared to be the same as another entry: by name, the name of that entry.
        """
        done = [c.aliases for c in self.contributions.values() if c.committed and c.aliases]
        aliases = [(name, of) for some in done for name, of in some.items() if self._is_bare(name)]
        return {name: of for name, of in reversed(aliases) if not self._is_bare(of)}

    def _tied_parts(self) -> dict[str, dict[Box, Value]]:
        """Return the committed shards that entries have because some participants declared them to
        be the same as another entry, of which these participants put the shards, while others put
        shards of both: by name and box.
        """
        found: dict[str, dict[Box, Value]] = {}
        for contribution in self.contributions.values():
            if not contribution.committed:
                continue
            for name, of in contribution.aliases.items():
                entry, source = self.entries.get(name), self.entries.get(of)
                if type(entry) is not Shards or type(source) is not Shards:
                    continue
                if entry.parts and entry.meta == source.meta:
                    for box in contribution.tied_boxes.get(of, ()):
                        value = source.parts.get(box)
                        if value is not None and value.created:
                            found.setdefault(name, {})[box] = value
        return found

    def _is_bare(self, name: str) -> bool:
        """Return whether only empty shards of an entry were put."""
        entry = self.entries.get(name)
        return type(entry) is Shards and not entry.parts

    def state(self, key: str, *, brief: bool = False) -> Pending:
        """Report the progress of the generation, for people. ``brief`` omits the missing boxes of a
        state dict, because finding them takes long.
        """
        boxes_of = () if brief and self.publication is not None else self.missing()
        return Pending(
            self.version,
            self.participants,
            [c.participant for c in self.contributions.values() if c.committed],
            [c.participant for c in self.contributions.values() if not c.committed],
            [(n or key, b.offset, b.shape) for n, b in itertools.islice(boxes_of, _MAX_SHOWN)],
            key,
            self.nbytes,
            self._missing_participants(),
        )

    def _missing_participants(self) -> list[str]:
        """Return the participants that have not begun, as far as they are known: all other ranks if
        the participants are ranks, otherwise those that have put to the sequence before.
        """
        here = self.contributions
        if len(here) >= self.participants:
            return []
        every: Iterable[str] = self.sequence.participants
        if all(name.isdecimal() and int(name) < self.participants for name in here):
            every = map(str, range(self.participants))
        missing = (name for name in every if name not in here)
        return list(itertools.islice(missing, min(self.participants - len(here), _MAX_SHOWN)))

    def seal(self, key: str, base: Stored | None) -> Stored:
        """Return the finished version, which holds its values in addition to the contributions. If
        all of it is one contribution, though, this one's hold is passed on to it.

        Args:
            base: the previous version, from which a partial one takes the entries it lacks.
        """
        now = moments.wall()
        version = self.version
        only = self._only()
        if only is not None and not only.partial and self.publication is not None:
            for value in only.values:
                value.version = version
            self.passed_on = True
            facts, packed = only.session.facts, self.publication.packed
            return Manifest(key, self.entries, only.paths, facts, version, now, packed)
        tied, elsewhere = self._tied_and_empty(), self._tied_parts()
        entries: dict[str, Value | Shards] = {}
        for name, entry in self.entries.items():
            if type(entry) is Value:
                entry.version, entry.created = version, now
                entries[name] = entry
            elif name not in tied:
                entries[name] = _sealed(entry, elsewhere.get(name, {}), version, now)
        publication = self.publication
        if publication is None:
            stored: Stored = entries[""]
            retain(all_values(stored))
            return stored
        done = [c for c in self.contributions.values() if c.committed]
        entries |= {name: entries[of] for name, of in tied.items()}
        for contribution in done:
            for name, of in contribution.aliases.items():
                entries.setdefault(name, entries[of])
        order: dict[str, None] = {}
        paths: dict[str, bytes] = {}
        for contribution in done:
            order |= contribution.order
            paths = contribution.paths | paths
        if order:
            entries = {name: entries[name] for name in order | dict.fromkeys(entries)}
        facts = done[0].session.facts
        made = Manifest(key, entries, paths, facts, version, now, publication.packed)
        retain(made.own_values())
        if self.is_partial and type(base) is Manifest:
            made.build_on(base)
        return made


def _sealed(entry: Shards, elsewhere: dict[Box, Value], version: int, now: float) -> Value | Shards:
    """Return an entry as its version keeps it: with the committed shards only, or as a single value
    if one of them covers the whole tensor. ``elsewhere``: shards that it shares with another entry.
    """
    entry.version, entry.created = version, now
    parts = {box: value for box, value in entry.parts.items() if value.created}
    parts = elsewhere | parts
    target = boxes.whole(entry.meta.shape)
    if (value := parts.get(target)) is not None:
        value.version, value.box = version, None
        return value
    if target.is_empty:
        return Value(
            entry.key, entry.meta, 0, 0, b"", -1, entry.creator, version=version, created=now
        )
    value = next(iter(parts.values()))
    itemsize = value.nbytes // max((value.box or target).numel, 1)
    sealed = Shards(entry.key, entry.meta, entry.creator, parts, target.numel * itemsize)
    sealed.version, sealed.created = version, now
    return sealed


@lru_cache(maxsize=1024)  # layers repeat, and so do versions
def _covers(target: Box, parts: tuple[Box, ...]) -> bool:
    return boxes.covers(target, parts)


def _whole(meta: ValueMeta) -> Box:
    return boxes.whole(meta.shape if isinstance(meta, TensorMeta) else ())


def _words(meta: ValueMeta) -> str:
    if isinstance(meta, TensorMeta):
        return f"{meta.dtype} {list(meta.shape)}"
    return "an object"
