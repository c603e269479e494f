"""Asking the server for the memory of a put, and giving it back."""

from __future__ import annotations

from collections.abc import Collection
from typing import TypeVar

import msgspec

from torchstore_core.clients.calls.clock import Clock
from torchstore_core.clients.session.channel import QUICK_ENTRIES, Channel
from torchstore_core.clients.session.session import Session
from torchstore_core.errors import StoreFullError, TorchStoreError
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


def give_up_put(
    session: Session, channel: Channel, txn: int, unsettled: Collection[tuple[int, str]] = ()
) -> None:
    """Abort a put, see ``messages.Abort``: behind what the channel has sent, or else, if that is
    down, in the background. The server ignores unknown ids, so this is right whether or not it has
    begun the put.
    """
    try:
        channel.send(m.Abort([txn], [*unsettled]))
    except TorchStoreError:
        session.abort(txn, unsettled)
