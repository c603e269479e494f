"""What a take may replace is decided before it writes anything."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from tests.support import until
from torch.distributed.checkpoint.api import CheckpointException

from torchstore_snapshot import (
    ForeignFileError,
    Snapshot,
    SnapshotCorruptError,
    SnapshotExistsError,
    SnapshotReplacedError,
    SnapshotVersionError,
    StateDict,
    gc,
)
from torchstore_snapshot.background.rendezvous import commit_together
from torchstore_snapshot.converting import convert
from torchstore_snapshot.dcp import SnapshotStorageWriter
from torchstore_snapshot.format.paths import MANIFEST
from torchstore_snapshot.ranks import Ranks
from torchstore_snapshot.series.claims import Claim, claims_in
from torchstore_snapshot.storage.local import LocalStorage
from torchstore_snapshot.taking.take import TakeOptions, prepare, write

MAP = "m.safetensors.index.json"
THEIRS = b'{"metadata": {}, "weight_map": {"w": "model-00001-of-00001.safetensors"}}'


def state(fill: float) -> dict[str, StateDict]:
    return {"m": StateDict(w=torch.full((3000,), fill))}


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def take(how: str, folder: Path, fill: float, *, overwrite: bool) -> None:
    if how == "dcp":
        writer = SnapshotStorageWriter(folder, overwrite=overwrite, fsync=False)
        try:
            dcp.save({"m": {"w": state(fill)["m"]["w"]}}, storage_writer=writer, no_dist=True)
        except CheckpointException as error:
            raise error.failures[0][0] from error
    elif how == "background":
        Snapshot.async_take(folder, state(fill), overwrite=overwrite, fsync=False).wait(300)
    else:
        Snapshot.take(folder, state(fill), overwrite=overwrite, fsync=False)


# The saves are those of one process.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
WAYS = pytest.mark.parametrize("how", ["take", "background", "dcp"])


@WAYS
@pytest.mark.parametrize("damage", ["cut", "empty", "flipped"])
def test_a_damaged_snapshot_is_replaced(tmp_path: Path, how: str, damage: str) -> None:
    folder = tmp_path / "s"
    Snapshot.take(folder, state(1), fsync=False)
    data = (folder / MANIFEST).read_bytes()
    changed = {"cut": data[:-9], "empty": b"", "flipped": data.replace(b"3000", b"3001")}[damage]
    (folder / MANIFEST).write_bytes(changed)
    before = contents(folder)
    with pytest.raises(SnapshotExistsError, match="cannot be read"):
        take(how, folder, 2, overwrite=False)
    assert contents(folder) == before
    take(how, folder, 2, overwrite=True)
    assert float(Snapshot(folder).read_object("m/w")[0]) == 2.0
    report = gc(tmp_path, grace=0)  # the files of the one before
    assert ([*report.unreadable], report.held) == ([], {})
    (file,) = Snapshot(folder).manifest.files
    assert contents(folder).keys() == {MANIFEST, MAP, file.name}


@WAYS
@pytest.mark.parametrize("damage", ["cut", "empty"])
def test_a_damaged_map_is_replaced_with_its_snapshot(tmp_path: Path, how: str, damage: str) -> None:
    Snapshot.take(tmp_path, state(1), fsync=False)
    data = (tmp_path / MAP).read_bytes()
    (tmp_path / MAP).write_bytes(data[:-9] if damage == "cut" else b"")
    take(how, tmp_path, 2, overwrite=True)
    assert Snapshot(tmp_path).verify() == {}
    (file,) = Snapshot(tmp_path).manifest.files
    assert file.name.encode() in (tmp_path / MAP).read_bytes()


@pytest.mark.parametrize("theirs", [b"", b"{"])
def test_the_map_of_somebody_else_may_be_damaged(tmp_path: Path, theirs: bytes) -> None:
    (tmp_path / MAP).write_bytes(theirs)
    with pytest.raises(ForeignFileError, match=MAP):
        Snapshot.take(tmp_path, state(1), overwrite=True)
    assert contents(tmp_path) == {MAP: theirs}


def test_ranks_wait_for_each_other_where_a_damaged_snapshot_is(tmp_path: Path) -> None:
    Snapshot.take(tmp_path, state(1), fsync=False)
    (tmp_path / MANIFEST).write_bytes(b"{")
    options = TakeOptions(overwrite=True, fsync=False)
    prepared = prepare(str(tmp_path), state(2), Ranks.alone(), None, options)
    part = write(prepared)
    other = type(part)(1, [], [], {}, [], [])
    failures: list[BaseException] = []

    def follow() -> None:
        try:
            commit_together(prepared.storage, prepared.take, other, 2, options, 60)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=follow)
    thread.start()
    while not [*tmp_path.glob(".part-*-1.json")]:
        thread.join(0.001)
    commit_together(prepared.storage, prepared.take, part, 2, options, 60, prepared.claim)
    thread.join(30)
    assert failures == []
    assert Snapshot(tmp_path).manifest.take == prepared.take


@WAYS
def test_one_of_a_newer_version_is_refused(tmp_path: Path, how: str) -> None:
    Snapshot.take(tmp_path / "s", state(1), fsync=False)
    path = tmp_path / "s" / MANIFEST
    path.write_bytes(path.read_bytes().replace(b'"version":2', b'"version":3', 1))
    before = contents(tmp_path / "s")
    with pytest.raises(SnapshotVersionError, match=r"version 3.*another path"):
        take(how, tmp_path / "s", 2, overwrite=True)
    assert contents(tmp_path / "s") == before


@WAYS
def test_a_file_of_somebody_else_is_refused(tmp_path: Path, how: str) -> None:
    theirs = tmp_path / MANIFEST
    theirs.write_text('{"format": "of another program"}')
    for overwrite in (False, True):
        with pytest.raises(ForeignFileError, match=MANIFEST):
            take(how, tmp_path, 2, overwrite=overwrite)
    assert [*contents(tmp_path)] == [MANIFEST]


@WAYS
@pytest.mark.parametrize("name", [MANIFEST, MAP])
@pytest.mark.parametrize("over", ["nothing", "snapshot"])
def test_a_folder_is_refused(tmp_path: Path, how: str, name: str, over: str) -> None:
    folder = tmp_path / "s"
    if over == "snapshot":
        Snapshot.take(folder, state(1), fsync=False)
        (folder / name).unlink()
    (folder / name / "theirs").mkdir(parents=True)
    before = sorted(folder.iterdir())
    for overwrite in (False, True) if over == "nothing" or name == MANIFEST else (True,):
        with pytest.raises(ForeignFileError, match=f"the folder '{name}'"):
            take(how, folder, 2, overwrite=overwrite)
        assert sorted(folder.iterdir()) == before


@WAYS
@pytest.mark.parametrize("overwrite", [False, True])
def test_the_map_of_another_model_is_refused(tmp_path: Path, how: str, overwrite: bool) -> None:
    folder = tmp_path / "s"
    if overwrite:
        Snapshot.take(folder, {"other": StateDict(w=torch.ones(3))}, fsync=False)
    folder.mkdir(exist_ok=True)
    (folder / MAP).write_bytes(THEIRS)
    before = contents(folder)
    with pytest.raises(ForeignFileError, match=MAP):
        take(how, folder, 2, overwrite=overwrite)
    assert contents(folder) == before
    Snapshot.take(folder, {"third": StateDict(w=torch.ones(3))}, overwrite=overwrite, fsync=False)
    assert (folder / MAP).read_bytes() == THEIRS


def test_the_map_of_another_model_is_not_removed(tmp_path: Path) -> None:
    folder = tmp_path / "0"
    Snapshot.take(folder, state(1), fsync=False)
    (folder / MAP).write_bytes(THEIRS)
    Snapshot.take(folder, {"other": StateDict(w=torch.ones(3))}, overwrite=True, fsync=False)
    assert (folder / MAP).read_bytes() == THEIRS
    Snapshot.take(tmp_path / "1", state(1), fsync=False)
    (tmp_path / "1" / MAP).write_bytes(THEIRS)
    Snapshot.take(tmp_path / "2", state(1), fsync=False)
    assert gc(tmp_path, keep_last=1, grace=0).dropped == ("0", "1")
    assert contents(tmp_path / "1") == {MAP: THEIRS}


def test_a_map_that_was_left_behind_is_replaced(tmp_path: Path) -> None:
    """A take that is killed just after it was committed leaves the map of the one before."""
    Snapshot.take(tmp_path, state(1), fsync=False)
    left = (tmp_path / MAP).read_bytes()
    Snapshot.take(tmp_path, state(2), overwrite=True, fsync=False)
    (tmp_path / MAP).write_bytes(left)
    Snapshot.take(tmp_path, state(3), overwrite=True, fsync=False)
    (file,) = Snapshot(tmp_path).manifest.files
    assert file.name.encode() in (tmp_path / MAP).read_bytes()


def test_the_map_of_a_snapshot_that_could_not_be_replaced_is_there_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Snapshot.take(tmp_path, state(1), fsync=False)
    before, rename = contents(tmp_path), os.rename
    there: list[bool] = []

    def fail(old: str, new: str) -> None:
        if new.endswith(MANIFEST):
            there.append((tmp_path / MAP).exists())
            raise OSError(errno.EIO, "the disk is broken")
        rename(old, new)

    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises(OSError, match="the disk is broken"):
        Snapshot.take(tmp_path, state(2), overwrite=True)
    assert there == [False]
    assert contents(tmp_path).items() >= before.items()


@pytest.mark.parametrize("gone", [False, True])
def test_a_map_of_nothing_is_collected(tmp_path: Path, gone: bool) -> None:
    """A take is killed when it has replaced a snapshot, before it removes the map of that."""
    folder = tmp_path / "0"
    Snapshot.take(
        folder, {"m": StateDict(w=torch.ones(3)), "theirs": StateDict(w=torch.ones(3))}, fsync=False
    )
    left = (folder / MAP).read_bytes()
    Snapshot.take(folder, {"other": StateDict(w=torch.ones(3))}, overwrite=True, fsync=False)
    (folder / MAP).write_bytes(left)
    (folder / "theirs.safetensors.index.json").write_bytes(THEIRS)
    kept = "other.safetensors.index.json"
    if gone:
        (folder / MANIFEST).unlink()
    expected = {MAP, kept} if gone else {MAP}
    for dry_run in (True, False):
        report = gc(tmp_path, dry_run=dry_run)
        assert {file.name for file in report.files} == expected
    left_there = {name for name in contents(folder) if not name.endswith(".safetensors")}
    assert left_there == {"theirs.safetensors.index.json"} | (set() if gone else {MANIFEST, kept})


def test_a_conversion_beside_the_map_of_another_model(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    save_file({"w": torch.ones(30)}, tmp_path / "source" / "model.safetensors")
    (tmp_path / "s").mkdir()
    path = tmp_path / "s" / "model.safetensors.index.json"
    path.write_bytes(THEIRS)
    with pytest.raises(ForeignFileError, match=path.name):
        convert(tmp_path / "source", tmp_path / "s")
    assert contents(tmp_path / "s") == {path.name: THEIRS}


@pytest.mark.parametrize("earlier", [False, True])
async def test_one_take_after_the_other_replaces_a_snapshot(tmp_path: Path, earlier: bool) -> None:
    """What another take, which began earlier or later, has committed just before is removed."""
    storage = LocalStorage(tmp_path / "s")
    storage.prepare(durable=False)
    other = Claim(storage, ("0" if earlier else "f") * 12 + "-00000000")
    other.commits(True)
    Snapshot.take(tmp_path / "1", state(1), fsync=False)
    with ThreadPoolExecutor(1) as pool:
        begun = pool.submit(take, "take", tmp_path / "s", 2, overwrite=True)
        if earlier:
            await until(lambda: [*(tmp_path / "s").glob("m-*.safetensors")], 60)
        else:
            await until(lambda: sum(record.commits for record, _ in claims_in(storage)) == 2, 60)
        for path in sorted((tmp_path / "1").iterdir()):
            path.rename(tmp_path / "s" / path.name)
        other.release()
        begun.result(60)
    (file,) = Snapshot(tmp_path / "s").manifest.files
    assert contents(tmp_path / "s").keys() == {MANIFEST, MAP, file.name}
    assert float(Snapshot(tmp_path / "s").read_object("m/w")[0]) == 2.0


@pytest.mark.parametrize("overwrite", [False, True])
def test_simultaneous_takes_leave_the_files_of_one(tmp_path: Path, overwrite: bool) -> None:
    meeting = threading.Barrier(2)

    class Waits(StateDict):
        def state_dict(self) -> dict[str, Any]:
            meeting.wait(30)  # both have seen that there is no snapshot
            return super().state_dict()

    def take(fill: float) -> str:
        state = {"m": Waits(w=torch.full((3000,), fill))}
        try:
            Snapshot.take(tmp_path / "s", state, fsync=False, overwrite=overwrite)
        except SnapshotExistsError:
            return "exists"
        return "taken"

    with ThreadPoolExecutor(2) as pool:
        said = sorted(pool.map(take, (1.0, 2.0)))
    assert said == (["taken"] * 2 if overwrite else ["exists", "taken"])
    files = {path.name for path in (tmp_path / "s").glob("*.safetensors")}
    assert files == {file.name for file in Snapshot(tmp_path / "s").manifest.files}
    assert not Snapshot(tmp_path / "s").verify()


@pytest.mark.parametrize("what", ["replaced", "removed"])
def test_a_snapshot_that_is_gone_when_it_is_read_is_not_called_damaged(
    tmp_path: Path, what: str
) -> None:
    folder = tmp_path / "latest"
    old = Snapshot.take(folder, state(1), fsync=False)
    assert old.manifest
    if what == "replaced":
        Snapshot.take(folder, state(2), overwrite=True, fsync=False)
    else:
        shutil.rmtree(folder)
    mine = state(0)
    for read in (
        lambda: old.restore(mine),
        lambda: old.restore(mine, verify=False),
        lambda: old.read_object("m/w"),
        lambda: old.get_state_dict_for_key("m"),
        old.verify,
    ):
        with pytest.raises(SnapshotReplacedError, match="open it again"):
            read()
    assert not mine["m"]["w"].any()
    if what == "replaced":
        Snapshot(folder).restore(mine)
        assert torch.equal(mine["m"]["w"], state(2)["m"]["w"])


def test_what_is_beside_the_data_of_another_snapshot_by_now_is_not_called_damaged(
    tmp_path: Path,
) -> None:
    old = Snapshot.take(tmp_path / "s", state(1), fsync=False)
    assert old.verify() == {}
    Snapshot.take(tmp_path / "t", state(1), base=tmp_path / "s", fsync=False)  # needs its file
    Snapshot.take(tmp_path / "s", state(2), overwrite=True, fsync=False)
    assert {file.name for file in old.manifest.files} <= {*os.listdir(tmp_path / "s")}
    with pytest.raises(SnapshotReplacedError, match=r"m\.safetensors\.index\.json.*open it again"):
        old.verify()
    (tmp_path / "s" / "m.safetensors.index.json").write_text('{"weight_map": {}}')
    assert [*Snapshot(tmp_path / "s").verify()] == ["m.safetensors.index.json"]


def test_a_snapshot_of_which_a_file_is_missing_is_damaged_and_not_replaced(tmp_path: Path) -> None:
    snapshot = Snapshot.take(tmp_path, state(1), fsync=False)
    (tmp_path / snapshot.manifest.files[0].name).unlink()
    with pytest.raises(SnapshotCorruptError, match="is damaged") as caught:
        snapshot.restore(state(0))
    assert not isinstance(caught.value, SnapshotReplacedError)
