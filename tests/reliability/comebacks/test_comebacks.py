"""A server that is killed comes back, with everything that it had."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import pickle
import random
import signal
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import torch
from tests.reliability.comebacks import loads
from tests.reliability.harness import (
    MB,
    Child,
    account,
    children_of,
    directory_of,
    fds,
    is_running,
    kill,
    under_way,
)
from tests.support import running_store, turn, until

import torchstore_core as ts
from torchstore_core.contracts.strategy import ClientFacts
from torchstore_core.machine import topology
from torchstore_core.testing.timers import within
from torchstore_core.wire import messages as m
from torchstore_core.wire.framing import FrameReader, decode_reply, encode
from torchstore_transports.shm.link import ShmLink

PAUSE_S = 5.0  # on a busy machine; see benchmarks for what it takes


@pytest.fixture
async def store() -> AsyncIterator[ts.Client]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHSTORE_REF_GRACE", "0.5")
        async with running_store(timeout=30) as client:
            yield client


async def server_pid() -> int:
    return (await ts.status()).controller_pid


async def lose_the_server() -> int:
    """Kill it; its pid."""
    pid = await server_pid()
    kill(pid)
    return pid


def keeper_of(server: int) -> int:
    """The parent of a server."""
    return int(Path(f"/proc/{server}/stat").read_text().rpartition(")")[2].split()[1])


async def test_everything_acknowledged_is_there_again(store: ts.Client) -> None:
    small, large = torch.arange(8.0), torch.arange(float(MB))
    await ts.put("small", small)
    await ts.put("small", small + 1)
    await ts.put_batch({"large": large, "object": {"a": [1, 2]}})
    for step in (1, 2, 3):
        entries = {"w": large + step, "b": [small, step]}
        await ts.put_state_dict(entries, "model", keep=2, version=10 * step)
    await ts.put("deleted", 1)
    await ts.delete("deleted")
    mapped = await ts.get("large")
    before, keys = await account(), await ts.keys()
    for _ in range(2):
        pid = await lose_the_server()
        async with within(PAUSE_S):
            assert await ts.keys() == keys
        assert await server_pid() != pid
        assert await account() == before
        assert torch.equal(await ts.get("small"), small + 1)
        assert torch.equal(mapped, large)
        assert torch.equal(await ts.get("large", torch.empty(MB)), large)
        assert await ts.get("object") == {"a": [1, 2]}
        assert await ts.versions("model") == [20, 30]
        got = await ts.get_state_dict("model", version=20)
        assert torch.equal(got["w"], large + 2)
        assert got["b"][1] == 2
        del got
        gc.collect()
        await until(lambda: _equal(before))
    assert (await ts.put("small", small)).version == 3
    assert (await ts.put("deleted", 1)).version == 2
    del mapped
    gc.collect()
    await until(lambda: _leased(0))


async def test_what_is_being_made_in_the_store_stays_whose_it_is(store: ts.Client) -> None:
    """Its memory is given to nobody else, and it is put in it, by a server that knows neither."""
    tensor = (await ts.empty(MB)).fill_(1)
    sealed = (await ts.empty(MB)).fill_(2)
    ref = await ts.put_object(sealed)
    await lose_the_server()
    for fill in range(4):
        await ts.put("other", torch.full((8 * MB,), float(fill)))
    assert (tensor == 1).all()
    assert (sealed == 2).all()
    before = (await account()).used
    await ts.put("t", tensor)
    assert (await account()).used == before, "it was copied"
    tensor.fill_(3)
    await lose_the_server()
    assert (await ts.get("t") == 1).all()
    assert (await ts.get(ref) == 2).all()
    assert (await ts.get("other") == 3).all()
    unput = await ts.empty(MB)
    await lose_the_server()
    del tensor, sealed, ref, unput
    gc.collect()
    await ts.delete_batch(await ts.keys())
    await until(lambda: _equal_used(0))


async def _equal_used(expected: int) -> bool:
    return (await account()).used == expected


async def _equal(expected: Any) -> bool:
    return await account() == expected


async def _leased(nbytes: int) -> bool:
    return (await account()).leased == nbytes


async def test_a_channel_that_is_let_in_too_late_does_not_wait_for_its_own_thread(
    store: ts.Client,
) -> None:
    """The thread that waits for it has to read first that the server has died once more, and to say
    what the client has, before any channel of the session is let in.
    """
    here = topology.probe()
    facts = ClientFacts(here.pid, here.host_id, here.hostname)
    path = store.address.partition(":")[2]

    def connected(hello: m.Hello) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(60)
        sock.connect(path)
        sock.sendall(encode(hello))
        return sock

    def said(sock: socket.socket) -> m.Welcome | None:
        reader = FrameReader(m.MAX_FRAME)
        while data := sock.recv(1 << 16):
            for body in reader.feed(data):
                if isinstance(reply := decode_reply(body), m.Welcome):
                    return reply
        return None

    def both() -> None:
        hello = m.Hello(1, m.PROTOCOL_VERSION, b"", here, facts)
        with connected(hello) as liveness:
            welcome = said(liveness)
            assert welcome is not None
            kill(welcome.server.pid)
            again = said(liveness)
            assert again is not None
            assert (again.id, again.life) == (0, welcome.life + 1)
            channel = msgspec.structs.replace(hello, session=welcome.session, life=welcome.life)
            with connected(channel) as late:
                assert said(late) is None
            with connected(msgspec.structs.replace(channel, life=again.life)) as waits:
                liveness.sendall(encode(m.Resume(again.life, [], [], [], last=True)))
                let_in = said(waits)
                assert let_in is not None
                assert let_in.life == again.life

    await asyncio.to_thread(both)


CALLS: dict[str, Callable[[], Awaitable[Any]]] = {
    "put inline": lambda: ts.put("a", 1),
    "put": lambda: ts.put("a", torch.zeros(MB)),
    "put_batch": lambda: ts.put_batch({"a": 1, "b": torch.zeros(MB)}),
    "put_state_dict": lambda: ts.put_state_dict({"x": torch.zeros(MB), "y": 1}, "sd"),
    "put_object": lambda: ts.put_object([1]),
    "put_object large": lambda: ts.put_object(torch.zeros(MB)),
    "hold": lambda: ts.hold("small"),
    "refs": lambda: ts.refs(),
    "get": lambda: ts.get("large"),
    "get in place": lambda: ts.get("large", torch.empty(MB)),
    "get_batch": lambda: ts.get_batch(["small", "large"]),
    "exists": lambda: ts.exists("small"),
    "keys": lambda: ts.keys(),
    "delete": lambda: ts.delete("small"),
    "delete_batch": lambda: ts.delete_batch(["small"]),
    "stat": lambda: ts.stat("small"),
    "status": lambda: ts.status(),
}


async def test_every_call_goes_on_that_finds_the_server_dead(store: ts.Client) -> None:
    """Those that are sent when it is dead already, and those that it was sent before it died."""
    for stopped in (False, True):
        await ts.put_batch({"small": 1, "large": torch.zeros(MB)})
        for name, call in CALLS.items():
            await ts.put("small", 1)
            pid = await server_pid()
            if stopped:
                os.kill(pid, signal.SIGSTOP)  # it receives the request, and never answers
                task = asyncio.ensure_future(call())
                await turn()
                kill(pid)
                await task
            else:
                kill(pid)
                await call()
            assert await server_pid() != pid, name
    assert (await account()).unfinished == 0


async def test_what_the_kernel_had_no_room_to_answer_is_not_done_twice(store: ts.Client) -> None:
    """The server dies with an answer in its own memory, of a put that its log has no more, because
    that was written anew. The loop that waits for it reads nothing all the time.
    """
    keys = [f"k{n}" for n in range(500)]
    await ts.put("other", bytes(60_000))
    puts = [asyncio.ensure_future(ts.put(key, 1)) for key in keys]
    await turn()

    async def elsewhere() -> int:
        for _ in range(1000):
            await ts.put("other", bytes(60_000))
        done = len(await ts.keys("k"))
        await lose_the_server()
        return done

    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(lambda: asyncio.run(elsewhere())).result()
    assert 0 < done < len(keys)
    assert [ref.version for ref in await asyncio.gather(*puts)] == [1] * len(keys)


async def test_a_wait_is_met_by_a_put_after_the_server_has_come_back(store: ts.Client) -> None:
    waits = [asyncio.ensure_future(ts.wait(f"k{n}", min_version=2)) for n in range(3)]
    await ts.put("k0", 0)
    await lose_the_server()
    for n in range(3):
        await ts.put(f"k{n}", 1)
    for n in range(3):
        await ts.put(f"k{n}", 2)
    assert [next(iter(one.values())).version for one in await asyncio.gather(*waits)] == [2, 2, 2]


async def test_a_put_that_is_being_written_is_finished(store: ts.Client) -> None:
    """Its memory is kept for it, and nobody else is given it."""
    values = [torch.arange(float(4 * MB)) + n for n in range(6)]

    async def put() -> list[ts.ObjectRef]:
        await ts.delete_batch(await ts.keys())
        refs = await asyncio.gather(*(ts.put(f"k{n}", one) for n, one in enumerate(values)))
        return list(refs)

    puts = await under_way(put, _unfinished)
    await lose_the_server()
    assert len({ref.version for ref in await puts}) == 1
    for n, one in enumerate(values):
        assert torch.equal(await ts.get(f"k{n}"), one)


async def _unfinished() -> bool:
    return (await account()).unfinished > 0


async def test_what_dead_processes_held_is_free_again(store: ts.Client) -> None:
    """They die while there is no server that could see it."""
    await ts.put("large", torch.zeros(MB))
    with Child(loads.holding, store.address) as child:
        assert await child.said() == "holds"
        before = await account()
        assert before.leased > 0
        assert before.sessions == 2
        os.kill((pid := await server_pid()), signal.SIGSTOP)
        child.kill()
        kill(pid)
        await until(lambda: _leased(0))
        await until(_alone)


async def test_references_are_held_while_there_is_no_server(store: ts.Client) -> None:
    """By this process, on their way, by one that has not joined the store, by a forked child."""
    value = torch.arange(float(MB))
    mine = await ts.put_object(value)
    passed = await ts.put_object(value + 1)
    await ts.put("k", value + 2)
    old = await ts.hold("k")
    await ts.put("k", value)
    await lose_the_server()
    with Child(loads.referring) as child:
        os.kill((pid := await server_pid()), signal.SIGSTOP)
        child.tell(passed)  # encoded, and read by a server that is dead
        del passed
        gc.collect()
        kill(pid)
        assert await child.said() == "received"
        assert torch.equal(await ts.get(mine), value)
        assert torch.equal(await ts.get(old), value + 2)
        assert await _held() == 3
        await lose_the_server()
        child.tell("fork")
        assert await child.said() == "forked"
        await lose_the_server()
        assert await _held() == 3
        again = pickle.loads(pickle.dumps(mine))
        assert again == mine
        await lose_the_server()
        del mine, again, old
        gc.collect()
        await until(lambda: _holds(1))
        await lose_the_server()
        child.tell("end")
        assert await child.said() == "ended"
        await until(lambda: _holds(0))
    await until(_only_k_is_left)


async def _only_k_is_left() -> bool:
    return (await account()).used == 4 * MB


@pytest.mark.thorough
async def test_what_was_read_and_not_handled_is_read_again(store: ts.Client) -> None:
    """By each life: the first has the connection from its client, the others from the keeper."""
    await ts.put("k", 1)
    ref = await ts.hold("k")
    session = await store._joined.session(10)
    many = 5000
    for lent in range(0, 4 * many, many):
        process = psutil.Process(await server_pid())
        process.suspend()
        lends = [encode(m.Lend(ref._ident, number + 1)) for number in range(lent, lent + many)]
        session.holder.write(bytearray().join(lends))
        used_s = sum(process.cpu_times()[:2])
        process.resume()
        ends = time.monotonic() + 1  # on a fast machine they may be less work than that
        while sum(process.cpu_times()[:2]) < used_s + 0.02 and time.monotonic() < ends:
            await turn()  # it is in the middle of them
        kill(process.pid)
        await until(partial(_holders, lent + many + 1), 10)


async def _holders(number: int) -> bool:
    return sum(len(report.holders) for report in await ts.refs()) == number


async def _held() -> int:
    return len(await ts.refs())


async def _holds(number: int) -> bool:
    return await _held() == number


async def test_memory_that_is_sought_when_the_server_has_just_died(store: ts.Client) -> None:
    """That is no reason to warn, and it is found again: the next life offers it elsewhere."""
    session = await store._joined.session(10)
    (volume,) = session.volumes
    candidate = next(c for c in volume.candidates(MB) if c.spec.name == "shm")
    keeper = (await ts.status()).keeper_pid
    os.kill(keeper, signal.SIGSTOP)  # so that there is none for a while
    try:
        await lose_the_server()
        with pytest.raises(ts.TransportNotReadyError, match="may come back") as caught:
            await ShmLink.connect(volume.info.offers["shm"], volume.context)
        volume.failed(candidate, caught.value)
    finally:
        os.kill(keeper, signal.SIGCONT)
    await ts.put("k", torch.ones(MB))
    assert (await ts.get("k")).sum() == MB
    assert {entry["chosen"] for entry in await store.explain()} == {"shm"}


async def test_a_child_reads_what_it_inherited_when_its_parent_is_gone(store: ts.Client) -> None:
    """The parent's connection, which the child has, too, protects it, whatever dies first."""
    await ts.put("large", torch.full((MB,), 7.0))
    with Child(loads.inheriting, store.address) as child:
        assert await child.said() == "forked"
        await lose_the_server()
        os.kill(child.pid, signal.SIGKILL)
        await child.ended()
        await ts.delete("large")
        for n in range(4):
            await ts.put(f"k{n}", torch.zeros(MB))
        assert (await account()).leased == 4 * MB


