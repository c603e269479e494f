"""Names that exist and are like one that does not, for the text of an error."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Mapping
from heapq import nlargest
from itertools import islice

from torchstore_core import moments
from torchstore_core.server.index.key_names import KeyNames, splits
from torchstore_core.server.index.records import Manifest, Stored
from torchstore_core.wire import messages as m

_MOST = 3
# So many keys, and entries of a state dict, are looked at on each side of where the name would be.
_NEARBY = 16
# Of those, so many that begin and end alike are compared closely.
_COMPARED = 8
_LEAST_ALIKE = 0.7
# Longer names are not compared, nor longer parts that differ, as that takes time quadratic in their
# length; and more entries are not sorted for this.
_LONGEST, _LONGEST_PART, _MOST_ENTRIES = 256, 64, 20_000
_MOST_SPLITS = 8
# So often in a second they are looked for. It takes up to ten times as long as a get that finds
# something, and clients may look in the store again and again for what they then make.
_A_SECOND = 32


class SimilarNames:
    """Names that are like one that does not exist, for some errors a second.

    Args:
        names, newest: the names in order, and what they stand for.
    """

    def __init__(self, names: KeyNames, newest: Mapping[str, Stored]) -> None:
        self._names, self._newest = names, newest
        self._looked: deque[float] = deque(maxlen=_A_SECOND)

    def of(self, key: str) -> list[str]:
        """See :func:`similar_names`; none if it has been called too often in the last second."""
        now = moments.monotonic()
        if len(self._looked) == _A_SECOND and now - self._looked[0] < 1.0:
            return []
        self._looked.append(now)
        return similar_names(self._names, self._newest, key)


def similar_names(names: KeyNames, newest: Mapping[str, Stored], key: str) -> list[str]:
    """Up to three names that are like ``key``, which is none; those that are most like it first.

    A few neighbours in the order of names are looked at, so the time does not depend on the size of
    the store.
    """
    if len(key) > _LONGEST:
        return []
    near = [name for name in names.near(key, _NEARBY) if not name.startswith(m.HIDDEN)]
    parts = list(islice(splits(key), _MOST_SPLITS))
    found: list[str] = []
    state_dicts: dict[str, Manifest] = {}
    for base in (*(base for base, _ in parts), *near):
        if type(stored := newest.get(base)) is Manifest:
            state_dicts[base] = stored
    for base, stored in state_dicts.items():  # its name is wrong, or was left out
        there = [name for name in (key, *(name for _, name in parts)) if stored.entry(name)]
        found += [f"{base}/{name}" for name in there]
    for base, name in parts:
        if base in state_dicts and len(state_dicts[base].entries) <= _MOST_ENTRIES:
            entries = state_dicts[base].ordered()
            at = bisect_left(entries, name)
            near += [f"{base}/{one}" for one in entries[max(0, at - _NEARBY) : at + _NEARBY]]
    near = [name for name in near if len(name) <= _LONGEST]
    alike = nlargest(_COMPARED, [(_ends_alike(key, name), name) for name in near])
    compared = [(_likeness(key, name), name) for _, name in alike]
    found += [name for how, name in nlargest(_MOST, compared) if how >= _LEAST_ALIKE]
    return list(dict.fromkeys(found))[:_MOST]


def _ends_alike(one: str, other: str) -> float:
    """Which part of two names is the same at their beginnings and their ends."""
    before, after = _ends(one, other)
    return 2 * (before + after) / (len(one) + len(other))


def _likeness(one: str, other: str) -> float:
    """Which part of two names is the same, see ``difflib``, if that is enough to be alike.

    >>> _likeness("policy/wieght", "policy/weight") > 0.9, _likeness("a", "b")
    (True, 0.0)
    """
    before, after = _ends(one, other)
    a, b = one[before : len(one) - after], other[before : len(other) - after]
    least = _LEAST_ALIKE * (len(one) + len(other)) / 2 - before - after
    same = sum([min(a.count(letter), b.count(letter)) for letter in {*a}])  # at most
    if same >= least:
        from difflib import SequenceMatcher  # here: most servers never need it

        short = max(len(a), len(b)) <= _LONGEST_PART
        blocks = SequenceMatcher(None, a, b, False).get_matching_blocks() if short else ()
        same = sum([block.size for block in blocks])
    return 2 * (before + after + same) / (len(one) + len(other))


def _ends(one: str, other: str) -> tuple[int, int]:
    """How many characters of two names are the same at their beginnings, and behind these at their
    ends.
    """
    before = _same(one, other)
    return before, _same(one[before:][::-1], other[before:][::-1])


def _same(one: str, other: str) -> int:
    """How many characters of two names are the same at their beginnings."""
    for at, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return at
    return min(len(one), len(other))
