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


@pytest.mark.parametrize("granted", [False, True])
async def test_a_loop_that_stands_still_passes_its_turn_on(granted: bool) -> None:
    """As that of a thread whose blocking call was cancelled."""
    turns, idle = Turns(), asyncio.new_event_loop()
    waits, released = threading.Event(), threading.Event()

    async def wait() -> None:
        async with turns:
            pass

    async def wait_in_vain() -> None:
        waiting = asyncio.ensure_future(wait())
        await turn()
        waits.set()
        if granted:
            released.wait(60)
        waiting.cancel()
        await asyncio.wait([waiting])

    async with turns:
        trying = asyncio.ensure_future(asyncio.to_thread(idle.run_until_complete, wait_in_vain()))
        await asyncio.to_thread(waits.wait, 60)
        if not granted:
            await trying
    released.set()
    await trying
    async with asyncio.timeout(10), turns:
        pass
    idle.close()


async def test_who_is_left_in_a_closed_loop_passes_no_turn_on_later() -> None:
    turns, closed = Turns(), asyncio.new_event_loop()

    async def wait() -> None:
        async with turns:
            pass

    left = wait()

    async def begin() -> None:
        left.send(None)

    async with turns:
        await asyncio.to_thread(closed.run_until_complete, begin())
        closed.close()
    async with asyncio.timeout(60), turns:
        other = asyncio.ensure_future(wait())
        await turn()
        left.close()
        await turn()
        assert not other.done()
    await asyncio.wait_for(other, 60)


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
