"""Who waits for which versions."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torchstore_core.server.catalog import Catalog
from torchstore_core.server.records import Stored, Waiter

__all__ = ["Waiting"]


class Waiting:
    """All open Waits of a store. False if there are none.

    Args:
        is_lost: whether a version cannot be read any more: then the next one is waited for.
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
        """Call ``reply`` with the versions once all keys are there; None if it did so at once."""
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

    def wake(self, keys: Iterable[str], groups: Iterable[str]) -> None:
        """Who waits for these keys, or for these groups or entries of them, has another look."""
        woken: set[Waiter] = set()
        for key in keys:
            woken |= self._by_key.get(key, set())
        for group in groups:
            for key, waiting in self._by_key.items():
                if key == group or key.startswith(f"{group}/"):
                    woken |= waiting
        for waiter in woken:
            versions = self._satisfied(waiter)
            if versions is not None:
                self.forget(waiter)
                waiter.reply(versions)

    def _satisfied(self, waiter: Waiter) -> list[int] | None:
        versions: list[int] = []
        for key in waiter.keys:
            found = self._catalog.find(key)
            if found is None or found[1] < waiter.min_version or self._is_lost(found[0]):
                return None
            versions.append(found[1])
        return versions
