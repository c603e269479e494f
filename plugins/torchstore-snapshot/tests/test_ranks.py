"""Snapshots taken and restored by several ranks, in real processes that are joined by gloo."""

from __future__ import annotations

import asyncio
import importlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integration.dtensors.ranks import Jobs, Nursery
from tests.support import until

from torchstore_snapshot import Snapshot, SnapshotNotFoundError, gc

_ACTS = "plugins.torchstore-snapshot.tests.rank_acts"
acts = importlib.import_module(_ACTS)


@pytest.fixture(scope="module")
def jobs() -> Iterator[Jobs]:
    with Nursery(_ACTS) as nursery:
        yield nursery.jobs


LAYOUTS = [
    ("one", [1], "0"),
    ("two", [2], "0"),
    ("two", [2], "1"),
    ("two", [2], "R"),
    ("four", [4], "0"),
    ("four", [2, 2], "01"),
    ("four", [2, 2], "00"),
    ("four", [2, 2], "R1"),
    ("four", [1, 2, 2], "010"),
]


@pytest.mark.parametrize(
    ("job", "mesh", "spec"),
    # Each is read in all of them.
    [pytest.param(*one, marks=pytest.mark.soak if i % 2 else ()) for i, one in enumerate(LAYOUTS)],
    ids=lambda v: v if isinstance(v, str) else "",
)
async def test_any_layout_restores_to_any_other(
    jobs: Jobs, tmp_path: Path, job: str, mesh: list[int], spec: str
) -> None:
    folder = str(tmp_path / "s")
    await jobs[job].run(acts.take_sharded, folder, mesh, spec, False)
    for other, other_mesh, other_spec in LAYOUTS:
        await jobs[other].run(acts.restore_sharded, folder, other_mesh, other_spec)
    whole = Snapshot(folder).get_state_dict_for_key("m")
    assert all(torch.equal(whole[name], acts.full(name)) for name in acts.SHAPES)


@pytest.mark.parametrize(
    ("job", "other", "mesh", "spec"),
    [("two", "four", [4], "0"), ("four", "two", [2], "0"), ("four", "one", [1], "0")],
    ids=["2 to 4", "4 to 2", "4 to 1"],
)
async def test_each_rank_reads_the_bytes_of_its_own_parts(
    jobs: Jobs, tmp_path: Path, job: str, other: str, mesh: list[int], spec: str
) -> None:
    """For parts that are not contiguous in their files, see ``storage/test_mapped_files.py``."""
    folder = str(tmp_path / "s")
    await jobs[job].run(acts.take_large, folder, [jobs[job].size], "0")
    for read, own in await jobs[other].run(acts.restore_large, folder, mesh, spec):
        assert read == own


@pytest.mark.thorough
@pytest.mark.parametrize("spec", ["010", "0R1", "100"])
async def test_a_mesh_of_three_dimensions(jobs: Jobs, tmp_path: Path, spec: str) -> None:
    """Two of which shard the same dimension of tensors, unevenly; some ranks have nothing."""
    folder, back = str(tmp_path / "s"), str(tmp_path / "back")
    await jobs["eight"].run(acts.take_sharded, folder, [2, 2, 2], spec, False)
    await jobs["two"].run(acts.restore_sharded, folder, [2], "1")
    await jobs["four"].run(acts.take_sharded, back, [4], "0", False)
    await jobs["eight"].run(acts.restore_sharded, back, [2, 2, 2], spec)
    whole = Snapshot(folder).get_state_dict_for_key("m")
    assert all(torch.equal(whole[name], acts.full(name)) for name in acts.SHAPES)


async def test_what_is_sharded_and_replicated_is_written_once(jobs: Jobs, tmp_path: Path) -> None:
    folder = tmp_path / "s"
    await jobs["four"].run(acts.take_sharded, str(folder), [2, 2], "R0", False)
    manifest = Snapshot(folder).manifest
    for name in acts.SHAPES:
        assert manifest.shared["m"][name].nbytes == acts.full(name).nbytes
    ranks = {manifest.files[piece.file].rank for piece in manifest.shared["m"]["wide"].pieces}
    assert len(ranks) == 2


