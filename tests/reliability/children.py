"""What the processes of these tests do. Every function gets its end of a pipe first."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import os
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
from tests.support import until

import torchstore_core as ts


class Failed(NamedTuple):
    """Sent instead of a message when a child fails."""

    text: str


def run(function: Callable[..., Any], pipe: Connection, *args: Any) -> None:
    """Run a (sync or async) function of this module in a fresh process."""
    # OpenMP's threads do not survive a fork; with more than one, torch waits for them for ever.
    torch.set_num_threads(1)
    try:
        made = function(pipe, *args)
        if inspect.iscoroutine(made):
            asyncio.run(made)
    except BaseException:
        pipe.send(Failed(f"{function.__name__} failed:\n{traceback.format_exc()}"))
        raise


async def told(pipe: Connection, timeout: float = 180.0) -> Any:
    """Wait for the test's next message without blocking the event loop."""

    def receive() -> Any:
        if not pipe.poll(timeout):
            raise TimeoutError("the test said nothing")
        return pipe.recv()

    return await asyncio.to_thread(receive)


async def work_for(pipe: Connection) -> None:
    """A worker of a pool: get what it is told to, a key or a reference, until it is told None."""
    while (what := await told(pipe)) is not None:
        try:
            pipe.send(await ts.get(what))
        except ts.TorchStoreError as error:
            pipe.send((error.code, error.message))


# ---- torn reads ---------------------------------------------------------------------------


def uniform(tensor: torch.Tensor) -> int:
    """The one number a tensor is full of."""
    low, high = (int(x) for x in tensor.aminmax())
    assert low == high, f"torn: it holds {low} and {high}"
    return low


async def overwrite(pipe: Connection, address: str, elements: int) -> None:
    """Put one key as fast as possible, until the test says something; version n is full of n."""
    await ts.connect(address)
    tensor = torch.empty(elements, dtype=torch.int32)
    number = 0
    while not pipe.poll():
        number += 1
        ref = await ts.put("w", tensor.fill_(number))
        assert ref.version == number
    pipe.send(number)


async def read_in_place(
    pipe: Connection, address: str, elements: int, seconds: float, least: int
) -> None:
    """Get into one tensor, for so many seconds, and at least so often, half of them something new;
    report how many reads, and how many different versions.
    """
    await ts.connect(address)
    mine = torch.zeros(elements, dtype=torch.int32)
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    last = reads = versions = 0
    await ts.wait("w")
    while loop.time() < end or reads < least or versions < least // 2:
        assert await ts.get("w", mine) is mine
        number = uniform(mine)
        assert number >= last, f"went back from {last} to {number}"
        reads += 1
        versions += number > last
        last = number
    pipe.send((reads, versions))


async def read_zero_copy(
    pipe: Connection, address: str, elements: int, seconds: float, least: int
) -> None:
    """The same with newest versions and exact ones; what is held stays as it was."""
    await ts.connect(address)
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    held: torch.Tensor | None = None
    last = reads = versions = 0
    await ts.wait("w")
    while loop.time() < end or reads < least or versions < least // 2:
        if reads % 2:
            tensor = await ts.get("w")
            number = uniform(tensor)
        else:
            ref = (await ts.wait("w"))["w"]
            try:
                tensor = await ts.get(ref)
            except ts.VersionGoneError:
                continue
            number = uniform(tensor)
            assert number == ref.version
        assert number >= last, f"went back from {last} to {number}"
        if held is not None:
            assert uniform(held) == last, "a tensor changed while it was held"
        held = tensor
        reads += 1
        versions += number > last
        last = number
    pipe.send((reads, versions))


# ---- clients that are killed --------------------------------------------------------------


async def put_once(
    pipe: Connection, address: str, keys: list[str], side: int, fill: int, slow: bool
) -> None:
    """Say when a put of all keys begins, and when it has ended; transposed bytes copy slowly."""
    await ts.connect(address)
    items = {key: torch.full((side, side), fill, dtype=torch.uint8) for key in keys}
    if slow:
        items = {key: tensor.t() for key, tensor in items.items()}
    pipe.send("begins")
    if len(keys) == 1:
        await ts.put(keys[0], items[keys[0]])
    else:
        await ts.put_batch(items)
    pipe.send("ended")
    await told(pipe)


async def hold(pipe: Connection, address: str, keys: list[str]) -> None:
    """Hold zero-copy tensors; for every message, say what they are full of."""
    await ts.connect(address)
    tensors = await ts.get_batch(keys)
    while True:
        pipe.send([uniform(tensors[key]) for key in keys])
        await told(pipe)


async def read_for_ever(pipe: Connection, address: str, key: str) -> None:
    """Get into one tensor, again and again."""
    await ts.connect(address)
    tensor = torch.empty_like(await ts.get(key))
    pipe.send("begins")
    while True:
        await ts.get(key, tensor)


# ---- servers and owners that are killed ---------------------------------------------------


async def wait_for_ever(pipe: Connection, address: str) -> None:
    """Wait for a key that never comes; say how the wait ended, and how the next call does."""
    await ts.connect(address)
    pipe.send("begins")
    ends: list[str] = []
    for _ in range(2):
        try:
            await ts.wait("never", timeout=60)
        except Exception as error:
            ends.append(type(error).__name__)
    pipe.send(ends)


