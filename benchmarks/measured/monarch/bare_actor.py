"""An actor that does nothing and imports nothing: what a process of a Monarch job costs."""

from __future__ import annotations

from monarch.actor import Actor, concurrent_endpoint


class Bare(Actor):
    """Answers."""

    @concurrent_endpoint
    async def nothing(self) -> int:
        """An answer."""
        return 0
