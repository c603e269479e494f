"""Many event loops: in threads at once, one after the other, of both kinds, and abandoned."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from tests.reliability import children
from tests.reliability.harness import MB, Account, account, fds, settled
from tests.reliability.loops.kinds import LOOPS, NewLoop, new_uvloop
from tests.support import SMALL, halt, turn, until

import torchstore_core as ts


@pytest.fixture(autouse=True, scope="module")
def _both_kinds_have_run() -> None:
    """The first loop of libuv opens a pipe that the process keeps: not what tests count."""
    run(turn)
    run(turn, new_uvloop)


@pytest.fixture(autouse=True, scope="module")
def _of_the_module() -> Iterator[None]:
    """A store that no event loop of a test has started."""
    asyncio.run(ts.initialize(**SMALL))
    try:
        yield
    finally:
        asyncio.run(ts.shutdown())


@pytest.fixture(autouse=True)
def _store(_of_the_module: None) -> None:
    """The store is as new: of the tests before, nothing is left in it."""

    async def emptied() -> None:
        await ts.delete_batch(await ts.keys())
        await settled(Account(1, 0), 20)  # of the test before, if something is left

    asyncio.run(emptied())


async def channels() -> int:
    """Channels of this process at the server."""
    status = await ts.status()
    return sum(session.lanes for session in status.sessions)


def run(main: Callable[[], object], new_loop: NewLoop = asyncio.new_event_loop) -> object:
    """``asyncio.run``, on a loop of the given kind."""
    with asyncio.Runner(loop_factory=new_loop) as runner:
        return runner.run(main())


# ---- one after the other ------------------------------------------------------------------


@pytest.mark.parametrize("new_loop", LOOPS)
def test_repeated_runs_leave_nothing_behind(new_loop: NewLoop):
    async def use() -> None:
        await ts.put("a", torch.full((MB,), 3, dtype=torch.uint8))
        assert (await ts.get("a"))[-1] == 3
        mine = torch.empty(MB, dtype=torch.uint8)
        assert (await ts.get("a", mine))[-1] == 3

    run(use, new_loop)
    before = run(open_fds, new_loop)
    threads = threading.active_count()
    for _ in range(200):
        run(use, new_loop)

    async def as_before() -> bool:  # but for the last run's channel until its end is noticed
        few = await open_fds() <= before and threading.active_count() <= threads
        return few and await channels() <= 2

    run(lambda: until(as_before, 10), new_loop)
    run(lambda: settled(Account(1, MB)), new_loop)


def test_tensors_outlive_their_loop():
    async def get() -> torch.Tensor:
        await ts.put("a", torch.full((MB,), 3, dtype=torch.uint8))
        return await ts.get("a")

    async def overwrite() -> None:
        for number in range(4, 10):
            await ts.put("a", torch.full((MB,), number, dtype=torch.uint8))

    tensor = asyncio.run(get())
    asyncio.run(overwrite())
    assert children.uniform(tensor) == 3
    assert asyncio.run(account()) == Account(1, 2 * MB, MB)
    del tensor  # no event loop is there to notice
    asyncio.run(settled(Account(1, MB)))


# ---- at once ------------------------------------------------------------------------------


def test_loops_in_threads_at_once():
    kinds = [asyncio.new_event_loop, new_uvloop] * 3
    start = threading.Barrier(len(kinds))
    asyncio.run(ts.put("shared", torch.zeros(MB, dtype=torch.uint8)))

    async def work(number: int) -> int:
        mine = torch.full((MB,), number, dtype=torch.uint8)
        small = torch.full((64,), number, dtype=torch.uint8)
        held: list[torch.Tensor] = []
        for step in range(20):
            await ts.put_batch({f"{number}": mine, f"{number} small": small, f"{number} o": number})
            got = await ts.get_batch([f"{number}", f"{number} small", f"{number} o", "shared"])
            assert children.uniform(got[f"{number}"]) == number
            assert children.uniform(got[f"{number} small"]) == number
            assert got[f"{number} o"] == number
            children.uniform(got["shared"])
            held = [*held[-3:], got[f"{number}"]]
            tensor = torch.empty(MB, dtype=torch.uint8)
            await asyncio.gather(ts.get(f"{number}", tensor), ts.put("shared", mine))
            assert children.uniform(tensor) == number
            await ts.wait("shared", min_version=step)
        assert all(children.uniform(tensor) == number for tensor in held)
        return number

    def one_thread(number: int) -> list[int]:
        start.wait(60)
        # Loops come and go while those of other threads run.
        return [run(lambda: work(number), kinds[number]) for _ in range(3)]  # type: ignore[misc]

    with ThreadPoolExecutor(len(kinds)) as pool:
        results = list(pool.map(one_thread, range(len(kinds))))
    assert results == [[number] * 3 for number in range(len(kinds))]
    gc.collect()

    async def quiet() -> bool:
        seen = await account()
        return seen.sessions == 1 and seen.leased == seen.unfinished == 0 and await channels() <= 2

    asyncio.run(until(quiet, 15))


def test_threads_join_at_once():
    """The first use of a store, by many loops at the same moment, makes one session."""
    asyncio.run(ts.put("a", 1))
    before = asyncio.run(open_fds())
    start = threading.Barrier(8)

    def one_thread() -> object:
        start.wait(60)
        return asyncio.run(ts.get("a"))

    for _ in range(5):
        asyncio.run(ts.reset_client())
        with ThreadPoolExecutor(8) as pool:
            assert [f.result(60) for f in [pool.submit(one_thread) for _ in range(8)]] == [1] * 8

        async def quiet() -> bool:
            return (await account()).sessions == 1 and await open_fds() <= before

        asyncio.run(until(quiet, 15))


async def open_fds() -> int:
    """Open descriptors of this process while a loop with a channel of its own runs."""
    await ts.exists("a")
    return fds()


def test_a_wait_in_one_thread_ends_with_a_put_in_another():
    before = asyncio.run(waits())
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(asyncio.run, ts.wait("later", timeout=20))
        asyncio.run(until(lambda: more_waits(before)))
        ref = asyncio.run(ts.put("later", 1))
        assert waiting.result(60) == {"later": ref}


async def waits() -> int:
    """How many calls of ``wait`` the server has seen."""
    return (await ts.status()).operations.get("Wait", 0)


async def more_waits(before: int) -> bool:
    return await waits() > before


@pytest.mark.parametrize("new_loop", LOOPS)
@pytest.mark.parametrize("reset_before", [False, True])
def test_leaving_in_one_thread_ends_the_calls_of_another(reset_before: bool, new_loop: NewLoop):
    """Also those that are still under way on connections that were dropped before."""

    async def join() -> None:
        await ts.connect(await ts.address(), store_name="guest")

    async def leave() -> None:
        if reset_before:
            await ts.reset_client("guest")
        await ts.shutdown("guest")

    asyncio.run(join())
    before = asyncio.run(waits())
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(
            run, lambda: ts.wait("never", store_name="guest", timeout=20), new_loop
        )
        asyncio.run(until(lambda: more_waits(before)))
        begun = time.monotonic()
        asyncio.run(leave())
        with pytest.raises(ts.StoreClosedError):
            waiting.result(60)
        assert time.monotonic() - begun < 5


def test_resetting_while_others_work():
    """They do not notice, and nothing stays behind."""
    asyncio.run(ts.put("a", torch.full((4 * MB,), 3, dtype=torch.uint8)))
    before = asyncio.run(open_fds())
    over = threading.Event()

    async def work() -> int:
        mine = torch.empty(4 * MB, dtype=torch.uint8)
        done = 0
        while not over.is_set():
            held = await ts.get("a")
            await ts.put(f"{threading.get_ident()}", mine)
            await ts.put(f"{threading.get_ident()} small", done)
            assert await ts.get(f"{threading.get_ident()} small") == done
            await ts.get("a", mine)
            assert children.uniform(held) == children.uniform(mine) == 3
            done += 1
        return done

    with ThreadPoolExecutor(3) as pool:
        working = [pool.submit(asyncio.run, work()) for _ in range(3)]
        try:
            for _ in range(30):
                asyncio.run(ts.reset_client())
                asyncio.run(ts.exists("a"))
        finally:
            over.set()
        assert all(future.result(60) for future in working)
    gc.collect()

    async def quiet() -> bool:
        seen = await account()
        return (seen.sessions, seen.leased, seen.unfinished) == (1, 0, 0) and (
            await open_fds() <= before
        )

    asyncio.run(until(quiet, 15))


async def _published() -> object:
    value = {"w": torch.full((MB,), 3, dtype=torch.uint8)}
    pending = await ts.put_state_dict(value, "d", blocking=False)
    return await pending if isinstance(pending, ts.PendingPut) else pending


CALLS: list[tuple[str, Callable[[], Coroutine[Any, Any, Any]]]] = [
    ("put", lambda: ts.put("b", 1)),
    ("large_put", lambda: ts.put("b", torch.full((MB,), 3, dtype=torch.uint8))),
    ("pending_put", _published),
    ("get", lambda: ts.get("a")),
    ("get_in_place", lambda: ts.get("a", torch.empty(MB, dtype=torch.uint8))),
    ("get_state_dict", lambda: ts.get_state_dict("model")),
    ("exists", lambda: ts.exists("a")),
    ("keys", lambda: ts.keys()),
    ("wait", lambda: ts.wait("a")),
    ("status", lambda: ts.status()),
]


@pytest.mark.parametrize("moment", ["joining", "asking"])
def test_a_call_that_begins_before_a_reset_ends_well(moment: str):
    """It takes the new connections if it has sent nothing yet, else it ends on the old ones."""

    async def main() -> None:
        if moment == "asking":
            await ts.exists("a")
        await halt(server)
        try:
            calls = [asyncio.ensure_future(call()) for _, call in CALLS]
            for _ in range(5):
                await turn()
            await ts.reset_client()
        finally:
            os.kill(server, signal.SIGCONT)
        results = await asyncio.gather(*calls, return_exceptions=True)
        named = zip(CALLS, results, strict=True)
        assert not {name: r for (name, _), r in named if isinstance(r, BaseException)}
        results.clear()  # or zero-copy tensors of the old session would live on
        calls.clear()
        await until(one_session)

    async def one_session() -> bool:
        gc.collect()
        return (await account()).sessions == 1

    asyncio.run(ts.put("a", torch.full((MB,), 3, dtype=torch.uint8)))
    asyncio.run(_state_dict())
    server = asyncio.run(ts.status()).controller_pid
    asyncio.run(main())


async def _state_dict() -> None:
    await ts.put_state_dict({"w": torch.zeros(MB, dtype=torch.uint8)}, "model")


# ---- abandoned ----------------------------------------------------------------------------


LARGE = 48 * MB


@pytest.mark.parametrize("new_loop", LOOPS)
@pytest.mark.parametrize("seconds", [0.0, 0.002, pytest.param(0.01, marks=pytest.mark.soak)])
def test_a_run_that_ends_in_the_middle_of_calls_leaves_nothing_behind(
    new_loop: NewLoop, seconds: float
):
    asyncio.run(ts.put("a", torch.full((LARGE,), 3, dtype=torch.uint8)))
    mine = torch.empty(LARGE, dtype=torch.uint8)

    async def begin() -> None:
        calls = [
            ts.put("a", torch.full((LARGE,), 4, dtype=torch.uint8)),
            ts.put_batch({"b": torch.zeros(LARGE, dtype=torch.uint8), "c": 1}),
            ts.get("a", mine),
            ts.get("a"),
            ts.wait("never"),
        ]
        tasks.extend(asyncio.ensure_future(call) for call in calls)
        await asyncio.sleep(seconds)

    tasks: list[asyncio.Future[object]] = []
    before = asyncio.run(open_fds())
    run(begin, new_loop)
    assert any(task.cancelled() for task in tasks)
    tasks.clear()
    asyncio.run(_as_before(before))


# What a loop strands in the middle of connecting, the collector closes, with a ResourceWarning.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("new_loop", LOOPS)
@pytest.mark.parametrize("seconds", [0.0, 0.002, pytest.param(0.01, marks=pytest.mark.soak)])
def test_a_loop_that_is_closed_in_the_middle_of_calls_leaves_nothing_behind(
    new_loop: NewLoop, seconds: float, caplog: pytest.LogCaptureFixture
):
    """No cancellation: the tasks are destroyed while they are pending."""
    asyncio.run(ts.put("a", torch.full((LARGE,), 3, dtype=torch.uint8)))
    before = asyncio.run(open_fds())

    def begin() -> None:
        loop = new_loop()
        calls = [
            ts.put("a", torch.full((LARGE,), 4, dtype=torch.uint8)),
            ts.put_batch({"b": torch.zeros(LARGE, dtype=torch.uint8), "c": 1}),
            ts.get("a", torch.empty(LARGE, dtype=torch.uint8)),
            ts.get("a"),
            ts.wait("never"),
        ]
        tasks = [loop.create_task(call) for call in calls]  # type: ignore[arg-type]
        loop.run_until_complete(asyncio.sleep(seconds))
        assert not all(task.done() for task in tasks)
        loop.close()

    begin()
    asyncio.run(_as_before(before))
    caplog.clear()


async def _as_before(fds_before: int) -> None:
    """Nothing unfinished, nothing leased, no descriptor more; ``a`` is whole."""

    state: list[object] = []

    async def quiet() -> bool:
        gc.collect()
        seen = await account()
        found = await ts.delete_batch(["b", "c"])
        open_channels, fds = await channels(), await open_fds()
        state[:] = [seen, found, open_channels, fds, fds_before]
        return (
            (seen.sessions, seen.used, seen.leased, seen.unfinished) == (1, LARGE, 0, 0)
            and not found
            and open_channels <= 2
            and fds <= fds_before
        )

    try:
        await until(quiet, 15)
    except AssertionError as error:
        error.add_note(f"last seen: {state}")
        raise
    assert children.uniform(await ts.get("a")) in (3, 4)
    await ts.put("a", torch.zeros(LARGE, dtype=torch.uint8))


async def test_a_reset_after_a_call_has_found_its_lane_is_seen_by_the_call(
    monkeypatch: pytest.MonkeyPatch,
):
    """At the last moment before the call holds its session: it goes on with the next one."""
    client = await ts.client()
    await client.put("k", 1)
    joined = client._joined
    session = joined.session_here()
    assert session is not None
    find = session.channel_here

    def find_and_reset() -> Any:
        channel = find()
        joined.reset()
        return channel

    monkeypatch.setattr(session, "channel_here", find_and_reset)
    assert await client.get("k") == 1
    assert joined.session_here() not in (None, session)
