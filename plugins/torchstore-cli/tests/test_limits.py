"""What ``torchstore doctor`` says of limits, before a store reaches them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from tests.support import running_store

import torchstore_core as ts
from torchstore_cli import reports
from torchstore_cli.doctor.limits import limit_notes, memory_notes, read_limits
from torchstore_cli.doctor.spilling import spill_notes
from torchstore_core.machine.topology import probe

MB = 1 << 20
ROOMY = reports.Limits(None, None, None, 1 << 20, None)


@pytest.mark.parametrize(
    ("limits", "left", "wanted"),
    [
        (ROOMY, None, None),
        (ROOMY, 1 << 40, None),
        (msgspec.structs.replace(ROOMY, open_files=1024, max_mappings=65530), 1 << 30, None),
        (msgspec.structs.replace(ROOMY, open_files=1023, open_files_hard=4096), None, "ulimit -n"),
        (msgspec.structs.replace(ROOMY, max_mappings=65529), None, "vm.max_map_count=65530"),
        (ROOMY, (1 << 30) - 1, "refuses puts before it is full"),
        (msgspec.structs.replace(ROOMY, memlock_bytes=1 << 20), None, "ulimit -l"),
    ],
)
def test_low_limits(limits: reports.Limits, left: int | None, wanted: str | None) -> None:
    notes = list(limit_notes(limits, left, 1 << 30, has_cuda=True))
    assert len(notes) == (wanted is not None)
    assert wanted is None or wanted in notes[0]


def test_page_locked_memory_matters_to_cuda_alone() -> None:
    low = msgspec.structs.replace(ROOMY, memlock_bytes=1 << 20)
    assert not list(limit_notes(low, None, 1, has_cuda=False))


def test_the_mappings_are_those_of_the_kernel() -> None:
    assert read_limits().max_mappings == int(Path("/proc/sys/vm/max_map_count").read_text())


def test_few_open_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))  # no store is there
    command = [sys.executable, "-m", "torchstore_cli", "doctor", "--json"]
    shell = ["sh", "-c", 'ulimit -n 500; exec "$@"', "sh", *command]
    done = subprocess.run(shell, capture_output=True, text=True, timeout=100, check=False)
    notes = json.loads(done.stdout)["notes"]
    assert [note for note in notes if note.startswith("only 500 open files")], done


async def test_a_store_that_may_use_more_than_there_is(store: ts.Client) -> None:
    status = await ts.status()
    [volume] = status.volumes
    missing = volume.capacity_bytes - volume.warm_bytes
    here = probe().host_id
    assert missing > MB
    assert not list(memory_notes(status, here, missing))
    assert not list(memory_notes(status, "another host", 0))
    assert not list(memory_notes(status, here, None))
    [note] = memory_notes(status, here, missing - 1)
    assert status.store_name in note
    assert "smaller capacity" in note


async def test_a_disk_that_others_fill(tmp_path: Path) -> None:
    async with running_store("local", capacity=64 * MB, spill=tmp_path):
        status = await ts.status()
    spill = status.spill
    assert spill.left_bytes > 64 * MB
    usual = msgspec.structs.replace(spill, file_system="ext4", disk_bytes=8 * MB)
    for left, said in ((56 * MB, False), (55 * MB, True)):
        changed = msgspec.structs.replace(usual, left_bytes=left)
        notes = list(spill_notes(msgspec.structs.replace(status, spill=changed)))
        assert bool(notes) == said
        assert all("others have filled the disk: it takes 55.0 MiB more" in one for one in notes)
