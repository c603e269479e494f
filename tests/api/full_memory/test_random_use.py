"""Random puts, gets, leases and deletes of several clients in a store that is always full, against
a model that is a dict.
"""

from __future__ import annotations

import asyncio
import gc
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support import running_store, until

import torchstore_core as ts

pytestmark = pytest.mark.local_only
KB = 1 << 10
CAPACITY = 8 << 20


_BYTES = torch.randint(0, 256, (4 << 20,), dtype=torch.uint8, generator=torch.manual_seed(0))


def value(seed: int, nbytes: int) -> torch.Tensor:
    """Bytes that no other seed has."""
    start = seed * 61 % (3 << 20)
    return _BYTES[start : start + nbytes]


class User:
    """One task that puts and gets its own keys, and knows what must be there."""

    def __init__(self, name: str, seed: int) -> None:
        self.name = name
        self.random = random.Random(seed)
        self.there: dict[str, tuple[int, int, str]] = {}  # seed, bytes, what when full
        self.held: list[tuple[torch.Tensor, int, int]] = []
        self.turn = 0

    async def step(self) -> None:
        self.turn += 1
        choice = self.random.random()
        key = f"{self.name}/{self.random.randrange(12)}"
        if choice < 0.4:
            await self.put(key)
        elif choice < 0.5:
            if key in self.there:
                await ts.delete_batch([key])
                del self.there[key]
        elif choice < 0.6 and self.held:
            self.held.pop(self.random.randrange(len(self.held)))
        elif choice < 0.7:
            await self.get_many()
        else:
            await self.get(key)

    async def put(self, key: str) -> None:
        nbytes = self.random.choice([100, 30 * KB, 200 * KB, 777_777, 1 << 20])
        how = self.random.choice(["spillable", "spillable", "evictable"])
        seed = self.turn * 100 + ord(self.name[0])
        await ts.put(key, value(seed, nbytes), when_full=how)
        self.there[key] = seed, nbytes, how

    async def get(self, key: str) -> None:
        known = self.there.get(key)
        try:
            if self.random.random() < 0.5 and known is not None:
                found = await ts.get(key, torch.empty(known[1], dtype=torch.uint8))
            else:
                found = await ts.get(key)
        except ts.KeyNotFoundError as error:
            if known is not None:
                told = type(error), known[2]
                assert told == (ts.EvictedError, "evictable"), key
                del self.there[key]
            return
        assert known is not None, key
        assert torch.equal(found, value(known[0], known[1])), key
        if self.random.random() < 0.1 and len(self.held) < 2:
            self.held.append((found, known[0], known[1]))

    async def get_many(self) -> None:
        kept = {k: v for k, v in self.there.items() if v[2] == "spillable"}
        keys = self.random.sample(sorted(kept), min(3, len(kept)))
        found = await ts.get_batch({k: torch.empty(kept[k][1], dtype=torch.uint8) for k in keys})
        for key in keys:
            assert torch.equal(found[key], value(kept[key][0], kept[key][1])), key

    def check_held(self) -> None:
        for tensor, seed, nbytes in self.held:
            assert torch.equal(tensor, value(seed, nbytes))


async def use(folder: Path, runtime: str, seed: int, steps: int, **arguments: Any) -> None:
    async with running_store(runtime, capacity=CAPACITY, spill=folder, **arguments):
        users = [User(name, seed + at) for at, name in enumerate("abc")]

        async def work(user: User) -> None:
            for _ in range(steps):
                await user.step()
            user.check_held()

        await asyncio.gather(*map(work, users))
        for user in users:
            for key in list(user.there):
                await user.get(key)
            user.held.clear()
        status = await ts.status()
        assert status.spill.written_bytes > 0
        assert status.spill.read_bytes > 0
        assert status.spill.evicted > 0
        await ts.delete_batch(await ts.keys())
        gc.collect()

        async def empty() -> bool:
            status = await ts.status()
            used = sum(v.used_bytes + v.leased_bytes + v.unfinished_bytes for v in status.volumes)
            return used == 0 and status.spill.disk_bytes == 0 and status.spill.spilled == 0

        await until(empty)


@pytest.mark.thorough
async def test_random_use(runtime: str, tmp_path: Path) -> None:
    await use(tmp_path, runtime, seed=1, steps=150)


@pytest.mark.thorough
async def test_random_use_of_several_volumes(runtime: str, tmp_path: Path) -> None:
    await use(tmp_path, runtime, seed=2, steps=150, num_storage_volumes=2, strategy="spread")


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(10, 20))
async def test_random_use_for_long(runtime: str, tmp_path: Path, seed: int) -> None:
    await use(tmp_path, runtime, seed=seed, steps=1000)
