"""Snapshots that cannot be read keep what they may refer to, and nothing else."""

from __future__ import annotations

from pathlib import Path

import msgspec
import torch

from torchstore_snapshot import GcReport, Series, Snapshot, StateDict, gc
from torchstore_snapshot.format.paths import MANIFEST, claim_file
from torchstore_snapshot.ranks import Ranks
from torchstore_snapshot.series.claims import Claim, claims_in
from torchstore_snapshot.storage.opening import open_storage
from torchstore_snapshot.taking.take import TakeOptions, prepare, write


def state(fill: float) -> dict[str, StateDict]:
    return {"m": StateDict(w=torch.full((3000,), fill), same=torch.ones(3000))}


def snapshots(report: GcReport) -> set[str]:
    """Which of them stay because of others."""
    return {name for name in report.held if "/" not in name}


def damage(folder: Path) -> bytes:
    """Returns what was there."""
    data = (folder / MANIFEST).read_bytes()
    (folder / MANIFEST).write_bytes(data[:-40])
    return data


def dies(path: Path, fill: float) -> set[str]:
    """A take that dies before it is committed. Returns its data files."""
    running = prepare(str(path), state(fill), Ranks.alone(), None, TakeOptions(fsync=False))
    write(running)
    claim = running.claim
    assert claim is not None
    bury(claim, running.take)
    return {f"{path.name}/{file.name}" for file in running.files}


def bury(claim: Claim, take: str) -> None:
    """Make a claim that of a process that has died."""
    claim.stop()
    storage = claim._storage
    (record,) = [r for r, _ in claims_in(storage) if r.take == take]
    data = msgspec.json.encode(msgspec.structs.replace(record, started=1))
    storage.publish(claim_file(take), data, take=take, overwrite=True, durable=False)


def test_later_snapshots_are_removed_all_the_same(tmp_path: Path) -> None:
    """In a long run, one bad sector must not fill the disk."""
    series = Series(tmp_path, keep_last=2)
    for step in range(3):
        Snapshot.take(
            tmp_path / str(step), state(step), base=tmp_path / "0" if step else None, fsync=False
        )
    data = damage(tmp_path / "2")
    dead = dies(tmp_path / "dead", 5.0)
    for step in range(3, 8):
        series.take(str(step), state(step), fsync=False)
    assert series.names() == ["0", "1", "6", "7"]  # 3, 4 and 5 have gone
    assert not [*tmp_path.glob("[345]/*")]
    report = series.gc(grace=0)
    assert not [*tmp_path.glob("dead/*")]
    assert dead <= {f"{f.snapshot}/{f.name}" for f in report.files} | dead
    assert (report.dropped, report.kept) == ((), ("0", "1", "6", "7"))
    assert [*report.unreadable] == ["2"]
    assert snapshots(report) == {"0", "1"}
    assert all("'2'" in why for why in report.held.values())
    (tmp_path / "2" / MANIFEST).write_bytes(data)
    assert not Snapshot(tmp_path / "2").verify()
    report = series.gc(grace=0)
    assert (report.dropped, report.held) == (("0", "1", "2"), {})
    assert Snapshot(tmp_path / "7").verify() == {}


def test_files_of_a_snapshot_that_is_gone_stay(tmp_path: Path) -> None:
    """The damaged snapshot refers to files of one that was removed before."""
    Snapshot.take(tmp_path / "0", state(0), fsync=False)
    Snapshot.take(tmp_path / "1", state(1), base=tmp_path / "0", fsync=False)
    Snapshot.take(tmp_path / "2", {"m": StateDict(x=torch.zeros(5))}, fsync=False)
    assert gc(tmp_path, keep_last=2).dropped == ("0",)
    data = damage(tmp_path / "1")
    report = gc(tmp_path, keep_last=1, grace=0)
    assert report.files == report.dropped == ()
    assert {Path(name).parts[0] for name in report.held} == {"0", "1"}
    (tmp_path / "1" / MANIFEST).write_bytes(data)
    assert not Snapshot(tmp_path / "1").verify()


def test_a_take_that_died_after_it_was_committed(tmp_path: Path) -> None:
    """Its claim is that of a dead take; but others refer to its files."""
    first = tmp_path / "0"
    Snapshot.take(first, state(0), fsync=False)
    take = Snapshot(first).manifest.take
    bury(Claim(open_storage(first), take), take)
    Snapshot.take(tmp_path / "1", state(1), base=first, fsync=False)
    Snapshot.take(first, {"m": StateDict(x=torch.zeros(5))}, overwrite=True, fsync=False)
    data = damage(tmp_path / "1")
    report = gc(tmp_path, grace=0)
    assert report.files == ()
    (tmp_path / "1" / MANIFEST).write_bytes(data)
    assert not Snapshot(tmp_path / "1").verify()


def test_a_damaged_head_is_not_believed(tmp_path: Path) -> None:
    for step in range(3):
        Snapshot.take(tmp_path / str(step), state(step), fsync=False)
    data = damage(tmp_path / "1")
    forged = data.replace(b'"sequence":2,', b'"sequence":0,', 1)
    assert forged != data
    (tmp_path / "1" / MANIFEST).write_bytes(forged[:-40])
    Snapshot.take(tmp_path / "3", state(3), fsync=False)
    report = gc(tmp_path, keep_last=1, grace=0)
    assert (report.dropped, report.files, snapshots(report)) == ((), (), {"0", "2"})


def test_one_of_a_newer_version(tmp_path: Path) -> None:
    for step in range(4):
        Snapshot.take(tmp_path / str(step), state(step), fsync=False)
    path = tmp_path / "1" / MANIFEST
    path.write_bytes(path.read_bytes().replace(b'"version":2', b'"version":9', 1))
    report = gc(tmp_path, keep_last=1, grace=0)
    assert "version 9" in report.unreadable["1"]
    assert (report.dropped, snapshots(report)) == (("2",), {"0"})
