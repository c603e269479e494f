"""A disk that is full, at any moment of a take, and a machine without any network."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.processes import run_script
from tests.support import disk_of, until

from torchstore_snapshot import Snapshot, StateDict, TakeLostError, gc
from torchstore_snapshot.format.paths import claim_file
from torchstore_snapshot.ranks import Ranks
from torchstore_snapshot.storage.opening import leavings, open_storage
from torchstore_snapshot.taking.take import TakeOptions, commit, prepare, write

_PAGE = 4096


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with disk_of(tmp_path / "disk", 4 << 20) as folder:
        yield folder


@pytest.mark.parametrize("background", [False, True])
def test_a_full_disk(small_disk: Path, background: bool) -> None:
    folder = small_disk / "s"
    Snapshot.take(folder, {"m": StateDict(w=torch.ones(100_000))})
    large = {"m": StateDict(w=torch.zeros(2_000_000))}

    def take() -> None:
        if background:
            Snapshot.async_take(folder, large, overwrite=True).wait(300)
        else:
            Snapshot.take(folder, large, overwrite=True)

    with pytest.raises(OSError, match="No space left"):
        take()
    assert leavings(open_storage(folder), Snapshot(folder).manifest) == []
    assert torch.equal(Snapshot(folder).read_object("m/w"), torch.ones(100_000))
    Snapshot.take(folder, {"m": StateDict(w=torch.zeros(10))}, overwrite=True)


def state(step: int) -> dict[str, StateDict]:
    values = {f"w{i}": torch.full((1500,), float(step if i % 2 else 0)) for i in range(6)}
    return {"m": StateDict(n=step, **values)}


def restored(path: Path) -> int:
    """Which step a snapshot is of, after checking every bit of it."""
    own = state(-1)["m"]
    Snapshot(path).restore({"m": own})
    expected = state(own["n"])["m"]
    assert all(torch.equal(own[f"w{i}"], expected[f"w{i}"]) for i in range(6))
    return int(own["n"])


def fill(disk: Path, free: int) -> None:
    """Leave ``free`` bytes, a multiple of a page."""
    with open(disk / "ballast", "wb", buffering=0) as file:
        while os.statvfs(disk).f_bavail:
            file.write(bytes(_PAGE))
        file.seek(0, os.SEEK_END)
        os.truncate(file.fileno(), file.tell() // _PAGE * _PAGE - free)


@pytest.mark.parametrize("how", ["overwrite", "base", "background"])
def test_a_disk_that_is_full_at_any_moment(small_disk: Path, how: str) -> None:
    """Each take has one page more than the one before, and so fails at the next thing that it
    writes: claim, data, manifest, map of the weights. Then it is cleaned up, on a disk that is as
    full, and a later take works.
    """
    folder = small_disk / "series"
    failed, pages, codes = 0, 0, set[int | None]()
    Snapshot.take(folder / "0", state(1))
    Snapshot.take(folder / "1", state(2), base=folder / "0")
    step = 2
    while True:
        fill(small_disk, pages * _PAGE)
        name = "1" if how == "overwrite" else "2"
        try:
            if how == "background":
                Snapshot.async_take(folder / name, state(step + 1)).wait(300)
            else:
                base = folder / "1" if how == "base" else None
                overwrite = how == "overwrite"
                Snapshot.take(folder / name, state(step + 1), overwrite=overwrite, base=base)
            committed = True
        except OSError as error:
            codes.add(error.errno)
            committed = False
            failed += 1
        newest = restored(folder / name) if committed else step
        if not committed:  # it may have become visible before it failed, but then it is whole
            newest = max(restored(folder / each) for each in snapshots(folder))
            assert newest in (step, step + 1)
        assert gc(folder, keep_last=1, grace=0).unreadable == {}
        (last,) = snapshots(folder)
        assert restored(folder / last) == newest
        assert Snapshot(folder / last).verify() == {}
        assert all_files(folder) == referred(folder, last)
        (small_disk / "ballast").unlink()
        step = newest + 1
        for each in "10":  # a later take works
            if each != last:
                Snapshot.take(folder / each, state(step), base=folder / last)
        Snapshot.take(folder / "1", state(step + 1), overwrite=True, base=folder / "0")
        step += 1
        gc(folder, keep_last=2, grace=0)
        if committed:
            break
        pages += 1
    assert codes == {errno.ENOSPC}
    assert failed > 5


def test_what_a_dead_take_has_left_is_collected_on_a_full_disk(small_disk: Path) -> None:
    folder = small_disk / "series"
    Snapshot.take(folder / "0", state(1))
    dying = prepare(str(folder / "1"), state(2), Ranks.alone(), None, TakeOptions())
    part = write(dying)
    assert dying.claim is not None
    dying.claim.stop()
    path = folder / "1" / claim_file(dying.take)
    path.write_bytes(path.read_bytes().replace(b'"started":', b'"started":9', 1))
    fill(small_disk, 0)
    report = gc(folder)
    assert report.dead == (dying.take,)
    assert {file.name for file in report.files} == {path.name, dying.files[0].name}
    assert not (folder / "1").exists()
    (small_disk / "ballast").unlink()
    with pytest.raises(TakeLostError):  # if it was only slow
        commit(dying.storage, dying.take, [part], dying.options, claim=dying.claim)


def snapshots(folder: Path) -> list[str]:
    return sorted(path.parent.name for path in folder.glob("*/snapshot.json"))


def all_files(folder: Path) -> set[str]:
    """The data files, and what takes leave that die."""
    found = {str(path.relative_to(folder)) for path in folder.glob("*/*")}
    return {name for name in found if not name.endswith(".json") or "/." in name}


def referred(folder: Path, name: str) -> set[str]:
    files = Snapshot(folder / name).manifest.files
    return {f"{file.snapshot or name}/{file.name}" for file in files}


def _without_network() -> list[str]:
    """A command that runs another in a network name space in which even loopback is down."""
    for command in (["unshare", "--net"], ["unshare", "--net", "--map-root-user"]):
        try:
            subprocess.run([*command, "true"], check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            why = getattr(error, "stderr", None) or error
            continue
        return command
    pytest.skip(f"no network name space: {why!r}")


_OFFLINE = """
import errno, os, socket
from torchstore_snapshot import Series, Snapshot, StateDict, gc
try:
    socket.create_connection(("127.0.0.1", 1), timeout=1)
