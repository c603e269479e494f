"""Versions that wait for others, and versions that are kept, in a store that has little room."""

from __future__ import annotations

import pytest
import torch
from tests.processes import run_script
from tests.support import running_store, until

import torchstore_core as ts
from torchstore_core import TensorShard, TensorSlice

MB = 1 << 20


def _shard(rank: int, number: float) -> TensorShard:
    """One megabyte, and half of the tensor."""
    part = TensorSlice((rank * 256, 0), (256, 1024), (512, 1024))
    return TensorShard(torch.full((256, 1024), float(number)), part)


@pytest.mark.thorough
async def test_a_rank_that_is_far_ahead_does_not_fill_the_store():
    async with running_store(capacity=24 * MB) as client:
        for number in range(40):  # 1 MB each
            await ts.put_state_dict({"w": _shard(0, number)}, "k", participants=2, participant=0)
        await ts.put("other", torch.zeros(MB))
        (volume,) = (await client.status()).volumes
        assert volume.used_bytes <= 20 * MB + 4 * MB
        # The slow one is late for most, and completes one that is still there.
        number = 0
        while not await ts.exists("k"):
            await ts.put_state_dict({"w": _shard(1, number)}, "k", participants=2, participant=1)
            number += 1
        got = (await ts.get_state_dict("k"))["w"]
        assert got[0, 0].item() == got[-1, 0].item() == number - 1


async def test_ranks_that_race_in_a_full_store_go_on():
    """Without a barrier, with less room than one of them is ahead."""
    async with running_store(capacity=6 * MB):
        for number in range(30):
            await ts.put_state_dict({"w": _shard(0, number)}, "k", participants=2, participant=0)
        for number in range(30):
            await ts.put_state_dict({"w": _shard(1, number)}, "k", participants=2, participant=1)
        got = (await ts.get_state_dict("k"))["w"]
        assert got[0, 0].item() == got[-1, 0].item()


async def test_a_full_store_says_which_versions_wait_for_others():
    async with running_store(capacity=8 * MB):
        await ts.put_state_dict({"w": _shard(0, 1)}, "k", participants=2, participant=0)
        with pytest.raises(ts.StoreFullError, match=r"wait for other participants \('k'\)") as full:
            await ts.put("other", torch.zeros(2 * MB))
        assert full.value.details["waiting"] == {"k": MB}


async def test_memory_of_abandoned_versions_makes_room(runtime):
    """The process that began them is gone, and nobody will complete them."""
    async with running_store(runtime, capacity=64 * MB) as store:
        await run_script("""
            part = ts.TensorSlice((0, 0), (8192, 1024), (16384, 1024))  # 32 MB of 64
            shard = ts.TensorShard(torch.ones(8192, 1024), part)
            await ts.put_state_dict({"w": shard}, "dead", participants=2, participant=0)
        """)

        async def is_gone() -> bool:
            return len((await store.status()).sessions) == 1

        await until(is_gone)
        await ts.put("large", torch.zeros(12 * MB))  # would not fit beside it
        assert await ts.exists("large")


@pytest.mark.thorough
async def test_memory_does_not_grow_with_the_number_of_versions():
    """Room for three versions of 10 MB, of which two are kept, is enough for any number."""
    async with running_store(capacity=33 * MB):
        for number in range(1, 30):
            value = torch.full((10 * MB // 4,), float(number))
            await ts.put_state_dict({"w": value}, "k", keep=2)
            assert (await ts.get_state_dict("k"))["w"][-1] == number
        assert await ts.versions("k") == [28, 29]
        with pytest.raises(ts.StoreFullError):
            await ts.put_state_dict({"w": torch.zeros(14 * MB // 4)}, "k", keep=2)
        assert await ts.versions("k") == [28, 29]
        assert (await ts.get_state_dict("k", version=28))["w"][0] == 28
