"""Which snapshot is the newest does not depend on clocks, and is never removed by mistake."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from pathlib import Path

import pytest
import torch

from torchstore_snapshot import Series, Snapshot, SnapshotNotFoundError, StateDict, gc
from torchstore_snapshot.format.hashes import digest_of
from torchstore_snapshot.format.paths import MANIFEST, claim_file
from torchstore_snapshot.ranks import Ranks
from torchstore_snapshot.series.retiring import retire, sweep_map
from torchstore_snapshot.storage.local import LocalStorage
from torchstore_snapshot.taking.take import TakeOptions, commit, prepare, write


def state(fill: float) -> dict[str, StateDict]:
    return {"m": StateDict(w=torch.full((3000,), fill))}


def value(path: Path) -> float:
    return float(Snapshot(path).read_object("m/w")[0])


@pytest.mark.parametrize("step_s", [-1000.0, 0.0])
def test_a_clock_that_goes_back_or_stands_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step_s: float
) -> None:
    now = 2e9
    monkeypatch.setattr(time, "time", lambda: now)
    monkeypatch.setattr(time, "time_ns", lambda: int(now * 1e9))
    series = Series(tmp_path, keep_last=2)
    for step in range(6):
        name = "fedcba"[step]
        if step % 2:
            series.take(name, state(step), fsync=False)
        else:  # without a base, and without Series
            Snapshot.take(tmp_path / name, state(step), fsync=False)
        now += step_s
        assert series.latest().path == str(tmp_path / name)
    assert series.names() == ["b", "a"]
    report = gc(tmp_path, keep_last=1, grace=0)
    assert (report.dropped, report.kept) == (("b",), ("a",))
    assert value(tmp_path / "a") == 5.0


def test_a_snapshot_whose_folder_another_collection_has_removed(tmp_path: Path) -> None:
    folder = tmp_path / "1"
    Snapshot.take(folder, state(1), fsync=False)
    manifest = Snapshot(folder).manifest
    shutil.rmtree(folder)
    assert retire(LocalStorage(folder), manifest)
    sweep_map(LocalStorage(folder), "model.safetensors.index.json")
    assert not folder.exists()


def test_snapshots_that_were_not_counted_are_the_oldest(tmp_path: Path) -> None:
    """Those of earlier versions of this package, in the order of their clocks."""
    for name in "ab":
        Snapshot.take(tmp_path / name, state(1), fsync=False)
        document = json.loads((tmp_path / name / MANIFEST).read_bytes())
        assert document.pop("head")["sequence"] == document["body"].pop("sequence") == 1
        document["body"]["created"] = 3e9 - ord(name)  # in the future, and "b" first
        body = json.dumps(document.pop("body"))
        document["digest"] = digest_of(body.encode())
        text = json.dumps(document)[:-1] + f', "body": {body}}}'
        (tmp_path / name / MANIFEST).write_text(text)
    Snapshot.take(tmp_path / "c", state(2), fsync=False)
    assert Series(tmp_path).names() == ["b", "a", "c"]
    assert gc(tmp_path, keep_last=1).kept == ("c",)


def test_a_snapshot_is_newer_than_its_base_also_when_that_is_gone(tmp_path: Path) -> None:
    for step in range(3):
        Snapshot.take(tmp_path / str(step), state(step), fsync=False)
    options = TakeOptions(base=str(tmp_path / "2"), fsync=False)
    running = prepare(str(tmp_path / "3"), state(2), Ranks.alone(), None, options)
    assert retire(LocalStorage(tmp_path / "2"), Snapshot(tmp_path / "2").manifest)
    commit(running.storage, running.take, [write(running)], options, claim=running.claim)
    assert Snapshot(tmp_path / "3").manifest.sequence == 4


class _Slow(LocalStorage):
    """Is stopped by the scheduler just before it removes the manifest."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.stopped, self.goes_on = threading.Event(), threading.Event()

    def delete(self, name: str) -> None:
        if name == MANIFEST:
            self.stopped.set()
            assert self.goes_on.wait(30)
        super().delete(name)


def test_what_replaces_a_snapshot_that_is_being_removed_stays(tmp_path: Path) -> None:
    """A program that has found the old snapshot there removes the manifest when another take has
    put its own into that place.
    """
    folder = tmp_path / "0"
    Snapshot.take(folder, state(1), fsync=False)
    slow = _Slow(folder)
    removing = threading.Thread(target=retire, args=(slow, Snapshot(folder).manifest))
    removing.start()
    assert slow.stopped.wait(30)
    taking = threading.Thread(
        target=Snapshot.take,
        args=(folder, state(2)),
        kwargs={"overwrite": True, "fsync": False},
    )
    taking.start()
    while len([*folder.glob(".claim-*")]) < 2:  # the take has begun
        taking.join(0.001)
    taking.join(0.2)  # it could have ended by now, and must wait
    slow.goes_on.set()
    removing.join()
    taking.join()  # until it has removed what it replaces
    assert value(folder) == 2.0
    assert gc(tmp_path, grace=0).files == ()
    assert not [*folder.glob(".claim-*")]


def test_a_snapshot_that_is_being_replaced_is_not_removed(tmp_path: Path) -> None:
    folder = tmp_path / "0"
    Snapshot.take(folder, state(1), fsync=False)
    before = Snapshot(folder).manifest
    options = TakeOptions(overwrite=True, fsync=False)
    running = prepare(str(folder), state(2), Ranks.alone(), None, options)
    assert not retire(LocalStorage(folder), before)
    commit(running.storage, running.take, [write(running)], options, claim=running.claim)
    assert not retire(LocalStorage(folder), before)  # another one by now
    assert value(folder) == 2.0
    assert retire(LocalStorage(folder), Snapshot(folder).manifest)
    with pytest.raises(SnapshotNotFoundError):
        value(folder)


def test_a_take_on_another_host_whose_clock_is_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Claims are dated by the file system. A host whose clock is a day ahead of that must not take
    them for those of dead takes.
    """
    options = TakeOptions(fsync=False)
    running = prepare(str(tmp_path / "0"), state(1), Ranks.alone(), None, options)
    part = write(running)
    path = tmp_path / "0" / claim_file(running.take)
    path.write_bytes(path.read_bytes().replace(b'"host":"', b'"host":"elsewhere-', 1))
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 86_400)
    report = gc(tmp_path)
    assert (report.running, report.files) == ((running.take,), ())
    commit(running.storage, running.take, [part], options, claim=running.claim)
    assert value(tmp_path / "0") == 1.0
    assert not [*(tmp_path / "0").glob(".*")]


def test_a_take_on_another_host_that_is_silent(tmp_path: Path) -> None:
    running = prepare(str(tmp_path / "0"), state(1), Ranks.alone(), None, TakeOptions(fsync=False))
    assert running.claim is not None
    running.claim.stop()
    path = tmp_path / "0" / claim_file(running.take)
    path.write_bytes(path.read_bytes().replace(b'"host":"', b'"host":"elsewhere-', 1))
    os.utime(path, (time.time() - 1000,) * 2)
    report = gc(tmp_path)
    assert (report.dead, len(report.files)) == ((running.take,), 1)
