"""The packed form in the store: put, got, and its entries fetched alone."""

from __future__ import annotations

import datetime

import pytest
import torch
from tests.api.state_dicts.test_packed import again, pack, shard
from tests.trees import assert_same

import torchstore_core as ts
from torchstore_core import TensorSlice, TorchStoreStateDict


async def test_put_and_got_as_the_same_type(shared):
    w = torch.randn(300, 400)
    state_dict = {"a": {"w": w, "tied": w}, "l": [torch.ones(3), ("x", 5)], "n": 1}
    ref = await ts.put("m1", pack(state_dict))
    assert ref == ts.ObjectRef("m1", 1)
    got = await ts.get("m1")
    assert isinstance(got, TorchStoreStateDict)
    assert_same(got.to_state_dict(), state_dict)
    assert got.nbytes == 480_000 + 64  # tied weights once
    assert_same((await ts.get_batch(["m1"]))["m1"].to_state_dict(), state_dict)
    assert_same((await ts.get(ref)).to_state_dict(), state_dict)


async def test_it_is_stored_as_a_state_dict(shared):
    state_dict = {"a": {"w": torch.randn(300, 400)}, "b": torch.ones(3, dtype=torch.int8), "n": 1}
    await ts.put("m2", pack(state_dict))
    assert await ts.keys() == ["m2", "m2/a.w", "m2/b", "m2/n"]
    assert torch.equal(await ts.get("m2/a.w"), state_dict["a"]["w"])
    part = shard(torch.zeros(2, 2), (5, 7), 300, 400)
    await ts.get("m2/a.w", part)
    assert torch.equal(part.tensor, state_dict["a"]["w"][5:7, 7:9])
    assert await ts.get("m2/n") == 1
    got = await ts.get_state_dict("m2")
    assert_same(got, state_dict)
    mine = {"a": {"w": torch.zeros(300, 400)}, "b": torch.zeros(3, dtype=torch.int8), "n": 0}
    await ts.get_state_dict("m2", mine)
    assert_same(mine, state_dict)


async def test_a_state_dict_that_was_not_packed_is_not_got_packed(shared):
    await ts.put("m3", pack({"w": torch.ones(3)}))
    await ts.put_state_dict({"w": torch.zeros(3)}, "m3")
    assert_same(await ts.get("m3"), {"w": torch.zeros(3)})
    await ts.put("m3", pack({"w": torch.ones(3)}))
    assert isinstance(await ts.get("m3"), TorchStoreStateDict)
    assert await ts.latest_version("m3") == 3


async def test_shards_of_several_participants_make_one_version(shared):
    w = torch.randn(4, 6)

    def of(rank: int, value: torch.Tensor) -> TorchStoreStateDict:
        mesh = {"mesh_shape": (2,), "coordinates": (rank,)}
        rows = slice(2 * rank, 2 * rank + 2)
        packed = pack({"layers": [{"w": shard(value[rows], (2 * rank, 0), 4, 6, **mesh)}], "n": 1})
        return again(packed)  # as if it came from a file

    assert await ts.put("m4", of(0, w)) == ts.ObjectRef("m4", 1)
    with pytest.raises(ts.PartialPutError):
        await ts.get("m4")
    assert await ts.put("m4", of(1, w)) == ts.ObjectRef("m4", 1)
    assert torch.equal(await ts.get("m4/layers.0.w"), w)
    column = shard(torch.zeros(4, 2), (0, 3), 4, 6)
    await ts.get("m4/layers.0.w", column)
    assert torch.equal(column.tensor, w[:, 3:5])
    got = await ts.get("m4")
    assert_same(got.to_state_dict(), {"layers": [{"w": w}], "n": 1})
    assert got.participants == 1  # it is whole

    await ts.put("m4", of(1, w + 1))  # the next version
    assert torch.equal(await ts.get("m4/layers.0.w"), w)
    await ts.put("m4", of(0, w + 1))
    assert torch.equal(await ts.get("m4/layers.0.w"), w + 1)
    assert await ts.versions("m4") == [2]


async def test_put_state_dict_takes_one_with_all_its_arguments(shared):
    state_dict = {"w": torch.randn(1000), "n": torch.arange(4)}
    packed = pack(state_dict)
    pending = await ts.put_state_dict(
        packed, "m5", transfer_dtype=torch.bfloat16, keep=2, version=5, blocking=False
    )
    assert await pending == ts.ObjectRef("m5", 5)
    half = {"w": state_dict["w"].bfloat16(), "n": state_dict["n"]}
    assert_same((await ts.get("m5")).to_state_dict(), half)
    await ts.put_state_dict(
        pack({"w": torch.ones(1000, dtype=torch.bfloat16)}), "m5", partial=True, keep=2
    )
    got = (await ts.get("m5")).to_state_dict()
    assert_same(got, {"w": torch.ones(1000, dtype=torch.bfloat16), "n": state_dict["n"]})
    assert await ts.versions("m5") == [5, 6]
    await ts.put("m5", packed, version=9)
    with pytest.raises(ts.VersionGoneError):
        await ts.put("m5", packed, version=9)

    await ts.put_state_dict(packed, "two", participants=2, participant="x")
    with pytest.raises(ts.PartialPutError):
        await ts.get("two")
    await ts.put_state_dict(pack({"b": torch.ones(1)}), "two", participants=2, participant="y")
    assert set((await ts.get("two")).to_state_dict()) == {"w", "n", "b"}


async def test_pickled_objects_need_permission_of_the_store_too(shared):
    state_dict = {"when": datetime.timedelta(3)}
    careful = again(pack(state_dict, allow_pickle=True))
    with pytest.raises(ts.UnsafeObjectError):
        await ts.put("m6", careful)
    allowed = pack(state_dict, allow_pickle=True)
    with pytest.raises(ts.UnsafeObjectError):
        await ts.put("m6", allowed, allow_pickle=False)
    await ts.put("m6", allowed)
    assert (await ts.get("m6")).to_state_dict() == state_dict
    with pytest.raises(ts.UnsafeObjectError):
        await ts.get("m6", allow_pickle=False)


async def test_it_is_put_alone(shared):
    packed = pack({"w": torch.ones(1)})
    with pytest.raises(ts.UnsupportedValueError, match="alone"):
        await ts.put_batch({"m7": packed, "n": 1})
    with pytest.raises(ts.UnsupportedValueError, match="alone"):
        await ts.put_state_dict({"m7": packed}, "k")
    with pytest.raises(ts.UnsupportedValueError):
        await ts.put("m7", packed, TensorSlice((0,), (1,), (1,)))
    assert await ts.keys() == []
