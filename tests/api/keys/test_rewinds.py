"""A run that goes back to an older checkpoint: ``rewind=True``."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest
import torch
from tests.support import until

import torchstore_core as ts
from torchstore_core import TensorShard, TensorSlice

LARGE = 1 << 18


def weights(number: float) -> dict[str, Any]:
    return {"large": torch.full((LARGE,), float(number)), "small": number}


async def publish(k: str, first: int, last: int, **how: Any) -> dict[int, ts.ObjectRef]:
    return {
        version: await ts.put_state_dict(weights(version), k, version=version, **how)
        for version in range(first, last + 1)
    }


async def gone(*refs: ts.ObjectRef) -> None:
    for ref in refs:
        for get in (ts.get(ref), ts.get_batch([ref])):
            with pytest.raises(ts.VersionGoneError):
                await get


async def test_what_was_newer_is_gone_in_one_step(shared, k):
    old = await publish(k, 49, 53, keep=4)
    mapped = await ts.get(old[52])
    entry = (await ts.wait(f"{k}/large", min_version=53))[f"{k}/large"]
    assert await ts.versions(k) == [50, 51, 52, 53]

    new = await ts.put_state_dict(weights(51.5), k, version=51, rewind=True)
    assert await ts.versions(k) == [50, 51]
    assert await ts.latest_version(k) == 51
    assert (await ts.get(k))["small"] == 51.5
    assert (await ts.get(new))["large"][0] == 51.5
    assert (await ts.get(old[50]))["small"] == 50  # both runs have it in common
    await gone(old[51], old[52], old[53], entry)
    assert mapped["large"][0] == 52  # what is leased stays
    assert new != old[51]
    assert new == ts.ObjectRef(k, 51)

    again = await publish(k, 52, 53)
    await gone(old[52], old[53], entry)
    assert (await ts.get(again[53]))["small"] == 53
    assert await ts.versions(k) == [50, 51, 52, 53]
    del mapped
    gc.collect()


async def test_values_and_batches_go_back_too(shared):
    old = await ts.put("v", torch.full((LARGE,), 1.0), version=7)
    new = await ts.put("v", torch.full((LARGE,), 2.0), version=5, rewind=True)
    assert (new.version, await ts.latest_version("v")) == (5, 5)
    await gone(old)
    assert (await ts.get(new))[0] == 2
    assert (await ts.put("v", 3)).version == 6
    await gone(new)
    third = await ts.put("v", 4)
    assert third.version == 7
    await gone(old)
    assert await ts.get(third) == 4

    batch = await ts.put_batch({"v": 5, "fresh": 6, "t": torch.ones(LARGE)}, version=2, rewind=True)
    assert {ref.version for ref in batch.values()} == {2}
    assert await ts.get_batch(["v", "fresh"]) == {"v": 5, "fresh": 6}
    for ref in batch.values():
        await ts.get(ref)
    await gone(third)
    packed = ts.TorchStoreStateDict.from_state_dict({"w": torch.ones(5)})
    assert (await ts.put("v", packed, version=1, rewind=True)).version == 1
    await gone(batch["v"])


async def test_one_that_is_not_behind_anything_is_like_any_other(shared, k):
    first = await ts.put_state_dict(weights(1), k, version=10, rewind=True, keep=2)
    waiting = [
        asyncio.create_task(ts.wait(k, min_version=11)),
        asyncio.create_task(ts.wait(k, after=first)),
        asyncio.create_task(ts.get_state_dict(k, min_version=11)),
    ]
    second = await ts.put_state_dict(weights(2), k, version=11, rewind=True)
    assert await waiting[0] == await waiting[1] == {k: second}
    assert (await waiting[2])["small"] == 2
    assert (await ts.get(first))["small"] == 1
    assert await ts.versions(k) == [10, 11]


async def test_who_waits_for_what_will_not_come_is_told(shared, k):
    old = await publish(k, 49, 53, keep=3)
    report = ts.StateDictReport()
    await ts.get_state_dict(k, report=report)
    assert report.ref == old[53]
    in_vain = [
        ts.wait(k, min_version=54, timeout=None),
        ts.wait(f"{k}/small", min_version=54, timeout=None),
        ts.wait(["never", k], min_version=54, timeout=None),
        ts.wait(k, after=old[53], timeout=None),
        ts.get_state_dict(k, min_version=54, timeout=None),
        ts.get_state_dict(k, after=report.ref, timeout=None),
    ]
    before = (await ts.status()).operations.get("Wait", 0)
    tasks = [asyncio.create_task(wait) for wait in in_vain]
    other = asyncio.create_task(ts.wait([k, "never"], min_version=51, timeout=None))

    async def all_wait() -> bool:
        return (await ts.status()).operations.get("Wait", 0) >= before + 5

    await until(all_wait)
    new = await ts.put_state_dict(weights(51.5), k, version=51, rewind=True)
    for task in tasks:
        with pytest.raises(ts.VersionGoneError, match="rewound") as caught:
            await asyncio.wait_for(task, 50)
        assert caught.value.details["current"] == 51
    assert not other.done()
    await ts.put("never", 1, version=51)
    assert (await asyncio.wait_for(other, 50))[k] == new

    # Who was not waiting is told by its ref, and not by a number.
    with pytest.raises(ts.VersionGoneError, match="rewound"):
        await ts.wait(k, after=old[53])
    with pytest.raises(ts.VersionGoneError, match="rewound"):
        await ts.get_state_dict(k, after=report.ref)
    assert await ts.wait(k, after=old[50]) == {k: new}  # its history goes on
    waiting = asyncio.create_task(ts.get_state_dict(k, after=new, report=report))
    newer = (await publish(k, 52, 52))[52]
    assert (await waiting)["small"] == 52
    assert report.ref == newer


def shard(rank: int, number: float) -> dict[str, Any]:
    part = TensorSlice((rank * 4,), (4,), (8,), (2,), (rank,))
    return {"w": TensorShard(torch.full((4,), float(number)), part), f"own{rank}": number}


async def put_of(k: str, rank: int, number: float, **how: Any) -> Any:
    return await ts.put_state_dict(shard(rank, number), k, participants=2, participant=rank, **how)


async def test_readers_see_the_old_run_until_all_participants_are_there(shared, k):
    for version in (50, 51, 52):
        for rank in (0, 1):
            ref = await put_of(k, rank, version, version=version, keep=4)
    unfinished = await put_of(k, 0, 53, version=53)
    await put_of(k, 1, 61, version=51, rewind=True)
    ahead = await put_of(k, 1, 62, version=52)  # it is faster, and belongs to the same run
    assert await ts.versions(k) == [50, 51, 52]
    assert (await ts.get(k))["w"].tolist() == [52] * 8
    assert (await ts.get(ref))["own1"] == 52
    pending = {p.version: p.committed for p in (await ts.stat(k)).pending}
    assert pending == {53: ["0"], 51: ["1"], 52: ["1"]}

    new = await put_of(k, 0, 61, version=51, rewind=True)
    assert await ts.versions(k) == [50, 51]
    assert (await ts.get(new))["w"].tolist() == [61] * 8
    await gone(ref, unfinished)
    assert [p.version for p in (await ts.stat(k)).pending] == [52]
    last = await put_of(k, 0, 62)  # its next is the version that the other one has begun
    assert last == ahead
    assert (last.incarnation, last.timeline) == (ahead.incarnation, ahead.timeline)
    assert (await ts.get(last))["w"].tolist() == [62] * 8
    assert await ts.versions(k) == [50, 51, 52]
    await gone(ref)


async def test_a_run_of_another_size_goes_back(shared, k):
    for rank in (0, 1):
        old = await put_of(k, rank, 9, version=9)
    new = await ts.put_state_dict(weights(4), k, version=4, rewind=True)
    await gone(old)
    assert (await ts.get(new))["small"] == 4
    assert (await ts.put_state_dict(weights(5), k)).version == 5


async def test_a_partial_version_builds_on_what_is_before_it(shared, k):
    old = await publish(k, 50, 52, keep=3)
    with pytest.raises(ts.KeyNotFoundError, match="the version before"):
        await ts.put_state_dict({"small": 0}, k, version=50, partial=True, rewind=True)
    new = await ts.put_state_dict({"small": -1}, k, version=51, partial=True, rewind=True)
    got = await ts.get(new)
    assert (got["small"], got["large"][0]) == (-1, 50)
    await gone(old[51], old[52])
    assert (await ts.get(old[50]))["small"] == 50


async def test_what_a_partial_version_builds_on_waits_for_it(shared, k):
    """The run before goes on meanwhile, and keeps less."""
    how: dict[str, Any] = {"participants": 2, "version": 51, "rewind": True, "partial": True}
    await publish(k, 50, 52, keep=3)
    await ts.put_state_dict({"small": -1}, k, participant="a", **how)
    await publish(k, 53, 56, keep=1)
    assert await ts.versions(k) == [56]
    new = await ts.put_state_dict({"more": -2}, k, participant="b", **how)
    got = await ts.get(new)
    assert (got["small"], got["more"], got["large"][0]) == (-1, -2, 50)
    await ts.delete(k)
    gc.collect()


async def test_a_deleted_key_goes_back_and_its_refs_do_not_come_back(shared, k):
    old = await publish(k, 50, 53, keep=2)
    new = await ts.put_state_dict(weights(51), k, version=51, rewind=True)
    await ts.delete(k)
    await gone(*old.values(), new)
    after = await ts.put(k, 1)
    assert after.version > 53  # above all that there ever were
    await gone(*old.values(), new)
    back = await ts.put(k, 2, version=51, rewind=True)
    await gone(*old.values(), new, after)
    assert await ts.get(back) == 2


async def test_what_is_given_up_changes_nothing(shared, k):
    old = await publish(k, 50, 52, keep=3)
    begun = await ts.put_state_dict(
        {"small": 0}, k, version=51, rewind=True, participants=2, participant="a"
    )
    assert await ts.versions(k) == [50, 51, 52]
    await gone(begun)
    third = (await publish(k, 53, 53))[53]  # this is another sequence: that of the run before
    assert (await ts.get(third))["small"] == 53
    assert (await ts.get(old[51]))["small"] == 51


async def test_a_number_of_before_is_gone_and_not_still_to_come(shared, k):
    """Who names a version by its number was told that it is not there yet."""
    await publish(k, 50, 53, keep=4)
    await ts.put_state_dict(weights(51.5), k, version=51, rewind=True)
    calls = [
        lambda version: ts.get(ts.Request(k, version)),
        lambda version: ts.get(ts.Request(f"{k}/small", version)),
        lambda version: ts.get_state_dict(k, version=version),
        lambda version: ts.stat(k, version=version),
    ]
    for call in calls:
        with pytest.raises(ts.VersionGoneError, match=r"rewound to 51.*wait for it") as caught:
            await call(52)
        assert caught.value.details == {"current": 51, "rewound": True}
        with pytest.raises(ts.VersionGoneError, match=r"no version 54 .* yet") as caught:
            await call(54)
        assert caught.value.details == {"current": 51}
    await publish(k, 52, 52)
    for call in calls:
        await call(52)
        with pytest.raises(ts.VersionGoneError, match="rewound to 51"):
            await call(53)


async def test_bad_arguments(shared, k):
    for put in (
        lambda **how: ts.put(k, 1, **how),
        lambda **how: ts.put_batch({k: 1}, **how),
        lambda **how: ts.put_state_dict({"a": 1}, k, **how),
    ):
        with pytest.raises(ts.ConfigurationError, match="version="):
            await put(rewind=True)
        with pytest.raises(ts.ConfigurationError, match="a bool"):
            await put(version=1, rewind=1)
    ref = await ts.put(k, 1)
    for call in (
        lambda **how: ts.wait(k, **how),
        lambda **how: ts.get_state_dict(k, **how),
    ):
        with pytest.raises(ts.UnsupportedValueError, match="an ObjectRef"):
            await call(after=3)
        with pytest.raises(ts.ConfigurationError, match="min_version="):
            await call(after=ref, min_version=2)
        with pytest.raises(ts.ConfigurationError):
            await call(after=ts.ObjectRef("other", 1))
        with pytest.raises(ts.UnsupportedValueError):
            await call(after=ts.ObjectRef(k, "1"))
    with pytest.raises(ts.ConfigurationError):
        await ts.wait([k, "other"], after=ref)
