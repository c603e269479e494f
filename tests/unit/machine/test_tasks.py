"""Work that must not be left running is waited for, however often the waiter is cancelled."""

from __future__ import annotations

import asyncio

import pytest
from tests.support import turn

from torchstore_core.machine.tasks import wait_ended


async def test_two_cancellations_do_not_end_the_wait() -> None:
    gate = asyncio.Event()
    work = asyncio.ensure_future(gate.wait())
    waiting = asyncio.ensure_future(wait_ended(work))
    for _ in range(3):
        await turn()
        waiting.cancel()
    await turn()
    assert not waiting.done()
    gate.set()
    await waiting
    assert work.done()


async def test_it_waits_no_longer_than_it_is_told() -> None:
    work = asyncio.ensure_future(asyncio.Event().wait())
    await asyncio.wait_for(wait_ended(work, timeout=0.01), 50)
    assert not work.done()
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
