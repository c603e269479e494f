"""Taking turns across event loops, and calls beside them."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref

import pytest
from tests.support import turn, until

from torchstore_transports.pairs.threads import Turns, in_thread


async def test_one_at_a_time_on_two_loops() -> None:
    turns, inside, most, done = Turns(), 0, 0, 0

    async def work() -> None:
        nonlocal inside, most, done
        for _ in range(50):
            async with turns:
                inside += 1
                most = max(most, inside)
                await turn()
                inside -= 1
                done += 1

    async def some() -> None:
        await asyncio.gather(*(work() for _ in range(4)))

    await asyncio.gather(asyncio.to_thread(asyncio.run, some()), some())
    assert (most, done) == (1, 400)


async def test_one_that_is_cancelled_passes_its_turn_on() -> None:
    turns, order = Turns(), list[int]()

    async def work(number: int) -> None:
        async with turns:
            order.append(number)

    async with turns:
        tasks = [asyncio.ensure_future(work(number)) for number in range(4)]
        await turn()
        tasks[1].cancel()
    tasks[0].cancel()  # it has the turn, and does not know yet
    await asyncio.wait(tasks)
    assert order == [2, 3]
    async with asyncio.timeout(60), turns:
        pass


async def test_a_loop_that_ends_passes_its_turn_on() -> None:
    turns = Turns()

    async def wait() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01), turns:
                pass

    async with turns:
        await asyncio.to_thread(asyncio.run, wait())
    async with asyncio.timeout(60), turns:
        pass


async def test_a_call_that_nobody_waits_for_ends_alone() -> None:
    gate, ended = threading.Event(), threading.Event()

    def call() -> None:
        gate.wait(60)
        ended.set()
        raise ValueError("nobody reads this")

    reported: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    waiting = in_thread(call)
    waiting.cancel()
    gate.set()
    await until(ended.is_set)
    del waiting
    gc.collect()
    await turn()
    assert not reported


async def test_an_error_keeps_nothing_alive() -> None:
    class Held:
        pass

    held = Held()
    known = weakref.ref(held)

    def call(one: Held) -> None:
        raise ValueError(str(one))

    gc.disable()
    try:
        waiting = in_thread(lambda one=held: call(one))  # type: ignore[misc]
        with pytest.raises(ValueError, match="Held"):
            await waiting
        del waiting, held
        await until(lambda: known() is None)
    finally:
        gc.enable()
