"""References in several processes that fork, are spawned, receive, drop and are killed."""

from __future__ import annotations

import asyncio
import functools
import gc
import multiprocessing
import os
import pickle
import signal
import time
from collections.abc import AsyncIterator
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from tests.processes import fork_server, run_script
from tests.reliability.harness import MB, Child
from tests.support import SMALL, halt, running_store, until, used

import torchstore_core as ts
from torchstore_core.clients.session.held_ref import lending

GRACE_S = 0.6
# For what has to arrive before it is over, however busy the machine is.
LONG_GRACE_S = 3.0
SIZE = 4 * MB


@pytest.fixture(autouse=True)
async def _store(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[None]:
    monkeypatch.setenv("TORCHSTORE_REF_GRACE", str(getattr(request, "param", GRACE_S)))
    async with running_store():
        yield


async def sessions_are(number: int) -> bool:
    return len((await ts.status()).sessions) == number


async def until_used(nbytes: int, timeout: float = 10.0) -> None:
    async def as_expected() -> bool:
        return await used() == nbytes

    try:
        await until(as_expected, timeout)
    except AssertionError:
        raise AssertionError(f"{await used()} are used, not {nbytes}: {await ts.refs()}") from None


async def stays_used(nbytes: int, seconds: float) -> None:
    """Nothing is ever freed early."""
    end = asyncio.get_running_loop().time() + seconds
    while asyncio.get_running_loop().time() < end:
        assert await used() == nbytes
        await asyncio.sleep(0.02)


def value(number: int = 1) -> torch.Tensor:
    return torch.full((SIZE,), number, dtype=torch.uint8)


# ---- what children do ---------------------------------------------------------------------


def keeper(pipe: Connection) -> None:
    """Decodes what comes, and keeps it, without ever joining the store unless it is told to."""
    kept: list[ts.HeldRef] = []
    while True:
        match pipe.recv():
            case bytes() as pickled:
                kept.append(pickle.loads(pickled))
                pipe.send("kept")
            case "read":
                pipe.send([int(asyncio.run(ts.get(ref))[0]) for ref in kept])
            case "send":
                pipe.send(pickle.dumps(kept[-1]))
            case "drop":
                kept.clear()
                gc.collect()
                pipe.send("dropped")
            case "fork":
                if not (pid := os.fork()):
                    signal.pause()
                pipe.send(pid)


async def maker(pipe: Connection, address: str) -> None:
    """Puts an object, sends it, and waits to be killed."""
    await ts.connect(address)
    ref = await ts.put_object(value(7))
    pipe.send(pickle.dumps(ref))
    await asyncio.Event().wait()


async def ask(child: Child, message: Any) -> Any:
    child.tell(message)
    return await child.said()


# ---- tests --------------------------------------------------------------------------------


@pytest.mark.parametrize(("start", "end"), [("fast", "drop"), ("fast", "kill"), ("spawn", "kill")])
async def test_a_receiver_that_never_joined_holds(start: str, end: str):
    with Child(keeper, start=start) as child:
        ref = await ts.put_object(value(3))
        assert await asyncio.wait_for(ask(child, pickle.dumps(ref)), 60) == "kept"
        del ref
        await stays_used(SIZE, 2 * GRACE_S)
        if end == "drop":
            assert await ask(child, "drop") == "dropped"
        else:
            child.kill()
        await until_used(0)


async def test_a_receiver_reads_and_passes_on():
    with Child(keeper) as first, Child(keeper) as second:
        ref = await ts.put_object(value(5))
        await ask(first, pickle.dumps(ref))
        del ref
        assert await ask(first, "read") == [5]
        await ask(second, await ask(first, "send"))
        await ask(first, "drop")
        await stays_used(SIZE, 2 * GRACE_S)
        assert await ask(second, "read") == [5]
        second.kill()
        await until_used(0)


@pytest.mark.parametrize("_store", [LONG_GRACE_S], indirect=True)
async def test_a_reference_in_flight_outlives_its_killed_sender():
    with Child(maker, (await ts.client()).address) as sender:
        pickled = await sender.said()
        sender.kill()
        await until(lambda: sessions_are(1))
        ref = pickle.loads(pickled)
        await stays_used(SIZE, LONG_GRACE_S + 1)
        assert (await ts.get(ref))[0] == 7
        del ref
        await until_used(0)


async def test_a_reference_in_flight_ends_with_the_grace_of_its_killed_sender():
    with Child(maker, (await ts.client()).address) as sender:
        pickled = await sender.said()
        await stays_used(SIZE, 2 * GRACE_S)
        sender.kill()
        await until_used(0)
        late = pickle.loads(pickled)
        with pytest.raises(ts.VersionGoneError, match="had ended before this one arrived"):
            await ts.get(late)


async def test_a_reference_in_a_queue_of_multiprocessing():
    context: Any = fork_server()
    queue = context.Queue()
    try:
        ref: ts.HeldRef | None = await ts.put_object(value(9))
        queue.put(ref)
        ref = None
        await stays_used(SIZE, 2 * GRACE_S)
        received = await asyncio.to_thread(queue.get, timeout=60)
        assert (await ts.get(received))[0] == 9
        del received
        await until_used(0)
    finally:
        queue.close()
        queue.join_thread()


@pytest.mark.parametrize("who", ["parent first", "child first"])
async def test_a_forked_child_holds_what_its_parent_held(who: str):
    """The parent of the fork is a child of this process, whose threads would be in the way."""
    with Child(keeper) as parent:
        ref = await ts.put_object(value(3))
        await ask(parent, pickle.dumps(ref))
        del ref
        child = await ask(parent, "fork")
        await stays_used(SIZE, 2 * GRACE_S)
        if who == "parent first":
            parent.kill()
            await stays_used(SIZE, 2 * GRACE_S)
            os.kill(child, signal.SIGKILL)
        else:
            os.kill(child, signal.SIGKILL)
            await stays_used(SIZE, 2 * GRACE_S)
            parent.kill()
        await until_used(0)


def _forked(kept: list[ts.HeldRef], commands: Connection) -> None:
    """A forked child of a process with a session and threads."""
    while True:
        if commands.recv() == "send":
            commands.send(pickle.dumps(kept[0]))
        else:
            kept.clear()
            gc.collect()
            commands.send("dropped")


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
async def test_a_fork_of_a_process_with_a_session():
    kept = [await ts.put_object(value(1))]
    ours, theirs = multiprocessing.Pipe()
    pid = os.fork()
    if not pid:
        try:
            _forked(kept, theirs)
        finally:
            os._exit(1)
    theirs.close()

    async def tell(message: str) -> Any:
        ours.send(message)
        assert await asyncio.to_thread(ours.poll, 60), "no answer"
        return ours.recv()

    try:
        kept.clear()
        gc.collect()
        await stays_used(SIZE, 2 * GRACE_S)
        received = pickle.loads(await tell("send"))
        assert await tell("drop") == "dropped"
        await stays_used(SIZE, 2 * GRACE_S)  # this process holds it again
        assert (await ts.get(received))[0] == 1
        del received
        await until_used(0)  # and the child lives
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


async def test_a_child_that_ends_at_once_leaves_nothing():
    with Child(keeper) as parent:
        ref = await ts.put_object(value(3))
        await ask(parent, pickle.dumps(ref))
        del ref
        for _ in range(3):
            os.kill(await ask(parent, "fork"), signal.SIGKILL)
        await ask(parent, "drop")
        await until_used(0)
        assert not await ts.refs()


async def test_a_child_that_was_forked_in_the_midst_of_a_put_takes_nothing_back():
    """It has a copy of the value, and of what is to be done if that is not put."""
    ref = await ts.put_object(value(1))
    _, lent = lending(functools.partial(pickle.dumps, ref))
    assert lent is not None
    if not (pid := os.fork()):
        lent.take_back()
        os._exit(0)
    await asyncio.to_thread(os.waitpid, pid, 0)

    async def only_here_are_holders() -> list[str]:
        states = sorted(one.state for report in await ts.refs() for one in report.holders)
        return states if states.count("held") == 1 else []

    assert await until(only_here_are_holders) == ["held", "in flight"]
    lent.take_back()
    del ref
    await until_used(0)


async def test_a_cancelled_put_object_holds_nothing():
    for delay in (0, 0.0005, 0.001, 0.002, 0.004):
        put = asyncio.create_task(ts.put_object(value(1)))
        await asyncio.sleep(delay)
        put.cancel()
        await asyncio.wait([put])  # it may have been faster
        del put
    gc.collect()
    await until_used(0)


@pytest.mark.parametrize("how", ["hold", "put_object"])
async def test_an_error_that_is_kept_keeps_nothing(how: str):
    """What an operation has begun to hold ends with it, not with the frames of its error."""
    await ts.put("w", value(1))
    server = (await ts.status()).controller_pid
    await halt(server)
    try:
        # The object is small: it is put as soon as the server reads the request.
        call = ts.hold("w", timeout=0.2) if how == "hold" else ts.put_object(1, timeout=0.2)
        with pytest.raises(ts.StoreTimeoutError) as kept:
            await call
    finally:
        os.kill(server, signal.SIGCONT)
    await ts.delete("w")
    await until_used(0)
    assert not await ts.refs()
    assert kept.value.details["operation"] == how


async def test_references_survive_a_reset_of_the_client():
    ref = await ts.put_object(value(4))
    await ts.reset_client()
    assert (await ts.get(ref))[0] == 4
    passed_on = pickle.loads(pickle.dumps(ref))
    del ref
    await stays_used(SIZE, 2 * GRACE_S)
    assert (await ts.get(passed_on))[0] == 4
    del passed_on
    await until_used(0)


async def test_a_stopped_server_does_not_stop_who_encodes_references():
    """What it could not be told is told when it goes on."""
    ref = await ts.put_object(value(2))
    server = (await ts.status()).controller_pid
    await halt(server)
    try:
        begun = time.monotonic()
        encoded = [pickle.dumps(ref) for _ in range(5000)]
        assert time.monotonic() - begun < 20
    finally:
        os.kill(server, signal.SIGCONT)
    received = pickle.loads(encoded[-1])
    del ref
    await stays_used(SIZE, 2 * GRACE_S)
    assert (await ts.get(received))[0] == 2
    assert await ts.free([received]) == 1
    await until_used(0)


async def test_references_to_a_store_that_was_started_again_are_gone():
    ref = await ts.put_object(value(2))
    encoded = pickle.dumps(ref)
    status = await ts.status()
    for pid in (status.keeper_pid, status.controller_pid):
        os.kill(pid, signal.SIGKILL)
    await until(lambda: _is_gone(ref))
    await ts.initialize(**SMALL)
    await ts.put("w", 1)
    for late in (ref, pickle.loads(encoded)):
        with pytest.raises(ts.VersionGoneError, match="without the memory of an earlier one"):
            await ts.get(late)


async def _is_gone(ref: ts.HeldRef) -> bool:
    try:
        await ts.get(ref)
    except ts.StoreClosedError:
        return True
    return False


async def test_equal_references_that_arrive_before_their_store_are_each_held(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On another host, they wait until their process has joined the store."""
    ref = await ts.put_object("value")
    monkeypatch.setenv("TORCHSTORE_HOST_ID", "another host")
    said = await run_script(
        f"""
        import os, pickle
        refs = [pickle.loads({pickle.dumps(ref)!r}) for _ in range(3)]
        refs.pop().release()
        await ts.connect({(await ts.address())!r})
        (report,) = await ts.refs()
        print([one.pid for one in report.holders].count(os.getpid()))
        """
    )
    assert said == "2\n"
