"""How what is written is divided into hashes, requests, files and threads."""

from __future__ import annotations

import functools
import os
import random
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from torchstore_snapshot import Snapshot, StateDict
from torchstore_snapshot.format.hashes import BLOCK
from torchstore_snapshot.restoring.restore import Verify
from torchstore_snapshot.storage.gathering import (
    SHORT_STEP,
    STEP,
    Block,
    Gathered,
    Run,
    blocks_of,
    tail,
)
from torchstore_snapshot.storage.local import LocalWriter
from torchstore_snapshot.threads import interleaved, run_tasks

MIB = 1 << 20


class Requests(LocalWriter):
    """A file whose requests are recorded."""

    def __init__(self, path: str, nbytes: int) -> None:
        super().__init__(path, nbytes)
        self.requests: list[tuple[int, int]] = []

    def write(self, offset: int, data: Any) -> None:
        self.requests.append((offset, memoryview(data).nbytes))
        super().write(offset, data)

    def write_parts(self, offset: int, parts: Any) -> None:
        self.requests.append((offset, sum(part.nbytes for part in parts)))
        super().write_parts(offset, parts)


@pytest.mark.parametrize("size", [STEP, SHORT_STEP])
def test_requests_end_at_multiples_wherever_tensors_do(tmp_path: Path, size: int) -> None:
    path = tmp_path / "file"
    sizes = [4096, 5 * MIB + 64, 3, *[1000] * 1500, 9 * MIB + 2, 0, 2 * MIB - 1, 4 * MIB]
    data = [memoryview(random.Random(i).randbytes(size)) for i, size in enumerate(sizes)]
    writer = Requests(str(path), sum(sizes))
    gathered = Gathered(writer, 0, size)
    for each in data:
        for step in gathered.steps(each):
            gathered.add(step)
    gathered.flush()
    writer.close(durable=False)
    assert path.read_bytes() == b"".join(data)
    assert [start for start, _ in writer.requests] == [*range(0, sum(sizes), size)]


@pytest.mark.parametrize("offset", [0, 4096, 1 * MIB + 8, 2 * MIB - 1])
def test_runs_write_everything_once(tmp_path: Path, offset: int) -> None:
    """Runs leave to the next what is behind the last multiple, which is then in one request with
    what follows; hashes are those of whole tensors all the same.
    """
    path = tmp_path / "file"
    sizes = [13 * MIB + 5, 10, 0, 700_000, 5 * MIB, 1]
    data = [random.Random(i).randbytes(size) for i, size in enumerate(sizes)]
    writer = Requests(str(path), offset + sum(sizes))
    run = Run(0, [memoryview(bytes(offset))])
    runs = [run]
    hashes: list[list[bytes]] = [[] for _ in data]
    for each, found in zip(data, hashes, strict=True):
        for number, parts in enumerate(blocks_of([memoryview(each)])):
            if run.full:
                run = run.following()
                runs.append(run)
            run.add(Block(parts, found, number, None))
    assert len(runs) > 2
    written = 0
    for each in runs:
        assert each.start == written
        gathered = Gathered(writer, each.start)
        blocks = [part for block in each.blocks for part in block.parts]
        everything = tail([*each.before, *blocks], each.end - each.start)
        for part in everything:
            for step in gathered.steps(part):
                gathered.add(step)
        if each.stop == each.end:
            gathered.flush()
        written = each.stop
    writer.close(durable=False)
    assert path.read_bytes() == bytes(offset) + b"".join(data)
    assert [start for start, _ in writer.requests] == [*range(0, offset + sum(sizes), STEP)]


def test_a_request_of_which_only_a_part_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = [memoryview(bytes([i]) * 10) for i in range(1, 6)]
    real = os.pwritev

    def short(file: int, buffers: list[memoryview], offset: int) -> int:
        return real(file, [memoryview(b"".join(buffers))[:23]], offset)

    monkeypatch.setattr(os, "pwritev", short)
    writer = LocalWriter(str(tmp_path / "file"), 55)
    writer.write_parts(5, parts)
    writer.close(durable=False)
    assert (tmp_path / "file").read_bytes() == bytes(5) + b"".join(parts)


def test_tensors_of_all_sizes_come_back(tmp_path: Path) -> None:
    sizes = [6 * MIB + 1, 3 * MIB, *range(1, 1500), BLOCK, BLOCK + 1, 2 * BLOCK + 4096]
    generator = torch.Generator().manual_seed(1)
    state = {
        str(i): torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
        for i, size in enumerate(sizes)
    }
    snapshot = Snapshot.take(tmp_path / "s", {"m": StateDict(state)}, fsync=False)
    assert not snapshot.verify()
    modes: list[Verify] = [True, "streaming", False]
    for verify in modes:
        own = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        snapshot.restore({"m": StateDict(own)}, verify=verify)
        assert all(torch.equal(own[name], state[name]) for name in state)


def test_large_state_dicts_are_in_a_file_for_each_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel lets only one thread at a time write to a file."""
    monkeypatch.setenv("TORCHSTORE_COPY_THREADS", "2")
    parts = {str(i): torch.full((9 * MIB,), i, dtype=torch.uint8) for i in range(15)}
    snapshot = Snapshot.take(tmp_path / "s", {"m": StateDict(parts)}, fsync=False)
    files = sorted((tmp_path / "s").glob("*.safetensors"))
    assert len(files) == 2
    assert min(file.stat().st_size for file in files) > 50 * MIB
    again = snapshot.get_state_dict_for_key("m")
    assert all(torch.equal(again[name], parts[name]) for name in parts)


def test_threads_take_tasks_of_different_lanes() -> None:
    together = threading.Barrier(2, timeout=20)
    order: list[tuple[str, int]] = []

    def task(lane: str, number: int) -> None:
        together.wait()  # with a task of the other lane, or never
        order.append((lane, number))

    lanes = [iter([functools.partial(task, lane, i) for i in range(3)]) for lane in "ab"]
    waiting = iter([functools.partial(order.append, ("c", 0))])
    run_tasks(interleaved([*lanes, waiting], width=2), threads=2)
    assert [n for lane, n in order if lane == "a"] == [n for lane, n in order if lane == "b"]
    assert len(order) == 7
