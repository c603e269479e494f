"""A take that fails leaves nothing: no file, and no folder that it has made."""

from __future__ import annotations

import errno
import os
import pickle
import resource
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tests.support import SMALL, disk_of, running_store
from torch.distributed.checkpoint import CheckpointException

from torchstore_core.errors import ConfigurationError
from torchstore_snapshot import (
    NotWrittenError,
    Snapshot,
    SnapshotNotFoundError,
    StateDict,
    gc,
    snapshot_store,
)
from torchstore_snapshot.converting import convert
from torchstore_snapshot.dcp import SnapshotStorageWriter
from torchstore_snapshot.errors import SnapshotCorruptError
from torchstore_snapshot.format.manifest import StoredKey
from torchstore_snapshot.format.paths import MANIFEST
from torchstore_snapshot.series.claims import Claim
from torchstore_snapshot.storage.local import make_folders
from torchstore_snapshot.storage.opening import open_storage
from torchstore_snapshot.taking.take import TakeOptions, take_values

# More than a disk has.
_LARGE = torch.ones(1 << 20)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with disk_of(tmp_path / "disk", 2 << 20) as folder:
        yield folder


def left(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def take(path: Path) -> None:
    Snapshot.take(path, {"m": StateDict(w=_LARGE)})


def async_take(path: Path) -> None:
    Snapshot.async_take(path, {"m": StateDict(w=_LARGE)}).wait()


def save(path: Path) -> None:
    with pytest.raises(CheckpointException) as raised:
        dcp.save({"m": {"w": _LARGE}}, storage_writer=SnapshotStorageWriter(path), no_dist=True)
    raise raised.value.failures[0][0]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("act", [take, async_take, save], ids=lambda act: act.__name__)
def test_a_take_for_which_the_disk_is_too_small(disk: Path, act: Callable[[Path], None]) -> None:
    folder = disk / "runs" / "one" / "step-1"
    with pytest.raises(NotWrittenError, match=r"No space left.*; free some space there") as raised:
        act(folder)
    assert left(disk) == []
    for error in (raised.value, pickle.loads(pickle.dumps(raised.value))):
        assert isinstance(error, OSError)
        assert (error.errno, error.details["path"]) == (errno.ENOSPC, str(folder))
        assert Path(error.details["file"]).suffix == ".safetensors"
        assert error.details["nbytes"] == _LARGE.nbytes + 4096  # with a header
        assert repr(error.details["file"]) in str(error)


def test_a_file_that_is_larger_than_files_may_be(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        with pytest.raises(NotWrittenError, match="file_max") as raised:
            take(tmp_path / "s")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert raised.value.errno == errno.EFBIG
    assert left(tmp_path) == []


def test_what_was_there_before_stays(disk: Path) -> None:
    (disk / "runs" / "step-1").mkdir(parents=True)
    with pytest.raises(OSError, match="No space left"):
        take(disk / "runs" / "step-1")
    with pytest.raises(OSError, match="No space left"):
        take(disk / "runs" / "step-2")
    Snapshot.take(disk / "runs" / "step-3", {"m": StateDict(n=1)})
    with pytest.raises(OSError, match="No space left"):
        take(disk / "runs" / "step-4")
    assert left(disk) == ["runs", "runs/step-1", "runs/step-3", "runs/step-3/snapshot.json"]


async def test_a_take_of_a_store_for_which_the_disk_is_too_small(disk: Path) -> None:
    async with running_store(**SMALL) as client:
        await client.put("w", _LARGE)
        with pytest.raises(OSError, match="No space left"):
            await snapshot_store(disk / "s", store_name=client.store_name)
    assert left(disk) == []


def test_a_take_whose_base_is_none(tmp_path: Path) -> None:
    with pytest.raises(SnapshotNotFoundError):
        Snapshot.take(tmp_path / "a" / "s", {"m": StateDict(n=1)}, base=tmp_path / "a" / "none")
    with pytest.raises(ConfigurationError, match="is not beside"):
        Snapshot.async_take(tmp_path / "a" / "s", {"m": StateDict(n=1)}, base=tmp_path / "b" / "s")
    assert left(tmp_path) == []


class _AtAFile:
    """Raises when a file is opened, once."""

    def __init__(self) -> None:
        self._error: BaseException | None = None
        self._which: Callable[[str], bool] = lambda _: False
        sys.addaudithook(self._heard)

    def raise_at(self, which: Callable[[str], bool], error: BaseException) -> None:
        self._which, self._error = which, error

    def _heard(self, event: str, args: tuple[Any, ...]) -> None:
        error = self._error
        if error is not None and event == "open" and self._which(str(args[0])):
            self._error = None
            raise error


_at_a_file = _AtAFile()


@pytest.mark.parametrize("how", ["take", "store", "convert"])
def test_a_take_that_fails_or_is_interrupted_when_it_is_committed(tmp_path: Path, how: str) -> None:
    state = {"m": StateDict(w=torch.ones(3000))}
    Snapshot.take(tmp_path / "run" / "1", state, fsync=False)
    before = left(tmp_path / "run")
    Snapshot.take(tmp_path / "other", state, fsync=False)
    convert(tmp_path / "other", tmp_path / "dcp", to="dcp", fsync=False)

    def act() -> None:
        if how == "take":
            Snapshot.take(tmp_path / "run" / "2", state, fsync=False)
        elif how == "convert":
            convert(tmp_path / "dcp", tmp_path / "run" / "2", fsync=False)
        else:
            take_values(
                str(tmp_path / "run" / "2"),
                {"m": dict(state["m"])},
                {"m": StoredKey("state dict", 1)},
                TakeOptions(fsync=False),
                lambda _: [],
            )

    def is_first(path: str) -> bool:
        return path == str(tmp_path / "run" / "1" / MANIFEST)

    def is_own(path: str) -> bool:
        return Path(path).name.startswith(f".{MANIFEST}-") and path.endswith(".tmp")

    # It puts its manifest nowhere: nothing is left.
    _at_a_file.raise_at(is_first, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        act()
    assert left(tmp_path / "run") == before
    # Nor when it fails, or is interrupted, while it puts it into its place.
    for error in (OSError(errno.EIO, "broken"), KeyboardInterrupt()):
        _at_a_file.raise_at(is_own, error)
        with pytest.raises(type(error)):
            act()
        assert left(tmp_path / "run") == before
    act()
    assert not Snapshot(tmp_path / "run" / "2").verify()


@pytest.mark.parametrize("to", ["snapshot", "safetensors"])
def test_a_conversion_of_what_is_damaged(tmp_path: Path, to: str) -> None:
    Snapshot.take(
        tmp_path / "s", {"m": StateDict(w=torch.ones(3000), v=torch.ones(3))}, fsync=False
    )
    if to == "snapshot":
        convert(str(tmp_path / "s"), str(tmp_path / "source"), to="safetensors", fsync=False)
    else:
        (tmp_path / "s").rename(tmp_path / "source")
    (file,) = (tmp_path / "source").glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-8])
    before = left(tmp_path)
    with pytest.raises(SnapshotCorruptError):
        convert(str(tmp_path / "source"), str(tmp_path / "a" / "b"), to=to)
    assert left(tmp_path) == before


def test_a_killed_take_leaves_nothing_after_a_collection(tmp_path: Path) -> None:
    """That of another process, which has got as far as its claim."""
    storage = open_storage(tmp_path / "runs" / "s")
    Claim.begin(storage, "0195d0a2b3c4-00c0ffee", durable=False).abandon()
    gc(tmp_path / "runs")
    assert left(tmp_path) == ["runs"]


def test_a_folder_that_is_removed_just_when_it_was_found_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, folder = os.mkdir, tmp_path / "s"

    def find(path: str, mode: int = 0o777) -> None:
        try:
            make(path, mode)
        except FileExistsError:
            folder.rmdir()  # as another take does that fails
            raise

    folder.mkdir()
    monkeypatch.setattr(os, "mkdir", find)
    assert make_folders(str(folder)) == [str(folder)]
    assert folder.is_dir()


def test_takes_beside_one_that_fails_go_on(tmp_path: Path) -> None:
    """Whose folder, and the one above, which all of them make, may be removed at any moment."""
    errors: list[BaseException] = []

    def run(path: Path, fails: bool) -> None:
        try:
            base = path.parent / "none" if fails else None
            Snapshot.take(path, {"m": StateDict(n=1)}, base=base, fsync=False)
        except SnapshotNotFoundError as error:
            if not fails:
                errors.append(error)
        except Exception as error:
            errors.append(error)

    for number in range(40):
        folder = tmp_path / str(number)
        threads = [
            threading.Thread(target=run, args=(folder / name, name.startswith("f")))
            for name in ("f1", "a", "f2", "b")
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors
        assert sorted(path.name for path in folder.iterdir()) == ["a", "b"]
