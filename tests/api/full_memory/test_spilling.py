"""Values that move to disk when memory is full, and come back."""

from __future__ import annotations

import asyncio
import gc
import itertools
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch
from tests.support import bits, noise, running_store, until

import torchstore_core as ts

pytestmark = pytest.mark.local_only
MB = 1 << 20


def value(seed: int, nbytes: int = 4 * MB) -> torch.Tensor:
    """Bytes that no other seed has."""
    return noise(nbytes, seed)


@pytest.fixture
async def spilling(runtime: str, tmp_path: Path) -> AsyncIterator[ts.Client]:
    """A store of 16 MB that may spill."""
    async with running_store(runtime, capacity=16 * MB, spill=tmp_path / "spill") as client:
        yield client


async def away(key: str) -> int:
    """How many bytes of a key are only on disk."""
    return (await ts.stat(key)).spilled_bytes


async def test_several_times_the_memory(spilling, tmp_path):
    for at in range(16):
        await ts.put(f"k{at}", value(at), when_full="spillable")
    status = (await ts.status()).spill
    assert status.spilled >= 12
    assert status.spilled_bytes == status.spilled * 4 * MB
    assert status.written_bytes >= 12 * 4 * MB
    assert status.disk_bytes >= status.spilled_bytes
    assert list((tmp_path / "spill").iterdir()) == []  # the file has no name
    for at in reversed(range(16)):
        assert torch.equal(await ts.get(f"k{at}"), value(at)), at
    into = torch.empty(4 * MB, dtype=torch.uint8)
    await ts.get("k3", into)
    assert torch.equal(into, value(3))
    part = ts.TensorSlice((100,), (5000,), (4 * MB,))
    assert torch.equal(await ts.get("k9", tensor_slice_spec=part), value(9)[100:5100])
    await ts.delete_batch([f"k{at}" for at in range(16)])
    await until(_all_is_free)


async def _all_is_free() -> bool:
    """Nothing is used on disk or in memory. The server hears of tensors that are gone over another
    connection than of a delete, so a status may come between the two.
    """
    status = await ts.status()
    return status.spill.disk_bytes == 0 and status.volumes[0].used_bytes == 0


@pytest.mark.thorough
async def test_small_values_that_are_read_together_leave_and_come_back(spilling):
    """They come in messages, move into the segment when many are read at once unless they are on
    their way to disk, and leave from where they are; some are larger than what is written together.
    """
    sizes = [66_000 if at % 2 else 12_345 for at in range(600)]
    values = {f"k{at}": value(at, nbytes) for at, nbytes in enumerate(sizes)}
    for key, tensor in values.items():
        await ts.put(key, tensor, when_full="spillable")
    names = list(values)
    for turn in range(3):
        for start in range(turn, len(names) - 39, 40):
            wanted = names[start : start + 40]
            for key, tensor in (await ts.get_batch(wanted)).items():
                assert torch.equal(tensor, values[key]), key
            del tensor
            if start % 3 == turn:
                await ts.put_batch({key: values[key] for key in wanted[::3]}, when_full="spillable")
    assert (await ts.status()).spill.spilled
    await ts.delete_batch(names)
    await until(_all_is_free)


async def test_objects_without_a_key_leave_too(spilling):
    refs = [await ts.put_object(value(at), when_full="spillable") for at in range(12)]
    assert (await ts.status()).spill.spilled >= 8
    for at, ref in enumerate(refs):
        assert torch.equal(await ts.get(ref), value(at)), at
    del refs, ref
    await until(_all_is_free)
    with pytest.raises(ts.ConfigurationError, match="not evicted"):
        await ts.put_object(1, when_full="evictable")


