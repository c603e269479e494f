"""The abilities of links: what is told by their methods is what their Protocols say."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from typing import Any

import pytest

from torchstore_core.clients.session import links
from torchstore_core.contracts import transport
from torchstore_inprocess.transport import InProcessLink
from torchstore_transports.shm.link import ShmLink

#: Each ability by its Protocol.
TOLD: dict[type, Callable[[object], bool]] = {
    transport.SupportsWindow: links.has_window,
    transport.SupportsMap: links.has_map,
    transport.SupportsMapThrough: links.has_map_through,
    transport.SupportsRegistration: links.has_registration,
    transport.SupportsProgress: links.has_progress,
}
METHODS = sorted({name for ability in TOLD for name in vars(ability) if not name.startswith("_")})


def link_with(methods: tuple[str, ...]) -> Any:
    return type("SomeLink", (), {name: lambda self: None for name in methods})()


@pytest.mark.parametrize("ability", TOLD)
def test_a_link_has_what_it_has_all_methods_of(ability: type) -> None:
    told = set()
    for count in range(len(METHODS) + 1):
        for methods in combinations(METHODS, count):
            link = link_with(methods)
            assert TOLD[ability](link) == isinstance(link, ability), methods
            told.add(TOLD[ability](link))
    assert told == {True, False}


def test_a_method_that_was_taken_away_does_not_count() -> None:
    class Unmapped(ShmLink):
        map = None  # type: ignore[assignment]

    assert links.has_map(ShmLink.__new__(ShmLink))
    assert not links.has_map(Unmapped.__new__(Unmapped))


def test_abilities_of_real_links() -> None:
    shm, inprocess = ShmLink.__new__(ShmLink), InProcessLink.__new__(InProcessLink)
    assert links.has_window(shm)
    assert not any(told(inprocess) for told in TOLD.values())