except OSError as error:
    assert error.errno == errno.ENETUNREACH, error

def state(fill):
    return {{"m": StateDict(w=torch.full((3000,), fill), same=torch.ones(3000) / 3)}}

series = Series({path!r}, keep_last=2)
series.take("0", state(0.0), fsync=False)
series.async_take("1", state(1.0), fsync=False).wait(300)
series.async_take("2", state(2.0), fsync=False).wait(300)
own = state(9.0)
series.latest().restore(own)
assert own["m"]["w"].tolist() == [2.0] * 3000
assert series.latest().verify() == {{}}
report = gc({path!r}, keep_last=1, grace=0)
print(report.dropped, report.kept, len(report.files))
"""


async def test_a_machine_without_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a name space of its own, whose loopback is down, too. Neither a process nor a temporary
    file stays.
    """
    for name in ("TMPDIR", "XDG_RUNTIME_DIR"):
        (tmp_path / name).mkdir(mode=0o700)
        monkeypatch.setenv(name, str(tmp_path / name))
    mark = f"OFFLINE={tmp_path}"
    monkeypatch.setenv(*mark.split("=", 1))
    said = await run_script(_OFFLINE.format(path=str(tmp_path / "run")), wrapper=_without_network())
    assert said == "('1',) ('2',) 1\n"

    def running() -> list[str]:
        found: list[str] = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if (
                    entry.name != str(os.getpid())
                    and mark.encode() in (entry / "environ").read_bytes()
                ):
                    found.append((entry / "cmdline").read_text().replace("\0", " "))
            except OSError:
                continue
        return found

    await until(lambda: not running(), 30)
    assert not [*(tmp_path / "TMPDIR").rglob("*")]
    assert not [path for path in (tmp_path / "XDG_RUNTIME_DIR").rglob("*") if not path.is_dir()]
    assert not [*(tmp_path / "run").rglob(".*")]
