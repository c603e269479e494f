"""Versions that had to make room for others, and what is remembered of them."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from torchstore_core import moments
from torchstore_core.errors import EvictedError, VersionGoneError
from torchstore_core.server.index.key_names import splits
from torchstore_core.server.index.records import (
    Manifest,
    Stored,
    Value,
    all_values,
    release_version,
)

if TYPE_CHECKING:
    from torchstore_core.server.index.catalog import Catalog

# Keys of which it is remembered that they were evicted.
_MAX_REMEMBERED = 4096


class Eviction(NamedTuple):
    """The last version of a key that was evicted, its size in bytes, when that was, and whether it
    was a state dict.
    """

    version: int
    nbytes: int
    at: float
    is_state_dict: bool


class Evictions:
    """Evicts versions of values that may be evicted, and explains that later.

    Args:
        catalog: what they are taken out of.

    Attributes:
        remembered: the last eviction of each key, the oldest first.
    """

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self.remembered: dict[str, Eviction] = {}

    def can_evict(self, key: str, value: Value, *, newest_too: bool) -> bool:
        """Whether a value belongs only to versions of a key that can be read, and no put that is
        under way is based on it: what a reference holds stays. ``newest_too``: it may belong to the
        newest version.
        """
        newest = self._catalog.newest.get(key)
        if newest is value:
            return newest_too and value.uses == 1
        history = self._catalog.histories.get(key)
        kept: Collection[Stored] = ()
        if history is not None:
            if history.branches or any(g.is_partial for g in history.pending.values()):
                return False
            kept = history.kept.values()
        readable = kept if newest is None else [*kept, newest]
        if not 0 < sum(_count(stored, value) for stored in readable) == value.uses:
            return False
        if newest is not None and not newest_too and _has(newest, value):
            return False
        return not any(_has(stored, value) for stored in _held_beside(readable))

    def evict(self, key: str, value: Value) -> list[Value]:
        """Forget the versions of a key that hold a value. If the newest is one of them, older ones
        are forgotten, too: nobody may take one of these for the newest. Returns the values that
        nobody holds any more.
        """
        catalog = self._catalog
        newest = catalog.newest.get(key)
        history = catalog.histories.get(key)
        kept = {} if history is None else history.kept
        going: list[Stored] = []
        if newest is not None and _has(newest, value):
            going = [*kept.values(), newest]
            kept.clear()
            catalog.hide(key)
        else:
            for version in [v for v, old in kept.items() if _has(old, value)]:
                going.append(kept.pop(version))
        if not going:
            return []
        last = going[-1]
        self.remembered.pop(key, None)
        self.remembered[key] = Eviction(
            last.version, last.nbytes, moments.wall(), type(last) is Manifest
        )
        if len(self.remembered) > _MAX_REMEMBERED:
            forgotten = next(iter(self.remembered))
            del self.remembered[forgotten]
            catalog.forget_history(forgotten)
        return [one for stored in going for one in release_version(stored)]

    def forget(self, key: str) -> None:
        """A key is deleted: that it was evicted before is no longer of interest."""
        self.remembered.pop(key, None)

    def missing_error(self, keys: Sequence[str]) -> EvictedError | None:
        """The error for keys that do not exist, if one of them was evicted."""
        for key in keys:
            found, what = self._of(key)
            if found is not None:
                return EvictedError(
                    f"{what} was evicted {_ago(found.at)} ago to make room for others: version "
                    f"{found.version}, {found.nbytes:,} bytes, had been put with "
                    'when_full="evictable". Put it again; what must stay is put with "spillable" '
                    'or "pinned"',
                    key=key,
                    details={
                        "missing": list(keys),
                        "version": found.version,
                        "nbytes": found.nbytes,
                        "evicted": found.at,
                        "reason": "evicted",
                    },
                )
        return None

    def _of(self, key: str) -> tuple[Eviction | None, str]:
        """The eviction of a key, or of the state dict of which it may have been an entry, and what
        to call it: which entries that had is forgotten with it.
        """
        if (found := self.remembered.get(key)) is not None:
            return found, repr(key)
        for base, name in splits(key):
            found = self.remembered.get(base)
            if found is not None and found.is_state_dict and base not in self._catalog.newest:
                return found, f"the state dict {base!r}, in which {name!r} is looked for,"
        return None, ""

    def gone_error(self, key: str, version: int, now: Sequence[int]) -> VersionGoneError | None:
        """The error for a version that cannot be read, if it was evicted."""
        found, what = self._of(key)
        if found is None or version != found.version:
            return None
        return VersionGoneError(
            f"version {version} of {what} was evicted {_ago(found.at)} ago to make room for "
            'others; it had been put with when_full="evictable"',
            key=key,
            details={"current": max(now, default=0), "reason": "evicted", "evicted": found.at},
        )


def _has(stored: Stored, value: Value) -> bool:
    """Whether a stored version contains a value."""
    return stored is value or any(one is value for one in all_values(stored))


def _count(stored: Stored, value: Value) -> int:
    """How many holders of a value a stored version is: tied weights are several names of one."""
    values = stored.own_values() if type(stored) is Manifest else all_values(stored)
    return sum(one is value for one in values)


def _held_beside(readable: Collection[Stored]) -> Iterator[Manifest]:
    """State dicts that references hold, and that may share values with those that can be read."""
    ours = {id(stored): stored for stored in readable if type(stored) is Manifest}
    every: dict[int, Manifest] = {}
    for at, stored in ours.items():
        if at not in every:
            every |= {id(one): one for one in stored.chain()}
    return (one for at, one in every.items() if one.holders > (at in ours))


def _ago(then: float) -> str:
    return f"{max(0.0, time.time() - then):.0f} s"
