"""Handles of the processes of ``publishers``: ranks that obey, readers that go on and on."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from tests.reliability.harness import Child
from tests.reliability.publishing import publishers
from tests.reliability.publishing.publishers import RANKS
from tests.support import until

__all__ = ["Rank", "Readers", "run_of"]


class Rank(Child):
    """A rank that publishes at the test's word."""

    def __init__(
        self, address: str, kind: str, rank: int, *, explicit: bool = True, named: bool = True
    ) -> None:
        super().__init__(publishers.obey, address, kind, rank, named)
        self._explicit = explicit

    async def do(self, what: str, number: int, version: int) -> Any:
        """Tell it; its answer."""
        self.tell((what, number, version if self._explicit else None))
        return await self.said()

    async def put(self, number: int, version: int) -> Any:
        """A publish: the version that it became, or the name of the error."""
        return await self.do("put", number, version)

    async def begin(self, number: int, version: int) -> None:
        """A publish up to the moment before its commit."""
        assert await self.do("begin", number, version) == "begun"


async def run_of(
    stack: ExitStack, address: str, kind: str, *, explicit: bool = True, named: bool = True
) -> list[Rank]:
    """All ranks of a run."""
    ranks = [
        stack.enter_context(Rank(address, kind, rank, explicit=explicit, named=named))
        for rank in range(RANKS)
    ]
    for rank in ranks:
        assert await rank.said() == "ready"
    return ranks


class Readers:
    """Two of them, in place and zero-copy, of which each read is checked."""

    def __init__(self, stack: ExitStack, address: str, kind: str) -> None:
        self._children = [
            stack.enter_context(Child(function, address, kind))
            for function in (publishers.read_columns, publishers.read_whole)
        ]

    async def seen(self) -> list[tuple[int, int, int]]:
        """Of each, how many reads and different publishes, and the last publish."""
        for child in self._children:
            child.tell("how far?")
        return [await child.said() for child in self._children]

    async def go_on(self) -> None:
        """Wait until each has read twice more."""
        before = await self.seen()

        async def both() -> bool:
            now = await self.seen()
            return all(new[0] >= old[0] + 2 for old, new in zip(before, now, strict=True))

        await until(both)

    async def reach(self, number: int) -> None:
        """Wait until each has seen a publish of at least this number."""

        async def both() -> bool:
            return all(last >= number for _, _, last in await self.seen())

        await until(both, 10)

    async def end(self) -> None:
        """They end, and nothing was wrong."""
        for child in self._children:
            child.tell("end")
        for child in self._children:
            assert await child.said() == "ended"