async def test_it_ends_with_its_owner_and_leaves_nothing(tmp_path: Path) -> None:
    with Child(loads.owning) as child:
        address, server = await child.said()
        keeper = next(iter(children_of(child.pid)))
        assert children_of(keeper) == {server}
        kill(server)
        await until(lambda: children_of(keeper) not in ({server}, set()), 10)
        child.kill()
        await until(lambda: not is_running(keeper), 10)
        assert not directory_of(address).exists()


@pytest.mark.parametrize("both", [True, False], ids=["both", "the keeper alone"])
async def test_the_end_of_a_keeper_is_a_typed_error(both: bool) -> None:
    """The server ends with it."""
    async with running_store(timeout=30) as store:
        await ts.put("k", torch.zeros(MB))
        mapped = await ts.get("k")
        pid = await server_pid()
        keeper = keeper_of(pid)
        waiting = asyncio.ensure_future(ts.wait("never"))
        await turn()
        if both:
            os.kill(keeper, signal.SIGSTOP)
            kill(pid)
        kill(keeper)
        await until(lambda: not is_running(pid))  # it is killed when the keeper has ended
        says = r"'torchstore' .*is gone, and so is its keeper.*what it had is lost.*`await"
        with pytest.raises(ts.StoreClosedError, match=says):
            await ts.get("k")
        with pytest.raises(ts.StoreClosedError, match=says):
            await waiting
        assert mapped.sum() == 0
        directory = directory_of(store.address)
    assert not directory.exists()