async def test_sharded_tensors_restore_on_other_ranks(jobs: Jobs, tmp_path: Path) -> None:
    for job, other in (("four", "two"), ("two", "four")):
        folder = str(tmp_path / job)
        await jobs[job].run(acts.take_sharded_tensors, folder)
        await jobs[other].run(acts.restore_sharded_tensors, folder)
        await jobs[other].run(acts.restore_sharded, folder, [jobs[other].size], "1")
        whole = Snapshot(folder).get_state_dict_for_key("m")
        assert all(torch.equal(whole[name], acts.full(name)) for name in acts.SHAPES)


async def test_each_rank_gets_its_own_values(jobs: Jobs, tmp_path: Path) -> None:
    folder = str(tmp_path / "s")
    await jobs["four"].run(acts.take_sharded, folder, [4], "0", False)
    found = await jobs["four"].run(acts.own_values, folder)
    assert found == [(rank, [float(rank)] * 4) for rank in range(4)]
    assert Snapshot(folder).read_object("2/m/rank") == 2
    assert sorted(Snapshot(folder).manifest.own[3]["m"]) == ["mine", "rank"]


@pytest.mark.parametrize("how", ["ddp", "globs"])
async def test_replicated_modules_are_written_once(jobs: Jobs, tmp_path: Path, how: str) -> None:
    await jobs["four"].run(acts.take_replicated, str(tmp_path / "s"), how)
    manifest = Snapshot(tmp_path / "s").manifest
    total = 4 * (64 * 64 + 64) * 4
    by_rank = [sum(f.nbytes - 4096 for f in manifest.files if f.rank == r) for r in range(4)]
    assert sum(by_rank) == total
    assert max(by_rank) < total / 4 * 1.1
    assert manifest.own == ()


async def test_fsdp_training_continues_on_other_numbers_of_ranks(
    jobs: Jobs, tmp_path: Path
) -> None:
    folder = str(tmp_path / "s")
    await jobs["two"].run(acts.train_fsdp, folder)
    (same, _) = await jobs["two"].run(acts.resume_fsdp, folder)
    for job in ("one", "four"):
        for found in await jobs[job].run(acts.resume_fsdp, folder):
            assert found == pytest.approx(same, rel=1e-4)


async def test_a_rank_that_fails_fails_all(jobs: Jobs, tmp_path: Path) -> None:
    folder = tmp_path / "s"
    found = await jobs["two"].run(acts.take_with_a_failing_rank, str(folder))
    assert found == ["RankFailedError", "UnsupportedValueError"]
    assert not folder.exists()
    assert await jobs["two"].run(acts.take_twice, str(folder)) == [
        "SnapshotExistsError",
        "RankFailedError",
    ]


async def test_ranks_take_in_the_background(jobs: Jobs, tmp_path: Path) -> None:
    folder = tmp_path / "s"
    assert await jobs["two"].run(acts.take_sharded, str(folder), [2], "0", True) == [2, 2]
    await jobs["four"].run(acts.restore_sharded, str(folder), [4], "1")
    # Each writer removes the report of its rank after it has told its program.
    await until(lambda: not [p for p in folder.iterdir() if p.name.startswith(".")], 20)


@pytest.mark.parametrize("moment", ["before", "half", "after"])
async def test_a_rank_that_dies_leaves_the_snapshot_before(
    jobs: Jobs, tmp_path: Path, moment: str
) -> None:
    folder = tmp_path / "s"
    await jobs["other"].run(acts.take_sharded, str(folder), [2], "0", False)
    before = {path.name for path in folder.iterdir()}
    with pytest.raises(AssertionError, match="it has ended"):
        await jobs["other"].run(acts.die_in_a_take, str(folder), moment)
    theirs = [p for p in folder.glob("m-*-1-0.safetensors") if p.name not in before]
    assert len(theirs) == (moment != "before")
    for path in theirs:  # it was killed where this test says
        assert (path.read_bytes()[-4:] == bytes(4)) == (moment == "half")
    await jobs["two"].run(acts.restore_sharded, str(folder), [2], "0")
    gc(folder)
    assert {path.name for path in folder.iterdir()} == before
    await jobs["two"].run(acts.restore_sharded, str(folder), [2], "0")
    assert await jobs["two"].run(acts.take_sharded, str(tmp_path / "t"), [2], "0", False) == [2, 2]


