"""Snapshots of state dicts with sharded entries, as a store keeps them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tests.support import SMALL

import torchstore_core as ts
from torchstore_core.clients.values.sharding import ShardList
from torchstore_snapshot import load_into_store, snapshot_store
from torchstore_snapshot.format.manifest import TensorEntry

WHOLE = torch.arange(50 * 700, dtype=torch.float32).view(50, 700)


def quarters(whole: torch.Tensor) -> ShardList:
    """Four shards: rows up to 20 and from there on, columns up to 400 and from there on."""
    return ShardList(
        ts.TensorShard(
            whole[top : top + rows, left : left + columns],
            ts.TensorSlice((top, left), (rows, columns), tuple(whole.shape)),
        )
        for top, rows in ((0, 20), (20, 30))
        for left, columns in ((0, 400), (400, 300))
    )


def state(step: int) -> dict[str, Any]:
    bias = torch.full((30_000,), float(step))
    return {
        "a": {"w": quarters(WHOLE + step), "b": bias, "again": bias},
        "l": [quarters(WHOLE.bfloat16()), torch.ones(3)],
        "step": step,
    }


def check(found: dict[str, Any], step: int) -> None:
    assert torch.equal(found["a"]["w"], WHOLE + step)
    assert torch.equal(found["l"][0], WHOLE.bfloat16())
    assert found["a"]["b"].tolist() == [float(step)] * 30_000
    assert found["a"]["b"].data_ptr() == found["a"]["again"].data_ptr()
    assert found["l"][1].tolist() == [1, 1, 1]
    assert found["step"] == step
    assert [*found] == ["a", "l", "step"]


async def facts(store: ts.Client, key: str) -> list[Any]:
    """What must be the same after a round trip, of all versions."""
    found: list[Any] = []
    for version in await store.versions(key):
        of = await store.stat(key, version=version)
        found.append((version, of.parts, of.nbytes, of.meta))
        for name in sorted(await store.keys(f"{key}/")):
            entry = await store.stat(name, version=version)
            found.append((name, entry.shards, entry.nbytes, entry.meta))
    return found


async def test_shards_in_state_dicts_stay_shards(store: ts.Client, tmp_path: Path) -> None:
    await store.put_state_dict(state(1), "sd", keep=2)
    await store.put_state_dict(state(2), "sd")
    packed = ts.TorchStoreStateDict.from_state_dict({"w": quarters(WHOLE), "x": WHOLE[0]})
    await store.put_state_dict(packed, "packed")
    before = {key: await facts(store, key) for key in ("sd", "packed")}
    assert len((await store.stat("sd/a.w")).shards) == 4
    snapshot = await snapshot_store(tmp_path / "s", fsync=False)
    assert snapshot.verify() == {}
    check(snapshot.get_state_dict_for_key("sd@1"), 1)
    entry = snapshot.manifest.of_rank(0)["sd"]["a.w"]
    assert isinstance(entry, TensorEntry)
    assert len(entry.pieces) == 4
    assert torch.equal(snapshot.read_object("sd/a.w"), WHOLE + 2)

    await ts.shutdown()
    again = await ts.initialize(**SMALL)
    await load_into_store(tmp_path / "s")
    assert {key: await facts(again, key) for key in ("sd", "packed")} == before
    for version in (1, 2):
        check(await again.get(ts.Request("sd", version)), version)
    back = await again.get("packed")
    assert isinstance(back, ts.TorchStoreStateDict)
    assert torch.equal(back.to_state_dict()["w"], WHOLE)


async def test_a_default_device_does_not_leak(store: ts.Client, tmp_path: Path) -> None:
    await store.put_state_dict(state(1), "sd")
    with torch.device("meta"):
        await snapshot_store(tmp_path / "s", prefix="sd", fsync=False)
        await load_into_store(tmp_path / "s", keep_versions=False)
        check(await store.get_state_dict("sd"), 1)


async def test_a_key_with_the_name_of_an_entry(store: ts.Client, tmp_path: Path) -> None:
    await store.put_state_dict(state(1), "sd")
    await store.put("sd/a.w", torch.zeros(2))
    snapshot = await snapshot_store(tmp_path / "s", prefix="sd", fsync=False)
    check(snapshot.get_state_dict_for_key("sd"), 1)


async def test_tied_shards_are_written_once(store: ts.Client, tmp_path: Path) -> None:
    part = ts.TensorSlice((0, 0), (20, 700), (50, 700))
    rest = ts.TensorSlice((20, 0), (30, 700), (50, 700))
    for rank, piece in enumerate((part, rest)):
        rows = WHOLE.narrow(0, piece.offsets[0], piece.local_shape[0]).clone()
        shard = ts.TensorShard(rows, piece)
        await store.put_state_dict(
            {"embed": shard, "head": shard}, "tied", participants=2, participant=rank
        )
    assert (await store.stat("tied")).nbytes == WHOLE.nbytes
    snapshot = await snapshot_store(tmp_path / "s", fsync=False)
    entries = snapshot.manifest.of_rank(0)["tied"]
    assert entries["embed"].pieces == entries["head"].pieces  # type: ignore[union-attr]
    (file,) = snapshot.manifest.files
    assert file.nbytes < WHOLE.nbytes + 10_000
    await ts.shutdown()
    again = await ts.initialize(**SMALL)
    await load_into_store(tmp_path / "s")
    assert (await again.stat("tied")).nbytes == WHOLE.nbytes
    back = await again.get_state_dict("tied")
    assert torch.equal(back["embed"], WHOLE)
    assert back["embed"] is back["head"]
