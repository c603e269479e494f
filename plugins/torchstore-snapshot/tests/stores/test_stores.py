"""Snapshots of stores."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch
from tests.support import SMALL

import torchstore_core as ts
from torchstore_snapshot import Snapshot, load_into_store, snapshot_store


@pytest.fixture
async def store() -> AsyncIterator[ts.Client]:
    client = await ts.initialize(**SMALL)
    yield client
    await ts.shutdown()


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
    snapshot = await snapshot_store(tmp_path / "s")
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
    with pytest.raises(ts.VersionGoneError):
        await load_into_store(tmp_path / "s", prefix="w")
    assert (await load_into_store(tmp_path / "s", prefix="w", keep_versions=False))["w"].version


@pytest.mark.parametrize("keep_versions", [True, False])
async def test_all_versions_come_back(
    store: ts.Client, tmp_path: Path, keep_versions: bool
) -> None:
    for step in range(4):
        state = {"w": torch.full((30_000,), float(step)), "n": step}
        await store.put_state_dict(state, "policy", version=10 + step, keep=3)
    await store.put("policy@11", "another")
    await store.put_state_dict({"w": torch.ones(2)}, "z")
    snapshot = await snapshot_store(tmp_path / "s")
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
    snapshot = await snapshot_store(tmp_path / "s", prefix="a/")
    assert [*snapshot.manifest.store] == ["a/x"]
    assert snapshot.read_object("a/x/value") == 1
