"""Work that would keep an event loop from others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from torchstore_core.machine.copying import DIRECT_MAX
from torchstore_core.machine.tasks import wait_ended

T = TypeVar("T")


async def in_thread(work: Callable[[], T]) -> T:
    """Run it in a thread. It has ended when this returns or raises, even if cancelled."""
    running = asyncio.ensure_future(asyncio.to_thread(work))
    cancelled = await wait_ended(running)
    done = running.result()
    if cancelled:
        raise asyncio.CancelledError
    return done


async def where_it_fits(nbytes: int, work: Callable[[], T]) -> T:
    """Copy so many bytes: a few on the event loop, because another thread would cost as much; more
    in a thread, which has ended when this returns or raises, even if cancelled.
    """
    return work() if nbytes <= DIRECT_MAX else await in_thread(work)
