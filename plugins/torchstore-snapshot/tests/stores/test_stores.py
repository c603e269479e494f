"""Snapshots of stores."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.support import SMALL

import torchstore_core as ts
from torchstore_snapshot import Snapshot, load_into_store, snapshot_store
from torchstore_snapshot.format.paths import new_take_id
from torchstore_snapshot.taking.collecting import collect_values
from torchstore_snapshot.taking.planning import holdings, split_work
from torchstore_snapshot.taking.sharing import plan_store_files


@pytest.mark.quick
async def test_a_store_comes_back_with_its_versions(store: ts.Client, tmp_path: Path) -> None:
    large = torch.randn(300, 400)
    await store.put("w", torch.zeros(1))
    await store.put("w", large)
    await store.put("config", {"lr": 0.1, "dims": (1, 2)})
    nested = {"layer": {"weight": large.t(), "steps": [torch.ones(2), 3]}, "n": 7}
    await store.put_state_dict(nested, "policy")
    packed = ts.TorchStoreStateDict.from_state_dict({"a": torch.arange(5), "b": 1})
    await store.put("packed", packed)
    for row in range(2):
        part = ts.TensorSlice((row * 2, 0), (2, 4), (4, 4), (2,), (row,))
        await store.put("shards", ts.TensorShard(torch.full((2, 4), float(row)), part))
    snapshot = await snapshot_store(tmp_path / "s", fsync=False)
    assert Snapshot(tmp_path / "s").read_object("w/value").equal(large)
    assert sorted(snapshot.manifest.store) == ["config", "packed", "policy", "shards", "w"]

    await ts.shutdown()
    again = await ts.initialize(**SMALL)
    refs = await load_into_store(tmp_path / "s")
    assert refs["w"].version == 2
    assert torch.equal(await again.get("w"), large)
    assert await again.get("config") == {"lr": 0.1, "dims": (1, 2)}
    back = await again.get_state_dict("policy")
    assert torch.equal(back["layer"]["weight"], large.t())
    assert back["layer"]["steps"][1] == 3
    assert torch.equal((await again.get("shards"))[:, 0], torch.tensor([0.0, 0, 1, 1]))
    assert isinstance(await again.get("packed"), ts.TorchStoreStateDict)
    with pytest.raises(ts.VersionGoneError, match=r"'w' .*keep_versions=False") as raised:
        await load_into_store(tmp_path / "s", prefix="w")
    assert "rewind" not in str(raised.value)
    assert (await load_into_store(tmp_path / "s", prefix="w", keep_versions=False))["w"].version


async def test_objects_with_tensors_in_them_come_back(store: ts.Client, tmp_path: Path) -> None:
    """A store pickles them, and a snapshot does not."""
    batch = {"tokens": [torch.arange(3), torch.arange(40_000)], "lengths": (3, 40_000)}
    await store.put("batch", batch)
    snapshot = await snapshot_store(tmp_path / "s", fsync=False)
    assert b"pickle" not in (tmp_path / "s" / "snapshot.json").read_bytes()
    assert torch.equal(snapshot.read_object("batch/value.tokens.0"), torch.arange(3))

    await ts.shutdown()
    again = await ts.initialize(**SMALL)
    await load_into_store(tmp_path / "s")
    back = await again.get("batch")
    assert [t.tolist() for t in back["tokens"]] == [t.tolist() for t in batch["tokens"]]
    assert back["lengths"] == (3, 40_000)

    await ts.shutdown()
    await ts.initialize(**SMALL, allow_pickle=False)
    with pytest.raises(ts.UnsafeObjectError, match=r"'batch': a dict .* as state dicts"):
        await load_into_store(tmp_path / "s")


async def test_what_was_put_together_is_there_together(store: ts.Client, tmp_path: Path) -> None:
    await store.put_batch({f"m/{number}": number for number in range(300)})

    async def publish() -> None:
        for step in itertools.count():
            weights = torch.full((30_000,), float(step))
            await store.put_batch({"a": weights, "n": step, "z": weights})
            await store.put_state_dict({"w": weights}, f"run/{step}")  # there are new keys, too
            for _ in range(100):  # a part of what it takes to read all keys, on any machine
                await store.exists("a")

    publisher = asyncio.create_task(publish())
    await store.wait(["a", "run/0"])
    steps = []
    for number in range(4):
        snapshot = await snapshot_store(tmp_path / str(number), fsync=False)
        read = [snapshot.read_object(f"{key}/value") for key in ("a", "n", "z")]
        assert read[0].unique().tolist() == read[2].unique().tolist() == [read[1]]
        steps.append(read[1])
    assert steps == sorted({*steps})
    publisher.cancel()
    await asyncio.gather(publisher, return_exceptions=True)


async def test_keys_that_are_put_again_all_the_time(store: ts.Client, tmp_path: Path) -> None:
    async def publish(key: str) -> None:
        for step in itertools.count():
            await store.put_state_dict({"w": torch.full((30_000,), float(step)), "n": step}, key)
            await store.put(f"{key}-plain", torch.full((30_000,), float(step)))

    publishers = [asyncio.create_task(publish(key)) for key in ("a", "b")]
    await store.wait(["a", "a-plain", "b", "b-plain"])
    for number in range(12):
        snapshot = await snapshot_store(tmp_path / str(number), fsync=False)
        for key in ("a", "b"):
            state = snapshot.get_state_dict_for_key(key)
            assert state["w"].unique().tolist() == [state["n"]]
            assert len(snapshot.read_object(f"{key}-plain/value").unique()) == 1
    for publisher in publishers:
        publisher.cancel()
    await asyncio.gather(*publishers, return_exceptions=True)


@pytest.mark.parametrize("keep_versions", [True, False])
async def test_all_versions_come_back(
    store: ts.Client, tmp_path: Path, keep_versions: bool
) -> None:
    for step in range(4):
        state = {"w": torch.full((30_000,), float(step)), "n": step}
        await store.put_state_dict(state, "policy", version=10 + step, keep=3)
    await store.put("policy@11", "another")
    await store.put_state_dict({"w": torch.ones(2)}, "z")
    snapshot = await snapshot_store(tmp_path / "s", fsync=False)
    assert snapshot.read_object("policy/n") == 3
    await ts.shutdown()
    again = await ts.initialize(**SMALL)
    refs = await load_into_store(tmp_path / "s", keep_versions=keep_versions)
    versions = [11, 12, 13] if keep_versions else [1, 2, 3]
    assert await again.versions("policy") == versions
    assert refs["policy"].version == versions[-1]
    for step, version in enumerate(versions, 1):
        back = await again.get(ts.Request("policy", version))
        assert back["n"] == step
        assert torch.equal(back["w"], torch.full((30_000,), float(step)))
    assert await again.get("policy@11") == "another"
    await again.put_state_dict({"w": torch.zeros(1)}, "policy")
    assert len(await again.versions("policy")) == 3  # as many as before stay
    assert await again.versions("z") == [1]


async def test_a_prefix(store: ts.Client, tmp_path: Path) -> None:
    await store.put("a/x", 1)
    await store.put("b/x", 2)
    snapshot = await snapshot_store(tmp_path / "s", prefix="a/", fsync=False)
    assert [*snapshot.manifest.store] == ["a/x"]
    assert snapshot.read_object("a/x/value") == 1


def test_shared_files_are_of_bounded_size() -> None:
    states = {f"v{i}": {"value": torch.ones(100)} for i in range(50)}
    items = collect_values(states)
    units = split_work(items, 0, [holdings(items)])
    files, sharing = plan_store_files(items, units, new_take_id(), (), file_max=4000)
    assert [len(file.units) for file in files] == [10] * 5
    assert sharing == states.keys()


async def test_small_keys_share_files(store: ts.Client, tmp_path: Path) -> None:
    values = {f"v/{i}": torch.full((100,), float(i)) for i in range(300)}
    await store.put_batch(values)
    for i in range(70):
        await store.put_state_dict({"w": torch.full((10 + i,), float(i)), "n": i}, f"sd/{i}")
    await store.put_state_dict({"w": torch.ones(1)}, "store")  # a file is named like this key
    snapshot = await snapshot_store(tmp_path / "s", fsync=False)
    names = {file.name.partition("-")[0] for file in snapshot.manifest.files}
    # The largest state dicts have files of their own, and maps of weights; all others share one.
    assert len(names) == len(snapshot.manifest.files) == 65
    assert names == {"store", *(f"sd_{i}" for i in range(6, 70))}
    assert len([*(tmp_path / "s").glob("*.index.json")]) == 64
    (shared,) = (tmp_path / "s").glob("store-*.safetensors")
    found = load_file(shared)
    assert len(found) == 307
    assert torch.equal(found["v/7"], values["v/7"])
    assert found["sd/5/w"].tolist() == [5.0] * 15
    assert snapshot.verify() == {}

    await ts.shutdown()
    again = await ts.initialize(**SMALL)
    assert len(await load_into_store(tmp_path / "s")) == 371
    back = await again.get_batch([*values])
    assert all(torch.equal(back[key], value) for key, value in values.items())
    assert (await again.get("sd/5"))["n"] == 5
    assert (await again.get("store"))["w"].tolist() == [1.0]
