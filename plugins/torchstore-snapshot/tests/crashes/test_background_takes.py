"""Whoever dies while a snapshot is written in the background (the program, one of several ranks,
the writer process, the server of the store): the snapshot before stays, and a later take works.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import queue
import random
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.processes import Script
from tests.support import SMALL, halt, resume, until

import torchstore_core as ts
from torchstore_snapshot import Snapshot, StateDict, gc
from torchstore_snapshot.api.stateful import AppState
from torchstore_snapshot.background import messages as m
from torchstore_snapshot.background.staged import STORE
from torchstore_snapshot.background.staging import PREFIX, begin_message
from torchstore_snapshot.background.writer import _Program, _serve
from torchstore_snapshot.format.paths import MANIFEST
from torchstore_snapshot.format.weight_maps import MAP
from torchstore_snapshot.ranks import Ranks
from torchstore_snapshot.taking.take import TakeOptions, prepare

_running = importlib.import_module("plugins.torchstore-snapshot.tests.crashes.running")
mark, started = _running.mark, _running.started
restored = importlib.import_module("plugins.torchstore-snapshot.tests.crashes.test_takes").restored

_TAKES = {
    "take": "Snapshot.take(path, state, overwrite=True, fsync=False, file_max=500_000)",
    "async_take": "Snapshot.async_take(path, state, overwrite=True, fsync=False).wait(300)",
    "two at once": """
        pending = [Snapshot.async_take(path, state, overwrite=True, fsync=False) for _ in "ab"]
        for each in pending:
            each.wait(300)
    """,
}
_PROGRAM = """
from torchstore_snapshot import Snapshot, StateDict, gc
path, n = {path!r}, {first}
while True:
    n += 1
    values = {{f"w{{i}}": torch.full((50_000,), float(n)) for i in range(8)}}
    state = {{"m": StateDict(n=n, **values)}}
    try:
        {take}
    except (ts.TorchStoreError, OSError) as error:
        print(type(error).__name__, flush=True)
