"""How the writers of several ranks commit together, each at its own pace."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

from torchstore_snapshot import RankFailedError, Snapshot, StateDict, TakeLostError
from torchstore_snapshot.background import rendezvous
from torchstore_snapshot.background.rendezvous import commit_together, report_failure
from torchstore_snapshot.committing.merging import Part
from torchstore_snapshot.format.manifest import DataFile
from torchstore_snapshot.format.paths import new_take_id
from torchstore_snapshot.series.claims import Claim
from torchstore_snapshot.storage.base import Storage
from torchstore_snapshot.storage.opening import open_storage
from torchstore_snapshot.taking.take import TakeOptions, commit

OPTIONS = TakeOptions(overwrite=True, fsync=False)


@pytest.fixture(autouse=True)
def _takes_without_a_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of most tests here have none, which is no sign of anything."""
    monkeypatch.setattr(rendezvous, "_TOLD_S", 1000.0)


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    """Where the snapshot ``s`` is taken to."""
    made = open_storage(tmp_path / "s")
    made.prepare(durable=False)
    return made


@pytest.fixture
def take() -> str:
    return new_take_id()


class Waits:
    """A rank above 0 that has reported, and looks again when it is told to."""

    def __init__(self, folder: Path, take: str) -> None:
        self.waiting, self.go = threading.Event(), threading.Event()
        self.result: Future[None] = Future()
        storage = open_storage(folder)
        args = (storage, take, part(1), 2, OPTIONS, 20.0, None, None, self._check)
        self._thread = threading.Thread(target=self._run, args=args)
        self._thread.start()
        assert self.waiting.wait(30)

    def _check(self) -> None:
        self.waiting.set()
        self.go.wait(30)

    def _run(self, *args: Any) -> None:
        try:
            self.result.set_result(commit_together(*args))
        except BaseException as error:
            self.result.set_exception(error)

    def join(self, timeout: float | None = None) -> None:
        self._thread.join(timeout)

    def end(self) -> None:
        self.go.set()
        self.join()
        self.result.result(0)


class AtCommit:
    """What rank 0 enters to report its part and to commit; calls something after the latter."""

    def __init__(self, then: Callable[[], object]) -> None:
        self._then, self._left = then, 0

    def __enter__(self) -> None:
        """Nothing is held."""

    def __exit__(self, *_: object) -> None:
        self._left += 1
        if self._left == 2:
            self._then()


def part(rank: int) -> Part:
    return Part(rank, ["m"], [DataFile(f"file-{rank}", 0, rank)], {"m": {}}, [], [])


def test_a_rank_hears_of_a_commit_that_was_replaced_since(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    Snapshot.take(folder, {"m": StateDict(w=torch.ones(3))}, fsync=False)
    take = new_take_id()
    slow = Waits(folder, take)
    commit_together(open_storage(folder), take, part(0), 2, OPTIONS, 20.0)
    assert Snapshot(folder).manifest.take == take
    Snapshot.take(folder, {"m": StateDict(w=torch.ones(3))}, overwrite=True, fsync=False)
    slow.end()
    assert not [path.name for path in folder.iterdir() if path.name.startswith(".")]


def test_a_rank_that_sees_the_commit_before_it_is_told_leaves_no_report(
    tmp_path: Path, storage: Storage, take: str
) -> None:
    slow = Waits(tmp_path / "s", take)

    def look() -> None:
        slow.go.set()  # the manifest is there, and rank 0 has told nobody yet
        slow.join(1)

    commit_together(storage, take, part(0), 2, OPTIONS, 20.0, None, AtCommit(look))
    slow.end()
    assert not [path.name for path in (tmp_path / "s").iterdir() if path.name.startswith(".")]


def test_a_rank_that_is_never_told_believes_the_manifest(
    tmp_path: Path, storage: Storage, take: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "_TOLD_S", 0.2)
    slow = Waits(tmp_path / "s", take)
    commit(storage, take, [part(0), part(1)], OPTIONS)
    slow.end()
    assert not [path.name for path in (tmp_path / "s").iterdir() if path.name.startswith(".")]


def test_a_rank_hears_that_rank_0_failed(tmp_path: Path, storage: Storage, take: str) -> None:
    slow = Waits(tmp_path / "s", take)
    report_failure(storage, take, 0, "it did not want to")
    with pytest.raises(RankFailedError, match="rank 0 failed: it did not want to"):
        slow.end()


def test_a_report_that_is_removed_is_a_lost_take(
    tmp_path: Path, storage: Storage, take: str
) -> None:
    slow = Waits(tmp_path / "s", take)
    for info in storage.list():
        storage.delete(info.name)
    with pytest.raises(TakeLostError):
        slow.end()


@pytest.mark.parametrize("how", ["abandon", "release"])
def test_a_rank_sees_that_the_take_was_given_up(
    tmp_path: Path, storage: Storage, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """What rank 0 had said of it may have been collected before this one reported."""
    monkeypatch.setattr(rendezvous, "_TOLD_S", 0.2)
    claim = Claim(storage, new_take_id())
    slow = Waits(tmp_path / "s", claim.take)
    getattr(claim, how)()
    with pytest.raises(TakeLostError, match="given up"):
        slow.end()


def test_a_rank_that_gives_up_late_keeps_the_take_from_being_committed(
    tmp_path: Path, storage: Storage, take: str
) -> None:
    slow = Waits(tmp_path / "s", take)
    report_failure(storage, take, 1, "its program has ended")
    with pytest.raises(RankFailedError, match="rank 1 failed"):
        commit_together(storage, take, part(0), 2, OPTIONS, 20.0)
    with pytest.raises(RankFailedError):
        slow.end()
