"""Event loops that nobody closes, as threads leave them: what goes with them, and when."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
import torch
from tests.processes import run_script
from tests.reliability.loops.kinds import LOOPS, NewLoop
from tests.support import SMALL, halt, loops_and_sockets, turn, until

import torchstore_core as ts

Loops = list[weakref.ref[asyncio.AbstractEventLoop]]

# The loops' own, from the collector: that they, and the pipe inside, were not closed. Nothing of
# ours, which is connected to a socket that has a name.
pytestmark = [
    pytest.mark.filterwarnings("ignore:unclosed event loop:ResourceWarning"),
    pytest.mark.filterwarnings(
        r"ignore:unclosed <socket.socket fd=\d+, family=1, type=1, proto=0>:ResourceWarning"
    ),
    pytest.mark.filterwarnings(
        "ignore:Exception ignored in. <function BaseEventLoop"
        ":pytest.PytestUnraisableExceptionWarning"
    ),
    pytest.mark.filterwarnings("ignore:unclosed resource <UVPoll:ResourceWarning"),
]


@pytest.fixture(autouse=True, scope="module")
def _store() -> Iterator[None]:
    asyncio.run(ts.initialize(**SMALL))
    try:
        yield
    finally:
        asyncio.run(ts.shutdown())


async def channels() -> int:
    """Channels of this process at the server."""
    return sum(session.lanes for session in (await ts.status()).sessions)


def in_thread(work: Callable[[], None]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()


# The numbers are what a process may have open: 100 loops have 3 descriptors each, and one is ours.
_MANY = """
import gc, os, resource, threading, warnings

