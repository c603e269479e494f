"""Versions of state dicts: waiting for them, keeping some, naming them, sharing their entries."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from tests.processes import Script
from tests.support import until
from tests.trees import assert_same

import torchstore_core as ts

MB = 1 << 20


def _of(number: float, *, megabytes: int = 1) -> dict[str, Any]:
    value = torch.full((megabytes * MB // 4,), float(number))
    return {"w": value, "in": {"b": value[: MB // 8] + 0}, "number": number}


async def _used() -> int:
    return (await ts.status()).volumes[0].used_bytes


async def _until_used(low: int, high: int) -> None:
    """What died here is given back in the background."""

    async def within() -> bool:
        return low <= await _used() <= high

    await until(within)


async def _until_waiting(count: int) -> None:
    async def enough() -> bool:
        return await _waits() >= count

    await until(enough, timeout=60)  # a process may have to start for it


async def _waits() -> int:
    return (await ts.status()).operations.get("Wait", 0)


# ---- which there are ----------------------------------------------------------------------


async def test_versions_begin_at_one_and_only_grow(shared, k):
    assert await ts.versions(k) == []
    assert await ts.latest_version(k) == 0
    for number in (1, 2, 3):
        ref = await ts.put_state_dict(_of(number), k)
        assert ref == ts.ObjectRef(k, number)
        assert await ts.versions(k) == [number]
        assert await ts.latest_version(k) == number
    await ts.delete(k)
    assert await ts.latest_version(k) == 0
    assert (await ts.put_state_dict({}, k)).version == 4
    await ts.put(f"{k} plain", 1)
    assert await ts.versions(f"{k} plain") == [1]
    assert await ts.latest_version(f"{k} plain") == 1


async def test_a_get_may_name_its_version(shared, k):
    first = await ts.put_state_dict(_of(1), k, keep=2)
    second = await ts.put_state_dict(_of(2), k, keep=2)
    for ref, number in ((first, 1), (second, 2)):
        assert_same(await ts.get_state_dict(k, version=ref.version), _of(number))
        mine = _of(0)
        await ts.get_state_dict(k, mine, version=ref.version)
        assert_same(mine, _of(number))
        assert_same(await ts.get(ref), _of(number))
        entry = await ts.get(ts.ObjectRef(f"{k}/in.b", ref.version))
        assert (entry == number).all()
    assert (await ts.get_state_dict(k))["number"] == 2
    assert (await ts.get(f"{k}/number")) == 2
    assert (await ts.stat(k)).versions == [first.version, second.version]
    assert await ts.versions(f"{k}/w") == [first.version, second.version]
    assert (await ts.get_batch([first, f"{k}/number"]))[k]["number"] == 1


# ---- waiting ------------------------------------------------------------------------------


async def test_a_get_waits_for_a_version(shared, k):
    first = await ts.put_state_dict(_of(1), k)
    before = await _waits()
    task = asyncio.create_task(ts.get_state_dict(k, min_version=first.version + 2, timeout=30))
    mine = _of(0)
    filling = asyncio.create_task(ts.get_state_dict(k, mine, min_version=first.version + 2))
    await _until_waiting(before + 2)
    await ts.put_state_dict(_of(2), k)
    assert await ts.exists(k)
    assert not task.done()
    await ts.put_state_dict(_of(3), k)
    assert (await task)["number"] == 3
    assert await filling is mine
    assert_same(mine, _of(3))
    for least in (first.version, first.version + 2, 0, -5):
        assert (await ts.get_state_dict(k, min_version=least))["number"] == 3
    got = await ts.get_state_dict(k, version=first.version + 2, min_version=first.version)
    assert got["number"] == 3


async def test_a_get_waits_for_the_first_version_of_another_process(shared):
    before = await _waits()
    with Script(
        """
        await ts.wait("go", timeout=50)
        for number in (1, 2):
            await ts.put_state_dict({"w": torch.full((300_000,), number)}, "theirs")
        """
    ) as script:
        task = asyncio.create_task(ts.get_state_dict("theirs", min_version=2, timeout=50))
        await _until_waiting(before + 2)
        await ts.put("go", 1)
        assert (await task)["w"].unique().tolist() == [2]
        await script.output()


async def test_wait_wakes_for_a_state_dict_and_for_its_entries(shared, k):
    before = await _waits()
    names = [k, f"{k}/in.b", f"{k}/number"]
    tasks = [asyncio.create_task(ts.wait(name, timeout=30)) for name in names]
    tasks.append(asyncio.create_task(ts.wait(names, timeout=30)))
    await _until_waiting(before + 4)
    ref = await ts.put_state_dict(_of(1), k)
    for name, task in zip(names, tasks, strict=False):
        assert await task == {name: ts.ObjectRef(name, ref.version)}
    assert list(await tasks[3]) == names
    later = asyncio.create_task(ts.wait(f"{k}/w", min_version=ref.version + 1, timeout=30))
    await _until_waiting(before + 5)
    await ts.put_state_dict({"x": 1}, k)  # newer, but without that entry
    assert await ts.exists(f"{k}/x")
    assert not later.done()
    third = await ts.put_state_dict(_of(3), k)
    assert await later == {f"{k}/w": ts.ObjectRef(f"{k}/w", third.version)}


async def test_waiting_ends_in_time(shared, k):
    ref = await ts.put_state_dict(_of(1), k)
    for call in (
        ts.get_state_dict(k, min_version=ref.version + 1, timeout=0.05),
        ts.get_state_dict(k, _of(0), min_version=ref.version + 1, timeout=0.05),
        ts.get_state_dict("never", min_version=1, timeout=0.05),
    ):
        with pytest.raises(ts.StoreTimeoutError, match=r"within 0\.05 s"):
            await call
    with pytest.raises(ts.StoreTimeoutError):
        await ts.put_state_dict(_of(2), k, timeout=0)
    assert await ts.latest_version(k) == ref.version
    assert (await ts.stat(k)).pending == []
    assert (await ts.status()).volumes[0].unfinished_bytes == 0


# ---- keeping ------------------------------------------------------------------------------


async def test_keep_keeps_the_last_versions_and_frees_the_others(shared, k):
    for number in range(1, 8):
        await ts.put_state_dict(_of(number), k, keep=3)
        there = [*range(max(1, number - 2), number + 1)]
        assert await ts.versions(k) == there
        size = MB + MB // 2
        assert len(there) * size <= await _used() <= len(there) * (size + 4096)
    for number in (5, 6, 7):
        assert_same(await ts.get_state_dict(k, version=number), _of(number))
    for gone in (1, 4, 8):
        for call in (
            ts.get_state_dict(k, version=gone),
            ts.get_state_dict(k, _of(0), version=gone, strict=False),
            ts.get(ts.ObjectRef(k, gone)),
            ts.get(ts.ObjectRef(f"{k}/w", gone)),
        ):
            with pytest.raises(ts.VersionGoneError, match=f"version {gone} of '{k}"):
                await call
    with pytest.raises(ts.VersionGoneError) as caught:
        await ts.get_state_dict(k, version=1)
    assert caught.value.details == {"current": 7, "versions": [5, 6, 7]}
    assert "it is at 7 now, and 5, 6 are kept" in str(caught.value)


async def test_an_error_names_few_of_very_many_versions(shared, k):
    for _ in range(300):
        await ts.put_state_dict({"step": 1}, k, keep=200)
    with pytest.raises(ts.VersionGoneError) as caught:
        await ts.get_state_dict(k, version=1)
    assert caught.value.details["versions"] == [*range(101, 301)]
    message = str(caught.value)
    assert "it is at 300 now, and 199 older ones are kept, the oldest of which is 101" in message
    assert len(message) < 300


async def test_fewer_are_kept_as_soon_as_somebody_says_so(shared, k):
    for number in range(1, 5):
        await ts.put_state_dict(_of(number), k, keep=4)
    assert await ts.versions(k) == [1, 2, 3, 4]
    await ts.put_state_dict(_of(5), k, keep=2)
    assert await ts.versions(k) == [4, 5]
    await ts.put_state_dict(_of(6), k)  # who does not say so keeps as many as before
    assert await ts.versions(k) == [5, 6]
    await ts.put_state_dict(_of(6), k, keep=1)
    assert await ts.versions(k) == [7]
    await _until_used(3 * MB // 2, 3 * MB // 2 + 4096)
    await ts.put_state_dict(_of(7), k, keep=2)
    await ts.put(k, "plain")
    assert await ts.versions(k) == [8, 9]
    assert (await ts.get_state_dict(k, version=8))["number"] == 7
    await ts.delete(k)
    await _until_used(0, 0)


async def test_readers_of_dropped_versions_keep_their_tensors(shared, k):
    held = []
    for number in range(1, 4):
        await ts.put_state_dict(_of(number), k, keep=2)
        held.append(await ts.get_state_dict(k))
    assert await ts.versions(k) == [2, 3]
    await ts.put_state_dict({}, k, keep=1)
    assert await ts.versions(k) == [4]
    assert await _used() > 4 * MB  # leased
    for _ in range(3):  # whatever is written now goes elsewhere
        await ts.put_state_dict(_of(9), "other")
    for number, got in enumerate(held, start=1):
        assert_same(got, _of(number))
    await ts.delete("other")
    del held, got
    await _until_used(0, 0)


# ---- naming them --------------------------------------------------------------------------


async def test_a_publisher_may_say_which_version_it_is(shared, k):
    assert (await ts.put_state_dict(_of(1), k, version=10, keep=5)).version == 10
    assert (await ts.put_state_dict(_of(2), k, keep=5)).version == 11
    assert (await ts.put_state_dict(_of(3), k, version=20, keep=5)).version == 20
    assert await ts.versions(k) == [10, 11, 20]
    for old in (1, 10, 19, 20):
        with pytest.raises(ts.VersionGoneError, match=f"version {old} of '{k}' cannot be put"):
            await ts.put_state_dict(_of(4), k, version=old)
    assert await ts.versions(k) == [10, 11, 20]
    assert (await ts.get_state_dict(k))["number"] == 3
    await ts.delete(k)
    with pytest.raises(ts.VersionGoneError):
        await ts.put_state_dict(_of(5), k, version=20)
    assert (await ts.put_state_dict(_of(5), k, version=21)).version == 21
    assert (await ts.status()).volumes[0].unfinished_bytes == 0


# ---- partial publishes --------------------------------------------------------------------


def _layers(count: int) -> dict[str, torch.Tensor]:
    return {f"layer.{i}": torch.full((MB // 4,), float(i)) for i in range(count)}


async def test_a_partial_publish_shares_what_it_does_not_name(shared, k):
    base = {**_layers(10), "config": {"step": 1, "names": [torch.ones(2), "x"]}}
    await ts.put_state_dict(base, k, keep=2)
    before = await _used()
    ref = await ts.put_state_dict(
        {"layer.3": torch.full((MB // 4,), 33.0), "config": {"step": 2}}, k, partial=True, keep=2
    )
    assert ref == ts.ObjectRef(k, 2)
    assert MB <= await _used() - before <= MB + 4096
    changed = {**base, "layer.3": torch.full((MB // 4,), 33.0)}
    changed["config"] = {"step": 2, "names": [torch.ones(2), "x"]}
    assert_same(await ts.get_state_dict(k), changed)
    assert_same(await ts.get_state_dict(k, version=1), base)
    mine = {name: torch.zeros(MB // 4) for name in _layers(10)}
    await ts.get_state_dict(k, mine, strict=False)
    assert [tensor[0].item() for tensor in mine.values()] == [0, 1, 2, 33, 4, 5, 6, 7, 8, 9]
    assert (await ts.get(f"{k}/layer.3"))[0] == 33
    assert (await ts.get(f"{k}/layer.4"))[0] == 4
    assert (await ts.get(ts.ObjectRef(f"{k}/layer.3", 1)))[0] == 3
    assert (await ts.stat(f"{k}/layer.4")).version == 2
    assert (await ts.stat(k)).nbytes >= 10 * MB
    # The next version drops the first one: only what it alone had goes.
    await ts.put_state_dict({"layer.0": torch.zeros(MB // 4)}, k, partial=True, keep=2)
    assert await ts.versions(k) == [2, 3]
    await _until_used(before + MB, before + MB + 3 * 4096)
    await ts.put_state_dict({}, k, partial=True)
    await _until_used(before, before + 2 * 4096)
    changed["layer.0"] = torch.zeros(MB // 4)
    assert_same(await ts.get_state_dict(k), changed)
    await ts.delete(k)
    await _until_used(0, 0)


async def test_a_partial_publish_may_bring_new_entries(shared, k):
    await ts.put_state_dict({"w": torch.ones(3)}, k)
    await ts.put_state_dict({"lora": {"a": torch.zeros(2), "b": 5}}, k, partial=True)
    expected = {"w": torch.ones(3), "lora": {"a": torch.zeros(2), "b": 5}}
    assert_same(await ts.get_state_dict(k), expected)
    # An entry may change its kind, shape and dtype.
    changed = {"w": torch.ones(2, 2).half(), "lora": {"b": torch.ones(1)}}
    await ts.put_state_dict(changed, k, partial=True)
    got = await ts.get_state_dict(k)
    assert_same(got["w"], torch.ones(2, 2).half())
    assert_same(got["lora"], {"a": torch.zeros(2), "b": torch.ones(1)})


async def test_tied_entries_are_untied_by_a_partial_publish_of_one(shared, k):
    table = torch.randn(300, 512)
    await ts.put_state_dict({"embedding": table, "head": table}, k)
    await ts.put_state_dict({"head": table + 1}, k, partial=True)
    got = await ts.get_state_dict(k)
    assert torch.equal(got["embedding"], table)
    assert torch.equal(got["head"], table + 1)
    await ts.put_state_dict({"embedding": table, "head": table}, k, partial=True)
    got = await ts.get_state_dict(k)
    assert got["embedding"].data_ptr() == got["head"].data_ptr()


async def test_a_trainer_that_goes_back_does_what_the_error_says(shared, k):
    def of(step: int) -> dict[str, Any]:
        return {"w": torch.full((3,), float(step)), "step": step}

    for step in range(1, 9):
        await ts.put_state_dict(of(step), k, version=step)
    words = rf"version 6 of '{k}' cannot be put: .*goes back to an older checkpoint.*rewind=True"
    for _ in range(2):
        with pytest.raises(ts.VersionGoneError, match=words):
            await ts.put_state_dict(of(6), k, version=6)
        with pytest.raises(ts.VersionGoneError, match=words):
            await ts.put(k, of(6), version=6)
        if await ts.exists(k):
            await ts.delete(k)  # is not the way out: readers may have seen that version
    ref = await ts.put_state_dict(of(6), k, version=6, rewind=True)
    assert ref.version == 6
    got = await ts.get_state_dict(k, min_version=6)
    assert (got["step"], got["w"][0].item()) == (6, 6.0)
    for step in (7, 8):
        assert (await ts.put_state_dict(of(step), k, version=step)).version == step
    assert (await ts.put_state_dict(of(6), f"{k}2", version=6)).version == 6


async def test_a_partial_publish_needs_a_version_before(shared):
    for key, value in (("never", None), ("plain", "value")):
        if value is not None:
            await ts.put(key, value)
        with pytest.raises(ts.KeyNotFoundError, match="put the whole state dict first") as caught:
            await ts.put_state_dict({"w": torch.ones(2)}, key, partial=True)
        assert type(caught.value) is ts.KeyNotFoundError
        assert caught.value.key == key
        assert caught.value.details == {"missing": [key]}
    assert not await ts.exists("never")
    assert await ts.get("plain") == "value"


async def test_a_reader_that_holds_the_base_is_not_disturbed(shared, k):
    await ts.put_state_dict(_layers(4), k)
    held = await ts.get_state_dict(k)
    for number in range(20):
        await ts.put_state_dict(
            {"layer.1": torch.full((MB // 4,), 100.0 + number)}, k, partial=True
        )
    assert_same(held, _layers(4))
    got = await ts.get_state_dict(k)
    assert [tensor[0].item() for tensor in got.values()] == [0, 119, 2, 3]
    del held, got
    await _until_used(4 * MB, 4 * MB + 4096)
