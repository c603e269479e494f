"""Arguments that are none are refused early, by a typed error that says what they are to be."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException

import torchstore_core as ts
from torchstore_snapshot import (
    AppStateError,
    ForeignFileError,
    PendingSnapshot,
    RNGState,
    Series,
    Snapshot,
    SnapshotNotFoundError,
    StateDict,
    Stateful,
    gc,
    load_into_store,
    snapshot_store,
)
from torchstore_snapshot.converting import convert
from torchstore_snapshot.dcp import (
    SnapshotStorageReader,
    SnapshotStorageWriter,
    TorchStoreReader,
    TorchStoreWriter,
)

STATE = {"m": StateDict(w=torch.ones(4), n=1)}
_NONE = [5, None, "", b"x", float("nan"), [], True, "a\0b", "\ud800", Path("s3://bucket/run")]


#: What torchsnapshot 0.1.0 takes, in its order: an import is all that has to change. (Of
#: ``storage_options``, which are last there, ours are fsspec's, and given by name.)
TORCHSNAPSHOT = {
    Snapshot: ["path", "pg"],
    Snapshot.take: ["path", "app_state", "pg", "replicated"],
    Snapshot.async_take: ["path", "app_state", "pg", "replicated"],
    Snapshot.restore: ["self", "app_state", "strict"],
    Snapshot.read_object: ["self", "path", "obj_out", "memory_budget_bytes"],
    Snapshot.get_manifest: ["self"],
    Snapshot.get_state_dict_for_key: ["self", "key"],
    PendingSnapshot.wait: ["self"],
    PendingSnapshot.done: ["self"],
}


def test_calls_of_torchsnapshot_are_taken(tmp_path: Path) -> None:
    for call, names in TORCHSNAPSHOT.items():
        every = inspect.signature(call).parameters.values()
        assert [one.name for one in every][: len(names)] == names, call
        assert all(
            one.default is not one.empty or one.kind is one.VAR_KEYWORD
            for one in list(every)[len(names) :]
        ), call
    state = {"m": StateDict(w=torch.arange(4.0), n=1), "rng": RNGState()}
    assert all(isinstance(one, Stateful) for one in state.values())
    Snapshot.take(str(tmp_path / "a"), state, None, ["m/*"], fsync=False)
    pending = Snapshot.async_take(str(tmp_path / "b"), state, None, ["m/*"], fsync=False)
    assert pending.wait().path == str(tmp_path / "b")
    assert pending.done()
    for name in ("a", "b"):
        snapshot = Snapshot(str(tmp_path / name), None)
        own: dict[str, Any] = {"m": StateDict(w=torch.zeros(4), n=0)}
        snapshot.restore(own, True)
        assert own["m"]["w"].tolist() == snapshot.get_state_dict_for_key("m")["w"].tolist()
        assert own["m"]["n"] == 1
        out = torch.zeros(4)
        assert snapshot.read_object("0/m/w", out, 1 << 20) is out
        assert out.tolist() == [0, 1, 2, 3]
        assert "0/m/w" in snapshot.get_manifest()


@pytest.mark.parametrize("path", _NONE, ids=repr)
async def test_what_is_no_path(tmp_path: Path, path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    calls: list[Callable[[], Any]] = [
        lambda: Snapshot(path),
        lambda: Snapshot.take(path, STATE),
        lambda: Snapshot.async_take(path, STATE),
        lambda: Series(path),
        lambda: gc(path),
        lambda: convert(path, "to"),
        lambda: convert("from", path),
    ]
    if path is not None:
        calls += [
            lambda: Snapshot.take("s", STATE, base=path),
            lambda: SnapshotStorageWriter(path),
            lambda: SnapshotStorageReader().reset(path),
        ]
    for call in calls:
        with pytest.raises(ts.ConfigurationError):
            call()
    for each in (snapshot_store(path), load_into_store(path)):
        with pytest.raises(ts.ConfigurationError):
            await each
    assert not SnapshotStorageReader.validate_checkpoint_id(path)
    assert os.listdir(tmp_path) == []


def test_a_path_that_only_looks_like_a_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run:").mkdir()
    Snapshot.take(Path("run:/ü 1"), STATE, fsync=False)
    assert Snapshot((tmp_path / "run:" / "ü 1").as_uri()).read_object("m/n") == 1


def test_what_is_no_other_argument(tmp_path: Path) -> None:
    path = tmp_path / "s"
    given: Any
    for given in (5, "", "model/*", b"x", [5], {"m": 1}):
        with pytest.raises((AppStateError, ts.ConfigurationError)):
            Snapshot.take(path, STATE, replicated=given)
    for given in (5, "", object()):
        for call in (Snapshot.take, Snapshot.async_take):
            with pytest.raises(ts.ConfigurationError, match="pg"):
                call(path, STATE, pg=given)
        with pytest.raises(ts.ConfigurationError, match="pg"):
            Snapshot(path, pg=given).restore(STATE)
    with pytest.raises(ts.ConfigurationError, match="this rank is not in the process group"):
        Snapshot.take(path, STATE, pg=dist.GroupMember.NON_GROUP_MEMBER)
    ended: Future[None] = Future()  # otherwise this process waits for it when it ends
    ended.set_result(None)
    for given in ("", b"x", -1, True, float("nan")):
        with pytest.raises(ts.ConfigurationError, match="timeout"):
            PendingSnapshot(Snapshot(path), ended).wait(given)
        with pytest.raises(ts.ConfigurationError, match="grace"):
            gc(path, grace=given)
        for name in ("rank", "file_max"):
            with pytest.raises(ts.ConfigurationError, match=name):
                convert(path, tmp_path / "to", to="safetensors", **{name: given})
    for given in (5, "", b"x", []):
        for refused in (SnapshotStorageReader, SnapshotStorageWriter):
            with pytest.raises(ts.ConfigurationError, match="key"):
                refused(path, key=given)
        with pytest.raises(ts.ConfigurationError, match="key"):
            convert(path, tmp_path / "to", key=given)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("half", [TorchStoreReader, TorchStoreWriter])
def test_what_is_no_key_of_a_store(half: Any) -> None:
    for given in (5, "", b"x", [], "\ud800", "x" * 5000):
        with pytest.raises(ts.UnsupportedValueError, match="key"):
            half(given)
        with pytest.raises(ts.UnsupportedValueError, match="key"):
            half().reset(given)
        assert not half.validate_checkpoint_id(given)
    own = "version" if half is TorchStoreReader else "keep"
    for name in ("store_name", "timeout", "allow_pickle", own):
        for given in (-1, [], ""):
            with pytest.raises(ts.ConfigurationError, match=name):
                half("k", **{name: given})
    half("k").reset("k")


@pytest.mark.parametrize("prefix", [5, None, b"x", ["a"]])
async def test_what_is_no_prefix(tmp_path: Path, prefix: Any) -> None:
    for call in (snapshot_store, load_into_store):
        with pytest.raises(ts.ConfigurationError, match="prefix"):
            await call(tmp_path / "s", prefix=prefix)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("where", ["file", "file/s", "gone"])
def test_a_file_in_the_place_of_a_folder(tmp_path: Path, where: str) -> None:
    """Also a link to nothing."""
    (tmp_path / "file").write_text("mine")
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    path, good = tmp_path / where, tmp_path / "good"
    Snapshot.take(good, STATE, fsync=False)
    calls: list[Callable[[], Any]] = [
        lambda: Snapshot.take(path, STATE, overwrite=True),
        lambda: Snapshot.async_take(path, STATE),
        lambda: Series(path).take("1", STATE),
    ]
    if where != "gone":
        calls += [lambda: gc(path), lambda: Series(path).names()]
    for call in calls:
        with pytest.raises(ForeignFileError, match="another path"):
            call()
    with pytest.raises(CheckpointException) as raised:
        dcp.save({"w": torch.ones(3)}, storage_writer=SnapshotStorageWriter(path), no_dist=True)
    assert isinstance(raised.value.failures[0][0], ForeignFileError)
    with pytest.raises(SnapshotNotFoundError):
        Snapshot(path).restore(STATE)
    assert sorted(os.listdir(tmp_path)) == ["file", "gone", "good"]
    assert (tmp_path / "file").read_text() == "mine"
