"""Values of a cache, which go when memory is full."""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch
from tests.support import at_rest, running_store

import torchstore_core as ts
from torchstore_core.contracts.runtime import StoreOptions
from torchstore_strategies import ReplicatedStrategy

pytestmark = pytest.mark.local_only
MB = 1 << 20


def value(seed: int, nbytes: int = 4 * MB) -> torch.Tensor:
    """Bytes that tell the seed."""
    return torch.full((nbytes,), seed % 251, dtype=torch.uint8)


@pytest.fixture
async def cache(runtime: str) -> AsyncIterator[ts.Client]:
    """A store of 16 MB whose values may be evicted."""
    async with running_store(runtime, capacity=16 * MB, when_full="evictable") as client:
        yield client


async def test_the_least_recently_used_go_first(cache):
    for at in range(4):
        await ts.put(f"k{at}", value(at))
    assert torch.equal(await ts.get("k0"), value(0))
    gc.collect()
    await ts.put("k4", value(4))
    await ts.put("k5", value(5))
    assert [await ts.exists(f"k{at}") for at in range(6)] == [True, False, False, True, True, True]
    assert await ts.keys() == ["k0", "k3", "k4", "k5"]
    with pytest.raises(ts.EvictedError, match=r"'k1' was evicted .* to make room") as caught:
        await ts.get("k1")
    assert isinstance(caught.value, ts.KeyNotFoundError)
    details = caught.value.details
    assert details["reason"] == "evicted"
    assert details["missing"] == ["k1"]
    assert details["version"] == 1
    assert details["nbytes"] == 4 * MB
    status = (await ts.status()).spill
    assert (status.evicted, status.evicted_bytes) == (2, 8 * MB)
    ref = await ts.put("k1", torch.ones(3))
    assert ref.version == 2  # versions go on
    with pytest.raises(ts.VersionGoneError, match="was evicted"):
        await ts.get(ts.ObjectRef("k1", 1))


@pytest.mark.thorough
async def test_small_values_go_too(cache):
    for at in range(3000):
        await ts.put(f"k{at}", value(at, 8000))
    assert not await ts.exists("k0")
    assert torch.equal(await ts.get("k2999"), value(2999, 8000))
    there = await ts.keys()
    assert there == sorted(f"k{at}" for at in range(3000 - len(there), 3000))
    assert len(there) == 16 * MB // 8000


async def test_what_is_leased_or_pinned_stays(cache):
    await ts.put("pinned", value(1), when_full="pinned")
    await ts.put("leased", value(2))
    tensor = await ts.get("leased")
    for at in range(5):
        await ts.put(f"k{at}", value(at))
    assert await ts.exists("pinned")
    assert await ts.exists("leased")
    assert torch.equal(tensor, value(2))
    held = [await ts.get(key) for key in ("k3", "k4")]
    with pytest.raises(ts.StoreFullError):
        await ts.put("more", value(9))
    del held


async def test_what_a_reference_holds_stays(cache):
    await ts.put("held", value(1))
    await ts.put_state_dict({"a": value(2), "n": 2}, "m")
    refs = [await ts.hold("held"), await ts.hold("m")]
    for at in range(4):
        await ts.put(f"k{at}", value(at))
    assert await ts.exists("held")
    assert await ts.exists("m")
    assert torch.equal(await ts.get(refs[0]), value(1))
    await ts.free(refs)
    await at_rest(cache)
    for at in range(4):
        await ts.put(f"more{at}", value(at))
    assert not await ts.exists("held")
    assert not await ts.exists("m")


async def test_a_state_dict_goes_as_a_whole(cache):
    for at in range(4):
        await ts.put_state_dict({"a": value(at), "b": value(at, MB), "n": at}, f"m{at}")
    with pytest.raises(ts.EvictedError):
        await ts.get_state_dict("m0")
    with pytest.raises(ts.KeyNotFoundError):
        await ts.get("m0/b")
    with pytest.raises(ts.EvictedError, match=r"'m0' was evicted"):  # the rest of it is gone
        await ts.put_state_dict({"n": 5}, "m0", partial=True)
    got = await ts.get_state_dict("m3")
    assert got["n"] == 3
    assert torch.equal(got["b"], value(3, MB))
    del got
    gc.collect()
    assert (await ts.put_state_dict({"a": value(9)}, "m0")).version == 2
    assert torch.equal(await ts.get("m0/a"), value(9))


async def test_old_versions_go_before_the_newest(cache):
    for at in range(6):
        await ts.put_state_dict({"w": value(at)}, "policy", keep=10)
    assert await ts.versions("policy") == [3, 4, 5, 6]
    with pytest.raises(ts.VersionGoneError, match="was evicted"):
        await ts.get_state_dict("policy", version=2)
    assert torch.equal(await ts.get("policy/w"), value(5))


async def test_a_deleted_key_was_not_evicted(cache):
    for at in range(5):
        await ts.put(f"k{at}", value(at))
    with pytest.raises(ts.EvictedError):
        await ts.get("k0")
    await ts.put("k0", torch.ones(1))
    await ts.delete("k0")
    with pytest.raises(ts.KeyNotFoundError, match="no such key") as caught:
        await ts.get("k0")
    assert not isinstance(caught.value, ts.EvictedError)


async def test_caches_go_before_others_are_written(runtime, tmp_path: Path):
    async with running_store(runtime, capacity=16 * MB, spill=tmp_path):
        for at in range(2):
            await ts.put(f"kept{at}", value(at), when_full="spillable")
            await ts.put(f"cache{at}", value(at), when_full="evictable")
        for at in range(2):
            await ts.put(f"more{at}", value(at), when_full="pinned")
        for at in range(2):
            assert torch.equal(await ts.get(f"kept{at}", torch.empty_like(value(0))), value(at))
            assert torch.equal(await ts.get(f"more{at}", torch.empty_like(value(0))), value(at))


async def test_replicas_and_several_volumes(runtime):
    async with running_store(
        runtime,
        capacity=32 * MB,
        num_storage_volumes=2,
        when_full="evictable",
        strategy=ReplicatedStrategy(copies=2),
    ):
        for at in range(20):
            await ts.put(f"k{at}", value(at))
        assert torch.equal(await ts.get("k19"), value(19))
        assert not await ts.exists("k0")


async def test_stores_of_a_monarch_job_are_told_what_to_do():
    protocol = pytest.importorskip("torchstore_monarch.protocol")
    options = StoreOptions("s", spill="/somewhere", spill_capacity=MB, when_full="evictable")
    request = protocol.StoreRequest.of(options)
    assert (request.spill, request.spill_capacity) == ("/somewhere", MB)
    assert request.when_full == "evictable"
