"""The clients that wait for versions of keys."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from torchstore_core.reports.stat import Pending
from torchstore_core.server.index.catalog import Catalog
from torchstore_core.server.index.records import Stored, Waiter
from torchstore_core.wire import messages as m

__all__ = ["Waiting"]

_MOST_UNMET = 16
_MOST_PENDING = 2
_MOST_NAMES = 256


class Waiting:
    """All unanswered Waits of a store. False if there are none.

    Args:
        is_lost: whether a version cannot be read any more; then the Wait is for the next one.
    """

    def __init__(self, catalog: Catalog, is_lost: Callable[[Stored], bool]) -> None:
        self._catalog = catalog
        self._is_lost = is_lost
        self._by_key: dict[str, set[Waiter]] = {}

    def __bool__(self) -> bool:
        return bool(self._by_key)

    def add(
        self, keys: list[str], min_version: int, reply: Callable[[list[int]], None]
    ) -> Waiter | None:
        """Call ``reply`` with the versions once all keys are there; None if they are already."""
        waiter = Waiter(keys, min_version, reply)
        versions = self._satisfied(waiter)
        if versions is not None:
            reply(versions)
            return None
        for key in keys:
            self._by_key.setdefault(key, set()).add(waiter)
        return waiter

    def forget(self, waiter: Waiter) -> None:
        """Drop a waiter."""
        for key in waiter.keys:
            waiting = self._by_key.get(key)
            if waiting is not None:
                waiting.discard(waiter)
                if not waiting:
                    del self._by_key[key]

    def wake(self, keys: Iterable[str], state_dicts: Iterable[str]) -> None:
        """Look again for those who wait for one of these keys, or for one of these state dicts or
        an entry of it.
        """
        woken: set[Waiter] = set()
        for key in keys:
            woken |= self._by_key.get(key, set())
        for base in state_dicts:
            for key, waiting in self._by_key.items():
                if key == base or key.startswith(f"{base}/"):
                    woken |= waiting
        for waiter in woken:
            versions = self._satisfied(waiter)
            if versions is not None:
                self.forget(waiter)
                waiter.reply(versions)

    def unmet(self, keys: list[str], min_version: int) -> list[m.UnmetKey]:
        """The first keys that are not there, or not in that version, and why, in short."""
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
        """Versions on their way of a key, or of the state dict that it may be an entry of."""
        bases = [key, *(key[:at] for at, character in enumerate(key) if character == "/")]
        for base in bases:
            if pending := self._catalog.pending(base):
                return [_in_short(one) for one in pending[:_MOST_PENDING]]
        return []

    def _satisfied(self, waiter: Waiter) -> list[int] | None:
        versions: list[int] = []
        for key in waiter.keys:
            found = self._catalog.find(key)
            if found is None or found[1] < waiter.min_version or self._is_lost(found[0]):
                return None
            versions.append(found[1])
        return versions


def _in_short(pending: Pending) -> Pending:
    """Without what may be thousands of names."""
    return msgspec.structs.replace(
        pending,
        committed=pending.committed[:_MOST_NAMES],
        writing=pending.writing[:_MOST_NAMES],
        missing=pending.missing[:_MOST_UNMET],
    )
