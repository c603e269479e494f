"""``kill -9`` of a server without a keeper: every call ends at once with a typed error, and nothing
is left.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from tests.processes import run_script
from tests.reliability import children
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
from tests.support import halt, named_memory, running_store, until

import torchstore_core as ts
from torchstore_core.machine.processes import stat_fields
from torchstore_core.testing.timers import within

# Far less than any time-out here, however busy the machine is.
AT_ONCE_S = 5.0
SAYS = (
    r"the server of store 'torchstore' .*is gone, and what it had is lost.*by themselves "
    r"when it is started again at that address; `await connect_or_initialize\(\)` starts a new one"
)

CALLS: dict[str, Callable[[], Awaitable[Any]]] = {
    "put inline": lambda: ts.put("a", 1),
    "put": lambda: ts.put("a", torch.zeros(MB)),
    "put_batch": lambda: ts.put_batch({"a": 1, "b": torch.zeros(MB)}),
    "get": lambda: ts.get("large"),
    "get in place": lambda: ts.get("large", torch.empty(MB)),
    "get_batch": lambda: ts.get_batch(["small", "large"]),
    "wait": lambda: ts.wait("never"),
    "wait for ever": lambda: ts.wait(["small", "large"], min_version=9),
    "exists": lambda: ts.exists("small"),
    "keys": lambda: ts.keys(),
    "delete": lambda: ts.delete("small"),
    "delete_batch": lambda: ts.delete_batch(["small"]),
    "stat": lambda: ts.stat("small"),
    "status": lambda: ts.status(),
}


@pytest.mark.parametrize("name", ["keys", "wait", "put"])
async def test_a_call_that_finds_the_server_gone_is_all_that_fails(name: str):
    """Before the event loop has seen the end: nothing else is left for it to report."""
    reported: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: reported.append(context))
    async with running_store(keeper=False):
        await ts.put("small", 1)
        pid = (await ts.status()).controller_pid
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # no turn of the loop in between
        with pytest.raises(ts.StoreClosedError, match=SAYS):
            await CALLS[name]()
        gc.collect()
        assert reported == []


async def test_a_program_is_not_ended_by_sigpipe():
    """Those that write into pipes bring back what it does by default."""
    await run_script("""
    import contextlib, signal, socket
    from torchstore_core.clients.session.channel import Channel
    from torchstore_core.wire import messages as m
    from torchstore_snapshot.background import messages
    from torchstore_transports.tcp.wire.connection import Connection

    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    ours, theirs = socket.socketpair()
    channel = Channel(ours.dup(), asyncio.get_running_loop(), "gone")
    theirs.close()
    for send in (
        lambda: channel.send(m.Cancel(1)),
        lambda: messages.send(ours, messages.Finish(1)),
    ):
        with contextlib.suppress(ts.StoreClosedError, BrokenPipeError):
            send()
            raise AssertionError
    with socket.create_server(("127.0.0.1", 0)) as server:
        connection = Connection(socket.create_connection(server.getsockname()))
        server.accept()[0].close()
    with contextlib.suppress(ConnectionError):
        while True:
            connection.send([memoryview(b"head")])
    """)


@pytest.mark.quick
async def test_every_call_that_waits_fails_at_once():
    async with running_store(keeper=False) as client:
        await ts.put_batch({"small": 1, "large": torch.ones(MB)})
        held = await ts.get("large")
        pid = (await ts.status()).controller_pid
        with Child(children.wait_for_ever, client.address) as other:
            assert await other.said() == "begins"
            await halt(pid)  # so that nothing is answered any more
            calls = {name: asyncio.ensure_future(call()) for name, call in CALLS.items()}
            done, _ = await asyncio.wait(calls.values(), timeout=0.1)
            assert not done
            async with within(AT_ONCE_S):
                kill(pid)
                await asyncio.wait(calls.values())
                assert await other.said() == ["StoreClosedError"] * 2
            ends = {name: type(call.exception()) for name, call in calls.items()}
            assert ends == dict.fromkeys(CALLS, ts.StoreClosedError)
            for call in calls.values():
                assert re.search(SAYS, str(call.exception()))
        for again in CALLS.values():
            with pytest.raises(ts.StoreClosedError, match=SAYS):
                await again()
        assert bool((held == 1).all())


@pytest.mark.parametrize("seconds", [0.0, 0.1, 0.3])
async def test_a_put_in_the_middle_of_copying_fails_at_once(seconds: float):
    async with running_store(capacity=512 * MB, keeper=False):
        pid = (await ts.status()).controller_pid
        # Transposed bytes take long to copy.
        value = torch.ones(16384, 16384, dtype=torch.uint8).t()

        async def copying() -> bool:
            return (await account()).unfinished > 0

        put = await under_way(lambda: ts.put("a", value), copying, seconds)
        async with within(AT_ONCE_S):
            kill(pid)
            with pytest.raises(ts.StoreClosedError):
                await put


async def test_nothing_is_left_of_a_killed_server():
    before = children_of(os.getpid())
    client = await ts.initialize(capacity=64 * MB, prefault=16 * MB, keeper=False)
    directory = directory_of(client.address)
    await ts.put("a", torch.arange(MB))
    held = await ts.get("a")
    pids = children_of(os.getpid()) - before
    assert pids == {(await ts.status()).controller_pid}
    assert directory.is_dir()
    assert not named_memory({*pids, os.getpid()})
    kill(pids.pop())
    await ts.shutdown()
    assert children_of(os.getpid()) <= before
    assert not directory.exists()
    assert "TORCHSTORE_ADDRESS" not in os.environ
    with pytest.raises(ts.StoreClosedError):
        await ts.get("a")
    assert torch.equal(held, torch.arange(MB))
    held += 1
    async with running_store():  # and the next one starts as if nothing had been
        await ts.put("b", held)
        assert torch.equal(await ts.get("b"), held)


@pytest.mark.parametrize("way", ["alone", "forked", "thread", "stopped keeper"])
async def test_the_server_ends_when_its_owner_is_killed(way: str):
    with Child(children.own, way) as owner:
        server, address, forked = await owner.said()
        try:
            owner.tell("still there?")
            assert await owner.said() == [0, 1, 2, 3, 4]
            assert is_running(server)
            if way == "stopped keeper":
                await halt(int(stat_fields(server)[1]))
            owner.kill()
            await until(lambda: not is_running(server), AT_ONCE_S)
            assert all(is_running(pid) for pid in forked)
        finally:
            for pid in forked:
                kill(pid)
    assert not directory_of(address).exists()


async def test_the_next_server_tidies_up_what_nobody_else_could():
    with Child(children.own, "without a keeper") as owner:
        server, address, _ = await owner.said()
        directory = directory_of(address)
        await halt(owner.pid)
        kill(server)
        owner.kill()
    await until(lambda: not is_running(server))  # or it would still listen
    async with running_store():
        # A server that starts at this moment may look like that.
        assert directory.exists()
    os.utime(directory / "control.sock", (0, 0))
    async with running_store():
        assert not directory.exists()


async def test_a_server_that_comes_back_at_its_address(tmp_path: Path):
    """A member needs no new connect, and keeps nothing of the servers that are gone."""
    config = msgspec.json.encode({"directory": str(tmp_path), "capacity": 64 * MB, "prefault": 0})
    command = [sys.executable, "-P", "-m", "torchstore_core.server", config.decode()]
    first: tuple[int, int] = (0, 0)
    for number in range(5):
        with subprocess.Popen(command, stdout=subprocess.PIPE) as server:
            try:
                assert server.stdout is not None
                assert await asyncio.to_thread(server.stdout.readline)
                if not number:
                    client = await ts.connect(f"unix:{tmp_path}/control.sock")
                await client.put("a", torch.full((MB,), number))
                assert children.uniform(await client.get("a")) == number
                await until(one_reclaimer)  # those of before have closed what was theirs
                if number == 1:
                    first = (fds(), ours())
                elif number:
                    await until(functools.partial(no_more_than, *first))
            finally:
                server.kill()
        with pytest.raises(ts.StoreClosedError):
            await client.get("a")
    await ts.shutdown()


def no_more_than(descriptors: int, threads: int) -> bool:
    return fds() <= descriptors and ours() <= threads


def ours() -> int:
    """Threads, but for the executor of this event loop, which may start one more at any time."""
    return sum(not thread.name.startswith("asyncio_") for thread in threading.enumerate())


def one_reclaimer() -> bool:
    return [thread.name for thread in threading.enumerate()].count("torchstore-reclaimer") == 1
