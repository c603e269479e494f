"""``kill -9`` of clients: the store forgets what they had begun and what they held."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator

import pytest
import torch
from tests.reliability import children
from tests.reliability.harness import Account, Child, account, settled
from tests.support import running_store

import torchstore_core as ts

SIDE = 8192
VALUE = SIDE * SIDE  # 64 MB


@pytest.fixture
async def address() -> AsyncIterator[str]:
    async with running_store(capacity=5 * VALUE) as client:
        yield client.address


def full_of(number: int) -> torch.Tensor:
    return torch.full((SIDE, SIDE), number, dtype=torch.uint8)


@pytest.mark.quick
@pytest.mark.parametrize("kills", [6, pytest.param(100, marks=pytest.mark.soak)])
async def test_a_put_that_is_killed_never_happened(address: str, kills: int):
    chance = random.Random(7)
    keys = ["a", "b"]
    items = {key: full_of(0) for key in keys}
    await ts.put_batch(items)
    begun = time.perf_counter()
    await ts.put_batch(items)
    took = time.perf_counter() - begun
    before = Account(sessions=1, used=2 * VALUE)
    assert await account() == before
    now = dict.fromkeys(keys, 0)
    buffers = {key: torch.empty_like(items[key]) for key in keys}
    number = in_the_middle = 0
    while number < kills or in_the_middle < kills // 4:  # how many do is up to the machine
        number += 1
        assert number < 10 * kills
        mine = keys if number % 3 else [chance.choice(keys)]
        slow = number % 2 == 0
        with Child(children.put_once, address, mine, SIDE, number, slow) as child:
            assert await child.said() == "begins"
            unfinished = 0
            if number % 4:  # the others die wherever they happen to be
                while not unfinished and not child.has_said():
                    unfinished = (await account()).unfinished
            await asyncio.sleep(chance.uniform(0, 0.2 if slow else took / 2))
            child.kill()
        await settled(before)
        await ts.get_batch(buffers)
        held = {key: children.uniform(buffers[key]) for key in keys}
        after = {key: number if key in mine else now[key] for key in keys}
        assert held in (now, after)
        in_the_middle += unfinished > 0 and held == now
        now = held

    assert await ts.keys() == keys


@pytest.mark.parametrize("way", ["delete", "overwrite"])
async def test_memory_that_a_killed_reader_held_comes_back(address: str, way: str):
    keys = ["a", "b"]
    await ts.put_batch({key: full_of(7) for key in keys})
    with Child(children.hold, address, keys) as reader:
        assert await reader.said() == [7, 7]
        newest = 0
        if way == "delete":
            await ts.delete_batch(keys)
        else:
            await ts.put_batch({key: full_of(8) for key in keys})
            newest = 2 * VALUE
        assert await account() == Account(2, 2 * VALUE + newest, 2 * VALUE)
        reader.tell("still there?")
        assert await reader.said() == [7, 7]
        reader.kill()
    await settled(Account(1, newest))
    # The memory itself, too.
    await ts.delete_batch(keys)
    await ts.put("large", torch.zeros(5 * VALUE, dtype=torch.uint8))


async def test_memory_that_a_killed_reader_was_copying_comes_back(address: str):
    chance = random.Random(3)
    for number in range(5):
        await ts.put("a", full_of(number))
        with Child(children.read_for_ever, address, "a") as reader:
            assert await reader.said() == "begins"
            while not (await account()).leased:
                assert not reader.has_said()
            await ts.delete("a")
            await asyncio.sleep(chance.uniform(0, 0.01))
            reader.kill()
        await settled(Account(1, 0))