@pytest.mark.thorough
async def test_objects_without_a_key_do_what_their_store_does(runtime, tmp_path):
    async with running_store(
        runtime, capacity=16 * MB, spill=tmp_path / "spill", when_full="spillable"
    ):
        refs = [await ts.put_object(value(at)) for at in range(6)]
        pinned = [await ts.put_object(value(at), when_full="pinned") for at in range(3)]
        with pytest.raises(ts.StoreFullError):
            await ts.put_object(value(9, 8 * MB), when_full="pinned", timeout=10)
        for at, ref in enumerate([*refs, *pinned]):
            assert torch.equal(await ts.get(ref), value(at % 6)), at
        del refs, pinned, ref
    async with running_store(runtime, capacity=16 * MB, when_full="evictable"):
        refs = [await ts.put_object(value(at)) for at in range(4)]
        with pytest.raises(ts.StoreFullError):  # what is referred to is there
            await ts.put_object(value(4), timeout=10)
        del refs


async def test_odd_sizes_and_dtypes_come_back_bit_for_bit(spilling):
    values = {
        "bf16": torch.randn(333_333).bfloat16(),
        "complex": torch.randn(77_777, dtype=torch.complex64),
        "bool": torch.rand(1_000_001) > 0.5,
        "matrix": torch.randn(511, 513).t(),
        "object": {"blob": bytes(range(256)) * 1000},
    }
    for turn in range(3):
        for name, one in values.items():
            await ts.put(f"{turn}/{name}", one, when_full="spillable")
    for at in range(5):  # push all of them out
        await ts.put(f"push{at}", value(at), when_full="spillable")
    assert await away("0/bf16") == 666_666
    for turn in range(3):
        for name, one in values.items():
            got = await ts.get(f"{turn}/{name}")
            if isinstance(one, torch.Tensor):
                assert torch.equal(bits(got), bits(one)), name
            else:
                assert got == one


async def test_the_least_recently_used_leave_first(spilling):
    for at in range(3):
        await ts.put(f"k{at}", value(at), when_full="spillable")
    del_me = await ts.get("k0")
    del del_me
    gc.collect()
    await ts.put("k3", value(3), when_full="spillable")
    await ts.put("k4", value(4), when_full="spillable")
    assert [await away(f"k{at}") > 0 for at in range(5)] == [False, True, False, False, False]
    await ts.put("k5", value(5), when_full="spillable")
    assert [await away(f"k{at}") > 0 for at in range(6)] == [False, True, True, False, False, False]


async def test_what_is_leased_or_pinned_stays(spilling):
    await ts.put("pinned", value(1))
    await ts.put("leased", value(2), when_full="spillable")
    tensor = await ts.get("leased")
    for at in range(6):
        await ts.put(f"k{at}", value(10 + at), when_full="spillable")
    assert await away("leased") == await away("pinned") == 0
    assert torch.equal(tensor, value(2))
    del tensor
    gc.collect()

    numbers = itertools.count()

    async def pushed() -> bool:  # the lease ends a little later
        await ts.put(f"more{next(numbers)}", value(3), when_full="spillable")
        return await away("leased") > 0

    await until(pushed)
    assert await away("pinned") == 0
    assert torch.equal(await ts.get("leased"), value(2))


async def test_versions_of_a_state_dict_that_are_kept_leave_by_default(spilling):
    for step in range(6):
        await ts.put_state_dict({"w": value(step), "step": step}, "policy", keep=6)
    assert await ts.versions("policy") == [1, 2, 3, 4, 5, 6]
    assert (await ts.status()).spill.spilled >= 2
    for step in range(6):
        got = await ts.get_state_dict("policy", version=step + 1)
        assert got["step"] == step
        assert torch.equal(got["w"], value(step))
        del got
    ref = ts.ObjectRef("policy/w", 2)
    assert torch.equal(await ts.get(ref), value(1))
    await ts.delete("policy")
    await until(_all_is_free)


