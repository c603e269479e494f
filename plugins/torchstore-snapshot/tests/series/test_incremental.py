"""Takes that refer to files of earlier snapshots, on local files and in object storage."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.object_storage import object_store as _server

import torchstore_core as ts
from torchstore_snapshot import (
    Series,
    Snapshot,
    SnapshotExistsError,
    SnapshotNotFoundError,
    StateDict,
    gc,
)
from torchstore_snapshot.series.survey import Place
from torchstore_snapshot.storage.opening import open_storage


@pytest.fixture(params=["files", "memory", pytest.param("objects", marks=pytest.mark.soak)])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A folder for a series."""
    if request.param == "files":
        yield str(tmp_path)
    elif request.param == "memory":
        yield f"memory://{tmp_path.name}/series"
    else:
        with _server.object_store():
            yield f"s3://{_server.BUCKET}/series"


def state(changed: dict[int, float] | None = None, count: int = 100) -> StateDict:
    values = {f"w{i}": torch.full((2500,), float(i)) for i in range(count)}
    for i, value in (changed or {}).items():
        values[f"w{i}"] = torch.full((2500,), value)
    return StateDict(values | {"t": torch.arange(6000.0).view(60, 100).t(), "step": len(values)})


def stored(path: str) -> int:
    return sum(info.nbytes for info in open_storage(path).list() if "safetensors" in info.name)


def holds(path: str, expected: StateDict) -> bool:
    back = Snapshot(path).get_state_dict_for_key("m")
    return back.keys() == expected.keys() and all(
        torch.equal(back[k], v) if isinstance(v, torch.Tensor) else back[k] == v
        for k, v in expected.items()
    )


@pytest.mark.quick
def test_only_what_changed_is_written(place: str) -> None:
    Snapshot.take(f"{place}/0", {"m": state()}, fsync=False)
    Snapshot.take(f"{place}/1", {"m": state({3: -1.0, 70: -2.0})}, base=f"{place}/0", fsync=False)
    Snapshot.take(f"{place}/2", {"m": state({3: -1.0, 70: -3.0})}, base=f"{place}/1", fsync=False)
    assert stored(f"{place}/1") <= 0.03 * stored(f"{place}/0")
    assert stored(f"{place}/2") <= 0.02 * stored(f"{place}/0")
    assert holds(f"{place}/0", state())
    assert holds(f"{place}/1", state({3: -1.0, 70: -2.0}))
    assert holds(f"{place}/2", state({3: -1.0, 70: -3.0}))
    # No chain: the newest refers to the files themselves, so the middle one can go.
    files = Snapshot(f"{place}/2").manifest.files
    assert {file.snapshot for file in files} == {"", "0", "1"}
    own = state(dict.fromkeys(range(100), 0.0))
    Snapshot(f"{place}/2").restore({"m": own})
    expected = state({3: -1.0, 70: -3.0})
    assert all(torch.equal(own[name], expected[name]) for name in own if name != "step")
    assert not Snapshot(f"{place}/2").verify()


def test_what_is_referred_to_stays(place: str) -> None:
    Snapshot.take(f"{place}/0", {"m": state()}, fsync=False)
    Snapshot.take(f"{place}/1", {"m": state({3: -1.0})}, base=f"{place}/0", fsync=False)
    before = gc(place, keep_last=1, dry_run=True)
    assert before.dropped == ("0",)
    assert holds(f"{place}/0", state())
    report = gc(place, keep_last=1)
    assert (report.dropped, report.kept) == (("0",), ("1",))
    assert (report.files, report.nbytes) == (before.files, before.nbytes) == ((), 0)
    with pytest.raises(SnapshotNotFoundError):
        Snapshot(f"{place}/0").get_manifest()
    assert holds(f"{place}/1", state({3: -1.0}))
    # Nothing in common with what was there: now the files can go.
    Snapshot.take(f"{place}/2", {"m": state({i: -5.0 - i for i in range(100)})}, fsync=False)
    report = gc(place, keep_last=1, grace=0)
    assert report.dropped == ("1",)
    assert {file.snapshot for file in report.files} == {"0", "1"}
    assert report.nbytes > 1_000_000
    assert stored(f"{place}/0") == stored(f"{place}/1") == 0
    assert holds(f"{place}/2", state({i: -5.0 - i for i in range(100)}))
    assert gc(place, grace=0).files == ()


