"""Conversions: what comes back, what is refused, and what remains of one that fails."""

from __future__ import annotations

import errno
import io
import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from tests.support import disk_of
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter

import torchstore_core as ts
from torchstore_core.clients.values.sharding import ShardList
from torchstore_snapshot import (
    NotWrittenError,
    Snapshot,
    SnapshotCorruptError,
    SnapshotExistsError,
    SnapshotFormatError,
    SnapshotNotFoundError,
    StateDict,
)
from torchstore_snapshot.converting import Kind, convert, detect

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")
DATA = Path(__file__).parent / "data"


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)
    model(torch.randn(5, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


def sharded() -> ShardList:
    """A tensor of 4 x 6 in three pieces."""
    whole = torch.arange(24.0).view(4, 6)
    parts = [((0, 0), (2, 6)), ((2, 0), (2, 4)), ((2, 4), (2, 2))]
    return ShardList(
        ts.TensorShard(whole[o[0] : o[0] + n[0], o[1] : o[1] + n[1]], ts.TensorSlice(o, n, (4, 6)))
        for o, n in parts
    )


def leavings(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]


# ---- torch.distributed.checkpoint ---------------------------------------------------------


def test_a_checkpoint_becomes_a_snapshot_and_again_a_checkpoint(tmp_path: Path) -> None:
    model, optimizer = trained()
    state = {
        "model": model.state_dict(),
        "optim": optimizer.state_dict(),
        "step": 3,
        "fp8": torch.ones(3).to(torch.float8_e5m2),
        "none": None,
        "loader": {"state": b"x" * 100_000},
        "empty": torch.zeros(0, 3),
    }
    dcp.save(state, storage_writer=FileSystemWriter(tmp_path / "dcp"))
    done = convert(tmp_path / "dcp", tmp_path / "s", fsync=False)
    assert (done.source, done.destination) == ("dcp", "snapshot")
    snapshot = Snapshot(tmp_path / "s")
    assert snapshot.verify() == {}
    other, other_optimizer = trained()
    rest = StateDict(dict.fromkeys(("step", "none"), 0), fp8=torch.zeros(3).to(torch.float8_e5m2))
    rest["empty"] = torch.ones(0, 3)
    loader = StateDict(state=b"")
    snapshot.restore(
        {"model": other, "optim": other_optimizer, "state_dict": rest, "loader": loader}
    )
    assert torch.equal(other[0].weight, model[0].weight)
    assert other_optimizer.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]
    assert (rest["step"], rest["none"], loader["state"]) == (3, None, b"x" * 100_000)
    assert rest["fp8"].float().tolist() == [1, 1, 1]

    back = convert(tmp_path / "s", tmp_path / "back", to="dcp", file_max=64, fsync=False)
    assert back.tensors == done.tensors == 18
    other, other_optimizer = trained()
    wanted: dict[str, Any] = {
        "model": other.state_dict(),
        "optim": other_optimizer.state_dict(),
        "step": 0,
        "none": 0,
        "fp8": torch.zeros(3).to(torch.float8_e5m2),
        "loader": {"state": b""},
    }
    dcp.load(wanted, storage_reader=FileSystemReader(tmp_path / "back"))
    assert torch.equal(other[1].bias, model[1].bias)
    assert wanted["optim"]["param_groups"] == optimizer.state_dict()["param_groups"]
    assert wanted["loader"]["state"] == b"x" * 100_000
    assert (wanted["step"], wanted["none"]) == (3, None)
    assert leavings(tmp_path) == []


def test_shards_stay_shards(tmp_path: Path) -> None:
    Snapshot.take(tmp_path / "s", {"m": StateDict(w=sharded())}, fsync=False)
    convert(tmp_path / "s", tmp_path / "dcp", to="dcp", file_max=16, fsync=False)
    assert len([*(tmp_path / "dcp").glob("*.distcp")]) == 3
    wanted = {"m": {"w": torch.zeros(4, 6)}}
    dcp.load(wanted, storage_reader=FileSystemReader(tmp_path / "dcp"))
    assert torch.equal(wanted["m"]["w"], torch.arange(24.0).view(4, 6))
    convert(tmp_path / "dcp", tmp_path / "again", fsync=False)
    again = Snapshot(tmp_path / "again")
    assert len(again.manifest.shared["m"]["w"].pieces) == 3
    assert torch.equal(again.read_object("m/w"), torch.arange(24.0).view(4, 6))


class Evil:
    """Makes a file when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def test_nothing_is_unpickled_unless_allowed(tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    dcp.save({"a": Evil(str(trap)), "b": 1}, storage_writer=FileSystemWriter(tmp_path / "dcp"))
    with pytest.raises(ts.UnsafeObjectError, match="allow_pickle=True"):
        convert(tmp_path / "dcp", tmp_path / "s")
    assert not trap.exists()
    assert not (tmp_path / "s" / "snapshot.json").exists()
    convert(tmp_path / "dcp", tmp_path / "s", allow_pickle=True, fsync=False)
    assert trap.exists()
    assert Snapshot(tmp_path / "s").read_object("state_dict/b") == 1

    trap.rmdir()
    metadata = tmp_path / "dcp" / ".metadata"
    original = pickle.loads(metadata.read_bytes())
    original.planner_data["b"] = Evil(str(trap))
    metadata.write_bytes(pickle.dumps(original))
    with pytest.raises(ts.UnsafeObjectError, match=r"posix\.mkdir"):
        convert(tmp_path / "dcp", tmp_path / "s2", allow_pickle=True)  # never in the metadata
    assert not trap.exists()
    for damaged in (b"", b"no pickle", pickle.dumps(3), metadata.read_bytes()[:50]):
        metadata.write_bytes(damaged)
        with pytest.raises(SnapshotFormatError):
            convert(tmp_path / "dcp", tmp_path / "s2")


def test_damaged_sources_leave_nothing(tmp_path: Path) -> None:
    model, _ = trained()
    dcp.save({"model": model.state_dict()}, storage_writer=FileSystemWriter(tmp_path / "dcp"))
    (file,) = (tmp_path / "dcp").glob("*.distcp")
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(SnapshotCorruptError, match="cannot be read"):
        convert(tmp_path / "dcp", tmp_path / "s")
    assert not (tmp_path / "s").exists()

    Snapshot.take(tmp_path / "t", {"model": model}, fsync=False)
    (file,) = (tmp_path / "t").glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    for to in ("dcp", "safetensors", "torchsnapshot"):
        with pytest.raises(SnapshotCorruptError):
            convert(tmp_path / "t", tmp_path / "out" / to, to=to)
    assert not (tmp_path / "out").exists()


# ---- safetensors --------------------------------------------------------------------------


def test_a_published_model_becomes_a_snapshot_and_is_published_again(tmp_path: Path) -> None:
    import transformers  # half a second, which no other test needs

    config = transformers.BertConfig(
        vocab_size=32,
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
    )
    model = transformers.BertModel(config)
    model.save_pretrained(tmp_path / "m", max_shard_size="4KB")
    assert len([*(tmp_path / "m").glob("*.safetensors")]) > 1
    convert(tmp_path / "m", tmp_path / "s", fsync=False)
    back = Snapshot(tmp_path / "s").get_state_dict_for_key("model")
    assert back.keys() == model.state_dict().keys()
    done = convert(tmp_path / "s", tmp_path / "out", to="safetensors", file_max=4096, fsync=False)
    assert done.tensors == len(back)
    shutil.copy(tmp_path / "m" / "config.json", tmp_path / "out")
    again = transformers.BertModel.from_pretrained(tmp_path / "out")
    for name, tensor in again.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name]), name


def test_shards_become_whole(tmp_path: Path) -> None:
    state = {"m": StateDict(w=sharded()), "n": StateDict(step=3)}
    Snapshot.take(tmp_path / "s", state, fsync=False)
    with pytest.raises(ts.LayoutMismatchError, match="say which"):
        convert(tmp_path / "s", tmp_path / "out", to="safetensors")
    with pytest.raises(ts.LayoutMismatchError, match="not tensors"):
        convert(tmp_path / "s", tmp_path / "out", to="safetensors", key="n")
    convert(tmp_path / "s", tmp_path / "out", to="safetensors", key="m", fsync=False)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(found["w"], torch.arange(24.0).view(4, 6))
    Snapshot.take(
        tmp_path / "odd", {"m": StateDict(w=torch.ones(1, dtype=torch.complex128))}, fsync=False
    )
    with pytest.raises(ts.UnsupportedValueError, match="complex128"):
        convert(tmp_path / "odd", tmp_path / "out2", to="safetensors")


def test_safetensors_that_are_damaged_or_forged(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    file = folder / "model.safetensors"
    save_file({"w": torch.arange(8.0)}, file)
    good = file.read_bytes()
    for bad in (b"", good[:20], b"\xff" * 8 + good[8:], good.replace(b'"w"', b'"w'), good[:8] * 9):
        file.write_bytes(bad)
        with pytest.raises(SnapshotFormatError):
            convert(folder, tmp_path / "s")
    for bad in (good[:-4], good.replace(b"[0,32]", b"[8,40]"), good.replace(b"[8]", b"[9]")):
        file.write_bytes(bad)
        with pytest.raises(SnapshotCorruptError):
            convert(folder, tmp_path / "s")
    file.write_bytes(good.replace(b"F32", b"F99"))
    with pytest.raises(ts.UnsupportedValueError, match="F99"):
        convert(folder, tmp_path / "s")
    file.write_bytes(good)
    index = folder / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"w": "../outside.safetensors"}}')
    with pytest.raises(SnapshotFormatError, match="outside"):
        convert(folder, tmp_path / "s")
    index.write_text('{"weight_map": {"w": "model.safetensors", "v": "model.safetensors"}}')
    with pytest.raises(SnapshotFormatError, match="'v'"):
        convert(folder, tmp_path / "s")
    assert not (tmp_path / "s").exists()


# ---- torchsnapshot ------------------------------------------------------------------------


def test_what_torchsnapshot_wrote(tmp_path: Path) -> None:
    assert detect(DATA / "one-rank") == "torchsnapshot"
    convert(DATA / "one-rank", tmp_path / "s", fsync=False)
    found = Snapshot(tmp_path / "s").get_state_dict_for_key("x")
    tensors = {n: found.pop(n) for n in ("big", "c", "k/y%")}
    first, second = found.pop("l")
    assert found == {
        "step": 3,
        "f": 1.5,
        "t": (1, 2),
        "s": "a/b",
        "b": b"x",
        "yes": True,
        "none": None,
        "q": {1: {"z": True}},
        "empty": {},
    }
    assert torch.equal(tensors["big"], torch.arange(64.0).view(32, 2))
    assert len(Snapshot(tmp_path / "s").manifest.shared["x"]["big"].pieces) > 1  # its chunks
    assert torch.equal(tensors["c"], torch.ones(2, dtype=torch.complex64))
    assert torch.equal(tensors["k/y%"], torch.ones(2, dtype=torch.bfloat16))
    assert (first.tolist(), second) == ([0], {"n": 7})
    parameter = torch.nn.Parameter(torch.zeros(2, 3))
    optimizer = torch.optim.AdamW([parameter])
    Snapshot(tmp_path / "s").restore({"optim": optimizer})
    state = optimizer.state_dict()
    assert state["param_groups"][0]["lr"] == 0.25
    assert state["param_groups"][0]["betas"] == (0.9, 0.999)
    assert torch.allclose(state["state"][0]["exp_avg"], torch.full((2, 3), 0.1))


def test_what_ranks_of_torchsnapshot_wrote(tmp_path: Path) -> None:
    convert(DATA / "two-ranks", tmp_path / "s", fsync=False)
    snapshot = Snapshot(tmp_path / "s")
    assert snapshot.manifest.world_size == 2
    assert torch.equal(snapshot.read_object("m/sharded"), torch.arange(15.0).view(5, 3))
    assert snapshot.read_object("m/replicated").tolist() == [0, 1, 2, 3]
    assert [snapshot.read_object(f"{rank}/mine/rank") for rank in range(2)] == [0, 1]
    assert snapshot.read_object("1/mine/t").tolist() == [1, 1]
    with pytest.raises(ts.LayoutMismatchError, match="rank="):
        convert(tmp_path / "s", tmp_path / "dcp", to="dcp")
    convert(tmp_path / "s", tmp_path / "dcp", to="dcp", rank=1, fsync=False)
    wanted = {"mine": {"rank": -1}, "m": {"sharded": torch.zeros(5, 3)}}
    dcp.load(wanted, storage_reader=FileSystemReader(tmp_path / "dcp"))
    assert wanted["mine"]["rank"] == 1
    assert torch.equal(wanted["m"]["sharded"], torch.arange(15.0).view(5, 3))
    convert(tmp_path / "s", tmp_path / "back", to="torchsnapshot", fsync=False)
    convert(tmp_path / "back", tmp_path / "again", fsync=False)
    again = Snapshot(tmp_path / "again")
    assert torch.equal(again.read_object("m/sharded"), torch.arange(15.0).view(5, 3))
    assert [again.read_object(f"{rank}/mine/t").tolist() for rank in range(2)] == [[0, 0], [1, 1]]


def test_there_and_back(tmp_path: Path) -> None:
    convert(DATA / "one-rank", tmp_path / "s", fsync=False)
    convert(tmp_path / "s", tmp_path / "back", to="torchsnapshot", fsync=False)
    convert(tmp_path / "back", tmp_path / "again", fsync=False)
    first, again = (Snapshot(tmp_path / name).manifest.shared for name in ("s", "again"))
    for key, named in first.items():
        for name, entry in named.items():
            other = again[key][name]
            assert other.steps == entry.steps
            if hasattr(entry, "pieces"):
                ours = [(p.digest, p.slice) for p in entry.pieces]
                assert [(p.digest, p.slice) for p in other.pieces] == ours
            else:
                assert (other.codec, other.data) == (entry.codec, entry.data)


@pytest.mark.parametrize("kind", ["dcp", "torchsnapshot", "safetensors"])
def test_a_default_device_does_not_leak(tmp_path: Path, kind: Kind) -> None:
    """Models are built under ``torch.device("meta")``, then filled from a snapshot."""
    weights = torch.arange(30_000.0).view(300, 100)
    state = {"m": StateDict(w=weights, t=weights.t(), s=sharded())}
    own = StateDict(w=torch.zeros(300, 100), t=torch.zeros(100, 300), s=torch.zeros(4, 6))
    with torch.device("meta"):
        Snapshot.take(tmp_path / "s", state, fsync=False)
        convert(tmp_path / "s", tmp_path / "other", to=kind, fsync=False)
        convert(tmp_path / "other", tmp_path / "back", fsync=False)
        for name in ("s", "back"):
            snapshot = Snapshot(tmp_path / name)
            key = "m" if "m" in snapshot.manifest.shared else next(iter(snapshot.manifest.shared))
            read = snapshot.get_state_dict_for_key(key)
            assert read["w"].device.type == read["s"].device.type == "cpu"
            assert torch.equal(read["w"], weights)
            assert torch.equal(read["t"], weights.t())
            assert torch.equal(snapshot.read_object(f"{key}/w"), weights)
            snapshot.restore({key: own})
            assert torch.equal(own["w"], weights)
            assert torch.equal(own["s"], read["s"])


def test_names_that_files_cannot_have(tmp_path: Path) -> None:
    state: dict[str, Any] = {"..": {"..": {"out": torch.ones(4)}}, ".": torch.ones(5)}
    state |= {"a\0b": torch.ones(6), "n" * 300: torch.ones(7), "s": sharded(), "s.0": torch.ones(8)}
    Snapshot.take(tmp_path / "s", {"..": StateDict(state)}, fsync=False)
    (tmp_path / "in").mkdir()
    convert(tmp_path / "s", tmp_path / "in" / "out", to="torchsnapshot", fsync=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "s"]
    assert [path.name for path in (tmp_path / "in").iterdir()] == ["out"]
    convert(tmp_path / "in" / "out", tmp_path / "again", fsync=False)
    again = Snapshot(tmp_path / "again").get_state_dict_for_key("..")
    assert torch.equal(again.pop("s"), torch.arange(24.0).view(4, 6))
    assert again.pop("..")[".."]["out"].tolist() == [1] * 4
    assert {name: len(value) for name, value in again.items()} == {
        ".": 5,
        "a\0b": 6,
        "n" * 300: 7,
        "s.0": 8,
    }


def test_torchsnapshots_that_are_damaged_or_forged(tmp_path: Path) -> None:
    source = tmp_path / "t"
    shutil.copytree(DATA / "one-rank", source)
    metadata = source / ".snapshot_metadata"
    good = metadata.read_text()
    metadata.write_text(good.replace('"batched/', '"../../'))
    with pytest.raises(SnapshotFormatError, match="outside"):
        convert(source, tmp_path / "s")
    metadata.write_text(good.replace('"batched/', '"missing/'))
    with pytest.raises(SnapshotCorruptError, match="missing"):
        convert(source, tmp_path / "s")
    for bad in ("{", "[]", good.replace('"True"', '"Maybe"')):
        metadata.write_text(bad)
        with pytest.raises(SnapshotFormatError):
            convert(source, tmp_path / "s")
    made = io.BytesIO()
    torch.save(Evil(str(tmp_path / "trap")), made)
    metadata.write_text(good)
    (source / "0" / "x" / "none").write_bytes(made.getvalue())
    with pytest.raises(ts.UnsafeObjectError):
        convert(source, tmp_path / "s")
    assert not (tmp_path / "trap").exists()
    (file,) = (source / "batched").iterdir()
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(SnapshotCorruptError, match="too short"):
        convert(source, tmp_path / "s", allow_pickle=True)


def test_a_rank_that_cannot_be_read_leaves_nothing_of_the_others(tmp_path: Path) -> None:
    source = tmp_path / "t"
    shutil.copytree(DATA / "two-ranks", source)
    metadata = json.loads((source / ".snapshot_metadata").read_text())
    metadata["manifest"]["1/mine/t"]["byte_range"] = [1000, 1008]
    (source / ".snapshot_metadata").write_text(json.dumps(metadata))
    with pytest.raises(SnapshotCorruptError, match="too short"):
        convert(source, tmp_path / "s")
    assert not (tmp_path / "s").exists()


# ---- what cannot be converted -------------------------------------------------------------


@pytest.mark.parametrize("to", ["dcp", "safetensors", "torchsnapshot", "snapshot"])
def test_a_full_disk(tmp_path: Path, to: Kind) -> None:
    """The error is that of the disk, whatever the library that writes makes of it."""
    state = {f"w{i}": torch.rand(500_000) for i in range(3)}
    Snapshot.take(tmp_path / "s", {"m": StateDict(**state)}, fsync=False)
    with disk_of(tmp_path / "disk", 4 << 20) as disk:
        source = tmp_path / "s"
        if to == "snapshot":
            convert(source, source := tmp_path / "plain", to="safetensors", fsync=False)
        with pytest.raises(NotWrittenError, match=r"No space left.*; free some space") as raised:
            convert(source, disk / "out", to=to)
        details = raised.value.details
        assert isinstance(raised.value, OSError)
        assert raised.value.errno == details["errno"] == errno.ENOSPC
        file = Path(details["path"], details["file"])
        if to == "dcp":  # torch does not say which file it is
            assert file == disk / "out"
        else:
            assert file.is_relative_to(disk / "out")
            assert details["nbytes"] >= 2_000_000
        assert not [path for path in disk.rglob("*") if path.is_file()]


def test_what_cannot_be_converted(tmp_path: Path) -> None:
    with pytest.raises(SnapshotNotFoundError, match="is no snapshot"):
        convert(tmp_path, tmp_path / "s")
    Snapshot.take(tmp_path / "s", {"m": StateDict(w=torch.ones(2))}, fsync=False)
    with pytest.raises(ts.ConfigurationError, match="convert twice"):
        convert(tmp_path / "s", tmp_path / "t")
    with pytest.raises(ts.ConfigurationError, match="convert twice"):
        convert(DATA / "one-rank", tmp_path / "t", to="dcp")
    with pytest.raises(ts.ConfigurationError, match="one of"):
        convert(tmp_path / "s", tmp_path / "t", to="pt")  # type: ignore[arg-type]
    with pytest.raises(SnapshotExistsError):
        convert(DATA / "one-rank", tmp_path / "s")
    convert(DATA / "one-rank", tmp_path / "s", overwrite=True, fsync=False)
    assert sorted(Snapshot(tmp_path / "s").manifest.shared) == ["optim", "x"]
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(SnapshotExistsError, match="not empty"):
        convert(tmp_path / "s", tmp_path / "full", to="dcp")
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["file"]
    Snapshot.take(
        tmp_path / "fp8", {"m": StateDict(w=torch.ones(2).to(torch.float8_e5m2))}, fsync=False
    )
    with pytest.raises(ts.UnsupportedValueError, match="float8"):
        convert(tmp_path / "fp8", tmp_path / "out", to="torchsnapshot")
    Snapshot.take(
        tmp_path / "int4", {"m": StateDict(w=torch.empty(2, dtype=torch.int4))}, fsync=False
    )
    with pytest.raises(ts.UnsupportedValueError, match="w' is int4"):
        convert(tmp_path / "int4", tmp_path / "out", to="dcp")
    assert not (tmp_path / "out").exists()
    assert leavings(tmp_path) == []
