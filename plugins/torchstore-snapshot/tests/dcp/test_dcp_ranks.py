"""Checkpoints of several ranks: real processes that are joined by gloo."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integration.dtensors.ranks import Jobs, Nursery

import torchstore_core.blocking as blocking
from torchstore_snapshot import Snapshot

_ACTS = "plugins.torchstore-snapshot.tests.dcp.acts"
acts = importlib.import_module(_ACTS)


@pytest.fixture(scope="module")
def jobs() -> Iterator[Jobs]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        with Nursery("transformers.models.bert.modeling_bert", _ACTS) as nursery:
            yield nursery.jobs


@pytest.fixture(scope="module")
def store() -> Iterator[blocking.Client]:
    """One for all tests: ranks stay connected to it. Each test has keys of its own."""
    client = blocking.initialize(capacity=1 << 30, prefault=0)
    yield client
    blocking.shutdown()


LAYOUTS = [
    ("one", [1], "0"),
    ("two", [2], "0"),
    ("two", [2], "1"),
    ("two", [2], "R"),
    ("four", [2, 2], "01"),
    ("four", [2, 2], "R0"),
]


def layout(value: Any) -> str:
    return value if isinstance(value, str) else ""


@pytest.mark.parametrize(
    ("job", "mesh", "spec"),
    # Each is read in all of them.
    [
        pytest.param(*each, marks=pytest.mark.soak if i % 2 else ())
        for i, each in enumerate(LAYOUTS)
    ],
    ids=layout,
)
async def test_any_layout_loads_into_any_other(
    jobs: Jobs, tmp_path: Path, store: blocking.Client, job: str, mesh: list[int], spec: str
) -> None:
    folder = str(tmp_path / "s")
    await jobs[job].run(acts.save, "snapshot", folder, mesh, spec)
    assert not [*Path(folder).glob(".claim-*")]  # no rank counts as running any more
    await jobs[job].run(acts.save, "store", folder, mesh, spec)
    for other, other_mesh, other_spec in LAYOUTS:
        if jobs[other].size <= jobs[job].size:  # which has a "loader" of each rank
            await jobs[other].run(acts.load, "snapshot", folder, other_mesh, other_spec)
            await jobs[other].run(acts.load, "store", folder, other_mesh, other_spec)
    assert Snapshot(folder).verify() == {}
    stored = sum(torch.Size(shape).numel() * 4 for shape in acts.SHAPES.values())
    entries = Snapshot(folder).manifest.shared["model"].values()
    assert sum(entry.nbytes for entry in entries) == stored  # once, whatever is replicated


_CUBES = [("four", [2, 1, 2], "001"), ("four", [1, 2, 2], "R10"), ("two", [2], "1")]


async def test_meshes_of_three_dimensions(
    jobs: Jobs, tmp_path: Path, store: blocking.Client
) -> None:
    """Two of which may divide one dimension of a tensor, into shards that are uneven or empty."""
    for number, (_, mesh, spec) in enumerate(_CUBES[:2]):
        where = str(tmp_path / str(number))
        for kind in ("snapshot", "store"):
            await jobs["four"].run(acts.save, kind, where, mesh, spec)
            for job, other_mesh, other_spec in _CUBES:
                await jobs[job].run(acts.load, kind, where, other_mesh, other_spec)
        assert Snapshot(where).verify() == {}


async def test_a_checkpoint_is_a_snapshot_and_a_snapshot_a_checkpoint(
    jobs: Jobs, tmp_path: Path
) -> None:
    folder, taken = str(tmp_path / "s"), str(tmp_path / "t")
    await jobs["two"].run(acts.save, "snapshot", folder, [2], "0")
    await jobs["four"].run(acts.load_by_snapshot, folder, [2, 2], "10")
    weight = Snapshot(folder).read_object("model/uneven")
    assert torch.equal(weight, acts.full("uneven"))
    await jobs["two"].run(acts.take_by_snapshot, taken, [2], "1")
    assert await jobs["two"].run(acts.load_a_take, taken, [2], "0") == [0, 1]


@pytest.mark.parametrize("kind", ["snapshot", "store"])
async def test_a_save_in_a_thread(
    jobs: Jobs, tmp_path: Path, store: blocking.Client, kind: str
) -> None:
    where = str(tmp_path / "s")
    await jobs["two"].run(acts.save_in_background, kind, where, False)
    await jobs["one"].run(acts.load, kind, where, [1], "0")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kind", "job"), [pytest.param("snapshot", "other", marks=pytest.mark.soak), ("store", "one")]
)
async def test_a_save_in_a_process(
    jobs: Jobs, tmp_path: Path, store: blocking.Client, kind: str, job: str
) -> None:
    """Of each rank, which imports torch."""
    where = str(tmp_path / "s")
    await jobs[job].run(acts.save_in_background, kind, where, True)
    jobs[job].kill()  # torch keeps the process for the next save
    await jobs["one"].run(acts.load, kind, where, [1], "0")


async def test_plans_that_are_cached(jobs: Jobs, tmp_path: Path, store: blocking.Client) -> None:
    where = str(tmp_path / "s")
    await jobs["two"].run(acts.save_cached, where)
    await jobs["two"].run(acts.save_cached_in_store, where)
    assert await asyncio.to_thread(store.versions, where) == [3]


@pytest.mark.parametrize("kind", ["snapshot", "store"])
async def test_a_failed_save_leaves_the_one_before(
    jobs: Jobs, tmp_path: Path, store: blocking.Client, kind: str
) -> None:
    where = str(tmp_path / "s")
    await jobs["two"].run(acts.save, kind, where, [2], "0")
    assert await jobs["two"].run(acts.fail, kind, where) == [["ConnectionResetError"]] * 2
    await jobs["two"].run(acts.load, kind, where, [2], "1")
    if kind == "store":  # the next save has nothing of the failed one
        await jobs["two"].run(acts.save, kind, where, [2], "1", 3.5)
        await jobs["two"].run(acts.load, kind, where, [2], "0", 3.5)
        found = await asyncio.to_thread(store.stat, where)
        assert found.versions == [3]
        assert found.pending == []


@pytest.mark.parametrize("verify", [True, "all", False])
async def test_damage_that_one_rank_finds_ends_the_load_of_all(
    jobs: Jobs, tmp_path: Path, verify: Any
) -> None:
    where = tmp_path / "s"
    await jobs["two"].run(acts.save, "snapshot", str(where), [2], "0")
    [path] = where.glob("model-*-1-0.safetensors")
    with path.open("r+b") as file:
        header = 8 + int.from_bytes(file.read(8), "little")
        file.seek(header)
        file.write(b"\x3f" * (path.stat().st_size - header))
    found = await jobs["two"].run(acts.load_damaged, str(where), verify)
    errors = {1: "SnapshotCorruptError"} if verify else {}
    assert found == [(errors, not verify)] * 2
    path.unlink()
    found = await jobs["two"].run(acts.load_damaged, str(where), verify)
    assert found == [({1: "SnapshotCorruptError"}, False)] * 2


@pytest.mark.parametrize("kind", ["snapshot", "store"])
async def test_a_rank_that_dies_leaves_the_checkpoint_before(
    jobs: Jobs, tmp_path: Path, store: blocking.Client, kind: str
) -> None:
    where = str(tmp_path / "s")
    await jobs["two"].run(acts.save, kind, where, [2], "0")
    with pytest.raises(AssertionError, match="it has ended"):
        await jobs["other"].run(acts.die, kind, where)
    await jobs["two"].run(acts.load, kind, where, [2], "1")
    if kind == "store":
        await jobs["other"].run(acts.save, kind, where, [2], "1", 3.5)
        await jobs["two"].run(acts.load, kind, where, [2], "0", 3.5)


@pytest.mark.parametrize("kind", ["snapshot", "store"])
async def test_a_partial_load(
    jobs: Jobs, tmp_path: Path, store: blocking.Client, kind: str
) -> None:
    where = str(tmp_path / "s")
    await jobs["four"].run(acts.save, kind, where, [2, 2], "01")
    assert await jobs["two"].run(acts.load_some, kind, where) == [2 * 2048 * 4] * 2


@pytest.mark.thorough
async def test_minilm_and_its_optimizer_from_fsdp_to_one_rank_to_tensor_parallelism(
    jobs: Jobs, tmp_path: Path, store: blocking.Client
) -> None:
    where, again = str(tmp_path / "s"), str(tmp_path / "again")
    files, key = str(tmp_path / "f"), str(tmp_path)
    kinds = [("snapshot", where), ("files", files), ("store", key), ("take", f"{where}-take")]
    await jobs["two"].run(acts.train, kinds)
    (alone,) = await jobs["one"].run(acts.resume, kinds, "", again)
    kinds = [("take", f"{again}-take"), ("take", f"{where}-take")]
    kinds += [("snapshot", again), ("snapshot", where), ("store", key)]
    for parallel in await jobs["two"].run(acts.resume, kinds, "TP"):
        assert parallel == pytest.approx(alone, rel=1e-6)
