"""Which objects have which parts of a spill space. This is bookkeeping, and does no I/O.

What is written is never written over: each write makes an object of a new name, and takes the
place of what other objects had there. An object of which nothing is in use any more is deleted. So
it does not matter in which order objects are written and deleted, or whether a request that was
given up is carried out later after all.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from sortedcontainers import SortedDict

_NAME = re.compile(r"([0-9a-f]+)-([0-9a-f]+)-([0-9a-f]+)-([0-9a-f]+)")


class ObjectName(NamedTuple):
    """What the name of an object says. Of two that have the same part of the space, the greater
    one was written later.

    Args:
        life: which life of the server has written it.
        number: how many it had written before.
        start, nbytes: which part of the space it was written for.
    """

    life: int
    number: int
    start: int
    nbytes: int

    def __str__(self) -> str:
        return f"{self.life:x}-{self.number:x}-{self.start:x}-{self.nbytes:x}"

    @classmethod
    def parse(cls, name: str) -> ObjectName | None:
        """The reverse; None if it is no such name.

        >>> str(ObjectName(1, 16, 4096, 8192)), ObjectName.parse("1-10-1000-2000")
        ('1-10-1000-2000', ObjectName(life=1, number=16, start=4096, nbytes=8192))
        >>> ObjectName.parse("probe")
        """
        found = _NAME.fullmatch(name)
        return cls(*(int(group, 16) for group in found.groups())) if found else None


class Part(NamedTuple):
    """A part of an object, and where it belongs.

    Args:
        name: of the object.
        at: where in the object it begins.
        nbytes: how long it is.
        to: where in what was looked for it belongs.
    """

    name: ObjectName
    at: int
    nbytes: int
    to: int


def joined(parts: Iterable[Part], gap: int) -> dict[Part, Part]:
    """Which larger part of an object each of these is read with: one for all between which there
    are at most ``gap`` bytes.

    >>> name, other = ObjectName(1, 0, 0, 99), ObjectName(1, 1, 99, 99)
    >>> places = [(name, 50), (name, 12), (other, 12), (name, 0), (other, 0)]
    >>> parts = [Part(one, at, 9, 7) for one, at in places]
    >>> [(span.at, span.nbytes) for span in joined(parts, 5).values()]
    [(0, 21), (0, 21), (50, 9), (0, 21), (0, 21)]
    """
    groups: list[list[Part]] = []
    end = 0
    for part in sorted(set(parts)):
        if groups and groups[-1][0].name == part.name and part.at <= end + gap:
            groups[-1].append(part)
        else:
            groups.append([part])
            end = 0
        end = max(end, part.at + part.nbytes)
    spans: dict[Part, Part] = {}
    for group in groups:
        start, stop = group[0].at, max(part.at + part.nbytes for part in group)
        span = Part(group[0].name, start, stop - start, 0)
        spans.update(dict.fromkeys(group, span))
    return spans


class _Range(NamedTuple):
    end: int
    name: ObjectName
    at: int


class Layout:
    """The space of one store."""

    def __init__(self) -> None:
        self._ranges = SortedDict()  # the beginning of each -> _Range
        self._in_use: dict[ObjectName, int] = {}

    @property
    def names(self) -> list[ObjectName]:
        """Of all objects of which something is in use."""
        return list(self._in_use)

    def write(self, name: ObjectName) -> list[ObjectName]:
        """An object was written. Returns those of which nothing is in use any more."""
        unused = self.free([(name.start, name.nbytes)])
        self._ranges[name.start] = _Range(name.start + name.nbytes, name, 0)
        self._in_use[name] = name.nbytes
        return unused

    def free(self, runs: Iterable[tuple[int, int]]) -> list[ObjectName]:
        """These parts of the space, as (offset, bytes), are not in use any more. Returns the
        objects of which nothing is.

        >>> layout = Layout()
        >>> layout.write(ObjectName(1, 0, 0, 12288))
        []
        >>> layout.free([(4096, 4096)])
        []
        >>> [str(name) for name in layout.free([(0, 4096), (8192, 4096)])]
        ['1-0-0-3000']
        """
        return [name for start, nbytes in runs for name in self._free(start, start + nbytes)]

    def _free(self, start: int, end: int) -> Iterator[ObjectName]:
        ranges = self._ranges
        at = ranges.bisect_right(start) - 1
        first = ranges.keys()[at] if at >= 0 else start
        for begin in list(ranges.irange(first, end, inclusive=(True, False))):
            there: _Range = ranges[begin]
            if there.end <= start:
                continue
            del ranges[begin]
            if begin < start:
                ranges[begin] = there._replace(end=start)
            if there.end > end:
                ranges[end] = there._replace(at=there.at + end - begin)
            left = self._in_use[there.name] - (min(end, there.end) - max(start, begin))
            if left:
                self._in_use[there.name] = left
            else:
                del self._in_use[there.name]
                yield there.name

    def keep_only(self, runs: Iterable[tuple[int, int]]) -> list[ObjectName]:
        """Nothing but these parts of the space is in use. Returns the objects of which nothing
        is.
        """
        if not self._ranges:
            return []
        end = self._ranges.peekitem()[1].end
        unused: list[ObjectName] = []
        kept = 0
        for start, nbytes in sorted(runs):
            if start > kept:
                unused += self._free(kept, start)
            kept = max(kept, start + nbytes)
        if end > kept:
            unused += self._free(kept, end)
        return unused

    def find(self, runs: Iterable[tuple[int, int]]) -> list[Part]:
        """The parts of objects that have these parts of the space, one after the other. What none
        has is left out.
        """
        found: list[Part] = []
        to = 0
        ranges = self._ranges
        for start, nbytes in runs:
            end = start + nbytes
            at = ranges.bisect_right(start) - 1
            first = ranges.keys()[at] if at >= 0 else start
            for begin in ranges.irange(first, end, inclusive=(True, False)):
                there: _Range = ranges[begin]
                here, stop = max(begin, start), min(there.end, end)
                if stop > here:
                    found.append(
                        Part(there.name, there.at + here - begin, stop - here, to + here - start)
                    )
            to += nbytes
        return found
