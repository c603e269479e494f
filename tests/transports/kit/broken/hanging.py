"""Halves of which one call never returns: it waits, or it blocks its event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

from tests.transports.kit.broken.simple import Plugin, Simple, SimpleLink, named

from torchstore_core.contracts.transport import (
    Copy,
    Link,
    LinkContext,
    Segment,
    ServerContext,
)

# Set at the end of a test, or nothing would ever end what blocks a thread of it.
go_on = threading.Event()


class Connecting(SimpleLink):
    @classmethod
    async def connect(cls, offer: bytes, context: LinkContext) -> Link:
        await asyncio.Event().wait()
        return await super().connect(offer, context)


class Reading(SimpleLink):
    async def read(self, copies: Sequence[Copy]) -> None:
        await asyncio.shield(self.never())

    async def never(self) -> None:
        await asyncio.Event().wait()


class Writing(SimpleLink):
    async def write(self, copies: Sequence[Copy]) -> None:
        go_on.wait()


class Closing(SimpleLink):
    def close(self) -> None:
        go_on.wait()
        super().close()


class Starting(Simple):
    async def start(self, context: ServerContext, segments: Sequence[Segment]) -> bytes:
        await asyncio.Event().wait()
        return await super().start(context, segments)


class Shaking(Simple):
    async def handshake(self, peer: bytes, request: bytes) -> bytes:
        await asyncio.Event().wait()
        return await super().handshake(peer, request)


class Disconnecting(Simple):
    async def disconnect(self, peer: bytes) -> None:
        await asyncio.Event().wait()


class Blocking(Simple):
    async def start(self, context: ServerContext, segments: Sequence[Segment]) -> bytes:
        go_on.wait()
        return await super().start(context, segments)


def __getattr__(name: str) -> Plugin:
    """``plugin_X``: the plug-in with the half ``X``."""
    return named(name, globals())
