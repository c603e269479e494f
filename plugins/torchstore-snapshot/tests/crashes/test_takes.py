"""A take that is killed, at any moment, or whose disk is full, leaves the snapshot before it."""

from __future__ import annotations

import asyncio
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.processes import Script
from tests.support import until

from torchstore_snapshot import Snapshot, StateDict
from torchstore_snapshot.format.paths import MANIFEST
from torchstore_snapshot.storage.opening import leavings, open_storage

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
    state = StateDict(n=-1, **{f"w{i}": torch.full((50_000,), -1.0) for i in range(8)})
    Snapshot.take(folder, {"m": state}, overwrite=True, fsync=False)
    assert restored(folder) == -1
    storage = open_storage(folder)
    for name in leavings(storage, Snapshot(folder).manifest):
        storage.delete(name)
    assert restored(folder) == -1


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


@pytest.mark.soak
@pytest.mark.timeout(1200)
async def test_kill_a_take_at_each_of_its_steps(tmp_path: Path) -> None:
    """Before each file that it opens, links, renames or removes."""
    steps, found = 0, 0
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
        if survived:
            break
    assert found == 2
    assert steps > 8


@pytest.mark.soak
async def test_kill_takes_hundreds_of_times(tmp_path: Path) -> None:
    await kill_takes(tmp_path / "s", 300)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("this process may not mount a file system")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.parametrize("background", [False, True])
def test_a_full_disk(small_disk: Path, background: bool) -> None:
    folder = small_disk / "s"
    Snapshot.take(folder, {"m": StateDict(w=torch.ones(100_000))})
    large = {"m": StateDict(w=torch.zeros(2_000_000))}

    def take() -> None:
        if background:
            Snapshot.async_take(folder, large, overwrite=True).wait(60)
        else:
            Snapshot.take(folder, large, overwrite=True)

    with pytest.raises(OSError, match="No space left"):
        take()
    assert leavings(open_storage(folder), Snapshot(folder).manifest) == []
    assert torch.equal(Snapshot(folder).read_object("m/w"), torch.ones(100_000))
    Snapshot.take(folder, {"m": StateDict(w=torch.zeros(10))}, overwrite=True)
