"""Everything that a store has, with the keys by which the strategy places it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torchstore_core.server.index.catalog import Catalog
from torchstore_core.server.index.records import Manifest, Stored, Value, all_values


def stored_values(catalog: Catalog) -> Iterator[list[tuple[str, Value]]]:
    """Yield every value that is complete, a list for each key, with the keys by which the strategy
    places them. Some are yielded several times. The catalog may change in the meantime; what is
    added then may be left out.
    """
    for key in list(catalog.newest):
        if (stored := catalog.newest.get(key)) is not None:
            yield _named(key, stored)
    for key in list(catalog.histories):
        history = catalog.histories.get(key)
        if history is None:
            continue
        found = [pair for stored in history.kept.values() for pair in _named(key, stored)]
        for branch in history.branches.values():
            if branch.base is not None:
                found += _named(key, branch.base)
        for generation in history.generations():
            for one in generation.contributions.values():
                if one.committed:
                    found += named_values(key, one.values)
        yield found
    for version in list(catalog.held.values()):
        yield _named(version.key, version.stored)


def _named(key: str, stored: Stored) -> list[tuple[str, Value]]:
    if type(stored) is Manifest:
        return [(f"{key}/{value.key}", value) for value in all_values(stored)]
    return [(value.key, value) for value in all_values(stored)]


def named_values(key: str, values: Iterable[Value]) -> list[tuple[str, Value]]:
    """Values of a contribution to ``key``, with the keys by which the strategy places them."""
    return [(v.key if v.key == key else f"{key}/{v.key}", v) for v in values]