def own(pipe: Connection, way: str) -> None:
    """Start a store and hold it: alone, beside forked children, from a thread that ended, or
    without a keeper, or with one that will be stopped.
    """

    async def start() -> tuple[int, str]:
        keeper = way != "without a keeper"
        await ts.initialize(capacity=8 << 20, prefault=0, keeper=keeper)
        await ts.put("a", torch.arange(5))
        return (await ts.status()).controller_pid, await ts.address()

    started: list[tuple[int, str]] = []
    if way == "thread":
        thread = threading.Thread(target=lambda: started.append(asyncio.run(start())))
        thread.start()
        thread.join()
    else:
        started.append(asyncio.run(start()))
    forked = [_forked_sleeper() for _ in range(2)] if way == "forked" else []
    pipe.send((*started[0], forked))
    while pipe.recv() == "still there?":
        pipe.send(asyncio.run(ts.get("a")).tolist())
    asyncio.run(ts.shutdown())
    pipe.send("shut down")
    pipe.recv()


def _forked_sleeper() -> int:
    pid = os.fork()
    if not pid:
        while True:
            time.sleep(60)
    return pid


# ---- ways to become a process -------------------------------------------------------------


async def add_one(pipe: Connection) -> None:
    """Find the store through the environment alone; put what is there, plus one."""
    tensor = await ts.get("a")
    await ts.put("b", tensor + 1)
    pipe.send(await ts.address())


# ---- forks --------------------------------------------------------------------------------


def inherit(pipe: Connection, held: list[torch.Tensor]) -> None:
    """A forked child with the parent's zero-copy tensors: do what the test says."""
    while True:
        match pipe.recv():
            case "check":
                pipe.send([uniform(tensor) for tensor in held])
            case "write":
                for tensor in held:
                    tensor.zero_()
                pipe.send("written")
            case "own":
                asyncio.run(_own_connection(pipe))
            case "still open?":
                try:
                    asyncio.run(ts.get("a"))
                    pipe.send(True)
                except ts.StoreClosedError:
                    pipe.send(False)
            case "fork":  # the child goes on in place of this process, which stays silent
                pid = os.fork()
                if pid:
                    pipe.send(pid)
                    time.sleep(600)
            case "end":
                return


async def _own_connection(pipe: Connection) -> None:
    tensor = await ts.get("a")
    number = uniform(tensor)
    ref = await ts.put(f"of {os.getpid()}", tensor)
    await ts.get(ref, torch.empty_like(tensor))
    await ts.delete(ref.key)
    pids = sorted(session.pid for session in (await ts.status()).sessions)
    pipe.send((number, pids))


def fork_with_tensors(
    pipe: Connection, address: str | None, nbytes: int, for_child: Connection, half: str = ""
) -> None:
    """Join (or, without address, own) a store, hold a zero-copy tensor, fork; then be idle.

    ``half``: a state dict of which to put one of two parts.
    """

    async def get() -> torch.Tensor:
        if address is None:
            await ts.initialize(capacity=4 * nbytes, prefault=0)
            await ts.put("a", torch.full((nbytes,), 7, dtype=torch.uint8))
        else:
            await ts.connect(address)
        if half:
            await ts.put_state_dict({"part": 1}, half, participants=2, participant=0)
        return await ts.get("a")

    held = asyncio.run(get())
    pid = os.fork()
    if not pid:
        try:
            inherit(for_child, [held])
        finally:
            os._exit(0)
    pipe.send(pid)
    pipe.recv()


# ---- many cycles --------------------------------------------------------------------------


async def cycle(pipe: Connection, address: str, cycles: int) -> None:
    """Put, get and delete; at 20 % and at 100 % tell the test, and wait for its word."""
    await ts.connect(address)
    small = torch.arange(128)  # 1 KB
    medium = torch.arange(12_800)  # 100 KB
    large = torch.zeros(4 << 20, dtype=torch.uint8)
    mine = torch.empty_like(medium)
    for turn in range(cycles):
        # Keys that come and go, and one that stays.
        await ts.put(f"small/{turn}", small)
        await ts.put("stays", small if turn % 2 else medium)
        ref = await ts.put(f"medium/{turn}", medium)
        assert torch.equal(await ts.get(f"small/{turn}"), small)
        assert await ts.get(ref, mine) is mine
        held = await ts.get(ref)
        await ts.delete(f"small/{turn}")
        await ts.delete_batch([f"medium/{turn}", "is not there"])
        assert torch.equal(held, medium)
        if turn % 25 == 0:
            await ts.put("large", large.fill_(turn % 251))
            held = await ts.get("large")
            assert uniform(held) == turn % 251
            await ts.delete("large")
            await ts.put_batch({"object": list(range(2000)), "stays": small})
            await ts.get_batch(["object", "stays"])
            with contextlib.suppress(ts.StoreTimeoutError):
                await ts.wait("never", timeout=0)
            with contextlib.suppress(ts.KeyNotFoundError):
                await ts.get("never")
        del held
        if turn + 1 in (cycles // 5, cycles):
            gc.collect()
            pipe.send(turn + 1)
            await told(pipe)


# ---- memory that is given back ------------------------------------------------------------


async def replace(pipe: Connection, address: str, side: int) -> None:
    """At the test's word, delete ``a`` and put 9s as ``b``, as soon as there is room."""
    await ts.connect(address)
    value = torch.full((side, side), 9, dtype=torch.uint8)
    pipe.send("ready")
    await told(pipe)

    async def fits() -> bool:
        await ts.delete_batch(["a"])  # also what another's put has made it meanwhile
        try:
            await ts.put("b", value)
        except ts.StoreFullError:
            return False
        return True

    await until(fits)
    pipe.send("replaced")
    await told(pipe)
