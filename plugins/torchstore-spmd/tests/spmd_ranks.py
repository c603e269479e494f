"""What a rank of ``test_spmd.py`` does: ``spmd_ranks.py ACT``, with the variables of a rank."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

import torchstore_core as ts

SMALL = {"capacity": 32 << 20, "prefault": 0, "timeout": 100.0}
RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
VALUE = torch.arange(300_000.0)


def say(what: str, **facts: object) -> None:
    """A line of JSON for the test, in one write: ranks under torchrun share the pipe."""
    os.write(1, json.dumps({"rank": RANK, "say": what, **facts}).encode() + b"\n")


async def told() -> None:
    """Wait for a line on standard input."""
    await asyncio.to_thread(sys.stdin.readline)


async def until_ranks(are: Callable[[list[int | None]], bool]) -> None:
    """Wait until the ranks with sessions at the store are as wanted."""
    async with asyncio.timeout(100):
        while not are([session.rank for session in (await ts.status()).sessions]):
            await asyncio.sleep(0.01)


async def exchange(store_name: str = "torchstore") -> None:
    """Put a value, and get those of all ranks."""
    await ts.put(f"of {RANK}", VALUE + RANK, store_name=store_name)
    names = [f"of {rank}" for rank in range(WORLD)]
    await ts.wait(names, store_name=store_name)
    for rank, got in enumerate((await ts.get_batch(names, store_name=store_name)).values()):
        assert torch.equal(got, VALUE + rank)


async def server() -> int:
    return (await ts.status()).controller_pid


async def rounds() -> None:
    """Every order of leaving, several stores, with and without a process group."""
    for first in (0, 1, None):
        await ts.initialize_spmd(**SMALL)
        assert await ts.versions("of 0") in ([], [1])  # nothing of an earlier store
        await exchange()
        say("server", pid=await server(), address=await ts.address())
        held = await ts.get("of 1")
        await ts.put(f"ready {RANK}", 1)
        await ts.wait([f"ready {rank}" for rank in range(WORLD)])
        if first == RANK:
            await ts.put("leaving", first)
        elif first is not None:  # the others still use it, when the first has left
            await ts.wait("leaving")
            await ts.get("leaving")
            await until_ranks(lambda ranks, left=first: left not in ranks)
            await exchange()
            assert await ts.get("of 0", torch.empty(300_000)) is not None
        if first == RANK:
            del held
        await ts.shutdown()
        if first != RANK:
            assert torch.equal(held, VALUE + 1)
        await ts.shutdown()
        if first == 0:
            dist.init_process_group("gloo")  # on the same port
        if first == 1:
            dist.barrier()
            dist.destroy_process_group()
    names = ["a", "b"] if RANK == 0 else ["b", "a"]  # in any order, at once
    await asyncio.gather(*(ts.initialize_spmd(store_name=name, **SMALL) for name in names))
    assert await ts.address("a") != await ts.address("b")
    await asyncio.gather(*(exchange(name) for name in names))
    for name in names:
        await ts.shutdown(name)
    say("done", fds=len(os.listdir("/proc/self/fd")))


async def stay() -> None:
    """Join, say who the server is, and use the store whenever told to."""
    await ts.initialize_spmd(**SMALL)
    await exchange()
    say("server", pid=await server(), address=await ts.address())
    await told()
    await ts.put("after", RANK)
    say("still here", value=await ts.get("after"))
    await told()
    await ts.shutdown()
    say("done")


async def keep() -> None:
    """Use a store; all ranks go on when rank 0 kills its server, and killed again
    while they leave it ends with the last of them.
    """
    await ts.initialize_spmd(**SMALL)
    await exchange()
    mapped = await ts.get(f"of {1 - RANK}")
    waiting = asyncio.ensure_future(ts.wait("killed", timeout=60))
    await asyncio.sleep(0)
    pid = await server()
    if RANK == 0:
        os.kill(pid, signal.SIGKILL)
        await ts.put("killed", pid)
    await waiting
    pid = await ts.get("killed")
    again = await server()
    assert again != pid
    assert torch.equal(mapped, VALUE + 1 - RANK)
    assert (await ts.put(f"of {RANK}", VALUE)).version == 2
    await ts.wait(f"of {1 - RANK}", min_version=2)
    assert torch.equal(await ts.get(f"of {1 - RANK}"), VALUE)
    say("server", pid=again, address=await ts.address())
    await ts.put(f"ready {RANK}", 1)
    await ts.wait(["ready 0", "ready 1"])
    if RANK == 0:
        await ts.shutdown()
    else:
        await until_ranks(lambda ranks: len(ranks) == 1)
        os.kill(again, signal.SIGKILL)
        assert torch.equal(await ts.get("of 0"), VALUE)
        last = await server()
        await ts.shutdown()  # which waits for the server, as this rank is the last one
        assert not Path(f"/proc/{last}").exists()
    say("done")


async def meet() -> None:
    """Join, or say why not; use the store once, when told to."""
    try:
        await ts.initialize_spmd(**SMALL)
    except ts.TorchStoreError as error:
        say("error", code=error.code, message=str(error))
        return
    say("server", pid=await server(), address=await ts.address())
    await told()
    await exchange()
    await ts.shutdown()


async def end_without_shutdown() -> None:
    await ts.initialize_spmd(**SMALL)
    await exchange()
    say("server", pid=await server(), address=await ts.address())


async def cannot_start() -> None:
    """Rank 0's server cannot start: where its sockets would lie, others may write."""
    say("here")
    await told()
    with tempfile.TemporaryDirectory() as folder:
        open_to_all = Path(folder) / "torchstore"
        open_to_all.mkdir()
        open_to_all.chmod(0o777)
        before = os.environ["XDG_RUNTIME_DIR"]
        if RANK == 0:
            os.environ["XDG_RUNTIME_DIR"] = folder
        try:
            await ts.initialize_spmd(**SMALL)
        except ts.TorchStoreError as error:
            say("error", code=error.code, message=str(error))
    os.environ["XDG_RUNTIME_DIR"] = before
    await told()
    await ts.initialize_spmd(**SMALL)  # and the next one can
    await exchange()
    await ts.shutdown()
    say("done")


asyncio.run(globals()[sys.argv[1]]())
