"""An object store carries a request out, or may still do so, and its reply is lost."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tests.object_storage import object_store as _server
from torch.distributed.checkpoint import CheckpointException

from torchstore_snapshot import Snapshot, SnapshotUndecidedError, StateDict, gc
from torchstore_snapshot.dcp import SnapshotStorageWriter
from torchstore_snapshot.format.paths import MANIFEST
from torchstore_snapshot.series.claims import claims_in
from torchstore_snapshot.storage import remote
from torchstore_snapshot.storage.opening import open_storage

_objects = importlib.import_module("plugins.torchstore-snapshot.tests.storage.test_object_storage")
FOLDER = f"s3://{_server.BUCKET}/run"
URL = f"{FOLDER}/step-1"
MAP = "m.safetensors.index.json"

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")  # for the process that writes
    monkeypatch.setitem(remote._S3_CONFIG, "retries", {"max_attempts": 1})
    monkeypatch.setattr("s3fs.S3FileSystem.retries", 2)
    with _server.object_store() as server:
        yield server


def take(fill: float, overwrite: bool) -> None:
    Snapshot.take(URL, {"m": StateDict(w=torch.full((3000,), fill))}, overwrite=overwrite)


def async_take(fill: float, overwrite: bool) -> None:
    state = {"m": StateDict(w=torch.full((3000,), fill))}
    Snapshot.async_take(URL, state, overwrite=overwrite).wait(100)


def save(fill: float, overwrite: bool) -> None:
    writer = SnapshotStorageWriter(URL, overwrite=overwrite)
    try:
        dcp.save({"m": {"w": torch.full((3000,), fill)}}, storage_writer=writer, no_dist=True)
    except CheckpointException as error:
        raise error.failures[0][0] from error


def of_manifest(environ: dict[str, Any]) -> bool:
    return str(environ["PATH_INFO"]).endswith(MANIFEST)


def files() -> list[str]:
    return [info.name for info in open_storage(URL).list()]


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("act", [take, save], ids=lambda act: act.__name__)
def test_a_take_finds_out_that_it_was_committed(
    store: Any, act: Callable[[float, bool], None], overwrite: bool
) -> None:
    if overwrite:
        take(1.0, False)
    store.cut = lambda environ: environ["REQUEST_METHOD"] == "PUT" and of_manifest(environ)
    act(2.0, overwrite)
    store.reset()
    assert float(Snapshot(URL).read_object("m/w")[0]) == 2.0
    (file,) = Snapshot(URL).manifest.files
    assert sorted(files()) == sorted([MANIFEST, MAP, file.name])
    assert Snapshot(URL).verify() == {}


@pytest.mark.parametrize(
    ("act", "overwrite"),
    [pytest.param(take, True, marks=pytest.mark.soak), (async_take, False), (save, False)],
    ids=["take", "async_take", "save"],
)
def test_what_may_still_be_committed_stays(
    store: Any, tmp_path: Path, act: Callable[[float, bool], None], overwrite: bool
) -> None:
    """The request arrives when the take has given up, and a collection has run."""
    if act is async_take:
        _objects.hurried_writer(tmp_path / "local")
    if overwrite:
        take(1.0, False)
    late: list[bytes] = []

    def lose(environ: dict[str, Any]) -> None:
        if of_manifest(environ) and environ["REQUEST_METHOD"] == "PUT":
            late.append(environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"])))
        if of_manifest(environ) and late:
            raise ConnectionResetError

    store.before = lose
    with pytest.raises(SnapshotUndecidedError, match="nobody knows") as raised:
        act(2.0, overwrite)
    store.reset()
    number = raised.value.details["take"]
    assert [record.commits for record, _ in claims_in(open_storage(URL))] == [False]
    assert (MAP in files(), MANIFEST in files()) == (False, overwrite)
    assert gc(FOLDER).running == (number,)
    manifest = late[0][late[0].index(b"{") : late[0].rindex(b"}") + 1]
    open_storage(URL).publish(MANIFEST, manifest, take="", overwrite=True, durable=True)
    assert gc(FOLDER).dead == ()
    assert float(Snapshot(URL).read_object("m/w")[0]) == 2.0
    assert Snapshot(URL).verify() == {}
    report = gc(FOLDER, grace=0)
    assert (report.running, report.mended) == ((), (f"step-1/{MAP}",))
    (file,) = Snapshot(URL).manifest.files
    assert sorted(files()) == sorted([MANIFEST, MAP, file.name])


def test_what_all_ranks_of_a_checkpoint_have_written_stays(store: Any) -> None:
    """Each has a claim of its own, which it gives up after a save that failed."""
    states = [{"m": {f"w{rank}": torch.ones(3000)}} for rank in range(2)]
    writers = [SnapshotStorageWriter(URL) for _ in states]
    planners = [dcp.DefaultSavePlanner() for _ in states]
    plans = []
    for rank, (state, writer, planner) in enumerate(zip(states, writers, planners, strict=True)):
        writer.set_up_storage_writer(rank == 0, rank=rank)
        planner.set_up_planner(state, writer.storage_meta(), rank == 0)
        plans.append(planner.create_local_plan())
    plans, metadata = planners[0].create_global_plan(plans)
    results = [
        writer.write_data(planner.finish_plan(plan), planner).wait()
        for writer, planner, plan in zip(writers, planners, plans, strict=True)
    ]
    gone: list[bool] = []

    def lose(environ: dict[str, Any]) -> None:
        gone.extend([True] if environ["REQUEST_METHOD"] == "PUT" and of_manifest(environ) else [])
        if gone and of_manifest(environ):
            raise ConnectionResetError

    store.before = lose
    with pytest.raises(SnapshotUndecidedError):
        writers[0].finish(metadata, results)
    store.reset()
    for writer in writers:
        writer._end_claim()
    report = gc(FOLDER)
    assert (report.files, len(report.running), report.dead) == ((), 2, ())
    assert len(gc(FOLDER, grace=0).files) == 4
    assert files() == []
