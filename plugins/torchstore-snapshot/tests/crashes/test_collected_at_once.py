"""What a program that is killed had let go is garbage at once, not only after a day."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
from tests.processes import Script
from tests.support import until

from torchstore_snapshot import GcReport, Snapshot, StateDict, gc
from torchstore_snapshot.format.paths import MANIFEST, claim_file
from torchstore_snapshot.ranks import Ranks
from torchstore_snapshot.series.claims import Record
from torchstore_snapshot.taking.take import TakeOptions, commit, prepare, write

# A process that dies before the n-th change that it makes after a manifest has changed.
_DIES = """
import os, signal, sys
from torchstore_snapshot import Series, Snapshot, StateDict, gc
left = [{step} + 1]
def count(event, args):
    if event in ("os.rename", "os.remove", "os.mkdir", "os.rmdir"):
        if left[0] <= {step} or str(args[event == "os.rename"]).endswith("/snapshot.json"):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
os.makedirs({path!r}, exist_ok=True)
state = {{"m": StateDict(**{{f"w{{i}}": torch.full((3000,), 7.0 + i) for i in range(3)}})}}
sys.addaudithook(count)
{call}
left[0] = -1
print("alive")
"""
_REPLACES = "Snapshot.take({path!r} + '/1', state, overwrite=True, fsync=False, file_max=20_000)"
_DROPS = "gc({path!r}, keep_last=1)"


def state(fill: float) -> dict[str, StateDict]:
    return {"m": StateDict(**{f"w{i}": torch.full((3000,), fill + i) for i in range(3)})}


async def dies(path: Path, call: str, step: int) -> bool:
    """Whether a process died before that step."""
    call = call.format(path=str(path))
    with Script(_DIES.format(path=str(path), call=call, step=step)) as script:
        await until(lambda: script._process.wait(0.005) is not None, 60)
        script._out.seek(0)
        return "alive" not in script._out.read()


def used(series: Path) -> set[str]:
    found: set[str] = set()
    for manifest in series.glob(f"*/{MANIFEST}"):
        name = manifest.parent.name
        files = Snapshot(manifest.parent).manifest.files
        found |= {f"{file.snapshot or name}/{file.name}" for file in files}
        assert Snapshot(manifest.parent).verify() == {}
    return found


def files(series: Path) -> set[str]:
    all_ = {str(path.relative_to(series)) for path in series.glob("*/*")}
    return {name for name in all_ if not name.endswith((MANIFEST, ".index.json"))}


def collected(series: Path) -> GcReport:
    report = gc(series)
    assert (report.running, report.unreadable, report.held) == ((), {}, {})
    assert files(series) == used(series)
    assert all(any(path.iterdir()) for path in series.iterdir())
    assert gc(series).files == ()
    return report


def take(path: Path, fill: float, **options: object) -> None:
    Snapshot.take(path, state(fill), fsync=False, file_max=20_000, **options)  # type: ignore[arg-type]


def with_earlier_files(series: Path) -> None:
    """Take snapshot 1 upon files of 0, and replace 0: its first files stay for the other."""
    take(series / "0", 1)
    take(series / "1", 1, base=series / "0")
    take(series / "0", 5, overwrite=True)


@pytest.mark.parametrize("then", [pytest.param("collected", marks=pytest.mark.soak), "replaced"])
async def test_a_take_that_is_killed_when_it_has_replaced_a_snapshot(
    tmp_path: Path, then: str
) -> None:
    """Also with files of an earlier one, which only the one that is replaced referred to."""
    step = 0
    died = True
    while died:
        step += 1
        series = tmp_path / str(step)
        with_earlier_files(series)
        assert len(files(series) - {f for f in files(series) if f[0] == "1"}) > 2
        died = await dies(series, _REPLACES, step)
        assert float(Snapshot(series / "1").read_object("m/w0")[0]) == 7.0
        if then == "replaced":
            take(series / "1", 9, overwrite=True)
            assert {file for file in files(series) if not file.endswith(".tmp")} == used(series)
        collected(series)
    assert step > 6


async def test_a_collection_that_is_killed_when_it_has_dropped_a_snapshot(tmp_path: Path) -> None:
    step = 0
    died = True
    while died:
        step += 1
        series = tmp_path / str(step)
        with_earlier_files(series)
        take(series / "2", 7)
        died = await dies(series, _DROPS, step)
        assert len([*series.glob(f"*/{MANIFEST}")]) < 3
        kept = collected(series).kept
        assert {path.name for path in series.iterdir() if [*path.glob("[!.]*")]} == {*kept}
        gc(series, keep_last=1, grace=0)
        assert {path.name for path in series.iterdir() if [*path.iterdir()]} == {"2"}
        assert files(series) == used(series)
    assert step > 6


async def test_what_a_take_may_refer_to_stays(tmp_path: Path) -> None:
    take(tmp_path / "1", 1)
    options = TakeOptions(base=str(tmp_path / "1"), fsync=False)
    running = prepare(str(tmp_path / "2"), state(1), Ranks.alone(), None, options)
    assert await dies(tmp_path, _REPLACES, 1)
    report = gc(tmp_path)
    assert report.running == (running.take,)
    commit(running.storage, running.take, [write(running)], options, claim=running.claim)
    assert collected(tmp_path).kept == ("1", "2")
    take(tmp_path / "2", 9, overwrite=True)
    collected(tmp_path)


@pytest.mark.parametrize("how", ["replaced", "dropped"])
def test_what_a_take_could_have_referred_to_and_did_not(tmp_path: Path, how: str) -> None:
    take(tmp_path / "1", 1)
    options = TakeOptions(base=str(tmp_path / "1"), fsync=False)
    running = prepare(str(tmp_path / "2"), state(9), Ranks.alone(), None, options)
    part = write(running)
    if how == "replaced":
        take(tmp_path / "1", 5, overwrite=True)
    else:
        take(tmp_path / "3", 5)
        assert gc(tmp_path, keep_last=1).dropped == ("1",)
    assert len({f for f in files(tmp_path) if f.startswith("1/m-")}) > 1
    commit(running.storage, running.take, [part], running.options, claim=running.claim)
    collected(tmp_path)
    assert (tmp_path / "1").exists() is (how == "replaced")


def test_a_claim_lets_go_nothing_but_what_takes_have_written(tmp_path: Path) -> None:
    series = tmp_path / "series"
    for name in "01":
        take(series / name, 1)
    theirs = [tmp_path / "theirs.txt", series / "0" / "config.json"]
    for path in theirs:
        path.write_text("{}")
    (own,) = Snapshot(series / "0").manifest.files[:1]
    named = [("..", "theirs.txt"), ("0", "config.json"), ("0", MANIFEST), ("0", own.name)]
    taken = Snapshot(series / "1").manifest.take
    record = Record(taken, "elsewhere", 1, 1, (), lost=True, lets_go=tuple(named))
    (series / "1" / claim_file(taken)).write_bytes(msgspec.json.encode(record))
    take(series / "1", 2, overwrite=True)
    assert gc(series).kept == ("0", "1")
    assert used(series) | {"0/config.json"} == files(series)
    assert theirs[0].exists()
