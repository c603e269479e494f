"""Cancelled, at any moment, in three ways: the store stays usable and nothing leaks."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.processes import run_script
from tests.reliability import children
from tests.reliability.harness import (
    MB,
    Account,
    account,
    children_of,
    directory_of,
    fds,
    settled,
)
from tests.support import start_store, turn, until

import torchstore_core as ts

LARGE = 6 * MB
ROUNDS = 40

Begin = Callable[..., Awaitable[Any]]
Way = Callable[[Begin, float], Awaitable[Any]]


async def pause(seconds: float) -> None:
    """A sleep that is exact: an event loop's own timers tick in milliseconds."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        await turn()


async def cancel(begin: Begin, seconds: float) -> Any:
    """``task.cancel()`` after so many seconds; None if it hit."""
    task = asyncio.ensure_future(begin())
    await turn()
    await pause(seconds)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        return await task


async def leave(begin: Begin, seconds: float) -> Any:
    """``asyncio.timeout``."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            return await begin()


async def give_up(begin: Begin, seconds: float) -> Any:
    """The operation's own ``timeout=``."""
    with contextlib.suppress(ts.StoreTimeoutError):
        return await begin(timeout=seconds)


WAYS = [cancel, leave, give_up]


@pytest.fixture(autouse=True, scope="module")
def _of_the_module() -> Iterator[None]:
    """One store for all tests: each must leave it as it was."""
    asyncio.run(start_store(capacity=8 * LARGE))
    try:
        yield
    finally:
        asyncio.run(ts.shutdown())


@pytest.fixture(autouse=True)
async def _store(_of_the_module: None) -> AsyncIterator[None]:
    """The store is empty, and a call waits all the time: without one, a small call is answered
    before anybody can cancel it.
    """
    await settled(Account(1, 0), 20)  # of the test before, if something is left
    before = await status_of("Wait")
    other = asyncio.ensure_future(ts.wait("bystander", timeout=300))
    await until(lambda: _another_wait(before))
    yield
    assert not other.done()
    ref = await ts.put("bystander", 0)
    assert await other == {"bystander": ref}
    await ts.delete_batch(await ts.keys())


async def _another_wait(before: int) -> bool:
    return await status_of("Wait") > before


async def status_of(operation: str) -> int:
    return (await ts.status()).operations.get(operation, 0)


def full_of(number: int, nbytes: int = LARGE) -> torch.Tensor:
    return torch.full((nbytes,), number, dtype=torch.uint8)


async def moments(way: Way, begin: Begin) -> AsyncIterator[Any]:
    """Interrupt an operation at many moments of its life; what it returned, None if it was hit."""
    chance = random.Random(1)
    took = 1.0
    for _ in range(3):
        begun = time.perf_counter()
        ended = await begin()
        took = min(took, time.perf_counter() - begun)
        yield ended
    hit = 0
    for _ in range(ROUNDS):
        ended = await way(begin, chance.uniform(0, took))
        hit += ended is None
        took *= 1.25 if ended is None else 0.8  # it may be far faster than when it was measured
        yield ended
    # The operation's own timeout need not be exact to the microsecond.
    assert hit > ROUNDS // 10 or (way is give_up and took < 0.01), "too late to mean anything"
    yield await begin()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("nbytes", [64, LARGE], ids=["small", "large"])
async def test_put(way: Way, nbytes: int):
    numbers = 0
    current = 0

    async def put(**how: float) -> ts.ObjectRef:
        nonlocal numbers
        numbers += 1
        return await ts.put("a", tensor.fill_(numbers), **how)

    tensor = full_of(0, nbytes)
    mine = full_of(0, nbytes)
    async for ended in moments(way, put):
        number = children.uniform(await ts.get("a", mine))
        assert number in ((current, numbers) if ended is None else (numbers,))
        current = number
    await settled(Account(1, nbytes))


