"""Requests of clients that wait for versions of keys."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

import msgspec

from torchstore_core.errors import TorchStoreError
from torchstore_core.reports.stat import Pending
from torchstore_core.server.index.catalog import Catalog
from torchstore_core.server.index.errors import in_vain_error, rewound_error
from torchstore_core.server.index.records import Stored, Waiter
from torchstore_core.wire import messages as m

_MOST_UNMET = 16
_MOST_PENDING = 2
_MOST_NAMES = 256


class Waiting:
    """All unanswered Wait requests of a store.

    Args:
        is_lost: returns whether a version can no longer be read; a Wait then waits for the next.

    Attributes:
        by_key: the requests by the keys that they wait for. Those who have waited longest come
            first, and are answered first.
    """

    def __init__(self, catalog: Catalog, is_lost: Callable[[Stored], bool]) -> None:
        self._catalog = catalog
        self._is_lost = is_lost
        self.by_key: dict[str, dict[Waiter, None]] = {}

    def add(
        self,
        keys: list[str],
        min_version: int,
        reply: Callable[[list[int]], None],
        timeline: int = -1,
        fail: Callable[[TorchStoreError], None] | None = None,
    ) -> Waiter | None:
        """Call ``reply`` with the versions once all keys have reached ``min_version``. Returns
        None if they have already.

        Args:
            timeline, fail: see ``Waiter``.

        Raises:
            VersionGoneError: the key was rewound to before the version that the wait follows.
        """
        waiter = Waiter(keys, min_version, reply, timeline, fail)
        for key in keys:
            if not self._follows(waiter, key):
                raise rewound_error(key, min_version - 1, self._catalog.newest_version(key))
        versions = self._satisfied(waiter)
        if versions is not None:
            reply(versions)
            return None
        for key in keys:
            self.by_key.setdefault(key, {})[waiter] = None
        return waiter

    def add_any(
        self, refs: list[tuple[str, int, int]], count: int, reply: Callable[[list[bool]], None]
    ) -> Waiter | None:
        """Call ``reply`` with a flag for each key, its lowest version and its timeline, once
        ``count`` of them are there; None if they are already.
        """

        keys = [ref[0] for ref in refs]
        one_each = len(set(keys)) == len(keys)

        def look() -> int:
            flags = [self._is_there(*ref) for ref in refs]
            missing = count - sum(flags)
            if missing > 0:
                return missing if one_each else 1
            reply(flags)
            return 0

        left = look()
        if not left:
            return None
        waiter = Waiter(keys, 0, lambda versions: None, look=look, left=left)
        for key in waiter.keys:
            self.by_key.setdefault(key, {})[waiter] = None
        return waiter

    def _is_there(self, key: str, version: int, timeline: int) -> bool:
        """Whether there is no need to wait: the key (version 0) can be read, or the version can,
        or a newer one, or it is gone for good, as is one of a timeline that the key has left (-1:
        any will do). An object without a key always is one of these.
        """
        if not key or (timeline >= 0 and self._catalog.timeline(key, version) != timeline):
            return True
        found = self._catalog.find(key)
        if version:
            return self._catalog.was_there(key, version) if found is None else found[1] >= version
        return found is not None and not self._is_lost(found[0])

    def forget(self, waiter: Waiter) -> None:
        """Drop a waiter without answering it."""
        for key in waiter.keys:
            waiting = self.by_key.get(key)
            if waiting is not None:
                waiting.pop(waiter, None)
                if not waiting:
                    del self.by_key[key]

    def wake(self, keys: Iterable[str], state_dicts: Iterable[str]) -> None:
        """Check the waiters again that wait for one of ``keys``, or for one of ``state_dicts`` or
        an entry of one, and answer those whose condition is met.
        """
        woken: dict[Waiter, int] = {}  # and how many of its keys have changed
        changed = [waiting for key in keys if (waiting := self.by_key.get(key))]
        for base in state_dicts:
            for key, waiting in self.by_key.items():
                if key == base or key.startswith(f"{base}/"):
                    changed.append(waiting)
        for waiting in changed:
            for waiter in waiting:
                woken[waiter] = woken.get(waiter, 0) + 1
        for waiter, count in woken.items():
            if waiter.look is not None:
                waiter.left -= count
                if waiter.left <= 0:
                    waiter.left = waiter.look()
                    if not waiter.left:
                        self.forget(waiter)
                continue
            versions = self._satisfied(waiter)
            if versions is not None:
                self.forget(waiter)
                waiter.reply(versions)

    def end(self, rewound: Iterable[tuple[str, bool]]) -> None:
        """Keys have begun new timelines, see ``Change``: those who wait for a version above the one
        that they went back to, or for what follows a version that is gone, do so in vain.
        """
        for base, went_back in rewound:
            keys = [key for key in self.by_key if key == base or key.startswith(f"{base}/")]
            for key in keys:
                newest = self._catalog.newest_version(key)
                for waiter in list(self.by_key.get(key, ())):
                    if waiter.timeline < 0:
                        in_vain = went_back and waiter.min_version > max(newest, 1)
                    else:
                        in_vain = not self._follows(waiter, key)
                    if in_vain and waiter.fail is not None:
                        self.forget(waiter)
                        waiter.fail(in_vain_error(key, waiter.min_version, newest))

    def _follows(self, waiter: Waiter, key: str) -> bool:
        """Whether the version that a waiter follows is still in the history of the key."""
        if waiter.timeline < 0 or waiter.min_version < 2:
            return True
        return self._catalog.timeline(key, waiter.min_version - 1) == waiter.timeline

    def unmet(self, keys: list[str], min_version: int) -> list[m.UnmetKey]:
        """Return the first few keys that do not meet the condition, and briefly why."""
        found: list[m.UnmetKey] = []
        for key in keys:
            there = self._catalog.find(key)
            version = 0 if there is None else there[1]
            lost = there is not None and self._is_lost(there[0])
            if there is None or version < min_version or lost:
                found.append(m.UnmetKey(key, version, lost, self._pending(key)))
                if len(found) == _MOST_UNMET:
                    break
        return found

    def _pending(self, key: str) -> list[Pending]:
        """Return unfinished versions of a key, or of the state dict of which it may be an entry."""
        bases = [key, *(key[:at] for at, character in enumerate(key) if character == "/")]
        for base in bases:
            if pending := self._catalog.pending(base):
                return [_in_short(one) for one in pending[:_MOST_PENDING]]
        return []

    def _satisfied(self, waiter: Waiter) -> list[int] | None:
        keys = waiter.keys
        versions = [0] * len(keys)
        # First the one that was missing before: of many keys, others would be looked at in vain.
        for at in itertools.chain(range(waiter.at, len(keys)), range(waiter.at)):
            found = self._catalog.find(keys[at])
            if (
                found is None
                or found[1] < waiter.min_version
                or self._is_lost(found[0])
                or not self._follows(waiter, keys[at])
            ):
                waiter.at = at
                return None
            versions[at] = found[1]
        return versions


def _in_short(pending: Pending) -> Pending:
    """Return ``pending`` with its lists shortened, which may have thousands of names."""
    return msgspec.structs.replace(
        pending,
        committed=pending.committed[:_MOST_NAMES],
        writing=pending.writing[:_MOST_NAMES],
        missing=pending.missing[:_MOST_UNMET],
    )