@pytest.mark.parametrize("place", ["files", "memory", "objects"], indirect=True)
def test_overwriting_what_others_refer_to(place: str) -> None:
    Snapshot.take(f"{place}/0", {"m": state()}, fsync=False)
    Snapshot.take(f"{place}/1", {"m": state({3: -1.0})}, base=f"{place}/0", fsync=False)
    Snapshot.take(f"{place}/0", {"m": state({4: -4.0}, count=5)}, overwrite=True, fsync=False)
    assert holds(f"{place}/1", state({3: -1.0}))
    # A base that is replaced by what refers to it.
    Snapshot.take(
        f"{place}/1", {"m": state({9: -9.0})}, overwrite=True, base=f"{place}/1", fsync=False
    )
    assert holds(f"{place}/1", state({9: -9.0}))
    gc(place, grace=0)
    assert holds(f"{place}/0", state({4: -4.0}, count=5))
    assert holds(f"{place}/1", state({9: -9.0}))


def test_in_the_background(tmp_path: Path) -> None:
    Snapshot.take(tmp_path / "0", {"m": state()}, fsync=False)
    pending = Snapshot.async_take(
        tmp_path / "1", {"m": state({3: -1.0})}, base=tmp_path / "0", fsync=False
    )
    pending.wait(300)
    assert stored(str(tmp_path / "1")) <= 0.03 * stored(str(tmp_path / "0"))
    assert holds(str(tmp_path / "1"), state({3: -1.0}))
    assert gc(tmp_path).running == ()
    assert not [i for i in open_storage(tmp_path / "1").list() if "claim" in i.name]


def test_bases_that_cannot_be_used(tmp_path: Path) -> None:
    Snapshot.take(tmp_path / "a/0", {"m": state(count=1)}, fsync=False)
    with pytest.raises(SnapshotNotFoundError):
        Snapshot.take(tmp_path / "a/1", {"m": state(count=1)}, base=tmp_path / "a/nothing")
    with pytest.raises(ts.ConfigurationError, match="beside"):
        Snapshot.take(tmp_path / "b/1", {"m": state(count=1)}, base=tmp_path / "a/0")
    assert gc(tmp_path / "a", grace=0).running == ()
    assert Place.at(str(tmp_path / "a")).folder("1").list() == []


@pytest.mark.parametrize("place", ["files", "memory", "objects"], indirect=True)
def test_a_series(place: str) -> None:
    series = Series(place, keep_last=2)
    with pytest.raises(SnapshotNotFoundError):
        series.latest()
    for step in range(4):
        series.take(str(step), {"m": state({step: -1.0})}, fsync=False)
    assert series.names() == ["2", "3"]
    assert stored(f"{place}/3") <= 0.03 * stored(f"{place}/0")
    assert holds(series.latest().path, state({3: -1.0}))
    assert gc(place, keep_last=2, grace=0).files == ()


def test_a_series_in_the_background(tmp_path: Path) -> None:
    series = Series(tmp_path, keep_last=1)
    for step in range(3):
        taken = series.async_take(str(step), {"m": state({step: -1.0})}, fsync=False).wait(300)
        assert series.names() == [str(step)]
        assert holds(taken.path, state({step: -1.0}))
    with pytest.raises(SnapshotExistsError):
        series.async_take("2", {"m": state()})


