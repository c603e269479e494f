"""Folders that cannot be made, read or written to."""

from __future__ import annotations

import errno
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tests.support import disk_of
from torch.distributed.checkpoint import CheckpointException

from torchstore_snapshot import Series, Snapshot, SnapshotStorageError, StateDict, gc
from torchstore_snapshot.converting import convert
from torchstore_snapshot.dcp import SnapshotStorageWriter
from torchstore_snapshot.errors import SnapshotAccessError


def state() -> dict[str, StateDict]:
    return {"m": StateDict(w=torch.ones(3))}


def save(path: Path) -> None:
    writer = SnapshotStorageWriter(path)
    try:
        dcp.save({"m": {"w": torch.ones(3)}}, storage_writer=writer, no_dist=True)
    except CheckpointException as error:
        raise error.failures[0][0] from error


WAYS: list[Callable[[Path], Any]] = [
    lambda path: Snapshot.take(path, state()),
    lambda path: Snapshot.take(path / "step-1", state()),
    lambda path: Snapshot.async_take(path, state()),
    lambda path: Series(path).take("step-1", state()),
    save,
]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("take", WAYS, ids=["take", "take below", "async_take", "series", "save"])
def test_where_no_folder_can_be_made(take: Callable[[Path], Any]) -> None:
    with pytest.raises(SnapshotStorageError, match="give another path") as raised:
        take(Path("/proc/snapshots"))
    assert raised.value.errno == errno.ENOENT


@pytest.mark.parametrize("to", ["dcp", "safetensors", "torchsnapshot"])
@pytest.mark.parametrize("path", ["/proc/snapshots", "/proc/snapshots/1"])
def test_a_conversion_to_where_no_folder_can_be_made(tmp_path: Path, path: str, to: Any) -> None:
    Snapshot.take(tmp_path / "s", state(), fsync=False)
    with pytest.raises(SnapshotStorageError, match="give another path"):
        convert(tmp_path / "s", path, to=to)


def test_a_path_that_is_too_long() -> None:
    path = "/tmp/" + "a" * 300
    for call in (
        lambda: Snapshot.take(path, state()),
        lambda: Snapshot(path).restore(state()),
        lambda: gc(path),
        lambda: gc(f"{path}/step-1"),
    ):
        with pytest.raises(SnapshotStorageError, match="give another path") as raised:
            call()
        assert raised.value.errno == errno.ENAMETOOLONG


def test_a_file_system_that_is_mounted_to_be_read(tmp_path: Path) -> None:
    with disk_of(tmp_path / "disk", 1 << 20) as folder:
        Snapshot.take(folder / "s", state(), fsync=False)
        subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
        for path in (folder / "s", folder / "t"):
            with pytest.raises(SnapshotAccessError, match="Read-only file system") as raised:
                Snapshot.take(path, state(), overwrite=True)
            assert isinstance(raised.value, PermissionError)
            assert raised.value.errno == errno.EROFS
        assert Snapshot(folder / "s").verify() == {}
