"""``wait``: for keys, for versions, with an end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time

import pytest
import torch
from tests.processes import Script
from tests.support import halt, running_store, until

import torchstore_core as ts
from torchstore_core.testing.timers import ends_within, within


async def _asked() -> int:
    """How many waits the server has seen."""
    operations = (await ts.status()).operations
    return sum(count for name, count in operations.items() if name.lower() == "wait")


async def _until_asked(count: int) -> None:
    async def enough() -> bool:
        return await _asked() >= count

    await until(enough)


async def test_what_is_there_is_given_at_once(shared):
    refs = await ts.put_batch({"a": 1, "b": torch.ones(300_000)})
    assert await ts.wait("a") == {"a": refs["a"]}
    assert await ts.wait(["b", "a"]) == refs
    assert list(await ts.wait(("b", "a"))) == ["b", "a"]
    assert await ts.wait(["a", "a"]) == {"a": refs["a"]}
    assert await ts.wait([]) == {}
    assert await ts.wait("a", min_version=1) == {"a": refs["a"]}


async def test_a_put_wakes_the_waiters(shared):
    before = await _asked()
    waiting = [asyncio.create_task(ts.wait("k", timeout=30)) for _ in range(5)]
    await _until_asked(before + 5)
    assert not any(task.done() for task in waiting)
    ref = await ts.put("k", 1)
    assert await asyncio.gather(*waiting) == [{"k": ref}] * 5


async def test_all_keys_must_be_there(shared):
    before = await _asked()
    task = asyncio.create_task(ts.wait(["a", "b", "c"], timeout=30))
    await _until_asked(before + 1)
    refs = {"a": await ts.put("a", 1), "c": await ts.put("c", 1)}
    # Its own answer would have come before this one's.
    assert await ts.exists("c")
    assert not task.done()
    refs["b"] = await ts.put("b", 1)
    assert await task == refs


async def test_a_batch_wakes_them_at_once(shared):
    before = await _asked()
    task = asyncio.create_task(ts.wait(["a", "b"], timeout=30))
    await _until_asked(before + 1)
    refs = await ts.put_batch({"b": torch.ones(300_000), "a": 2, "c": 3})
    assert await task == {"a": refs["a"], "b": refs["b"]}


async def test_min_version(shared):
    before = await _asked()
    first = (await ts.put("k", 1)).version
    task = asyncio.create_task(ts.wait("k", min_version=first + 2, timeout=30))
    await _until_asked(before + 1)
    await ts.put("k", 2)
    assert await ts.exists("k")
    assert not task.done()
    third = await ts.put("k", 3)
    assert await task == {"k": third}
    assert third.version == first + 2
    # A later version is as good; min_version is for every key.
    fourth = await ts.put("k", 4)
    assert await ts.wait("k", min_version=first + 2) == {"k": fourth}
    other = await ts.put("other", 1)
    with pytest.raises(ts.StoreTimeoutError):
        await ts.wait(["k", "other"], min_version=other.version + 1, timeout=0.05)
    for wrong in ("3", 2.0, True):
        with pytest.raises(ts.UnsupportedValueError, match="min_version"):
            await ts.wait("k", min_version=wrong)


async def test_a_deleted_key_is_not_there(shared):
    before = await _asked()
    ref = await ts.put("k", 1)
    await ts.delete("k")
    task = asyncio.create_task(ts.wait("k", timeout=30))
    await _until_asked(before + 1)
    assert not task.done()
    again = await ts.put("k", 2)
    assert await task == {"k": again}
    assert again.version > ref.version


async def test_timeout(shared):
    start = time.monotonic()
    async with within(5):
        with pytest.raises(ts.StoreTimeoutError, match=r"0\.2 s.*'never'") as caught:
            await ts.wait(["never", "nor this"], timeout=0.2)
    assert time.monotonic() - start >= 0.2
    assert isinstance(caught.value, TimeoutError)
    assert caught.value.key == "never"
    with pytest.raises(ts.StoreTimeoutError, match=r"version 7 or newer: 'never'"):
        await ts.wait("never", min_version=7, timeout=0.05)
    # Nobody waits for it any more, and the store goes on.
    ref = await ts.put("never", 1)
    assert await ts.wait("never") == {"never": ref}


async def test_the_default_timeout_holds_and_is_named(shared):
    client = await ts.connect(await ts.address(), store_name="impatient", timeout=1.5)
    try:
        with pytest.raises(ts.StoreTimeoutError, match=r"within 1\.5 s"):
            await client.wait("never")
    finally:
        await ts.shutdown("impatient")


async def test_a_cancelled_wait_leaves_no_trace(shared):
    before = await _asked()
    task = asyncio.create_task(ts.wait("k", timeout=30))
    await _until_asked(before + 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    ref = await ts.put("k", 1)
    assert await ts.wait("k", timeout=5) == {"k": ref}


async def test_woken_by_another_process(shared):
    before = await _asked()
    with Script(
        """
        await ts.wait("question", timeout=50)
        number = await ts.get("question")
        await ts.put("answer", torch.full((300_000,), number + 1))
        """
    ) as script:
        waiting = asyncio.create_task(ts.wait("answer", timeout=50))
        await _until_asked(before + 2)  # this one, and the script's
        await ts.put("question", 41)
        refs = await waiting
        assert torch.equal(await ts.get(refs["answer"]), torch.full((300_000,), 42))
        await script.output()


async def test_many_waiters_with_different_wishes(shared):
    before = await _asked()
    first = (await ts.put_batch({f"k{key}": 0 for key in range(10)}))["k0"].version
    tasks = [
        asyncio.create_task(ts.wait(f"k{i % 10}", min_version=first + 1 + i // 10, timeout=30))
        for i in range(100)
    ]
    await _until_asked(before + 100)
    assert not any(task.done() for task in tasks)
    for _ in range(10):
        for key in range(10):
            await ts.put(f"k{key}", 1)
    for i, task in enumerate(tasks):
        ((key, ref),) = (await task).items()
        assert key == f"k{i % 10}"
        assert ref.version >= first + 1 + i // 10


async def test_a_wait_in_vain_says_what_there_is(shared):
    """Seconds are rounded, and it is said which keys are missing, and how far the others are."""
    ref = await ts.put("old", 1)
    there = await ts.put("there", 1)
    await ts.put_state_dict({"x": 1}, "half", participants=2, participant="0")
    with pytest.raises(ts.StoreTimeoutError) as caught:
        await ts.wait(["never", "old", "there"], min_version=ref.version + 5, timeout=0.1 + 0.2)
    error = caught.value
    wanted = f"version {ref.version + 5} or newer"
    assert error.message.startswith(f"not there within 0.3 s with {wanted}: ")
    assert "'never' (there is none)" in error.message
    assert f"'old' (the newest is version {ref.version})" in error.message
    assert error.details["min_version"] == ref.version + 5
    assert error.details["keys"] == ["never", "old", "there"]
    unmet = {one["key"]: one["version"] for one in error.details["unmet"]}
    assert unmet == {"never": 0, "old": ref.version, "there": there.version}
    for key in ("half", "half/x"):
        with pytest.raises(ts.StoreTimeoutError) as caught:
            await ts.wait(["there", key], timeout=0.01)
        assert "is half put, by 1 of 2 participants (0)" in caught.value.message
        assert caught.value.key == key
        ((one,),) = [caught.value.details["unmet"]]
        assert one["key"] == key
        assert one["pending"][0]["participants"] == 2
        assert one["pending"][0]["committed"] == ["0"]


async def test_a_wait_that_only_looks(shared):
    refs = {"k": await ts.put("k", 1), "s/x": await ts.put_state_dict({"x": 1}, "s")}
    found = await ts.wait(["k", "s/x"], timeout=0)
    assert {key: ref.version for key, ref in found.items()} == {
        k: r.version for k, r in refs.items()
    }
    least = refs["k"].version
    assert await ts.wait("k", min_version=least, timeout=0) == {"k": refs["k"]}
    with pytest.raises(ts.StoreTimeoutError, match="the newest is version"):
        await ts.wait("k", min_version=least + 1, timeout=0)
    with pytest.raises(ts.StoreTimeoutError, match="the newest is version"):
        await ts.wait("k", after=refs["k"], timeout=0)
    newer = await ts.put("k", 2)
    assert await ts.wait("k", after=refs["k"], timeout=0) == {"k": newer}


async def test_a_wait_in_vain_for_many_keys_names_a_few(shared):
    await ts.put("k", 1)
    names = [f"{i:05}" for i in range(5000)]
    with pytest.raises(ts.StoreTimeoutError) as caught:
        await ts.wait(["k", *names], timeout=0)
    assert len(caught.value.message) < 1000
    assert len(caught.value.details["keys"]) == 16
    assert [one["key"] for one in caught.value.details["unmet"]] == names[:16]


async def test_a_state_dict_that_does_not_come_says_what_there_is(shared):
    ref = await ts.put_state_dict({"x": 1}, "k")
    with pytest.raises(ts.StoreTimeoutError, match="the newest is version") as caught:
        await ts.get_state_dict("k", min_version=ref.version + 1, timeout=0)
    assert caught.value.details["unmet"][0]["version"] == ref.version


async def test_a_wait_ends_in_time_though_nobody_can_say_what_there_is():
    """The server is stopped, then it dies: neither hides that the time is over, or prolongs it."""
    async with running_store(store_name="stopped", keeper=False) as client:
        await client.put("k", 1)
        pid = (await client.status()).controller_pid
        await halt(pid)
        try:
            start = time.monotonic()
            waiting = asyncio.create_task(client.wait("never", timeout=0.5))
            assert await ends_within(waiting, 0.9)
            assert time.monotonic() - start >= 0.5
            with pytest.raises(ts.StoreTimeoutError, match=r"within 0\.5 s: 'never'") as caught:
                await waiting
            assert "the server did not say" in str(caught.value)  # it is not known to be missing
            waited_for = {"keys": ["never"], "min_version": 1, "timeout": 0.5}
            of_all = {"operation": "wait", "address": client.address}
            assert caught.value.details == {**waited_for, **of_all}
            assert caught.value.__suppress_context__  # "did not answer" is not what it waited for
            waiting = asyncio.create_task(client.wait("never", timeout=0.3))
            await asyncio.wait([waiting], timeout=0.35)  # it asks what there is
            os.kill(pid, signal.SIGKILL)
            with pytest.raises((ts.StoreTimeoutError, ts.StoreClosedError)):
                await waiting
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
