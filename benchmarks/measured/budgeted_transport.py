"""The plug-in ``budgeted``: a transport without a window, as that of a network would be, that moves
no more than a fixed number of bytes a second to and from each volume.

The bytes go through shared memory, whose rate is far above the budget; the rest of the time the
link waits. So it is the transport that limits a get, and several volumes read at the same time take
as long as one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from torchstore_core.contracts.hooks import hookimpl
from torchstore_core.contracts.transport import (
    Bid,
    Copy,
    Link,
    LinkContext,
    Refusal,
    TransportSpec,
)
from torchstore_transports.shm.link import ShmLink

NAME = "budgeted"
BYTES_PER_S = 0.2e9


class BudgetedLink(Link):
    """One link to one volume, which has the whole budget of that volume."""

    def __init__(self, link: ShmLink) -> None:
        self._link = link
        self._free_at = 0.0  # when the budget is used up to what was asked for until now

    @classmethod
    async def connect(cls, offer: bytes, context: LinkContext) -> BudgetedLink:
        return cls(await ShmLink.connect(offer, context))

    async def write(self, copies: Sequence[Copy]) -> None:
        await self._link.write(copies)
        await self._spend(copies)

    async def read(self, copies: Sequence[Copy]) -> None:
        await self._link.read(copies)
        await self._spend(copies)

    async def _spend(self, copies: Sequence[Copy]) -> None:
        now = asyncio.get_running_loop().time()
        nbytes = sum(copy.nbytes for copy in copies)
        self._free_at = max(now, self._free_at) + nbytes / BYTES_PER_S
        await asyncio.sleep(self._free_at - now)

    def close(self) -> None:
        self._link.close()


def _bid(context: LinkContext) -> Bid | Refusal:
    if not (context.same_host and context.offered):
        return Refusal("the volume is on another host, or does not offer it")
    return Bid(1e-3, BYTES_PER_S, "a budget of bytes a second, for benchmarks")


@hookimpl
def torchstore_transport() -> TransportSpec:
    """See ``torchstore_core.contracts.hooks``."""
    return TransportSpec(
        NAME,
        bid=_bid,
        client=f"{__name__}:BudgetedLink",
        server="torchstore_transports.shm.server:ShmServer",
    )
