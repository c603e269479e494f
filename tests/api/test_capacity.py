"""A store that is full: says so, changes nothing, and has room again after a delete."""

from __future__ import annotations

import asyncio

import pytest
import torch
from tests.support import running_store, until

import torchstore_core as ts

MB = 1 << 20
CAPACITY = 32 * MB


@pytest.fixture
async def small():
    async with running_store(capacity=CAPACITY) as client:
        yield client


def _megabytes(count: float, fill: int = 0) -> torch.Tensor:
    return torch.full((int(count * MB),), fill, dtype=torch.uint8)


async def _used() -> int:
    return (await ts.status()).volumes[0].used_bytes


async def test_full_is_a_typed_error_with_the_facts(small):
    await ts.put_batch({"a": _megabytes(20), "b": _megabytes(4)})
    held = await ts.get("b")
    with pytest.raises(ts.StoreFullError) as caught:
        await ts.put("c", _megabytes(9))
    error = caught.value
    assert error.details["capacity_bytes"] == CAPACITY
    assert error.details["used_bytes"] == 24 * MB
    assert error.details["requested_bytes"] == 9 * MB
    assert error.details["leased_bytes"] == 4 * MB
    assert error.details["unfinished_bytes"] == 0
    assert [holder["leased"] for holder in error.details["holders"]] == [4 * MB]
    assert f"{9 * MB:,}" in str(error)
    assert "'a'" in str(error), "the largest key is named"
    assert "capacity" in str(error)
    assert held.numel() == 4 * MB


async def test_nothing_is_changed(small):
    refs = await ts.put_batch({"a": _megabytes(10, 1), "b": _megabytes(10, 2), "o": [1]})
    used = await _used()
    for attempt in (
        {"a": _megabytes(13)},
        {"new": _megabytes(13)},
        {"a": 0, "o": [2], "new": _megabytes(13)},
        {"new 1": _megabytes(5), "new 2": _megabytes(5), "new 3": _megabytes(5)},
        {"a": torch.zeros(1, dtype=torch.uint8).expand(1000 * MB)},
        {"o": bytes(13 * MB)},
    ):
        with pytest.raises(ts.StoreFullError):
            await ts.put_batch(attempt)
        assert await _used() == used
    assert (await ts.status()).volumes[0].unfinished_bytes == 0
    assert await ts.keys() == ["a", "b", "o"]
    got = await ts.get_batch(list(refs.values()))  # not one version went by
    assert (got["a"] == 1).all()
    assert (got["b"] == 2).all()
    assert got["o"] == [1]


async def test_room_comes_back(small):
    await ts.put("small", 1)
    assert await ts.delete_batch(["small"]) == 1
    for _ in range(5):
        await ts.put("a", _megabytes(20))
        with pytest.raises(ts.StoreFullError):
            await ts.put("b", _megabytes(13))
        await ts.delete("a")
        assert await _used() == 0
        await ts.put("b", _megabytes(13))
        await ts.delete("b")
    await ts.put("all of it", _megabytes(32, 7))
    assert (await ts.get("all of it") == 7).all()


async def test_an_overwrite_needs_room_beside_the_old_version(small):
    """Readers see the old one until the new one is whole, so both exist for a moment."""
    await ts.put("a", _megabytes(15, 1))
    await ts.put("a", _megabytes(15, 2))
    assert await _used() == 15 * MB
    await ts.put("b", _megabytes(10))
    with pytest.raises(ts.StoreFullError):
        await ts.put("a", _megabytes(15, 3))
    assert (await ts.get("a") == 2).all()


async def test_inline_values_count_too(small):
    chunk = bytes(32 << 10)

    async def fill() -> None:
        for at in range(2000):
            await ts.put(f"k{at}", chunk)

    with pytest.raises(ts.StoreFullError):
        await fill()
    count = len(await ts.keys())
    assert 900 < count <= CAPACITY // len(chunk)
    assert await ts.delete_batch(await ts.keys()) == count
    assert await _used() == 0
    await ts.put("large", _megabytes(30))


async def test_leased_memory_is_used_memory(small):
    await ts.put("a", _megabytes(20, 1))
    held = await ts.get("a")
    await ts.delete("a")
    assert await _used() == 20 * MB
    with pytest.raises(ts.StoreFullError, match="drop tensors"):
        await ts.put("b", _megabytes(13))
    assert (held == 1).all()
    del held

    async def free() -> bool:
        return await _used() == 0

    await until(free)
    await ts.put("b", _megabytes(30))


async def test_pieces_of_free_memory_are_enough_for_a_batch(small):
    """Free memory that is not in one run still takes values that fit into its parts."""
    await ts.put_batch({f"k{i}": _megabytes(2, i) for i in range(16)})
    await ts.delete_batch([f"k{i}" for i in range(0, 16, 2)])
    await ts.put_batch({f"new{i}": _megabytes(2, 100 + i) for i in range(8)})
    for i in range(8):
        assert (await ts.get(f"new{i}") == 100 + i).all()
        assert (await ts.get(f"k{2 * i + 1}") == 2 * i + 1).all()


async def test_puts_that_compete_for_the_last_room(small):
    results = await asyncio.gather(
        *(ts.put(f"k{i}", _megabytes(5, i)) for i in range(10)), return_exceptions=True
    )
    stored = [result for result in results if isinstance(result, ts.ObjectRef)]
    refused = [result for result in results if isinstance(result, ts.StoreFullError)]
    assert len(stored) == 6
    assert len(refused) == 4
    for ref in stored:
        assert (await ts.get(ref) == int(ref.key[1:])).all()
    assert await _used() == 30 * MB


@pytest.mark.parametrize("strategy", ["host", "local-rank"])
async def test_volumes_share_the_capacity(strategy):
    async with running_store(capacity=CAPACITY, num_storage_volumes=2, strategy=strategy):
        status = await ts.status()
        assert sum(volume.capacity_bytes for volume in status.volumes) == CAPACITY
        with pytest.raises(ts.StoreFullError):
            await ts.put("more than one volume", _megabytes(17))
        for i in range(2):
            await ts.put(f"k{i}", _megabytes(16, i))
        with pytest.raises(ts.StoreFullError) as caught:
            await ts.put("more", _megabytes(1))
        assert caught.value.details["used_bytes"] == CAPACITY
        for i in range(2):
            assert (await ts.get(f"k{i}") == i).all()
