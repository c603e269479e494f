"""What processes do while their server is killed again and again; each checks what it sees."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import pickle
import random
from multiprocessing.connection import Connection

import torch

import torchstore_core as ts

SMALL, LARGE = 64, 1 << 18  # elements: inline, and in the segment


async def mixed(pipe: Connection, address: str, index: int, seed: int) -> None:
    """Put, get, delete, hold; until something comes through the pipe. Then say how many calls were
    made and how long the longest took.
    """
    await ts.connect(address, timeout=60)
    pipe.send("ready")
    tasks = [asyncio.create_task(one(pipe, index, n, seed)) for n in range(3)]
    counts = await asyncio.gather(*tasks)
    pipe.recv()
    await ts.put(f"last/{index}", index)
    pipe.send((sum(count for count, _ in counts), max(longest for _, longest in counts)))
    await asyncio.to_thread(pipe.recv)  # the parent has looked: now let go of the session


async def one(pipe: Connection, index: int, number: int, seed: int) -> tuple[int, float]:
    """One of several tasks of a process, on keys that no other one writes."""
    chance = random.Random(f"{seed} {index} {number}")
    mine = f"{index}/{number}"
    versions: dict[str, int] = {}
    values: dict[str, int] = {}
    held: list[tuple[torch.Tensor, float]] = []
    owned: list[tuple[ts.HeldRef, int]] = []
    seen = 0
    calls = 0
    longest = 0.0
    loop = asyncio.get_running_loop()
    while not pipe.poll():
        begun = loop.time()
        calls += 1
        key = f"{mine}/{chance.randrange(3)}"
        size = chance.choice((SMALL, SMALL, LARGE))
        what = chance.randrange(11)
        if what < 4:
            ref = await ts.put(key, torch.full((size,), float(calls)))
            # Exactly one: a put is neither lost nor done twice.
            assert ref.version == versions.get(key, 0) + 1, (ref, versions.get(key))
            versions[key], values[key] = ref.version, calls
        elif what < 6 and key in values:
            tensor = await ts.get(key)
            assert (tensor == values[key]).all(), (key, tensor[:3], values[key])
            if tensor.numel() == LARGE:
                held.append((tensor, float(values[key])))
        elif what == 6 and key in values:
            await ts.delete(key)
            del values[key]
            assert not await ts.exists(key)
        elif what == 7:
            value = torch.full((SMALL,), float(calls))
            entries = {"a": value, "b": torch.full((LARGE,), float(calls))}
            ref = await ts.put_state_dict(entries, f"{mine}/model")
            assert ref.version == versions.get("model", 0) + 1
            versions["model"] = ref.version
            got = await ts.get_state_dict(f"{mine}/model")
            assert (got["a"] == calls).all()
            assert (got["b"] == calls).all()
        elif what == 8:
            owned.append((await ts.put_object(torch.full((size,), float(calls))), calls))
        elif what == 9 and key in values:
            ref = pickle.loads(pickle.dumps(await ts.hold(key)))
            assert ref.version == versions[key]
            owned.append((ref, values[key]))
        else:
            await ts.put("shared", torch.full((LARGE,), float(index)))
            version = await ts.latest_version("shared")
            assert version > seen, (version, seen)
            seen = version
            tensor = await ts.get("shared")
            assert (tensor == tensor[0]).all()
            held.append((tensor, float(tensor[0])))
        longest = max(longest, loop.time() - begun)
        while len(owned) > 3:
            ref, was = owned.pop(chance.randrange(len(owned)))
            tensor = await ts.get(ref)
            assert (tensor == was).all(), (ref, tensor[:3], was)
            del tensor, ref
        while len(held) > 4:
            tensor, was = held.pop(chance.randrange(len(held)))
            assert (tensor == was).all()
    return calls, longest


async def holding(pipe: Connection, address: str) -> None:
    """Hold a tensor, and memory for a put that never ends, until killed."""
    await ts.connect(address, timeout=60)
    tensor = await ts.get("large")
    pipe.send("holds")
    await asyncio.to_thread(pipe.recv)
    assert tensor.sum() == 0


async def referring(pipe: Connection) -> None:
    """Have a reference without having joined the store, then have a child have it, until told."""
    ref = await asyncio.to_thread(pipe.recv)
    pipe.send("received")
    assert await asyncio.to_thread(pipe.recv) == "fork"
    end, other = multiprocessing.Pipe()
    if not (child := os.fork()):
        other.recv()  # and nothing else: it ends, and so does what it holds
        os._exit(0)
    del ref
    pipe.send("forked")
    assert await asyncio.to_thread(pipe.recv) == "end"
    end.send("end")
    os.waitpid(child, 0)
    pipe.send("ended")
    await asyncio.to_thread(pipe.recv)


async def inheriting(pipe: Connection, address: str) -> None:
    """Fork a child that has a tensor and ends with the pipe."""
    await ts.connect(address, timeout=60)
    tensor = await ts.get("large")
    if not os.fork():
        try:
            pipe.recv()
        finally:
            os._exit(0 if (tensor == 7).all() else 1)
    pipe.send("forked")
    await asyncio.Event().wait()


async def owning(pipe: Connection) -> None:
    """Own a store, until killed."""
    client = await ts.initialize(capacity=64 << 20, prefault=0)
    await ts.put("k", 1)
    pipe.send((client.address, (await ts.status()).controller_pid))
    await asyncio.to_thread(pipe.recv)