resource.setrlimit(resource.RLIMIT_NOFILE, (150, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
warnings.simplefilter("error")
warnings.filterwarnings("ignore", "unclosed event loop", ResourceWarning)
import torchstore_core.blocking as bts
from tests.support import until

os.environ.pop("TORCHSTORE_ADDRESS", None)  # of the store of this module: there is a warning of it

def sockets():
    found = 0
    for fd in os.listdir("/proc/self/fd"):
        try:
            found += os.readlink(f"/proc/self/fd/{fd}").startswith("socket:")
        except OSError:
            pass
    return found

def unclosed():
    asyncio.new_event_loop().run_until_complete(ts.put("a", 1))

def blocking():
    bts.put("a", 1)

async def nothing_is_left():
    gc.collect()
    lanes = sum(session.lanes for session in (await ts.status()).sessions)
    return lanes == 1 and sockets() <= before

failed = []
def unraisable(args):
    if "control.sock" in f"{args.exc_value!r} {args.object!r}":  # else it is in a loop
        failed.append(repr(args.exc_value))

sys.unraisablehook = unraisable
threading.excepthook = lambda args: failed.append(repr(args.exc_value))
await ts.initialize(capacity=64 << 20, prefault=0)
await ts.put("a", 1)
gc.collect()
before = sockets()
for work in (unclosed, blocking):
    for number in range(100):
        thread = threading.Thread(target=work)
        thread.start()
        await asyncio.to_thread(thread.join)
        if number % 30 == 29:
            gc.collect()
    await until(nothing_is_left, 100)
print("failed:", failed[:3])
await ts.shutdown()
"""


async def test_a_hundred_unclosed_loops_do_not_use_up_the_descriptors():
    assert await run_script(fresh=True, body=_MANY) == "failed: []\n"


# ---- one, in every state ------------------------------------------------------------------


async def _nothing(loops: Loops) -> None:
    await ts.put("a", 1)


async def _a_wait(loops: Loops) -> None:
    _begin(ts.wait("never"))
    await turn()


async def _a_large_put(loops: Loops) -> None:
    _begin(ts.put("large", torch.zeros(8 << 20, dtype=torch.uint8)))
    await turn()


async def _a_published_put(loops: Loops) -> None:
    await ts.put_state_dict({"w": torch.zeros(8 << 20, dtype=torch.uint8)}, "d", blocking=False)


async def _leases_given_back(loops: Loops) -> None:
    """Waits for the server to have them, which never comes."""
    client = await ts.client()
    await client.exists("a")
    session = client._joined.session_here()
    channel = None if session is None else session.channel_here()
    assert session is not None
    assert channel is not None
    await halt(_server)
    _begin(session.wait_released(channel, None))
    await turn()


_server = 0
_tasks: list[weakref.ref[asyncio.Task[Any]]] = []


def _begin(call: Coroutine[Any, Any, Any]) -> None:
    _tasks.append(weakref.ref(asyncio.get_running_loop().create_task(call)))


@pytest.mark.parametrize("new_loop", LOOPS)
@pytest.mark.parametrize(
    "before",
    [_nothing, _a_wait, _a_large_put, _a_published_put, _leases_given_back],
    ids=lambda before: before.__name__.strip("_"),
)
def test_an_unclosed_loop_goes_with_who_made_it(
    before: Callable[[Loops], Coroutine[Any, Any, None]],
    new_loop: NewLoop,
    caplog: pytest.LogCaptureFixture,
):
    """Whatever is under way on it. Nothing of ours keeps it, and the server sees its end."""
    global _server
    loops: Loops = []

    def work() -> None:
        loop = new_loop()
        loops.append(weakref.ref(loop))
        loop.run_until_complete(before(loops))

    async def quiet() -> bool:
        gc.collect()
        volume = (await ts.status()).volumes[0]
        return await channels() == 1 and volume.unfinished_bytes == 0 and loops[0]() is None

    async def main() -> None:
        await ts.exists("a")
        with contextlib.suppress(ProcessLookupError):
            await asyncio.to_thread(in_thread, work)
            os.kill(_server, signal.SIGCONT)
        await until(quiet, 15)

    _server = asyncio.run(ts.status()).controller_pid
    asyncio.run(main())
    caplog.clear()  # what asyncio and uvloop say of a loop that was not closed


@pytest.mark.parametrize("new_loop", LOOPS)
def test_the_lane_of_a_loop_whose_thread_has_ended_ends(new_loop: NewLoop):
    """Though somebody holds the loop; who runs it again, in another thread, gets a new channel."""
    held: list[asyncio.AbstractEventLoop] = []

    def work() -> None:
        held.append(new_loop())
        held[-1].run_until_complete(ts.put("a", len(held)))

    def again() -> None:
        assert held[0].run_until_complete(ts.get("a")) == 8
        held[0].run_until_complete(ts.put("a", 9))

    for _ in range(8):
        in_thread(work)
    asyncio.run(until(lambda: _at_most(2)))  # what is opened now, and the last one's
    in_thread(again)
    assert asyncio.run(ts.get("a")) == 9
    for loop in held:
        loop.close()


def test_a_loop_that_stands_still_keeps_its_lane():
    """Its thread lives, and will run it again: that is no reason to connect again."""
    loop = asyncio.new_event_loop()
    loop.run_until_complete(ts.put("a", 1))
    before = loop.run_until_complete(_channel())
    in_thread(lambda: asyncio.run(ts.put("a", 2)))
    assert loop.run_until_complete(_channel()) is before
    loop.close()


async def _channel() -> object:
    client = await ts.client()
    await client.exists("a")
    session = client._joined.session_here()
    return None if session is None else session.channel_here()


def test_a_put_that_has_ended_keeps_no_loop():
    """Its handle is kept, as a trainer may that looks at it later."""
    handles: list[Any] = []
    loops: Loops = []

    async def main() -> None:
        value = {"w": torch.zeros(8 << 20, dtype=torch.uint8)}
        handles.append(await ts.put_state_dict(value, "kept", blocking=False))
        await handles[0]

    def work() -> None:
        loop = asyncio.new_event_loop()
        loops.append(weakref.ref(loop))
        loop.run_until_complete(main())

    def gone() -> bool:
        gc.collect()
        return loops[0]() is None

    in_thread(work)
    asyncio.run(until(gone))  # a copy thread has its last job for a moment longer
    assert handles[0].done()
    assert asyncio.run(_awaited(handles[0])) == ts.ObjectRef("kept", 1)


async def _awaited(handle: Any) -> object:
    return await handle


def test_a_commit_is_awaited_on_the_loop_of_another_thread():
    """Which asks before the commit is answered: the loop of the put stands still till then."""
    asking = threading.Event()
    refs: list[object] = []

    async def ask(handle: Any) -> None:
        awaited = asyncio.ensure_future(_awaited(handle))
        await turn()
        asking.set()
        refs.append(await awaited)

    async def main() -> None:
        handle = await ts.put_state_dict({"w": torch.zeros(300_000)}, "far", blocking=False)
        thread = threading.Thread(target=lambda: asyncio.run(ask(handle)))
        thread.start()
        assert asking.wait(60)
        assert not handle.done()
        ref = await handle
        await asyncio.to_thread(thread.join, 30)
        assert refs == [ref]

    asyncio.run(main())


@pytest.mark.parametrize("way", ["closed", "cancelled"])
def test_a_commit_that_its_loop_has_left_behind_is_an_error(way: str):
    """Not the cancellation of whoever awaits it on another loop, which nobody has cancelled. What
    was put is there all the same: a program may end right after its last put.
    """
    loop = asyncio.new_event_loop()
    # So many entries that the reply to their commit is awaited.
    value = {f"w{number}": torch.zeros(30_000) for number in range(100)}
    handles: list[Any] = []

    async def put() -> None:
        handles.append(await ts.put_state_dict(value, way, blocking=False))
        if way == "cancelled":  # before the task that awaits the commit has begun
            sys.exit()

    with contextlib.suppress(SystemExit):
        loop.run_until_complete(put())
    (handle,) = handles
    assert not handle.done()
    if way == "cancelled":
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(turn())
        loop.run_until_complete(turn())
    loop.close()
    said = f"loop of the put ended; .* whether '{way}' has committed"
    with pytest.raises(ts.StoreClosedError, match=said) as caught:
        asyncio.run(_awaited(handle))
    assert caught.value.key == way
    assert asyncio.run(ts.wait(way, timeout=20))


@pytest.mark.parametrize("entries", [1, 64])
def test_threads_that_call_without_await_leave_nothing_behind(entries: int):
    """Also without the collector, and when the reply to a call was awaited on the event loop, as
    for many entries: no descriptor of theirs is left once they have ended.
    """
    import torchstore_core.blocking as blocking

    def work() -> None:
        blocking.put_batch({f"a{number}": number for number in range(entries)})

    asyncio.run(ts.exists("a"))
    in_thread(work)
    gc.collect()
    gc.disable()
    try:
        before = loops_and_sockets()
        for _ in range(20):
            in_thread(work)
        assert loops_and_sockets() <= before  # at once, with their threads
    finally:
        gc.enable()
    asyncio.run(until(lambda: _at_most(2), 10))


async def _at_most(number: int) -> bool:
    return await channels() <= number
