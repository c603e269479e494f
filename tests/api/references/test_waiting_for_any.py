"""``wait_any``: how long it waits, and what there is no need to wait for."""

from __future__ import annotations

import asyncio
import gc
import os
import pickle
import signal
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import torch
from tests.support import running_store, until

import torchstore_core as ts
from torchstore_core.testing.timers import within


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
        for ref in (held, held.ref, await other.put("w", 1)):
            for call in (shared.wait_any, shared.free):
                with pytest.raises(ts.VersionGoneError, match="belongs to store 'other'") as raised:
                    await call([ref])
                assert raised.value.details["incarnation"] == held.ref.incarnation
        with pytest.raises(ts.VersionGoneError, match="belongs to another store"):
            await shared.get(held)
        assert await other.get(held) == [1]
        gone = held.ref
        del held, ref, call, raised
    assert await shared.wait_any([gone], timeout=20) == ([gone], [])


async def test_what_is_put_has_no_references_to_another_store_in_it(shared: ts.Client) -> None:
    """This store could not keep alive what they refer to."""
    async with running_store(timeout=20, capacity=1 << 20, store_name="other") as other:
        held, own = await other.put_object([1]), await shared.put_object(1)
        for put in (
            shared.put("k", {"ref": held}),
            shared.put("k", [own, held, bytes(1 << 20)]),
            shared.put_batch({"k": [held], "l": 1}),
            shared.put_state_dict({"a": 1, "refs": (held,)}, "s"),
            shared.put_object(held),
        ):
            with pytest.raises(ts.UnsupportedValueError, match="is in store 'other', which store"):
                await put
        del put
        assert await shared.keys() == []
        await shared.put("k", [held.ref, pickle.dumps(held), own])
        ref, pickled, _ = await shared.get("k")
        assert ref == held.ref
        assert await other.get(ref) == [1]

        async def in_flight() -> int:
            gc.collect()  # the errors and their frames
            holders = [holder for one in await other.refs() for holder in one.holders]
            return [holder.state for holder in holders].count("in flight")

        await until(lambda: _is(in_flight, 1))
        await other.free([pickle.loads(pickled)])
    await shared.delete("k")


async def _is(asked: Callable[[], Awaitable[int]], count: int) -> bool:
    return await asked() == count


async def test_what_is_no_list_of_references_is_refused(shared: ts.Client) -> None:
    held = await shared.hold(await shared.put("k", 1))
    wrong: list[Any] = [None, 7]
    for one in wrong:
        for call in (shared.wait_any, shared.free, shared.wait, shared.delete_batch):
            with pytest.raises(ts.UnsupportedValueError, match="a list of"):
                await call(one)
    for one in (["k"], {"k": 1}, 1):  # also what has no hash
        with pytest.raises(ts.UnsupportedValueError, match="a key is"):
            await shared.wait_any([one])
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


async def test_a_version_of_a_run_that_was_rewound_is_not_waited_for(shared: ts.Client) -> None:
    kept = await ts.put_state_dict({"w": 1}, "run", version=50, keep=3)
    old = await ts.put_state_dict({"w": 2}, "run", version=52, keep=3)
    future = ts.ObjectRef("run", 53, old.incarnation, old.timeline)
    entry = ts.ObjectRef("run/w", 53, old.incarnation, old.timeline)
    asked = (await ts.status()).operations.get("WaitAny", 0)
    waiting = asyncio.create_task(ts.wait_any([future, entry], num_returns=2, timeout=20))
    await until(lambda: _has_asked(asked + 1))
    new = await ts.put_state_dict({"w": 3}, "run", version=51, rewind=True, keep=3)
    assert await waiting == ([future, entry], [])
    refs = [old, future, kept, new]
    assert await ts.wait_any(refs, num_returns=4, timeout=20) == (refs, [])
    with pytest.raises(ts.VersionGoneError, match="rewound"):
        await ts.get(old)
    # What the new run will put is waited for, also as a number without a history.
    pending = [ts.ObjectRef("run", 52, new.incarnation, new.timeline), ts.ObjectRef("run", 53)]
    assert await ts.wait_any(pending, num_returns=2, timeout=0.01) == ([], pending)
    await ts.put_state_dict({"w": 4}, "run", version=53, keep=3)
    assert await ts.wait_any(pending, num_returns=2, timeout=20) == (pending, [])
    await ts.delete("run")


async def _has_asked(times: int) -> bool:
    return (await ts.status()).operations.get("WaitAny", 0) >= times


@pytest.mark.local_only
async def test_a_server_that_is_stopped_is_not_waited_for_much_longer_than_the_timeout() -> None:
    async with running_store(timeout=20, capacity=8 << 20, store_name="stopped") as store:
        await store.put("here", 1)
        server = (await store.status()).controller_pid
        os.kill(server, signal.SIGSTOP)
        try:
            async with within(8):
                with pytest.raises(ts.StoreTimeoutError, match="it is stopped, or busy"):
                    await store.wait_any(["here"], timeout=0.2)
        finally:
            os.kill(server, signal.SIGCONT)
