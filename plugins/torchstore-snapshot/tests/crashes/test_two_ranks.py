"""Two ranks take snapshots together, and one of them, its writer or its server dies at any moment,
or the disk is full: the snapshot before stays, and a later take works.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import random
import signal
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from tests.object_storage import object_store as _stores
from tests.processes import Script
from tests.support import disk_of, until

from torchstore_snapshot import Snapshot, SnapshotNotFoundError, StateDict, gc
from torchstore_snapshot.format.paths import MANIFEST
from torchstore_snapshot.format.weight_maps import MAP
from torchstore_snapshot.storage.opening import open_storage

_running = importlib.import_module("plugins.torchstore-snapshot.tests.crashes.running")
mark, started = _running.mark, _running.started

_RANK = """
import os
import torch.distributed as dist
from torchstore_snapshot import RankFailedError, Snapshot, StateDict
os.environ["GLOO_SOCKET_IFNAME"] = "lo"
dist.init_process_group("gloo", init_method="file://{meeting}", rank={rank}, world_size=2)
n, unreachable = {first}, 0
while unreachable < 2:
    n += 1
    values = {{f"w{{i}}": torch.full((20_000,), float(n)) for i in range(8)}}
    state = {{"m": StateDict(n=n, mine=torch.full((20_000,), n + {rank} / 2), **values)}}
    options = dict(replicated=["m/w*"], overwrite=True, fsync=False, file_max=200_000)
    try:
        {take}
    except RankFailedError as error:
        unreachable += "ranks" not in error.details
        print(type(error).__name__, flush=True)
    except (ts.TorchStoreError, OSError) as error:
        print(type(error).__name__, flush=True)
os._exit(0)
"""
_TAKES = {
    "take": "Snapshot.take({url!r}, state, **options)",
    "async_take": "Snapshot.async_take({url!r}, state, **options).wait(300)",
}
_EXPECTED = {"RankFailedError", "NotWrittenError", "SnapshotStorageError", "StoreLostError"}
_EXPECTED |= {"SnapshotUnavailableError", "SnapshotWriterError", "StoreClosedError"}
_EXPECTED |= {"KeyNotFoundError"}
_FULL = "full disk"


class Place(NamedTuple):
    """Where the snapshot is, and a folder for what is not part of it, on the same disk."""

    url: str
    beside: Path

    @property
    def series(self) -> str:
        """The folder of the snapshot's folder."""
        return self.url.rpartition("/")[0]

    def take(self) -> str:
        """The id of the take that is there; empty if there is none."""
        try:
            return Snapshot(self.url).manifest.take
        except SnapshotNotFoundError:
            return ""

    def restored(self) -> int:
        """Which take is there, after checking every bit of it."""
        values = {f"w{i}": torch.zeros(20_000) for i in range(8)}
        state = StateDict(n=0, mine=torch.zeros(20_000), **values)
        snapshot = Snapshot(self.url)
        snapshot.restore({"m": state})
        n = int(state["n"])
        for name in ("mine", *values):
            assert torch.equal(state[name], torch.full((20_000,), float(n)))
        assert torch.equal(snapshot.read_object("1/m/mine"), torch.full((20_000,), n + 0.5))
        # Of a take that died after its manifest, the map of an earlier one is left, until a gc.
        stale = {f"s/{name}" for name in snapshot.verify()}
        assert stale == (stale and set(gc(self.series, dry_run=True).mended))
        return n

    def collect(self) -> None:
        """Collect garbage; nothing is left then but the newest snapshot."""
        before = self.restored()
        report = gc(self.series, keep_last=1, grace=0)
        assert (report.running, report.unreadable, report.held) == ((), {}, {})
        assert self.restored() == before
        files = {file.name for file in Snapshot(self.url).manifest.files}
        left = {info.name for info in open_storage(self.url).list()} - files
        assert left <= {MANIFEST, f"m{MAP}"}

    async def taken(self) -> None:
        """Wait until another take is committed."""
        before = self.take()
        await until(lambda: self.take() != before, 100)


async def crash(place: Place, mark: str, take: str, victim: str, chance: random.Random) -> None:
    """Two ranks that take snapshots until both are dead; in the middle of that, a victim dies."""
    last = place.restored() if place.take() else 0
    meeting = place.beside / f"meeting-{uuid.uuid4().hex}"
    bodies = [
        _RANK.format(
            meeting=meeting, rank=rank, first=last, take=_TAKES[take].format(url=place.url)
        )
        for rank in range(2)
    ]
    with Script(bodies[0]) as first, Script(bodies[1]) as second:
        ranks = [first, second]

        def said() -> set[str]:
            for rank in ranks:
                rank._out.seek(0)
            return {line for rank in ranks for line in rank._out.read().split()}

        await place.taken()
        await asyncio.sleep(chance.random() * 0.05)  # any moment of one of the next takes
        if victim == _FULL:
            filler = place.beside / "filler"
            with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(4096))
            await until(lambda: bool(said()), 60)
            filler.unlink()
        elif victim != "rank":
            pids = started(mark)[victim]
            assert pids
            os.kill(chance.choice(pids), signal.SIGKILL)
        if victim != "rank":
            await place.taken()
            await place.taken()
            await asyncio.sleep(chance.random() * 0.05)
        dies = chance.randrange(2)
        os.kill(ranks[dies].pid, signal.SIGKILL)
        await until(lambda: ranks[1 - dies]._process.wait(0.005) is not None, 60)
        errors = said()
    await until(lambda: not any(started(mark).values()), 30)
    assert errors <= _EXPECTED
    assert "RankFailedError" in errors
    assert place.restored() > last


async def crashes(place: Place, mark: str, turns: list[tuple[str, str]]) -> None:
    chance = random.Random(3)
    for take, victim in turns:
        await crash(place, mark, take, victim, chance)
        if chance.random() < 0.7:  # otherwise, what is left meets what the next ones leave
            place.collect()
    place.collect()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Place]:
    """A disk of 8 MB, if this process may mount one."""
    with disk_of(tmp_path / "disk", 8 << 20) as folder:
        yield Place(str(folder / "series" / "s"), folder)


@pytest.mark.soak  # each moment of a take has a test of its own in test_ranks and test_takes
@pytest.mark.timeout(300)
async def test_one_of_two_ranks_is_killed_at_any_moment(disk: Place, mark: str) -> None:
    await crashes(disk, mark, [("take", "rank"), ("take", _FULL)] * 4)


@pytest.mark.soak
@pytest.mark.timeout(3000)
async def test_whoever_is_killed_hundreds_of_times(disk: Place, mark: str) -> None:
    victims = ["rank", _FULL]
    turns = [("take", victim) for victim in victims]
    turns += [("async_take", victim) for victim in [*victims, "writer", "server"]]
    await crashes(disk, mark, turns * 40)


@pytest.mark.soak
@pytest.mark.timeout(3000)
async def test_whoever_is_killed_beside_object_storage(tmp_path: Path, mark: str) -> None:
    turns = [("take", "rank"), *(("async_take", who) for who in ("rank", "writer", "server"))]
    with _stores.object_store():
        place = Place(f"s3://{_stores.BUCKET}/series/s", tmp_path)
        await crashes(place, mark, turns * 25)
