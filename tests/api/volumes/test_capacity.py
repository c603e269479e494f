"""A store that is full: says so, changes nothing, and has room again after a delete."""

from __future__ import annotations

import asyncio
import os

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


@pytest.mark.thorough
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


@pytest.mark.thorough
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


async def _holes(*sizes: int) -> None:
    """Fill the store with values of so many megabytes, and delete every other one, from the first
    on.
    """
    assert sum(sizes) == CAPACITY // MB
    for at, size in enumerate(sizes):
        await ts.put(f"filler {at}", _megabytes(size, at))
    for at in range(0, len(sizes), 2):
        await ts.delete(f"filler {at}")


async def test_memory_in_pieces_is_told_from_memory_that_is_used_up(small):
    """A value lies in one piece: enough bytes are free, and it does not fit."""
    await _holes(8, 8, 6, 10)
    reader = await ts.get("filler 1")
    with pytest.raises(ts.StoreFullError) as caught:
        await ts.put("k", _megabytes(10))
    error = caught.value
    assert "14,680,064 are free, but in 2 piece(s), the largest of 8,388,608" in error.message
    assert "the largest of this put has 10,485,760" in error.message
    assert "smaller values" in error.message
    assert "zero-copy gets returned, which lie in between" in error.message
    assert f"pid {os.getpid()}: {8 * MB:,}" in error.message  # who holds what is between
    assert error.details["pieces"] == 2
    assert error.details["largest_value_bytes"] == 10 * MB
    assert error.details["largest_free_bytes"] == 8 * MB
    # The advice works.
    await ts.put_batch({"a": _megabytes(5), "b": _megabytes(5)})
    await ts.delete_batch(["a", "b"])
    await ts.delete("filler 1")
    del reader
    await ts.put("k", _megabytes(10))


async def test_values_that_do_not_go_into_the_pieces_together(small):
    await _holes(8, 8, 6, 10)
    with pytest.raises(ts.StoreFullError, match="the 2 of this put do not go into them") as caught:
        await ts.put_batch({"a": _megabytes(7), "b": _megabytes(7)})
    assert "Put fewer values at once" in caught.value.message
    with pytest.raises(ts.StoreFullError) as caught:  # that is no question of pieces
        await ts.put_batch({"a": _megabytes(8), "b": _megabytes(8)})
    assert "pieces" not in caught.value.details
    assert await _used() == 18 * MB


async def test_values_find_their_pieces_whatever_their_order(small):
    await _holes(8, 8, 4, 12)
    values = {"small": _megabytes(4, 1), "large": _megabytes(8, 2)}
    await ts.put_batch(values)  # the small one must not take the place of the large one
    assert await _used() == CAPACITY
    for key, value in values.items():
        assert torch.equal(await ts.get(key), value)