@pytest.mark.parametrize(
    ("how", "error"),
    [("arguments", "ConfigurationError"), ("file", "NotWrittenError"), ("nothing", "OSError")],
)
async def test_all_ranks_hear_at_once_of_one_that_fails_in_the_background(
    jobs: Jobs, tmp_path: Path, how: str, error: str
) -> None:
    act = acts.take_in_background_with_a_failing_rank
    found = await jobs["two"].run(act, str(tmp_path / "s"), how)
    assert [name for name, _ in found] == ["RankFailedError", error]
    assert max(seconds for _, seconds in found) < 30
    with pytest.raises(SnapshotNotFoundError):
        Snapshot(tmp_path / "s").get_manifest()


async def test_new_ranks_get_what_is_common(jobs: Jobs, tmp_path: Path) -> None:
    folder = str(tmp_path / "s")
    await jobs["two"].run(acts.take_and_draw, folder)
    found = await jobs["four"].run(acts.restore_and_draw, folder)
    expected = [torch.rand(1, generator=torch.Generator().manual_seed(s)) for s in (0, 1, 102, 103)]
    assert [drawn for drawn, _ in found] == [float(each) for each in expected]
    assert [missing for _, missing in found] == ["", "", "m/mine", "m/mine"]


# In the background, each of the four ranks starts a process with torch.
@pytest.mark.parametrize("background", [False, pytest.param(True, marks=pytest.mark.soak)])
async def test_tensors_of_one_name_on_different_meshes(
    jobs: Jobs, tmp_path: Path, background: bool
) -> None:
    folder = str(tmp_path / "s")
    await jobs["four"].run(acts.take_stages, folder, background)
    await jobs["four"].run(acts.restore_stages, folder)
    snapshot = Snapshot(folder)
    assert snapshot.verify() == {}
    # What is equal, or was said to be, or is on one mesh alone, can be restored by any rank.
    assert sorted(snapshot.manifest.shared["m"]) == ["declared", "last", "same"]
    assert [sorted(own["m"]) for own in snapshot.manifest.own] == [["size", "w"]] * 4
    stored = list(snapshot.manifest.shared["m"].values())
    assert [t.nbytes for t in stored] == [acts.full(n).nbytes for n in ("uneven", "cube", "wide")]
    for rank, first in enumerate([0.5, 0.5, 100.5, 100.5]):
        assert float(snapshot.read_object(f"{rank}/m/w")[0, 0]) == first


@pytest.mark.parametrize("how", ["shape", "part", "name"])
async def test_ranks_that_contradict_each_other_write_nothing(
    jobs: Jobs, tmp_path: Path, how: str
) -> None:
    folder = tmp_path / "s"
    path = "m/x/w" if how == "name" else "m/w"
    assert await jobs["two"].run(acts.take_contradictions, str(folder), how) == [path, path]
    assert not folder.exists()


def damage(path: Path, *, at: int = -50_000) -> None:
    with path.open("r+b") as file:
        file.seek(at, 2)
        file.write(b"\xff" * 100)


