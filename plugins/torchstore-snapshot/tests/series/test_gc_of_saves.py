"""Garbage collections beside saves of ``torch.distributed.checkpoint`` and beside conversions."""

from __future__ import annotations

import gc as python_gc
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tests.processes import Script
from tests.support import until
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from torchstore_snapshot import Snapshot, StateDict, TakeLostError, gc
from torchstore_snapshot.converting.incoming import chunk, tensor_item, write_parts
from torchstore_snapshot.dcp import SnapshotStorageWriter
from torchstore_snapshot.series.gc import GcReport
from torchstore_snapshot.taking.take import TakeOptions

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


class Collecting(DefaultSavePlanner):
    """A planner whose values are there when everything beside the save has been collected."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.reports: list[GcReport] = []

    def resolve_data(self, write_item: Any) -> Any:
        self.reports.append(gc(self.folder, grace=0))
        return super().resolve_data(write_item)


def state(fill: float) -> dict[str, Any]:
    return {"m": {f"w{i}": torch.full((3000,), fill + i) for i in range(4)}}


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_save_beside_a_collection(tmp_path: Path) -> None:
    planner = Collecting(tmp_path)
    writer = SnapshotStorageWriter(tmp_path / "0", fsync=False)
    dcp.save(state(1), storage_writer=writer, planner=planner)
    assert all(len(report.running) == 1 and not report.files for report in planner.reports)
    assert planner.reports
    assert Snapshot(tmp_path / "0").verify() == {}
    before = files(tmp_path / "0")
    assert gc(tmp_path, grace=0).running == ()
    assert files(tmp_path / "0") == before
    dcp.save(state(2), checkpoint_id=tmp_path / "1", storage_writer=writer, planner=planner)
    assert Snapshot(tmp_path / "1").verify() == {}


def test_a_save_that_fails(tmp_path: Path) -> None:
    class Failing(Collecting):
        def commit(self) -> None:
            raise OSError("no space")

    writer = SnapshotStorageWriter(tmp_path / "0", fsync=False)
    writer.finish = Failing(tmp_path).commit  # type: ignore[assignment]
    with pytest.raises(dcp.CheckpointException):
        dcp.save(state(1), storage_writer=writer)
    assert len(gc(tmp_path, grace=60, dry_run=True).running) == 1
    del writer
    python_gc.collect()
    assert len(gc(tmp_path, grace=60).files) == 2  # the data, and the claim
    assert not (tmp_path / "0").exists() or files(tmp_path / "0") == []


async def test_a_save_that_is_killed(tmp_path: Path) -> None:
    Snapshot.take(tmp_path / "0", {"m": StateDict(state(0)["m"])}, fsync=False)
    body = f"""
    import os, signal
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torchstore_snapshot.dcp import SnapshotStorageWriter

    class Dying(DefaultSavePlanner):
        def resolve_data(self, item):
            if item.index.fqn.endswith("w2"):
                os.kill(os.getpid(), signal.SIGKILL)
            return super().resolve_data(item)

    state = {{"m": {{f"w{{i}}": torch.full((3000,), 1.0) for i in range(4)}}}}
    writer = SnapshotStorageWriter({str(tmp_path / "1")!r}, fsync=False)
    dcp.save(state, storage_writer=writer, planner=Dying())
    """
    with Script(body) as script:
        await until(lambda: script._process.wait(0.01) is not None, 60)
    assert len(files(tmp_path / "1")) == 2
    report = gc(tmp_path)
    assert len(report.dead) == 1
    assert len(report.files) == 2
    assert report.kept == ("0",)
    assert Snapshot(tmp_path / "0").verify() == {}
    dcp.save(state(5), storage_writer=SnapshotStorageWriter(tmp_path / "1", fsync=False))
    assert Snapshot(tmp_path / "1").verify() == {}


@pytest.mark.parametrize("given_up", [False, True])
def test_a_conversion_beside_a_collection(tmp_path: Path, given_up: bool) -> None:
    reports: list[GcReport] = []

    def load() -> torch.Tensor:
        if given_up:
            (claim,) = (tmp_path / "0").glob(".claim-*")
            claim.unlink()
        reports.append(gc(tmp_path, grace=0))
        return torch.ones(9)

    piece = chunk("float32", (0,), (9,), (9,), "m/w")
    member = tensor_item("m", "w", "float32", (9,), [(piece, load)])
    if given_up:
        with pytest.raises(TakeLostError):
            write_parts(str(tmp_path / "0"), [[member]], TakeOptions(fsync=False))
        assert not (tmp_path / "0").exists()
        return
    write_parts(str(tmp_path / "0"), [[member]], TakeOptions(fsync=False))
    assert len(reports[0].running) == 1
    assert Snapshot(tmp_path / "0").verify() == {}
    assert gc(tmp_path, grace=0).running == ()