@pytest.mark.soak  # without a server: test_keeper
async def test_a_server_that_dies_at_once_again_and_again_is_given_up(store: ts.Client) -> None:
    keeper = keeper_of(await server_pid())

    async def kill_again() -> None:
        while is_running(keeper):
            with contextlib.suppress(ProcessLookupError):  # it ends while this looks
                for pid in children_of(keeper):
                    kill(pid)
            await asyncio.sleep(0.005)

    await ts.put("k", 1)
    await asyncio.wait_for(kill_again(), 30)
    with pytest.raises(ts.StoreClosedError):
        await ts.get("k")


@pytest.mark.parametrize(
    ("processes", "kills"),
    [
        pytest.param(3, 8, marks=pytest.mark.thorough),
        pytest.param(8, 200, marks=[pytest.mark.soak, pytest.mark.timeout(1200)]),
    ],
)
async def test_mixed_load_while_it_is_killed(
    processes: int, kills: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every put happens once, every get gives what was put last, whoever waits goes on; and in the
    end there is as much memory, and as many descriptors, as if nothing had happened.
    """
    seed = random.randrange(1 << 30)
    print(f"{seed=}")
    chance = random.Random(seed)
    monkeypatch.setenv("TORCHSTORE_REF_GRACE", "0.5")
    async with running_store(capacity=1 << 30, timeout=60) as store:
        with contextlib.ExitStack() as stack:
            loading = [
                stack.enter_context(Child(loads.mixed, store.address, n, seed))
                for n in range(processes)
            ]
            for child in loading:
                assert await child.said() == "ready"
            for _ in range(kills):
                await asyncio.sleep(chance.uniform(0.3, 0.8))  # how long it may work
                await lose_the_server()
                for child in loading:
                    assert not child.has_said(), await child.said()
            for child in loading:
                child.tell("stop")
            counts = [await child.said(180) for child in loading]
            assert all(calls > kills for calls, _ in counts), (seed, counts)
            await until(_idle)  # tensors have just died
            assert await ts.keys("last/") == [f"last/{n}" for n in range(processes)]
            await ts.delete_batch([key for key in await ts.keys() if not key.count("/model/")])
            # References on their way have their grace. Those who had them still live: what the
            # server has not heard of them would end with their sessions.
            await until(_empty)
            assert await _held() == 0
            for child in loading:
                child.tell("end")
        await until(_alone)
        pid = await server_pid()
        await until(lambda: fds(pid) < 40 and fds(keeper_of(pid)) < 15)


async def _idle() -> bool:
    there = await account()
    return there.unfinished == there.leased == 0


async def _empty() -> bool:
    return (await account()).used == 0


async def _alone() -> bool:
    return (await account()).sessions == 1
