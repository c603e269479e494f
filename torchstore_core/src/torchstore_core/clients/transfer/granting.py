"""Asking the server for the memory of a put."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from torchstore_core.clients.calls.clock import Clock
from torchstore_core.clients.session.channel import QUICK_ENTRIES, Channel
from torchstore_core.clients.session.session import Session
from torchstore_core.errors import StoreFullError
from torchstore_core.wire import messages as m

R = TypeVar("R", bound=m.Message)


async def begin_put(
    session: Session,
    channel: Channel,
    put: m.Put | m.PutObject,
    items: int,
    expect: type[R],
    clock: Clock,
) -> R:
    """Send a Put with so many items. Retry once if tensors or references that have just ended in
    this process held the missing space.
    """
    quick = items <= QUICK_ENTRIES
    try:
        return await channel.call(put, expect, clock.left(), quick=quick)
    except StoreFullError as full:
        if not (full.details.get("leased_bytes") or full.details.get("held_bytes")):
            raise
        if not await session.wait_released(channel, clock.left()):
            raise
    again = msgspec.structs.replace(put, id=channel.next_id())
    return await channel.call(again, expect, clock.left())
