"""A lease protects memory for as long as anything lives on it, in stores that are full."""

from __future__ import annotations

import pytest
import torch
from tests.processes import Script
from tests.support import leased, nothing_leased, running_store, until

import torchstore_core as ts

NUMEL = 1 << 20  # of int64: 8 MB


async def _until_full(prefix: str, nbytes: int) -> int:
    """Put values of ``nbytes`` until no more fit; how many did."""
    for count in range(1000):
        try:
            await ts.put(f"{prefix}{count}", torch.full((nbytes // 8,), -1 - count))
        except ts.StoreFullError:
            return count
    raise AssertionError("the store is never full")


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["overwrite", "delete", "delete and put again"])
async def test_memory_is_not_reused_while_a_tensor_lives(how):
    """A nearly full store is filled again and again around a tensor that somebody holds."""
    nbytes = 16 << 20
    async with running_store(capacity=4 * nbytes):
        original = torch.randint(0, 1 << 60, (nbytes // 8,))
        await ts.put("t", original)
        held = await ts.get("t")
        part = (await ts.get("t"))[1000:2000]  # a view is enough to hold on
        if how == "overwrite":
            await ts.put("t", torch.zeros(nbytes // 8).long())
        else:
            await ts.delete("t")
        if how == "delete and put again":
            await ts.put("t", torch.zeros(nbytes // 8).long())
        room = 3 if how == "delete" else 2
        for round_ in range(2):
            assert await _until_full(f"{round_}/", 2 << 20) == room * 8
            assert torch.equal(held, original)
            assert torch.equal(part, original[1000:2000])
            await ts.delete_batch(await ts.keys(f"{round_}/"))
        del held
        assert await _until_full("more/", 2 << 20) == room * 8, "the view holds it still"
        assert torch.equal(part, original[1000:2000])
        await ts.delete_batch(await ts.keys("more/"))
        del part
        await until(nothing_leased)
        assert await _until_full("all/", 2 << 20) == (room + 1) * 8


async def test_memory_is_not_reused_while_another_process_holds_it():
    nbytes = 16 << 20
    async with running_store(capacity=2 * nbytes):
        await ts.put("t", torch.arange(nbytes // 8))
        with Script(
            f"""
            tensor = await ts.get("t")
            await ts.put("held", 1)
            await ts.wait("look", timeout=50)
            assert torch.equal(tensor, torch.arange({nbytes // 8}))
            print("whole")
            """
        ) as script:
            await ts.wait("held", timeout=50)
            await ts.delete("t")
            for round_ in range(2):
                assert await _until_full(f"{round_}/", 2 << 20) in (7, 8)
                await ts.delete_batch(await ts.keys(f"{round_}/"))
            await ts.put("look", 1)
            assert await script.output() == "whole\n"
        await until(nothing_leased)  # its end gives the memory back
        await ts.delete_batch(["held", "look"])
        assert await _until_full("all/", 2 << 20) == 16


async def test_tensors_outlive_the_store_and_the_client(store):
    original = torch.arange(NUMEL)
    await ts.put("t", original)
    tensor = await ts.get("t")
    await ts.reset_client()
    assert torch.equal(tensor, original)
    assert await leased() == NUMEL * 8, "the reset gave the lease back"
    await ts.shutdown()
    assert torch.equal(tensor, original)
    tensor.zero_()
    assert not tensor.any()
