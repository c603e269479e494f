"""``wait_any``: how long it waits, and what there is no need to wait for."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from tests.support import running_store

import torchstore_core as ts


async def test_without_a_timeout_it_waits_beyond_that_of_the_store(shared: ts.Client) -> None:
    hasty = await ts.connect(shared.address, store_name="hasty", timeout=1.5)
    try:
        waiting = asyncio.create_task(hasty.wait_any(["late", "later"]))
        with pytest.raises(ts.StoreTimeoutError):
            await hasty.wait("never")  # begins after it
        assert not waiting.done()
        await shared.put("late", 1)
        assert await waiting == (["late"], ["later"])
        assert await hasty.wait_any(["never"], timeout=0.01) == ([], ["never"])
    finally:
        await shared.delete("late")
        await ts.reset_client("hasty")


async def test_what_is_gone_for_good_is_not_waited_for(shared: ts.Client) -> None:
    deleted = await ts.put("deleted", 1)
    await ts.delete("deleted")
    old = await ts.put("old", 1)
    await ts.put("old", 2)
    await ts.put_state_dict({"w": torch.ones(2), "b": 1}, "model")
    entry, left_out = ts.ObjectRef("model/w", 1), ts.ObjectRef("model/b", 1)
    await ts.put_state_dict({"w": torch.ones(2)}, "model")
    for ref in (deleted, old, left_out):
        assert await ts.wait_any([ref, "never"], timeout=20) == ([ref], ["never"])
        with pytest.raises(ts.VersionGoneError):
            await ts.get(ref)
    await ts.delete("model")
    assert await ts.wait_any([entry, left_out], num_returns=2, timeout=20) == (
        [entry, left_out],
        [],
    )
    # What may still come is: a newer version of what was deleted, and a key by its name.
    pending: list[Any] = [ts.ObjectRef("deleted", 2), ts.ObjectRef("model/w", 3), "deleted"]
    assert await ts.wait_any(pending, timeout=0) == ([], pending)
    assert (await ts.put("deleted", 2)).version == 2
    assert await ts.wait_any(pending, num_returns=2, timeout=20) == (
        [pending[0], pending[2]],
        [pending[1]],
    )
    for key in ("deleted", "old"):
        await ts.delete(key)


async def test_an_evicted_version_is_not_waited_for() -> None:
    async with running_store(timeout=20, capacity=8 << 20, store_name="cache") as cache:
        ref = await cache.put("first", torch.ones(1 << 20), when_full="evictable")
        await cache.put_state_dict({"w": torch.ones(1 << 18)}, "model", when_full="evictable")
        for number in range(4):
            await cache.put(f"f{number}", torch.ones(1 << 20), when_full="evictable")
        entry = ts.ObjectRef("model/w", 1)
        assert await cache.wait_any([ref, entry], num_returns=2) == ([ref, entry], [])
        for key in ("model", "model/w"):
            with pytest.raises(ts.EvictedError, match="'model'"):
                await cache.get(key)
        for one in (ref, entry):
            with pytest.raises(ts.VersionGoneError, match="was evicted"):
                await cache.get(one)
        with pytest.raises(ts.KeyNotFoundError) as missing:
            await cache.get("first/w")  # which was no state dict
        assert type(missing.value) is ts.KeyNotFoundError
        await cache.put_state_dict({"v": 1}, "model")
        with pytest.raises(ts.KeyNotFoundError) as missing:
            await cache.get("model/w")
        assert type(missing.value) is ts.KeyNotFoundError


async def test_references_of_another_store_are_refused(shared: ts.Client) -> None:
    async with running_store(timeout=20, capacity=1 << 20, store_name="other") as other:
        held = await other.put_object([1])
        for call in (shared.wait_any([held], timeout=1), shared.free([held])):
            with pytest.raises(ts.ConfigurationError, match="belongs to store 'other'"):
                await call
        with pytest.raises(ts.VersionGoneError, match="belongs to another store"):
            await shared.get(held)
        assert await other.get(held) == [1]
        del held


async def test_what_is_no_list_of_references_is_refused(shared: ts.Client) -> None:
    held = await shared.hold(await shared.put("k", 1))
    wrong: list[Any] = [None, 7]
    for one in wrong:
        for call in (shared.wait_any, shared.free, shared.wait, shared.delete_batch):
            with pytest.raises(ts.UnsupportedValueError, match="a list of"):
                await call(one)
    with pytest.raises(ts.UnsupportedValueError, match="a list of keys"):
        await shared.wait(held)  # type: ignore[arg-type]
    for key in ("\ud800", "a/\udfff"):
        with pytest.raises(ts.UnsupportedValueError, match="a key is"):
            await shared.put(key, 1)
    await shared.put("ü/☃", 1)
    await shared.delete_batch(["k", "ü/☃"])


@pytest.mark.parametrize("wrong", ["yes", 1, 0])
async def test_a_keeper_is_a_bool(wrong: Any) -> None:
    for call in (ts.initialize, ts.connect_or_initialize):
        with pytest.raises(ts.ConfigurationError, match="keeper is a bool"):
            await call(store_name="kept", keeper=wrong)