@pytest.mark.parametrize("way", WAYS)
async def test_put_batch(way: Way):
    numbers = 0

    async def put(**how: float) -> dict[str, ts.ObjectRef]:
        nonlocal numbers
        numbers += 1
        value = large.fill_(numbers)
        return await ts.put_batch({"a": value, "b": value[:64], "c": numbers}, **how)

    large = full_of(0)
    async for ended in moments(way, put):
        got = await ts.get_batch(["a", "b", "c"])
        assert children.uniform(got["a"]) == children.uniform(got["b"]) == got["c"]
        assert ended is None or got["c"] == numbers
        del got
    await settled(Account(1, LARGE + 64 + 64))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layout", ["contiguous", "strided"])
async def test_get_in_place(way: Way, layout: str):
    """What was interrupted does not write any more."""
    nbytes = LARGE if layout == "contiguous" else LARGE // 4
    whole = full_of(0, 2 * nbytes).view(-1, 4)
    mine = whole[:, 1:3] if layout == "strided" else whole.view(-1, 2)[: nbytes // 2]
    await ts.put("a", full_of(1, nbytes).view(-1, 2))

    async def get(**how: float) -> torch.Tensor:
        mine.zero_()
        return await ts.get("a", mine, **how)

    async for ended in moments(way, get):
        if ended is None:
            seen = mine.clone()
            await ts.put("b", seen)
            assert torch.equal(mine, seen)
        else:
            assert ended is mine
            assert children.uniform(mine) == 1
    if layout == "strided":
        assert children.uniform(whole[:, ::3]) == 0
    await settled(Account(1, 2 * nbytes))


@pytest.mark.parametrize("way", WAYS)
async def test_get_zero_copy(way: Way):
    items = {str(i): full_of(i, MB) for i in range(8)}
    await ts.put_batch({**items, "object": bytes(10 * MB)})
    used = (await account()).used

    async def get(**how: float) -> dict[str, Any]:
        return await ts.get_batch([*items, "object"], **how)

    async for got in moments(way, get):
        if got is not None:
            assert [children.uniform(got[key]) for key in items] == list(range(8))
            assert got["object"] == bytes(10 * MB)
        del got
    await settled(Account(1, used))
    assert await ts.delete_batch([*items, "object"]) == 9
    await settled(Account(1, 0))


@pytest.mark.parametrize("way", WAYS)
async def test_get_of_small_values(way: Way):
    items = {str(i): full_of(i, 64) for i in range(8)}
    await ts.put_batch(items)

    async def get(**how: float) -> dict[str, Any]:
        return await ts.get_batch(list(items), **how)

    async for got in moments(way, get):
        if got is not None:
            assert [children.uniform(got[key]) for key in items] == list(range(8))
    await settled(Account(1, 8 * 64))


@pytest.mark.parametrize("way", WAYS)
async def test_wait(way: Way):
    before = await status_of("Wait") - await status_of("Cancel")
    with contextlib.suppress(TimeoutError):
        await ts.wait("never", timeout=0.01)
    for seconds in [0.0, 1e-5, 1e-4, 1e-3] * 50:
        assert await way(lambda **how: ts.wait(["never", "later"], **how), seconds) is None
    # The server has forgotten them all but the bystander.
    operations = (await ts.status()).operations
    assert operations["Wait"] > 50
    assert operations["Wait"] - operations["Cancel"] <= before
    waiting = asyncio.ensure_future(ts.wait(["never", "later"], timeout=10))
    await ts.put_batch({"never": 1, "later": 2})
    assert set(await waiting) == {"never", "later"}


@pytest.mark.parametrize("way", WAYS)
async def test_small_calls(way: Way):
    await ts.put("a", 1)
    chance = random.Random(2)
    calls: list[Begin] = [
        lambda **how: ts.exists("a", **how),
        lambda **how: ts.keys(**how),
        lambda **how: ts.stat("a", **how),
        lambda **how: ts.get("a", **how),
        lambda **how: ts.status(**how),
        lambda **how: ts.delete_batch(["b"], **how),
    ]
    for _ in range(200):
        await way(chance.choice(calls), chance.uniform(0, 3e-4))
    # Late answers go to nobody: these get their own.
    assert await asyncio.gather(ts.get("a"), ts.keys(), ts.exists("b")) == [1, ["a"], False]
    await settled(Account(1, 1))


async def test_many_at_once():
    """Cancelled in the middle of a crowd; the others are not disturbed."""
    value = full_of(5, MB)
    await ts.put("a", value)
    for number in range(10):
        crowd = [
            asyncio.ensure_future(call)
            for i in range(10)
            for call in (ts.put(f"{i}", value), ts.get("a", torch.empty_like(value)), ts.get("a"))
        ]
        await asyncio.sleep(number * 5e-4)
        for task in crowd[::3]:
            task.cancel()
        ends = await asyncio.gather(*crowd, return_exceptions=True)
        assert not [e for e in ends if isinstance(e, Exception)]
        assert all(
            children.uniform(end) == 5 for i, end in enumerate(ends) if i % 3 and end is not None
        )
        del ends
        crowd.clear()
    await ts.delete_batch(await ts.keys())
    await settled(Account(1, 0))


@pytest.mark.parametrize("way", WAYS)
async def test_connecting(way: Way):
    address = await ts.address()
    await ts.put("a", full_of(1, MB))
    chance = random.Random(3)
    begun = time.perf_counter()
    await ts.connect(address, store_name="other")
    took = time.perf_counter() - begun
    await ts.shutdown("other")
    await settled(Account(1, MB))
    before = fds(), threading.active_count()

    async def connect(**how: float) -> ts.Client:
        return await ts.connect(address, store_name="other", **how)

    joined = 0
    for i in range(40):
        joined += await way(connect, chance.uniform(0, took) if i % 4 else 1e-9) is not None
        await ts.shutdown("other")
    # Joining may be over before a timeout of microseconds is looked at.
    assert joined < 40 or way is give_up

    async def as_before() -> bool:
        return fds() <= before[0] and threading.active_count() <= before[1]

    await settled(Account(1, MB))
    await until(as_before)
    assert children.uniform(await ts.get("a")) == 1


@pytest.mark.parametrize("way", WAYS)
async def test_starting(way: Way, monkeypatch: pytest.MonkeyPatch):
    chance = random.Random(4)
    before = children_of(os.getpid())

    async def initialize(**how: float) -> ts.Client:
        return await ts.initialize(store_name="other", capacity=MB, prefault=0, **how)

    with tempfile.TemporaryDirectory() as runtime:
        monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
        begun = time.perf_counter()
        client = await initialize()
        took = time.perf_counter() - begun
        directories = directory_of(client.address).parent
        assert directories == Path(runtime, "torchstore")
        await ts.shutdown("other")
        for _ in range(8):
            if await way(initialize, chance.uniform(0, took)) is not None:
                await ts.shutdown("other")
            await until(lambda: children_of(os.getpid()) <= before)
        await until(lambda: not os.listdir(directories))
        await initialize()
        await ts.shutdown("other")


async def test_shutting_down():
    before = children_of(os.getpid())
    for seconds in (1e-5, 0.001, 0.01):
        client = await ts.initialize(store_name="other", capacity=MB, prefault=0)
        await cancel(lambda: ts.shutdown("other"), seconds)
        await until(lambda: children_of(os.getpid()) <= before)
        directory = directory_of(client.address)
        await until(lambda: not directory.exists())  # noqa: B023
        with pytest.raises(ts.StoreClosedError):
            await client.keys()


async def test_ctrl_c_in_the_middle_of_a_reply_is_no_error_of_the_event_loop() -> None:
    """asyncio.run cancels the main task in the handler, whatever line is running."""
    out = await run_script("""
    import signal, sys, threading
    import torchstore_core.blocking as blocking

    def put_when_waited_for():
        while not blocking.status().operations.get("Wait"):
            pass
        blocking.put("k", 1)

    def trace(frame, event, argument):
        if frame.f_code.co_name == "_assembled":
            sys.settrace(None)
            print("interrupted in", asyncio.current_task())
            signal.raise_signal(signal.SIGINT)

    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda loop, context: print(context))
    await ts.initialize(capacity=64 << 20, prefault=0)
    thread = threading.Thread(target=put_when_waited_for)
    loop.call_soon(thread.start)
    loop.call_soon(sys.settrace, trace)
    try:
        await ts.wait("k")
    except asyncio.CancelledError:
        asyncio.current_task().uncancel()
    thread.join()
    print(await ts.get("k"))
    await ts.shutdown()
    """)
    assert out == "interrupted in None\n1\n"
