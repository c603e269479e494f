"""Versions that several puts make together: the shards of a DTensor, the ranks of a state dict.

Each put of a participant contributes to one *generation* of a key. A put that names no version
belongs to the next generation of its *sequence*: the puts of one layout (mesh, shape, dtype), or of
one number of participants, of which each participant's n-th put makes the n-th generation. As soon
as a generation is whole it becomes the newest version, and every older one that is not is dropped.

Pure bookkeeping, which knows nothing of memory: values that nobody holds any more are returned.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from functools import lru_cache

import msgspec

from torchstore_core import boxes
from torchstore_core.boxes import Box
from torchstore_core.contracts.strategy import ClientFacts
from torchstore_core.errors import LayoutMismatchError
from torchstore_core.reports.stat import Pending
from torchstore_core.server.index import moments
from torchstore_core.server.index.participants import Contribution, PutSequence
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

__all__ = ["Generation"]

_MAX_SHOWN = 100


class Generation(msgspec.Struct, eq=False):
    """A version on its way.

    Args:
        participants: how many make it; 0: as many as it takes to cover the one tensor.

    Attributes:
        entries: what is put, by name; "" is the name of a key's own value.
        contributions: by participant.
        relied: entries that nobody stores any more, but that some participants put as well and
            left to those who stored them.
        dropped: it will never be a version.
        lost: why, if committed parts of it are gone with a volume.
    """

    sequence: PutSequence
    version: int
    participants: int
    publication: m.Publication | None
    entries: dict[str, Value | Shards] = {}
    contributions: dict[str, Contribution] = {}
    relied: dict[str, ValueMeta] = {}
    dropped: bool = False
    lost: str = ""

    def holds(self, name: str, meta: ValueMeta, box: Box | None, nbytes: int) -> bool:
        """Whether another participant puts these very bytes.

        Raises:
            LayoutMismatchError: another participant puts the entry with another shape, dtype or
                element size.
        """
        entry = self.entries.get(name)
        there = self.relied.get(name) if entry is None else entry.meta
        if there is None:
            return False
        if there != meta and (isinstance(meta, TensorMeta) or isinstance(there, TensorMeta)):
            key = name if entry is None else name or entry.key
            raise LayoutMismatchError(
                f"version {self.version}: {key!r} comes as {_words(meta)}, but another participant "
                f"puts it as {_words(there)}",
                key=key,
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
                raise LayoutMismatchError(
                    f"version {self.version}: {name or entry.key!r} comes in elements of different "
                    "sizes",
                    key=name or entry.key,
                )
        return box in entry.parts

    def add(self, contribution: Contribution, name: str, key: str, value: Value) -> None:
        """Add a value of a contribution, which nobody else puts."""
        contribution.items.append((name, value))
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
        """An entry that comes in parts; a new one if there is none yet."""
        entry = self.entries.get(name)
        if type(entry) is Shards:
            return entry
        if not isinstance(meta, TensorMeta) or entry is not None:
            raise LayoutMismatchError(f"{key!r} comes whole and in parts", key=key)
        made = self.entries[name] = Shards(key, meta, creator, {})
        return made

    def remove(self, contribution: Contribution) -> list[Value]:
        """Take a contribution out again; those of its values that nobody holds any more."""
        if self.contributions.get(contribution.participant) is contribution:
            del self.contributions[contribution.participant]
        names = dict.fromkeys([*contribution.others, *(name for name, _ in contribution.items)])
        for name, value in contribution.items:
            entry = self.entries.get(name)
            if entry is value:
                del self.entries[name]
            elif type(entry) is Shards and value.box is not None:
                entry.parts.pop(value.box, None)
        freed = release(contribution.values)
        contribution.items.clear()
        self._forget(names)
        return freed

    def _forget(self, names: Iterable[str]) -> None:
        """Somebody does not put these entries any more: forget those that nobody else puts."""
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
        """Drop it; the values that nobody holds any more. Contributions that are still being
        written release theirs when they end.
        """
        self.dropped = True
        return release(self.stored_values())

    @property
    def is_complete(self) -> bool:
        """Whether all participants are done and the committed boxes cover every tensor. (A partial
        one becomes a version only after the one before it.)
        """
        done = sum(c.committed for c in self.contributions.values())
        if done < self.participants:
            return False
        return next(iter(self._incomplete()), None) is None

    @property
    def is_written(self) -> bool:
        """Whether a participant is writing its part at this moment."""
        return not all(c.committed for c in self.contributions.values())

    @property
    def nbytes(self) -> int:
        """Bytes of the values of it that are committed."""
        return sum([value.nbytes for value in self.stored_values()])

    def stored_values(self) -> list[Value]:
        """The values of it that are committed."""
        done = [c.items for c in self.contributions.values() if c.committed]
        return [value for items in done for _, value in items]

    @property
    def is_alive(self) -> bool:
        """Whether any of the processes that put to it still lives."""
        return any(c.session.closed is None for c in self.contributions.values())

    @property
    def is_partial(self) -> bool:
        """Whether it takes the entries that it does not bring from the version before."""
        return any(c.partial for c in self.contributions.values())

    @property
    def names(self) -> Iterable[str]:
        """The entries that it brings."""
        yield from self.entries
        for contribution in self.contributions.values():
            yield from contribution.aliases

    def missing(self) -> Iterable[tuple[str, Box]]:
        """The boxes that are not committed, with the names of their entries."""
        for name, meta, ready in self._incomplete():
            yield from ((name, box) for box in boxes.missing(_whole(meta), ready))

    def _incomplete(self) -> Iterable[tuple[str, ValueMeta, Sequence[Box]]]:
        """The entries that are not committed completely: what they are, and the boxes that are."""
        tied = self._tied_and_empty()
        for name, entry in self.entries.items():
            if type(entry) is Value and entry.created:  # the usual case
                continue
            if name in tied:
                continue
            if type(entry) is Shards:
                ready = tuple([box for box, value in entry.parts.items() if value.created])
                if not _covers(boxes.whole(entry.meta.shape), ready):
                    yield name, entry.meta, ready
            elif not entry.created:
                yield name, entry.meta, ()
        for name, meta in self.relied.items():
            if name not in self.entries:
                yield name, meta, ()

    def _tied_and_empty(self) -> dict[str, str]:
        """Entries of which only empty shards were put here, but which other participants tie to
        another entry: by name, what they are tied to.
        """
        done = [c.aliases for c in self.contributions.values() if c.committed and c.aliases]
        aliases = [(name, of) for some in done for name, of in some.items() if self._is_bare(name)]
        return {name: of for name, of in reversed(aliases) if not self._is_bare(of)}

    def _is_bare(self, name: str) -> bool:
        """Whether only empty shards of an entry were put."""
        entry = self.entries.get(name)
        return type(entry) is Shards and not entry.parts

    def state(self, key: str, *, brief: bool = False) -> Pending:
        """How far it is, for people. ``brief``: without the missing boxes of a state dict, which
        take long to find.
        """
        boxes_of = () if brief and self.publication is not None else self.missing()
        return Pending(
            self.version,
            self.participants,
            [c.participant for c in self.contributions.values() if c.committed],
            [c.participant for c in self.contributions.values() if not c.committed],
            [(n or key, b.offset, b.shape) for n, b in boxes_of][:_MAX_SHOWN],
            key,
            self.nbytes,
            self._missing_participants(),
        )

    def _missing_participants(self) -> list[str]:
        """The participants that have not begun: of ranks all others, else those that put before."""
        here = self.contributions
        if len(here) >= self.participants:
            return []
        every: Iterable[str] = self.sequence.participants
        if all(name.isdecimal() and int(name) < self.participants for name in here):
            every = map(str, range(self.participants))
        missing = (name for name in every if name not in here)
        return list(itertools.islice(missing, min(self.participants - len(here), _MAX_SHOWN)))

    def seal(self, key: str, base: Stored | None, *, inherit: bool = False) -> Stored:
        """The finished version, which now holds its values, besides the contributions.

        Args:
            base: the version before, from which a partial version takes the other entries.
            inherit: that version is about to be dropped. Then the new one takes over what it shares
                with it, so that a small put costs little however many entries there are.
        """
        now = moments.wall()
        tied = self._tied_and_empty()
        version = self.version
        entries: dict[str, Value | Shards] = {}
        for name, entry in self.entries.items():
            if type(entry) is Value:
                entry.version, entry.created = version, now
                entries[name] = entry
            elif name not in tied:
                entries[name] = _sealed(entry, version, now)
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
        mine = entries
        if self.is_partial and type(base) is Manifest:
            before = base.entries
            entries = before | mine
            replaced = {name: before[name] for name in mine if name in before}
            new_paths = base.paths | paths
            for name in replaced:
                if name not in paths:
                    new_paths.pop(name, None)
            paths = new_paths
            if inherit:
                base.entries = replaced
            else:
                mine = entries
        for entry in mine.values():
            if type(entry) is Value:
                entry.uses += 1
            else:
                retain(all_values(entry))
        facts = done[0].session.facts
        return Manifest(key, entries, paths, facts, self.version, now, publication.packed)


def _sealed(entry: Shards, version: int, now: float) -> Value | Shards:
    """An entry as a version keeps it: with the committed parts only; as one value if one of them is
    all of it.
    """
    entry.version, entry.created = version, now
    parts = {box: value for box, value in entry.parts.items() if value.created}
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
