"""Snapshots of tensors that a store keeps as shards."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.support import SMALL

import torchstore_core as ts
from torchstore_core import boxes
from torchstore_snapshot import Snapshot, load_into_store, snapshot_store
from torchstore_snapshot.api import shards
from torchstore_snapshot.api.shards import fetching
from torchstore_snapshot.api.stores import _read
from torchstore_snapshot.format.manifest import StoredKey, TensorEntry
from torchstore_snapshot.taking.collecting import collect_values

WHOLE = torch.arange(5 * 7, dtype=torch.bfloat16).view(5, 7)
# Rows 0-1 and 2-4, columns 0-3 and 4-6.
BOXES = [
    boxes.Box((row, column), (rows, columns))
    for row, rows in ((0, 2), (2, 3))
    for column, columns in ((0, 4), (4, 3))
]


def shard(
    whole: torch.Tensor,
    box: boxes.Box,
    mesh: tuple[int, ...] = (),
    at: tuple[int, ...] = (),
) -> ts.TensorShard:
    view = whole
    for dim, (start, extent) in enumerate(zip(*box, strict=True)):
        view = view.narrow(dim, start, extent)
    return ts.TensorShard(view, ts.TensorSlice(box.offset, box.shape, tuple(whole.shape), mesh, at))


async def put(store: ts.Client, key: str, whole: torch.Tensor) -> None:
    for box in BOXES:
        await store.put(key, shard(whole, box))


def entry_of(snapshot: Snapshot, key: str, name: str = "value") -> TensorEntry:
    entry = snapshot.manifest.of_rank(0)[key][name]
    assert isinstance(entry, TensorEntry)
    return entry


@pytest.mark.parametrize("keep_versions", [True, False])
async def test_shards_stay_shards(store: ts.Client, tmp_path: Path, keep_versions: bool) -> None:
    await store.put("w", torch.zeros(1))
    await put(store, "w", WHOLE)
    before = await store.stat("w")
    assert before.version == 2
    snapshot = await snapshot_store(tmp_path / "s", fsync=False)
    entry = entry_of(snapshot, "w")
    assert sorted(entry.boxes()) == BOXES
    assert snapshot.verify() == {}
    assert torch.equal(snapshot.read_object("w/value"), WHOLE)
    middle = ts.TensorSlice((1, 3), (2, 2), (5, 7))
    assert torch.equal(snapshot.read_object("w/value", tensor_slice=middle), WHOLE[1:3, 3:5])
    (file,) = (tmp_path / "s").glob("*.safetensors")
    pieces = load_file(file)
    assert len(pieces) == 4
    assert torch.equal(pieces["w[2:5,4:7]"], WHOLE[2:, 4:])

    await ts.shutdown()
    again = await ts.initialize(**SMALL, num_storage_volumes=3)
    refs = await load_into_store(tmp_path / "s", keep_versions=keep_versions)
    after = await again.stat("w")
    assert after.shards == before.shards
    assert (after.parts, after.nbytes, after.pending) == (4, WHOLE.nbytes, [])
    assert refs["w"].version == after.version == (2 if keep_versions else 1)
    assert torch.equal(await again.get("w"), WHOLE)


async def test_what_is_only_partly_put_is_not_there(store: ts.Client, tmp_path: Path) -> None:
    await put(store, "w", WHOLE)
    await store.put("w", shard(WHOLE + 1, BOXES[0]))
    await store.put("never", shard(WHOLE, BOXES[1]))
    assert [p.version for p in (await store.stat("w")).pending] == [2]
    snapshot = await snapshot_store(tmp_path / "s", fsync=False)
    assert [(key, known.version) for key, known in snapshot.manifest.store.items()] == [("w", 1)]
    assert torch.equal(snapshot.read_object("w/value"), WHOLE)
    assert len(entry_of(snapshot, "w").pieces) == 4


async def test_replicas_are_written_once(store: ts.Client, tmp_path: Path) -> None:
    halves = [boxes.Box((0, 0), (3, 7)), boxes.Box((5, 0), (0, 7)), boxes.Box((3, 0), (2, 7))]
    for number, box in enumerate(halves):
        for copy in range(2):
            if (number, copy) != (2, 1):  # the other copy completes the version
                await store.put("w", shard(WHOLE, box, (3, 2), (number, copy)))
    before = await store.stat("w")
    assert before.parts == len(before.shards) == 2  # stores keep no empty ones
    snapshot = await snapshot_store(tmp_path / "s", fsync=False)
    assert entry_of(snapshot, "w").nbytes == WHOLE.nbytes
    await ts.shutdown()
    again = await ts.initialize(**SMALL)
    await load_into_store(tmp_path / "s")
    after = await again.stat("w")
    assert (after.shards, after.nbytes) == (before.shards, WHOLE.nbytes)
    assert torch.equal(await again.get("w"), WHOLE)


async def test_shards_that_overlap(
    store: ts.Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the order of their offsets, two of them are the whole tensor before the third comes."""
    monkeypatch.setattr(shards, "_READ", 1)  # a batch would be one shard
    for row, rows in ((0, 4), (2, 2), (1, 4)):
        await store.put("w", shard(WHOLE, boxes.Box((row, 0), (rows, 7))))
    before = await store.stat("w")
    assert before.parts == 3
    snapshot = await snapshot_store(tmp_path / "s", fsync=False)
    assert torch.equal(snapshot.read_object("w/value"), WHOLE)
    await ts.shutdown()
    again = await ts.initialize(**SMALL)
    await load_into_store(tmp_path / "s")
    after = await again.stat("w")
    assert (after.shards, after.pending) == (before.shards, [])
    assert torch.equal(await again.get("w"), WHOLE)


async def test_shards_are_read_and_put_batch_by_batch(store: ts.Client, tmp_path: Path) -> None:
    rows, count = 1 << 10, 6
    whole = torch.arange(rows * count * 4096, dtype=torch.int32).view(-1, 4096)
    for number in range(count):
        await store.put("w", shard(whole, boxes.Box((number * rows, 0), (rows, 4096))))
    snapshot = await snapshot_store(tmp_path / "s", fsync=False)
    assert len(entry_of(snapshot, "w").pieces) == count
    await store.delete("w")
    refs = await load_into_store(tmp_path / "s", keep_versions=False)
    assert (await store.stat("w")).parts == count
    assert torch.equal(await store.get(refs["w"]), whole)


async def test_a_version_that_is_replaced_before_it_is_written(store: ts.Client) -> None:
    """What is in the snapshot was read by stat; its shards are only read later."""
    await put(store, "w", WHOLE)
    held: list[ts.HeldRef] = []
    taken = await _read(store, (await store.wait("w"))["w"], held)
    await put(store, "w", WHOLE + 1)
    items = collect_values({"w": taken.value}, absent=True)
    fetch = fetching(store, {"w": StoredKey("tensor", taken.version)})
    pieces = [(items[0], piece) for piece in items[0].pieces]
    tensors = await asyncio.to_thread(fetch, pieces)
    for box, tensor in zip(BOXES, tensors, strict=True):
        assert torch.equal(tensor, shard(WHOLE, box).tensor)
