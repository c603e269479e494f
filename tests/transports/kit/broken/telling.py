"""Client halves with optional abilities, and some that say something wrong about their progress."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, ClassVar

from tests.transports.kit.broken.simple import Plugin, SimpleLink, named

from torchstore_core.contracts.transport import Copy, Memory


class Telling(SimpleLink):
    """Correct: counts the transfers that have ended."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.ended = 0

    async def move(self, copies: Sequence[Copy], *, write: bool) -> None:
        await super().move(copies, write=write)
        self.ended += 1

    def progress(self) -> Any:
        return self.ended


class Able(Telling):
    """Correct: also reaches the memory of devices, and is told whose memory it is."""

    devices: ClassVar[frozenset[str]] = frozenset({"cpu"})

    async def write_from(self, copies: Sequence[Copy], memory: Sequence[Memory]) -> None:
        await self.write(copies)

    async def read_into(self, copies: Sequence[Copy], memory: Sequence[Memory]) -> None:
        await self.read(copies)


class Raising(Telling):
    """Does not know."""

    def progress(self) -> Any:
        raise ValueError("progress")


class Wordy(Telling):
    """Says it in words."""

    def progress(self) -> Any:
        return "much"


class Pausing(Telling):
    """Takes its time."""

    def progress(self) -> Any:
        time.sleep(0.05)
        return super().progress()


class Restless(Telling):
    """Counts how often it is asked, too."""

    def progress(self) -> Any:
        self.ended += 1
        return super().progress()


class Still(Telling):
    """Says that nothing moves."""

    def progress(self) -> Any:
        return 0


def __getattr__(name: str) -> Plugin:
    """``plugin_X``: the plug-in with the half ``X``."""
    return named(name, globals())
