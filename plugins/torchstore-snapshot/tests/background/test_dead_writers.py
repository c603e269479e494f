"""What is left of takes whose writer process was killed, while the program goes on."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from tests.support import SMALL

from torchstore_core import blocking
from torchstore_core.errors import StoreClosedError
from torchstore_snapshot import Series, Snapshot, SnapshotWriterError, StateDict, gc
from torchstore_snapshot.background.process import the_writer
from torchstore_snapshot.background.staged import STORE, wait_released
from torchstore_snapshot.background.stores import own_name


def everything(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("keep_last", [None, 1])
def test_what_a_dead_writer_leaves_is_collected(tmp_path: Path, keep_last: int | None) -> None:
    series = Series(tmp_path / "run", keep_last=keep_last)
    state = {"m": StateDict(w=torch.arange(50_000.0))}
    writer = the_writer()
    os.kill(writer.pid, signal.SIGSTOP)  # it cannot take the claim over
    pending = series.async_take("lost", state, fsync=False)
    os.kill(writer.pid, signal.SIGKILL)
    with pytest.raises(SnapshotWriterError):
        pending.wait(300)
    left = everything(tmp_path)
    if keep_last is None:
        report = gc(tmp_path / "run")
        assert report.running == ()
        assert len(report.dead) == 1
        assert [f"run/{file.snapshot}/{file.name}" for file in report.files] == left
    else:  # the next take collects it
        series.async_take("next", state, fsync=False).wait(300)
    assert not (tmp_path / "run/lost").exists()
    if keep_last:
        assert not any("claim" in name for name in everything(tmp_path))


def test_a_store_that_ends_before_everything_is_written(tmp_path: Path) -> None:
    state = {"m": StateDict(w=torch.arange(50_000.0))}
    writer = the_writer()
    os.kill(writer.pid, signal.SIGSTOP)
    try:
        pending = Snapshot.async_take(tmp_path / "s", state, fsync=False)
        blocking.shutdown(own_name())
    finally:
        os.kill(writer.pid, signal.SIGCONT)
    with pytest.raises(SnapshotWriterError, match="take the snapshot again") as raised:
        pending.wait(300)
    assert raised.value.details["path"] == str(tmp_path / "s")
    Snapshot.async_take(tmp_path / "s", state, fsync=False).wait(300)


def test_a_store_may_end_when_everything_was_read() -> None:
    """The writer has the bytes: that it waits for the store's memory is no reason to fail."""
    client = blocking.initialize(store_name="ends", **SMALL)
    address = client.address
    blocking.shutdown("ends")
    with pytest.raises(StoreClosedError):
        blocking.connect(address, store_name=STORE)
    wait_released(address, 10)
