"""A take that is killed, at any moment, leaves the snapshot before it; and what it leaves goes."""

from __future__ import annotations

import asyncio
import json
import os
import random
from pathlib import Path

import pytest
import torch
from tests.processes import Script
from tests.support import until

from torchstore_snapshot import Snapshot, StateDict, gc
from torchstore_snapshot.format.paths import MANIFEST
from torchstore_snapshot.format.weight_maps import weight_maps

_TAKES = """
from torchstore_snapshot import Snapshot, StateDict
n = {first}
while True:
    n += 1
    state = StateDict(n=n, **{{f"w{{i}}": torch.full((50_000,), float(n)) for i in range(8)}})
    Snapshot.take({path!r}, {{"m": state}}, overwrite=True, fsync=False, file_max=500_000)
"""


def restored(folder: Path) -> int:
    """Which take is there, after checking every bit of it."""
    state = StateDict(n=0, **{f"w{i}": torch.zeros(50_000) for i in range(8)})
    Snapshot(folder).restore({"m": state})
    for i in range(8):
        assert torch.equal(state[f"w{i}"], torch.full((50_000,), float(state["n"])))
    return int(state["n"])


async def kill_takes(folder: Path, times: int) -> None:
    last = 0
    chance = random.Random(0)
    for _ in range(times):
        with Script(_TAKES.format(first=last, path=str(folder))):
            mark = (folder / MANIFEST).stat().st_ino if (folder / MANIFEST).exists() else 0
            await until(
                lambda mark=mark: (
                    (folder / MANIFEST).exists() and (folder / MANIFEST).stat().st_ino != mark
                ),
                60,
            )
            await asyncio.sleep(chance.random() * 0.03)  # any moment of one of the next takes
        found = restored(folder)
        assert found > last
        last = found
        if chance.random() < 0.7:  # otherwise, what is left meets what the next one leaves
            collect(folder, chance)
            assert restored(folder) == last
    state = StateDict(n=-1, **{f"w{i}": torch.full((50_000,), -1.0) for i in range(8)})
    Snapshot.take(folder, {"m": state}, overwrite=True, fsync=False)
    assert restored(folder) == -1
    collect(folder, chance)
    assert restored(folder) == -1


def collect(folder: Path, chance: random.Random) -> None:
    """Collect garbage; nothing is left then but the newest snapshot."""
    if chance.random() < 0.5:
        report = gc(folder, grace=0)
    else:
        report = gc(folder.parent, keep_last=1, grace=0)
    assert (report.running, report.unreadable, report.held) == ((), {}, {})
    manifest = Snapshot(folder).manifest
    files = {file.name for file in manifest.files}
    assert {name: (folder / name).read_bytes() for name in weight_maps(manifest)} == weight_maps(
        manifest
    )
    assert {path.name for path in folder.iterdir()} - files <= {
        MANIFEST,
        "m.safetensors.index.json",
    }


async def test_kill_takes_at_any_moment(tmp_path: Path) -> None:
    await kill_takes(tmp_path / "s", 10)


_DIES = """
import os, signal, sys
from torchstore_snapshot import Snapshot, StateDict
state = StateDict(n=2, **{{f"w{{i}}": torch.full((50_000,), 2.0) for i in range(8)}})
left = [{step}]
def count(event, args):
    if event in ("open", "os.remove", "os.rename", "os.link", "os.truncate"):
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(count)
Snapshot.take({path!r}, {{"m": state}}, overwrite=True, fsync=False, file_max=500_000)
left[0] = 0
print("alive")
"""


_DIES_BEFORE_ITS_MAP = """
import os, signal, sys
from torchstore_snapshot import Snapshot, StateDict
state = StateDict(n=2, **{{f"w{{i}}": torch.full((50_000,), 2.0) for i in range(8)}})
def die(event, args):
    if event == "open" and ".index.json-" in str(args[0]):
        os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(die)
Snapshot.take({path!r}, {{"m": state}}, overwrite=True, fsync=False, file_max=500_000)
"""


@pytest.mark.parametrize("replaces", [True, False])
async def test_kill_a_take_between_its_manifest_and_its_map(tmp_path: Path, replaces: bool) -> None:
    """The map of the snapshot before is gone: who goes by it would get other weights."""
    folder = tmp_path / "s"
    if replaces:
        state = StateDict(n=1, **{f"w{i}": torch.full((50_000,), 1.0) for i in range(8)})
        Snapshot.take(folder, {"m": state}, fsync=False, file_max=500_000)
    with Script(_DIES_BEFORE_ITS_MAP.format(path=str(folder))) as script:
        await until(lambda: script._process.wait(0.005) is not None, 60)
    assert restored(folder) == 2
    expected = weight_maps(Snapshot(folder).manifest)
    (name,) = expected
    assert not (folder / name).exists()
    mended = (f"s/{name}",)
    assert gc(tmp_path, dry_run=True).mended == mended
    report = gc(tmp_path, grace=0)
    assert report.mended == mended
    assert (folder / name).read_bytes() == expected[name]
    assert all(
        (folder / file).exists() for file in json.loads(expected[name])["weight_map"].values()
    )
    assert gc(tmp_path, grace=0).mended == ()
    (folder / name).write_bytes(b'{"weight_map": {"theirs": "model.safetensors"}}')
    os.utime(folder / name, (0, 0))
    assert gc(tmp_path, grace=0).mended == ()


_DIES_EARLY = """
import os, signal, sys
from torchstore_snapshot import Snapshot, StateDict
left = [{step}]
def count(event, args):
    if event in ("open", "os.mkdir", "os.remove", "os.rename", "os.link"):
        left[0] -= {series!r} in str(args)
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(count)
Snapshot.take({series!r} + "/s", {{"m": StateDict(n=1)}}, fsync=False)
left[0] = 0
print("alive")
"""


async def test_kill_a_take_before_there_is_anything(tmp_path: Path) -> None:
    """The folder that it makes says whose it is from the beginning, and goes with what is left."""
    claimed = 0
    while not claimed:
        steps = len(os.listdir(tmp_path)) + 1
        series = tmp_path / str(steps)
        series.mkdir()
        with Script(_DIES_EARLY.format(step=steps, series=str(series))) as script:
            await until(lambda script=script: script._process.wait(0.005) is not None, 60)
        if (series / "s").exists():
            claimed = len(os.listdir(series / "s"))
            assert claimed, f"an empty folder is left after step {steps}"
        gc(series)
        assert not os.listdir(series), f"something is left after step {steps}"
    assert steps > 5


@pytest.mark.soak
@pytest.mark.timeout(1200)
async def test_kill_a_take_at_each_of_its_steps(tmp_path: Path) -> None:
    """Before each file that it opens, links, renames or removes."""
    steps, found, chance = 0, 0, random.Random(2)
    while True:
        steps += 1
        folder = tmp_path / str(steps)
        state = StateDict(n=1, **{f"w{i}": torch.full((50_000,), 1.0) for i in range(8)})
        Snapshot.take(folder, {"m": state}, fsync=False, file_max=500_000)
        with Script(_DIES.format(step=steps, path=str(folder))) as script:
            await until(lambda script=script: script._process.wait(0.005) is not None, 60)
            script._out.seek(0)
            survived = "alive" in script._out.read()
        assert restored(folder) >= found  # once it is committed, it stays
        found = restored(folder)
        collect(folder, chance)
        assert restored(folder) == found
        if survived:
            break
    assert found == 2
    assert steps > 8


@pytest.mark.soak
async def test_kill_takes_hundreds_of_times(tmp_path: Path) -> None:
    await kill_takes(tmp_path / "s", 300)