async def test_shards_come_back_where_they_are_wanted(spilling):
    whole = value(1, 8 * MB)
    for at in range(2):
        part = ts.TensorSlice((at * 4 * MB,), (4 * MB,), (8 * MB,), (2,), (at,))
        await ts.put("t", whole[at * 4 * MB : (at + 1) * 4 * MB], part, when_full="spillable")
    for at in range(4):
        await ts.put(f"k{at}", value(at), when_full="spillable")
    assert await away("t") == 8 * MB
    part = ts.TensorSlice((5 * MB,), (MB,), (8 * MB,))
    assert torch.equal(await ts.get("t", tensor_slice_spec=part), whole[5 * MB : 6 * MB])
    assert await away("t") == 4 * MB  # the other shard was not wanted
    assert torch.equal(await ts.get("t"), whole)


@pytest.mark.thorough
async def test_batches_are_one_cut_wherever_their_values_are(spilling):
    keys = ["a", "b", "c"]

    async def write(turn: int) -> None:
        same = torch.full((MB,), turn % 251, dtype=torch.uint8)
        await ts.put_batch(dict.fromkeys(keys, same), when_full="spillable")

    await write(0)
    done = asyncio.Event()

    async def push() -> None:
        at = 0
        while not done.is_set():
            await ts.put(f"push{at % 6}", value(at % 6), when_full="spillable")
            at += 1

    async def read() -> None:
        while not done.is_set():
            got = await ts.get_batch({key: torch.empty(MB, dtype=torch.uint8) for key in keys})
            seen = {int(one[at]) for one in got.values() for at in (0, MB // 2, MB - 1)}
            assert len(seen) == 1

    tasks = [asyncio.create_task(one()) for one in (push, read, read)]
    for turn in range(60):
        await write(turn)
    done.set()
    await asyncio.gather(*tasks)
    assert (await ts.status()).spill.written_bytes > 0


@pytest.mark.thorough
async def test_many_readers_at_once(spilling):
    for at in range(12):
        await ts.put(f"k{at}", value(at), when_full="spillable")

    async def read(at: int) -> None:
        into = torch.empty(4 * MB, dtype=torch.uint8)
        await ts.get(f"k{at % 12}", into)
        assert torch.equal(into, value(at % 12))

    await asyncio.gather(*[read(at) for at in range(36)])


async def test_an_overwritten_version_is_gone_from_the_disk_too(spilling):
    ref = await ts.put("k", value(0), when_full="spillable")
    numbers = itertools.count()

    async def pushed() -> bool:  # what is written after it may be done before it
        await ts.put(f"push{next(numbers)}", value(3, 3 * MB), when_full="spillable")
        return await away("k") > 0

    await until(pushed)
    before = (await ts.status()).spill.spilled_bytes
    await ts.put("k", torch.ones(10))
    with pytest.raises(ts.VersionGoneError):
        await ts.get(ref)
    assert torch.equal(await ts.get("k"), torch.ones(10))
    assert (await ts.status()).spill.spilled_bytes == before - 4 * MB


async def test_pinned_values_that_do_not_fit_are_refused_as_ever(spilling):
    for at in range(3):
        await ts.put(f"k{at}", value(at))
    await ts.put("small", value(4, MB), when_full="spillable")
    with pytest.raises(ts.StoreFullError, match=r"pinned or being used.*'spillable'"):
        await ts.put("k3", value(3, 5 * MB), timeout=30)
    with pytest.raises(ts.StoreFullError):
        await ts.put("k4", value(3, 17 * MB), when_full="spillable")
    assert torch.equal(await ts.get("small"), value(4, MB))


async def test_who_waits_too_long_is_told_for_what(spilling):
    await ts.put("k", value(0), when_full="spillable")
    for at in range(5):
        await ts.put(f"push{at}", value(at), when_full="spillable")
    assert await away("k") > 0
    held = [await ts.get(f"push{at}") for at in range(2, 5)]
    await ts.put("pinned", value(9, 3 * MB))
    with pytest.raises(ts.StoreTimeoutError, match="memory was full; readers held") as caught:
        await ts.get("k", timeout=1.5)
    assert "memory was full" in caught.value.details["waiting_for"]
    with pytest.raises(ts.StoreTimeoutError, match=r"`put`.*full; readers held 12.0 MiB"):
        await ts.put("other", value(1), timeout=1.5)
    del held
    gc.collect()
    assert torch.equal(await ts.get("k"), value(0))
    status = await ts.status()
    assert status.spill.waiting == 0
    assert status.volumes[0].unfinished_bytes == 0


async def test_a_put_that_is_given_up_while_it_waits_leaves_nothing(spilling):
    held = []
    for at in range(3):
        await ts.put(f"k{at}", value(at), when_full="spillable")
        held.append(await ts.get(f"k{at}"))
    used = (await ts.status()).volumes[0].used_bytes
    task = asyncio.create_task(ts.put("late", value(5, 8 * MB), when_full="spillable"))

    async def waits() -> bool:
        return (await ts.status()).spill.waiting == 1

    await until(waits)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    held.clear()
    gc.collect()

    async def idle() -> bool:
        status = await ts.status()
        leased = status.volumes[0].leased_bytes
        return status.spill.waiting == 0 and leased == 0 and status.volumes[0].used_bytes <= used

    await until(idle)
    assert not await ts.exists("late")


@pytest.mark.thorough
async def test_small_values_leave_too(spilling):
    """Those that the server has in its own memory: a store that is full of them takes more."""
    count, nbytes = 1500, 20_000
    whole = value(1, count + nbytes)
    small = {f"k{at:04}": whole[at : at + nbytes] for at in range(count)}
    keys = list(small)
    for at in range(0, count, 25):
        await ts.put_batch({key: small[key] for key in keys[at : at + 25]}, when_full="spillable")
    await ts.put("other", value(2), when_full="spillable")
    assert await away(keys[0]) == nbytes
    status = await ts.status()
    assert status.spill.spilled_bytes >= count * nbytes + 4 * MB - 16 * MB
    assert status.volumes[0].used_bytes <= 16 * MB
    for key in keys[::50]:
        assert torch.equal(await ts.get(key), small[key]), key
    for at in range(0, count, 100):
        found = await ts.get_batch(keys[at : at + 100])
        assert all(torch.equal(found[key], small[key]) for key in keys[at : at + 100])
    await ts.put(keys[0], value(3, 100), when_full="spillable")
    assert torch.equal(await ts.get(keys[0]), value(3, 100))
    assert torch.equal(await ts.get("other"), value(2))
    await ts.delete_batch([*keys, "other"])
    await until(_all_is_free)


async def test_small_values_that_are_pinned_stay(spilling):
    await ts.put("small", torch.arange(10))
    for at in range(6):
        await ts.put(f"k{at}", value(at), when_full="spillable")
    assert (await ts.stat("small")).inline
    assert torch.equal(await ts.get("small"), torch.arange(10))


@pytest.mark.thorough
async def test_it_says_what_is_wrong_with_arguments(store, tmp_path):
    with pytest.raises(ts.ConfigurationError, match="initialize it with spill="):
        await ts.put("k", value(0), when_full="spillable")
    with pytest.raises(ts.ConfigurationError, match="'pinned', 'spillable', 'evictable'"):
        await ts.put("k", value(0), when_full="swap")
    with pytest.raises(ts.ConfigurationError, match="pass spill="):
        await ts.initialize(store_name="other", when_full="spillable")
    with pytest.raises(ts.ConfigurationError, match="Protocol not known: nowhere"):
        await ts.initialize(store_name="other", spill="nowhere://bucket/spill")
    with pytest.raises(ts.ConfigurationError, match="spill_capacity= needs spill="):
        await ts.initialize(store_name="other", spill_capacity=1 << 30)
    (tmp_path / "file").touch()
    with pytest.raises(ts.ConfigurationError, match="cannot spill to"):
        await ts.initialize(store_name="other", spill=tmp_path / "file")