@pytest.mark.parametrize("verify", [True, "all", "streaming"])
async def test_a_restore_is_all_or_nothing(jobs: Jobs, tmp_path: Path, verify: Any) -> None:
    """Of several ranks, too: what one of them finds damaged is restored nowhere."""
    folder = tmp_path / "s"
    await jobs["two"].run(acts.take_halves, str(folder))
    assert (
        await jobs["two"].run(acts.restore_halves, str(folder), verify)
        == [("", "", True, True)] * 2
    )
    [path] = folder.glob("m-*-1-0.safetensors")
    damage(path)
    streaming = verify == "streaming"  # damage is found when tensors have been written to
    assert await jobs["two"].run(acts.restore_halves, str(folder), verify) == [
        ("RankFailedError", "SnapshotCorruptError", streaming, False),
        ("SnapshotCorruptError", "", streaming, False),
    ]
    path.unlink()  # which is found before anything is written in any case
    assert await jobs["two"].run(acts.restore_halves, str(folder), verify) == [
        ("RankFailedError", "SnapshotCorruptError", False, False),
        ("SnapshotCorruptError", "", False, False),
    ]


@pytest.mark.parametrize("verify", [True, False])
async def test_a_new_rank_that_misses_something_ends_the_restore_of_all(
    jobs: Jobs, tmp_path: Path, verify: bool
) -> None:
    folder = str(tmp_path / "s")
    await jobs["two"].run(acts.take_halves, folder)
    found = await jobs["four"].run(acts.restore_halves, folder, verify)
    assert (
        found
        == [("RankFailedError", "LayoutMismatchError", False, False)] * 2
        + [("LayoutMismatchError", "", False, False)] * 2
    )


async def test_all_ranks_hear_that_there_is_no_snapshot(jobs: Jobs, tmp_path: Path) -> None:
    found = await jobs["two"].run(acts.restore_halves, str(tmp_path), True)
    assert found == [("SnapshotNotFoundError", "", False, False)] * 2


@pytest.mark.parametrize("moment", [1, 2])
async def test_all_ranks_hear_of_one_that_dies_in_a_restore(
    jobs: Jobs, tmp_path: Path, moment: int
) -> None:
    """Not only two of them, for which the others would wait: they have given up, and live."""
    folder, results = str(tmp_path / "s"), tmp_path / "results"
    results.mkdir()
    await jobs["four"].run(acts.take_halves, folder)
    with pytest.raises(AssertionError, match=r"failed:\nit has ended$"):
        await jobs["four"].run(acts.die_in_a_restore, folder, moment, str(results))
    said = [path.read_text() for path in sorted(results.iterdir())]
    assert len(said) == 3
    assert all("rank 3, one of which may have died" in text for text in said)
    assert max(int(text.split()[0]) for text in said) < 30
    assert await jobs["four"].run(acts.restore_halves, folder, True) == [("", "", True, True)] * 4


_OPTION = {"compression": "zstd"}


@pytest.mark.parametrize(
    ("call", "wrong"),
    [
        ("take", _OPTION),
        ("take", {"storage_options": "none"}),
        ("async_take", _OPTION),
        ("series", {"name": "a/b"}),
        ("series", _OPTION),
    ],
)
async def test_all_ranks_hear_at_once_of_wrong_arguments_of_one(
    jobs: Jobs, tmp_path: Path, call: str, wrong: dict[str, str]
) -> None:
    (first, seconds), (own, _) = await jobs["two"].run(
        acts.give_wrong_arguments, str(tmp_path / "s"), call, wrong
    )
    assert own.startswith("ConfigurationError: ")
    assert first.startswith(f"RankFailedError: given up, because other ranks failed (rank 1: {own}")
    assert seconds < 30
    assert not (tmp_path / "s").exists()


async def test_the_others_say_which_rank_is_silent(jobs: Jobs, tmp_path: Path) -> None:
    results = tmp_path / "results"
    results.mkdir()
    running = asyncio.ensure_future(
        jobs["four"].run(acts.stop_in_a_take, str(tmp_path / "s"), str(results))
    )
    await until(lambda: running.done() or len(os.listdir(results)) == 4, 60)
    os.kill(int((results / "stopped").read_text()), signal.SIGCONT)
    said = (await running)[:3]
    assert all("has not heard from " in text for text in said)
    assert all("rank 3, one of which may have died" in text for text in said)
    assert all("make another one and give it as pg=" in text for text in said)
    assert gc(tmp_path).running == ()
