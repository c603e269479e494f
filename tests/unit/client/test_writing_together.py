"""Copies on several hosts are written at the same time, and stop together."""

from __future__ import annotations

import asyncio

import pytest
from tests.support import turn

from torchstore_core.errors import TransportError
from torchstore_core.machine.tasks import together


async def test_all_run_at_the_same_time() -> None:
    barrier = asyncio.Barrier(3)

    async def one() -> None:
        await barrier.wait()  # passes only when all three are here

    await asyncio.wait_for(together([one(), one(), one()]), 50)


async def test_when_one_fails_the_others_have_stopped_and_its_error_is_raised() -> None:
    begun, stopped = asyncio.Event(), []

    async def writes() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            await turn()  # a link that needs a moment to stop
            stopped.append(True)

    async def fails() -> None:
        await begun.wait()
        raise TransportError("cable")

    with pytest.raises(TransportError, match="cable"):
        await together([writes(), fails()])
    assert stopped == [True]


async def test_when_the_put_is_cancelled_all_have_stopped() -> None:
    begun, stopped = asyncio.Event(), []

    async def writes() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            stopped.append(True)

    task = asyncio.create_task(together([writes(), writes()]))
    await begun.wait()
    await turn()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert stopped == [True, True]


async def test_a_cancel_is_not_lost_when_one_fails_while_the_others_stop() -> None:
    """A task group says only what failed: the caller would go on."""
    begun = asyncio.Event()

    async def fails_while_it_stops() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            raise TransportError("cable")

    async def stops() -> None:
        await asyncio.Event().wait()

    task = asyncio.create_task(together([fails_while_it_stops(), stops()]))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