"""
_EXPECTED = {"SnapshotWriterError", "StoreClosedError", "StoreLostError", "KeyNotFoundError"}


async def crash(folder: Path, mark: str, take: str, victim: str, chance: random.Random) -> None:
    """One program that takes snapshots until it, too, is killed; in the middle of that, a victim is
    killed.
    """

    async def taken() -> None:
        before = identity()
        await until(lambda: identity() != before, 60)

    def identity() -> int:
        path = folder / MANIFEST
        return path.stat().st_ino if path.exists() else 0

    last = restored(folder) if identity() else 0
    body = _PROGRAM.format(path=str(folder), first=last, take=_TAKES[take])
    with Script(body) as script:
        await taken()
        await asyncio.sleep(chance.random() * 0.05)  # any moment of one of the next takes
        pids = {**started(mark), "program": [script.pid]}[victim]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        if victim != "program":
            assert pids
            await taken()
            await taken()
            await asyncio.sleep(chance.random() * 0.05)
            started(mark)  # a writer that is ending when it is looked for first cannot be found
            os.kill(script.pid, signal.SIGKILL)
        await until(lambda: script._process.wait(0.005) is not None, 30)
        script._out.seek(0)
        errors = script._out.read().split()
    await until(lambda: not any(started(mark).values()), 30)
    assert set(errors) <= _EXPECTED, errors
    assert restored(folder) > last


# A take in the foreground has no other process.
_TURNS = (
    ("take", "program"),
    ("async_take", "writer"),
    ("two at once", "server"),
    ("two at once", "program"),
    ("two at once", "writer"),
    ("async_take", "server"),
    ("async_take", "program"),
)


async def crashes(folder: Path, mark: str, times: int) -> None:
    chance = random.Random(1)
    for turn in range(times):
        await crash(folder, mark, *_TURNS[turn % len(_TURNS)], chance)
        if chance.random() < 0.7:
            collect(folder)
    state = StateDict(n=-1, **{f"w{i}": torch.full((50_000,), -1.0) for i in range(8)})
    Snapshot.take(folder, {"m": state}, overwrite=True, fsync=False)
    collect(folder)
    assert restored(folder) == -1
    assert Snapshot(folder).verify() == {}


def collect(folder: Path) -> None:
    """Collect garbage; nothing is left then but the newest snapshot."""
    before = restored(folder)
    report = gc(folder.parent, keep_last=1, grace=0)
    assert (report.running, report.unreadable, report.held) == ((), {}, {})
    assert restored(folder) == before
    files = {file.name for file in Snapshot(folder).manifest.files}
    assert {path.name for path in folder.iterdir()} - files <= {
        MANIFEST,
        "m.safetensors.index.json",
    }


@pytest.mark.timeout(300)  # four programs, one after the other
async def test_whoever_is_killed_at_any_moment(tmp_path: Path, mark: str) -> None:
    """Each way to take, and each victim; `make soak` has all pairs of them."""
    await crashes(tmp_path / "s", mark, 4)


@pytest.mark.soak
@pytest.mark.timeout(3000)
async def test_whoever_is_killed_hundreds_of_times(tmp_path: Path, mark: str) -> None:
    await crashes(tmp_path / "s", mark, 300)


async def test_a_program_that_dies_when_its_snapshot_is_committed(tmp_path: Path) -> None:
    path = tmp_path / "s"
    Snapshot.take(path, {"m": StateDict(w=torch.zeros(9))}, fsync=False)
    state: AppState = {"m": StateDict(w=torch.ones(100_000))}
    options = TakeOptions(overwrite=True, fsync=False)
    prepared = prepare(str(path), state, Ranks.alone(), None, options)
    client = await ts.initialize(**SMALL)
    here, there = socket.socketpair()
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    try:
        await client.put_state_dict({"0": state["m"].state_dict()["w"]}, "staged")
        threading.Thread(target=_serve, args=(here, inbox, _Program()), daemon=True).start()
        inbox.put(m.Join(1, prepared.url, prepared.take, 0, 1))
        inbox.put(begin_message(prepared, 1))
        inbox.put(m.Batch(1, client.address, "staged", [m.Chunk(0, 0, 0)]))
        assert m.receive(there)  # the batch was written
        there.close()  # from here on, nobody hears of it
        inbox.put(m.Finish(1))
        inbox.put(m.Finish(2))
        await until(lambda: inbox.empty(), 30)
    finally:
        there.close()
        await ts.shutdown("staged")  # joined by what would be the writer's process
        await ts.shutdown()
    assert Snapshot(path).manifest.take == prepared.take
    assert torch.equal(Snapshot(path).read_object("m/w"), torch.ones(100_000))


_RANK = """
import os, signal
import torch.distributed as dist
from torchstore_snapshot import RankFailedError, Snapshot, StateDict
from torchstore_snapshot.background import process, staging
os.environ["GLOO_SOCKET_IFNAME"] = "lo"
dist.init_process_group("gloo", init_method="file://{meeting}", rank={rank}, world_size=2)
writer = process.the_writer().pid
if {rank} == {dies} and {victim!r} == "program, early":
    staging.the_writer = lambda: os.kill(os.getpid(), signal.SIGKILL)
elif {rank} == {dies}:
    os.kill(writer, signal.SIGSTOP)
state = {{"m": StateDict(mine=torch.full((1000,), {rank}.0))}}
try:
    pending = Snapshot.async_take({path!r}, state, overwrite=True, fsync=False)
except ts.TorchStoreError as error:
    print(type(error).__name__, error, flush=True)
    os._exit(0)
if {rank} == {dies}:
    who = os.getpid() if {victim!r} == "program" else writer
    print(writer, flush=True)
    os.kill(who, signal.SIGKILL)
try:
    pending.wait(300)
except ts.TorchStoreError as error:
    print(type(error).__name__, error, flush=True)
