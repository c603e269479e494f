"""A rank that fails because the disk is full tells the others nevertheless, so that they do not
wait for it.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.support import disk_of, until

from torchstore_snapshot import RankFailedError, Snapshot, SnapshotNotFoundError, gc
from torchstore_snapshot.background import messages as m
from torchstore_snapshot.background import rendezvous
from torchstore_snapshot.background.rendezvous import commit_together, report_failure
from torchstore_snapshot.format.paths import data_file, new_take_id, part_file
from torchstore_snapshot.series.claims import Claim
from torchstore_snapshot.storage.opening import open_storage
from torchstore_snapshot.taking.take import Prepared

_giving_up = importlib.import_module("plugins.torchstore-snapshot.tests.background.test_giving_up")
_together = importlib.import_module("plugins.torchstore-snapshot.tests.background.test_together")
writer, prepared, begun = _giving_up.writer, _giving_up.prepared, _giving_up.begun
Writer = _giving_up.Writer
_takes_without_a_claim = _together._takes_without_a_claim


@pytest.fixture
def tmp_path(tmp_path: Path) -> Iterator[Path]:
    """A disk of 1 MB, if this process may mount one."""
    with disk_of(tmp_path / "disk", 1 << 20) as folder:
        yield folder


def fill(disk: Path) -> None:
    (disk / "ballast").write_bytes(bytes(os.statvfs(disk).f_bavail * 4096))
    assert os.statvfs(disk).f_bavail == 0


async def test_rank_0_hears_of_a_rank_that_has_no_room_to_say_why(
    tmp_path: Path, writer: Writer, prepared: Prepared
) -> None:
    file = begun(writer, prepared, 60.0)
    storage = open_storage(prepared.url)
    with ThreadPoolExecutor() as pool:
        args = (storage, prepared.take, _together.part(0), 2, _together.OPTIONS, 20.0)
        waiting = pool.submit(commit_together, *args)
        await until((file.parent / part_file(prepared.take, 0)).exists, 30)
        fill(tmp_path)
        writer.tell(m.Finish(1))  # its data, of which nothing was written yet
        failed = writer.reply()
        assert (failed.errno, failed.told) == (28, True)
        with pytest.raises(RankFailedError, match=r"rank 1 failed: .*no room") as caught:
            waiting.result()
    assert [*caught.value.details["ranks"]] == ["1"]
    with pytest.raises(SnapshotNotFoundError):
        Snapshot(prepared.url).manifest  # noqa: B018


def test_the_other_ranks_hear_of_a_rank_0_that_has_no_room_to_say_why(tmp_path: Path) -> None:
    take = new_take_id()
    storage = open_storage(tmp_path / "s")
    storage.prepare(durable=False)
    slow = _together.Waits(tmp_path / "s", take)
    fill(tmp_path)
    with pytest.raises(OSError, match="No space left"):  # for its part
        commit_together(storage, take, _together.part(0), 2, _together.OPTIONS, 20.0)
    report_failure(storage, take, 0, "OSError: No space left on device")
    with pytest.raises(RankFailedError, match=r"rank 0 failed: .*no room"):
        slow.end()


def test_a_take_that_has_no_room_to_say_that_it_has_failed_does_not_look_alive(
    tmp_path: Path,
) -> None:
    """Otherwise nothing of it could be collected for as long as the program runs."""
    storage = open_storage(tmp_path / "s")
    claim = Claim.begin(storage, new_take_id(), durable=False)
    (tmp_path / "s" / data_file("m", claim.take, 0, 0)).write_bytes(bytes(100_000))
    fill(tmp_path)
    claim.abandon()
    report = gc(tmp_path)
    assert (report.running, report.dead, len(report.files)) == ((), (claim.take,), 2)
    assert not (tmp_path / "s").exists()


def test_a_rank_that_has_no_room_takes_back_what_it_has_reported(tmp_path: Path) -> None:
    take = new_take_id()
    storage = open_storage(tmp_path / "s")
    storage.prepare(durable=False)
    slow = _together.Waits(tmp_path / "s", take)
    fill(tmp_path)
    report_failure(storage, take, 1, "its program has ended")
    (tmp_path / "ballast").unlink()
    with pytest.raises(RankFailedError, match=r"rank 1 failed: .*no room"):
        commit_together(storage, take, _together.part(0), 2, _together.OPTIONS, 20.0)
    with pytest.raises(RankFailedError):
        slow.end()


def test_a_rank_is_not_kept_waiting_by_a_rank_0_that_has_no_room_to_say_that_it_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "_TOLD_S", 1000.0)
    take = new_take_id()
    storage = open_storage(tmp_path / "s")
    storage.prepare(durable=False)
    slow = _together.Waits(tmp_path / "s", take)

    committing = _together.AtCommit(lambda: fill(tmp_path))
    args = (storage, take, _together.part(0), 2, _together.OPTIONS, 20.0, None, committing)
    commit_together(*args)
    assert Snapshot(storage.url).manifest.take == take
    slow.go.set()
    slow.join(30)
    slow.result.result(0)
    assert not [path.name for path in (tmp_path / "s").iterdir() if path.name.startswith(".")]