def test_collections_beside_takes(tmp_path: Path) -> None:
    """Two threads take, each referring to what is newest; two collect all the time."""
    failures: list[BaseException] = []
    stop = threading.Event()

    def take(first: int) -> None:
        series = Series(tmp_path)
        try:
            for step in range(first, first + 12):
                taken = series.take(str(step), {"m": state({step: -1.0}, count=20)}, fsync=False)
                with contextlib.suppress(SnapshotNotFoundError):  # dropped in the meantime
                    taken.get_manifest()
        except BaseException as error:
            failures.append(error)

    def collect() -> None:
        try:
            while not stop.is_set():
                gc(tmp_path, keep_last=2)
        except BaseException as error:
            failures.append(error)

    takers = [threading.Thread(target=take, args=(first,)) for first in (0, 50)]
    collectors = [threading.Thread(target=collect) for _ in range(2)]
    for thread in takers + collectors:
        thread.start()
    for thread in takers:
        thread.join()
    stop.set()
    for thread in collectors:
        thread.join()
    assert failures == []
    names = Series(tmp_path).names()
    assert names
    for name in names:
        assert not Snapshot(tmp_path / name).verify()
        assert holds(str(tmp_path / name), state({int(name): -1.0}, count=20))
    gc(tmp_path, keep_last=1, grace=0)
    assert gc(tmp_path, grace=0).files == ()


@pytest.mark.parametrize("harm", ["missing", "cut", "longer", "folder"])
def test_a_file_of_the_base_that_is_not_whole_is_not_referred_to(place: str, harm: str) -> None:
    Snapshot.take(f"{place}/0", {"m": state()}, fsync=False)
    Snapshot.take(f"{place}/1", {"m": state({3: -1.0})}, base=f"{place}/0", fsync=False)
    storage = open_storage(f"{place}/0")
    (name,) = [info.name for info in storage.list() if info.name.endswith(".safetensors")]
    data = storage.read(name)
    for each in storage.list() if harm == "folder" else ():
        storage.delete(each.name)
    storage.delete(name)
    if harm in ("cut", "longer"):
        writer = storage.create(name, len(data) + (1 if harm == "longer" else -1))
        writer.write(0, data[:-1] if harm == "cut" else data + b"x")
        writer.close(durable=False)
    Snapshot.take(f"{place}/2", {"m": state({3: -1.0, 4: -2.0})}, base=f"{place}/1", fsync=False)
    assert Snapshot(f"{place}/1").verify()  # damaged
    assert not Snapshot(f"{place}/2").verify()
    assert holds(f"{place}/2", state({3: -1.0, 4: -2.0}))
    (other, own) = sorted(Snapshot(f"{place}/2").manifest.files, key=lambda f: f.snapshot != "1")
    assert (other.snapshot, own.snapshot) == ("1", "")  # what the base itself wrote is whole


def test_files_of_a_replaced_snapshot_go_with_the_last_one_that_refers_to_them(place: str) -> None:
    Snapshot.take(f"{place}/0", {"m": state()}, fsync=False)
    Snapshot.take(f"{place}/1", {"m": state({0: -1.0})}, base=f"{place}/0", fsync=False)
    Snapshot.take(
        f"{place}/0", {"m": state(dict.fromkeys(range(100), -2.0))}, overwrite=True, fsync=False
    )
    before = {info.name for info in open_storage(f"{place}/0").list()}
    assert gc(place).files == ()  # the other one needs them
    foreseen = gc(place, keep_last=1, dry_run=True)
    report = gc(place, keep_last=1)
    assert report.dropped == foreseen.dropped == ("1",)
    assert {*report.files} == {*foreseen.files}
    assert {file.snapshot for file in report.files} == {"0", "1"}
    left = {info.name for info in open_storage(f"{place}/0").list()}
    assert left == before - {file.name for file in report.files}
    assert left == {file.name for file in Snapshot(f"{place}/0").manifest.files} | {
        "snapshot.json",
        *(name for name in left if name.endswith(".index.json")),
    }
    assert not Snapshot(f"{place}/0").verify()