os._exit(0)
"""


@pytest.mark.parametrize(
    ("victim", "dies"),
    [
        *[("program", 1), ("writer", 1)],
        *(
            pytest.param(*each, marks=pytest.mark.soak)
            for each in [("program", 0), ("program, early", 1)]
        ),
    ],
)
async def test_the_other_ranks_hear_at_once_of_one_that_dies(
    tmp_path: Path, mark: str, victim: str, dies: int
) -> None:
    folder = tmp_path / "s"
    Snapshot.take(folder, {"m": StateDict(mine=torch.ones(5))}, fsync=False)
    fields = {"meeting": tmp_path / "meeting", "path": str(folder), "victim": victim, "dies": dies}
    with (
        Script(_RANK.format(rank=dies, **fields)) as dying,
        Script(_RANK.format(rank=1 - dies, **fields)) as other,
    ):
        await until(lambda: dying._process.wait(0.005) is not None, 60)
        if victim == "program":
            dying._out.seek(0)
            resume(int(dying._out.read()))
        said = await other.output(30)
    if victim == "program, early":  # its writer has not heard of the take, so gloo says it
        assert said.startswith("RankFailedError")
    else:
        assert said.startswith(f"RankFailedError given up, because rank {dies} failed: ")
    await until(lambda: not any(started(mark).values()), 30)
    assert torch.equal(Snapshot(folder).read_object("m/mine"), torch.ones(5))
    gc(tmp_path)  # also what the ranks have told each other, at once
    (file,) = Snapshot(folder).manifest.files
    assert {path.name for path in folder.iterdir()} == {MANIFEST, f"m{MAP}", file.name}


_STAGES = """
import os, signal
from torchstore_snapshot import Snapshot, StateDict, gc
from torchstore_snapshot.background import process
await ts.connect({address!r})
writer = process.the_writer().pid
os.kill(writer, signal.SIGSTOP)
Snapshot.async_take({path!r}, {{"m": StateDict(w=torch.ones(1000))}}, fsync=False)
print(writer, flush=True)
await asyncio.Event().wait()
"""


@pytest.mark.parametrize("victim", ["program", "writer"])
async def test_nothing_stays_in_a_store_that_outlives_the_program(
    tmp_path: Path, mark: str, victim: str
) -> None:
    client = await ts.initialize(**SMALL)
    try:
        body = _STAGES.format(address=client.address, path=str(tmp_path / "s"))
        with Script(body) as script:
            await until(lambda: script._out.seek(0) or "\n" in script._out.read(), 60)
            script._out.seek(0)
            writer = int(script._out.read())
            assert await ts.keys(PREFIX)
            os.kill({"program": script.pid, "writer": writer}[victim], signal.SIGKILL)
            if victim == "program":
                await until(lambda: script._process.wait(0.005) is not None, 60)
                resume(writer)

            async def empty() -> bool:
                return not await ts.keys(PREFIX)

            await until(empty, 30)
    finally:
        await ts.shutdown()


def _waits(thread: threading.Thread) -> bool:
    """Whether a thread waits for the answer to a call."""
    frame = sys._current_frames().get(thread.ident or 0)
    while frame is not None and frame.f_code.co_name != "select":
        frame = frame.f_back
    return frame is not None


async def test_a_program_that_ends_while_the_writer_takes_a_batch_out_of_the_store() -> None:
    """The writer ends behind it, but not before the batch is gone."""
    client = await ts.initialize(**SMALL)
    try:
        await client.put_state_dict({"0": torch.ones(9)}, "batch")
        program, batch = _Program(), m.Batch(1, client.address, "batch", [m.Chunk(0, 0, 0)])
        program.note(batch)
        await ts.connect(client.address, store_name=STORE)
        pid = (await ts.status()).controller_pid
        await halt(pid)
        try:
            released = threading.Thread(target=program.release, args=[batch])
            buried = threading.Thread(target=program.bury)
            released.start()
            await until(lambda: _waits(released), 30)
            buried.start()
            await until(lambda: _waits(buried) or not buried.is_alive(), 30)
            assert buried.is_alive()
        finally:
            os.kill(pid, signal.SIGCONT)
        await asyncio.to_thread(buried.join)
        assert not await ts.keys()
        await asyncio.to_thread(released.join)
    finally:
        await ts.shutdown(STORE)
        await ts.shutdown()
