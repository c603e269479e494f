"""The test transport ``foreign``: a package that raises whatever its authors did not think of.

It is not offered unless :data:`FAULTY` is set.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from typing import Any

from tests.transports.mailbox import MailboxLink

from torchstore_core.contracts.hooks import hookimpl
from torchstore_core.contracts.transport import (
    Bid,
    Copy,
    LinkContext,
    Mapping,
    Refusal,
    TransportSpec,
    Window,
)
from torchstore_core.errors import KeyNotFoundError, StoreTimeoutError, TransportError
from torchstore_transports.shm.link import ShmLink

#: Environment variable: ``mailbox`` or ``window``, whose links are to fail.
FAULTY = "TORCHSTORE_TEST_FAULTY"


FAULTS: dict[str, Callable[[], BaseException]] = {
    "OSError": lambda: ConnectionResetError(104, "reset by the peer"),
    "KeyError": lambda: KeyError("a descriptor"),
    "TimeoutError": TimeoutError,
    "of the store": lambda: KeyNotFoundError("not for transports"),
    "StoreTimeoutError": lambda: StoreTimeoutError("not the operation's"),
    "CancelledError": asyncio.CancelledError,
    "MemoryError": MemoryError,
    "RecursionError": lambda: RecursionError("maximum recursion depth exceeded"),
    "strange details": lambda: TransportError("no", details={"done": object(), "why": fail}),
}

#: The method that fails, how, and how often it has done so; whether progress has been looked at.
state: dict[str, Any] = {"method": "", "fault": "", "failed": 0, "closed": 0, "looked": False}


def fail(method: str) -> None:
    """Raise what the test wants of that method, if anything."""
    if state["method"] == method:
        state["failed"] += 1
        raise FAULTS[state["fault"]]()


class ForeignLink(MailboxLink):
    """Fails in the middle: half of the copies have been moved."""

    @classmethod
    async def connect(cls, offer: bytes, context: LinkContext) -> Any:
        fail("connect")
        if state["method"] == "connect gives":
            state["failed"] += 1
            return None
        return await super().connect(offer, context)

    async def write(self, copies: Sequence[Copy]) -> None:
        await super().write(copies[: len(copies) // 2])
        fail("write")
        await super().write(copies[len(copies) // 2 :])

    async def read(self, copies: Sequence[Copy]) -> None:
        await super().read(copies[: len(copies) // 2])
        fail("read")
        await super().read(copies[len(copies) // 2 :])

    def progress(self) -> int:
        fail("progress again" if state["looked"] else "progress")
        state["looked"] = True
        return super().progress()

    def close(self) -> None:
        super().close()
        state["closed"] += 1
        fail("close")


class ForeignWindow(ShmLink):
    """Of the optional abilities."""

    def window(self, segment: int) -> Window:
        fail("window")
        return super().window(segment)

    def prepare(self, segment: int, offset: int, nbytes: int, *, fresh: bool) -> None:
        fail("prepare")
        super().prepare(segment, offset, nbytes, fresh=fresh)

    def map(self, segment: int, offset: int, nbytes: int) -> Mapping:
        fail("map")
        return super().map(segment, offset, nbytes)


def _bid(context: LinkContext) -> Bid | Refusal:
    if not context.offered:
        return Refusal("it is not what is tested")
    return Bid(1.0, 1e6, "as good as it gets")


def _probe() -> str | None:
    return None if os.environ.get(FAULTY) else "it is not what is tested"


@hookimpl
def torchstore_transport() -> TransportSpec:
    """See ``torchstore_core.contracts.hooks``."""
    windows = os.environ.get(FAULTY) == "window"
    server = "torchstore_transports.shm.server:ShmServer"
    return TransportSpec(
        "foreign",
        bid=_bid,
        probe=_probe,
        client=f"{__name__}:{'ForeignWindow' if windows else 'ForeignLink'}",
        server=server if windows else "tests.transports.mailbox:MailboxServer",
    )
