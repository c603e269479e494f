"""Programs that take snapshots of a series, and others that clean it, all killed at any moment."""

from __future__ import annotations

import asyncio
import importlib
import random
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from tests.processes import Script
from tests.support import until

from torchstore_snapshot import Series, Snapshot, StateDict, gc
from torchstore_snapshot.format.paths import MANIFEST

_running = importlib.import_module("plugins.torchstore-snapshot.tests.crashes.running")
mark, started = _running.mark, _running.started

_COUNT = 8
_STATE = """
def state(n):
    values = {{f"w{{i}}": torch.full((5_000,), float(n - (n - i) % 8)) for i in range(8)}}
    return {{"m": StateDict(n=n, **values)}}
"""
# Each step changes one tensor of eight; a step that is done is printed.
_TAKES = f"""
from torchstore_snapshot import Series, Snapshot, StateDict
{_STATE}
series, n = Series({{path!r}}, keep_last={{keep}}), {{first}}
while True:
    n += 1
    name = str(n % 12) if {{names}} else str(n)
    if {{background}}:
        series.async_take(name, state(n), overwrite=True, fsync=False).wait(300)
    else:
        series.take(name, state(n), overwrite=True, fsync=False, file_max=30_000)
    print(n, flush=True)
"""
_COLLECTS = """
import itertools, time
from torchstore_snapshot import gc
for n in itertools.count():
    gc({path!r}, keep_last=1 + n % 3, grace=0)
    print("0", flush=True)
    time.sleep(0.01)  # or the other program hardly gets to a take whose base is there
"""


def state(n: int) -> StateDict:
    values = {f"w{i}": torch.full((5_000,), float(n - (n - i) % 8)) for i in range(_COUNT)}
    return StateDict(n=n, **values)


def restored(path: Path | str) -> int:
    """Which step a snapshot is of, after checking every bit of it."""
    own = state(-1)
    Snapshot(path).restore({"m": own})
    expected = state(own["n"])
    assert all(torch.equal(own[f"w{i}"], expected[f"w{i}"]) for i in range(_COUNT))
    return int(own["n"])


def said(script: Script) -> list[int]:
    script._out.seek(0)
    return [int(line) for line in script._out.read().splitlines()]


def files(folder: Path) -> Iterator[str]:
    """All but manifests, and maps beside them."""
    for path in folder.glob("*/*"):
        map_of_it = path.name == "m.safetensors.index.json" and (path.parent / MANIFEST).exists()
        if path.name != MANIFEST and not map_of_it:
            yield f"{path.parent.name}/{path.name}"


async def kill_programs(folder: Path, mark: str, times: int) -> None:
    chance = random.Random(3)
    last = 0
    for turn in range(times):
        fields = {
            "path": str(folder),
            "first": last,
            "keep": chance.choice([None, 1, 3]),
            "names": chance.random() < 0.5,  # the same ones again and again
            "background": turn % 4 == 3,
        }
        with ExitStack() as programs:
            takes = programs.enter_context(Script(_TAKES.format(**fields)))
            others = [
                programs.enter_context(Script(_COLLECTS.format(**fields)))
                for _ in range(chance.randrange(3))
            ]
            await until(lambda takes=takes: len(said(takes)) > 1, 60)
            started(mark)  # one that is ending when it is looked for first cannot be found any more
            await asyncio.sleep(chance.random() * 0.1)
            for victim in chance.sample([takes, *others], 1 + len(others)):
                assert victim._process.wait(0) is None, victim._err.read()
                victim._process.kill()
                await asyncio.sleep(chance.random() * 0.05)
            done = max(said(takes))
        await until(lambda: not any(started(mark).values()), 30)  # also what writes in background
        series = Series(folder)
        assert restored(series.latest().path) >= done  # what is committed stays
        for name in series.names():
            restored(folder / name)
            assert Snapshot(folder / name).verify() == {}
        last = restored(series.latest().path)
        if chance.random() < 0.7:
            report = gc(folder, keep_last=2, grace=0)
            assert (report.unreadable, report.held) == ({}, {})
            kept = series.names()
            assert len(kept) <= 2
            assert restored(folder / kept[-1]) == last
            assert report.running == ()
            used = {
                f"{file.snapshot or name}/{file.name}"
                for name in kept
                for file in Snapshot(folder / name).manifest.files
            }
            assert {*files(folder)} == used


@pytest.mark.soak  # test_collected_at_once kills takes and collections at each of their steps
async def test_programs_that_are_killed(tmp_path: Path, mark: str) -> None:
    await kill_programs(tmp_path, mark, 4)


@pytest.mark.soak
@pytest.mark.timeout(3000)
async def test_programs_that_are_killed_hundreds_of_times(tmp_path: Path, mark: str) -> None:
    await kill_programs(tmp_path, mark, 300)
