"""Checkpoints of one process: what comes back, what is refused, and what is read."""

from __future__ import annotations

import gc
import importlib
import io
import pickle
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from tests.processes import run_script
from tests.support import until
from torch.distributed.checkpoint import CheckpointException, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

import torchstore_core.blocking as ts
from torchstore_core.clients.values.tensors import _BY_NAME, _QUANTIZED
from torchstore_snapshot import Snapshot, StateDict, TakeLostError
from torchstore_snapshot.dcp import (
    SnapshotStorageReader,
    SnapshotStorageWriter,
    TorchStoreReader,
    TorchStoreWriter,
)
from torchstore_snapshot.series import claims
from torchstore_snapshot.series.claims import Claim

acts = importlib.import_module("plugins.torchstore-snapshot.tests.rank_acts")

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


@pytest.fixture(scope="module")
def store() -> Iterator[ts.Client]:
    client = ts.initialize(capacity=256 << 20, prefault=0)
    yield client
    ts.shutdown()


def causes(error: CheckpointException) -> list[str]:
    return [type(failure[0]).__name__ for failure in error.failures.values()]


def save(where: str, state: dict[str, Any], **options: Any) -> None:
    writer = SnapshotStorageWriter(where, fsync=False, **options)
    dcp.save(state, storage_writer=writer)


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)
    for _ in range(2):
        model(torch.randn(5, 4)).sum().backward()
        optimizer.step()
    return model, optimizer


def planned(dtype: torch.dtype) -> bool:
    """Whether torch's planner knows how large a tensor is."""
    try:
        return torch._utils._element_size(dtype) > 0
    except TypeError:
        return False


def test_every_dtype_shape_and_stride(tmp_path: Path, store: ts.Client) -> None:
    where = str(tmp_path / "s")
    dtypes = [d for d in _BY_NAME.values() if d not in _QUANTIZED and planned(d)]
    raw = torch.arange(4 * 16, dtype=torch.uint8) % 2
    tensors = {
        f"{dtype}{list(shape)}": raw[: 4 * dtype.itemsize].view(dtype)[:n].view(shape)
        for dtype in dtypes
        for shape, n in (((2, 2), 4), ((), 1), ((0, 3), 0))
    }
    base = torch.randn(300, 200)
    tensors |= {"t": base.t(), "step": base[::2, 1::3], "long": torch.randn(5 << 20, 2)[:, 0]}
    for writer, reader in (
        (SnapshotStorageWriter(where, fsync=False), SnapshotStorageReader(where)),
        (TorchStoreWriter(where), TorchStoreReader(where)),
    ):
        dcp.save(tensors, storage_writer=writer)
        wanted = {
            name: torch.zeros(*t.shape, 2 * t.itemsize, dtype=torch.uint8)[..., : t.itemsize]
            .contiguous()
            .view(t.dtype)[..., 0]
            for name, t in tensors.items()
        }
        dcp.load(wanted, storage_reader=reader)
        for name, tensor in tensors.items():
            stored = tensor.contiguous().view(-1).view(torch.uint8)
            assert torch.equal(wanted[name].contiguous().view(-1).view(torch.uint8), stored), name


@pytest.mark.quick
def test_a_checkpoint_restores_objects_and_a_take_loads(tmp_path: Path) -> None:
    model, optimizer = trained()
    state = {"model": model.state_dict(), "optim": optimizer.state_dict(), "step": 3}
    save(str(tmp_path / "s"), state)
    new_model, new_optimizer = trained()
    rest = StateDict(step=0)
    snapshot = Snapshot(tmp_path / "s")
    snapshot.restore({"model": new_model, "optim": new_optimizer, "state_dict": rest})
    assert rest["step"] == 3
    assert torch.equal(new_model[0].weight, model[0].weight)
    states, wanted = new_optimizer.state_dict(), optimizer.state_dict()
    assert states["param_groups"] == wanted["param_groups"]
    assert torch.equal(states["state"][3]["exp_avg"], wanted["state"][3]["exp_avg"])
    fresh = torch.optim.AdamW(new_model.parameters())  # has no state yet
    snapshot.restore({"optim": fresh})
    assert torch.equal(fresh.state_dict()["state"][3]["exp_avg"], wanted["state"][3]["exp_avg"])

    Snapshot.take(
        tmp_path / "t", {"model": model, "optim": optimizer, "p": StateDict(step=3)}, fsync=False
    )
    new_model, new_optimizer = trained()
    into = {"model": new_model.state_dict(), "optim": new_optimizer.state_dict(), "p": {"step": 0}}
    dcp.load(into, storage_reader=SnapshotStorageReader(tmp_path / "t"))
    assert into["optim"]["param_groups"] == wanted["param_groups"]
    assert into["p"]["step"] == 3
    assert torch.equal(into["optim"]["state"][3]["exp_avg"], wanted["state"][3]["exp_avg"])
    assert torch.equal(new_model[0].weight, model[0].weight)  # in place


def test_one_key_for_everything(tmp_path: Path) -> None:
    model, optimizer = trained()
    save(str(tmp_path / "m"), model.state_dict(), key="model")
    save(str(tmp_path / "o"), optimizer.state_dict(), key="optim")
    other, other_optimizer = trained()
    Snapshot(tmp_path / "m").restore({"model": other})
    Snapshot(tmp_path / "o").restore({"optim": other_optimizer})
    assert torch.equal(other[1].bias, model[1].bias)
    wanted = {name: torch.zeros_like(t) for name, t in model.state_dict().items()}
    dcp.load(wanted, storage_reader=SnapshotStorageReader(tmp_path / "m"))
    assert torch.equal(wanted["1.bias"], model[1].bias)
    Snapshot.take(tmp_path / "t", {"a": model, "b": optimizer}, fsync=False)
    wanted = {name: torch.zeros_like(t) for name, t in model.state_dict().items()}
    dcp.load(wanted, storage_reader=SnapshotStorageReader(tmp_path / "t", key="a"))
    assert torch.equal(wanted["1.bias"], model[1].bias)


def test_data_files_are_safetensors(tmp_path: Path) -> None:
    model, _ = trained()
    save(str(tmp_path), {"model": model.state_dict()})
    (file,) = tmp_path.glob("*.safetensors")
    found = load_file(file)
    assert found.keys() == model.state_dict().keys()
    assert torch.equal(found["0.weight"], model[0].weight)
    assert (tmp_path / "model.safetensors.index.json").exists()


NESTED = {
    "list": [torch.ones(2), {"deep": torch.zeros(1), "n": 3}],
    "groups": [{"lr": 0.1, "betas": (0.9, 0.99), "params": [0, 1]}, {"lr": 0.2}],
    "plain": {"a": (1, 2.5, None), "b": {1, 2}, "bytes": b"x" * 200_000, "c": 1 + 2j},
    "text": "x",
    "names": ["a", ["b"]],
    "none": None,
    "state_dict": {"w": torch.ones(1)},
}


@pytest.mark.parametrize("flatten", [True, False])
def test_nested_values(tmp_path: Path, store: ts.Client, flatten: bool) -> None:
    where = str(tmp_path / "s")
    if not flatten:  # whole values, which contain no tensors
        state: dict[str, Any] = {k: v for k, v in NESTED.items() if k not in ("list", "state_dict")}
    else:
        state = NESTED
    planner = DefaultSavePlanner(flatten_state_dict=flatten)
    dcp.save(state, storage_writer=SnapshotStorageWriter(where, fsync=False), planner=planner)
    wanted: dict[str, Any] = {
        **dict.fromkeys(state),
        "groups": [{"lr": 0, "betas": 0, "params": 0}, {"lr": 0}],
        "plain": dict.fromkeys(state["plain"]),
    }
    if flatten:
        wanted["list"] = [torch.zeros(2), {"deep": torch.ones(1), "n": 0}]
        wanted["state_dict"] = {"w": torch.zeros(1)}
    loader = DefaultLoadPlanner(flatten_state_dict=flatten, flatten_sharded_tensors=flatten)
    dcp.load(wanted, storage_reader=SnapshotStorageReader(where), planner=loader)
    for name in ("groups", "plain", "text", "names", "none"):
        assert wanted[name] == NESTED[name], name
    if flatten:
        assert wanted["list"][0].tolist() == [1, 1]
        assert wanted["list"][1]["deep"].tolist() == [0]
        assert wanted["list"][1]["n"] == 3
        assert wanted["state_dict"]["w"].tolist() == [1]
        dcp.save(state, storage_writer=TorchStoreWriter(where))
        again = {**wanted, "groups": [{"lr": 0, "betas": 0, "params": 0}, {"lr": 0}], "none": 1}
        dcp.load(again, storage_reader=TorchStoreReader(where))
        assert again["groups"] == NESTED["groups"]
        assert again["none"] is None
        read = _load_state_dict_from_keys(storage_reader=SnapshotStorageReader(where))
        assert read["groups"] == NESTED["groups"]
        assert read["list"][1]["n"] == 3


def test_tuples_of_tensors_of_a_take(tmp_path: Path) -> None:
    pair = (torch.arange(3), {"w": torch.ones(2)}, 5)
    Snapshot.take(tmp_path / "s", {"m": StateDict(pair=pair)}, fsync=False)
    wanted: dict[str, Any] = {"m": {"pair": None}}
    dcp.load(wanted, storage_reader=SnapshotStorageReader(tmp_path / "s"))
    first, second, third = wanted["m"]["pair"]
    assert first.tolist() == [0, 1, 2]
    assert second["w"].tolist() == [1, 1]
    assert third == 5


class Custom:
    """Needs pickle."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Custom)


def test_pickle_is_refused_unless_allowed(tmp_path: Path, store: ts.Client) -> None:
    where = str(tmp_path / "s")
    for refusing in (SnapshotStorageWriter(where), TorchStoreWriter(where)):
        with pytest.raises(CheckpointException) as refused:
            dcp.save({"a": Custom()}, storage_writer=refusing)
        assert causes(refused.value) == ["UnsafeObjectError"]
    assert not Path(where, "snapshot.json").exists()
    save(where, {"a": Custom(), "b": 1}, allow_pickle=True)
    dcp.save({"a": Custom()}, storage_writer=TorchStoreWriter(where, allow_pickle=True))
    rest: dict[str, Any] = {"b": 0}
    dcp.load(rest, storage_reader=SnapshotStorageReader(where))  # what is not pickled
    assert rest["b"] == 1
    for reader in (SnapshotStorageReader(where), TorchStoreReader(where)):
        with pytest.raises(CheckpointException, match="allow_pickle"):
            dcp.load({"a": 0}, storage_reader=reader)
    readers: list[Any] = [SnapshotStorageReader(where, allow_pickle=True)]
    for reader in [*readers, TorchStoreReader(where, allow_pickle=True)]:
        wanted: dict[str, Any] = {"a": 0}
        dcp.load(wanted, storage_reader=reader)
        assert wanted["a"] == Custom()


class Locked(DefaultSavePlanner):
    """Gives bytes that only `Unlocked` can read."""

    def transform_object(self, write_item: Any, object: Any) -> Any:
        return object if isinstance(object, torch.Tensor) else io.BytesIO(b"locked")


class Unlocked(DefaultLoadPlanner):
    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        self.original_state_dict[read_item.dest_index.fqn] = value.read()


def test_a_bytesio_is_a_value_unless_a_planner_gave_it(tmp_path: Path, store: ts.Client) -> None:
    where = str(tmp_path / "s")
    losses = io.BytesIO()
    torch.save([1.5, 2.5], losses)  # as trainers put them into their state
    state = {"train": {"losses": losses, "raw": io.BytesIO(b"raw")}}
    writers: list[Any] = [SnapshotStorageWriter(where, fsync=False, allow_pickle=True)]
    writers.append(TorchStoreWriter("bytesio", allow_pickle=True))
    readers: list[Any] = [SnapshotStorageReader(where, allow_pickle=True)]
    readers.append(TorchStoreReader("bytesio", allow_pickle=True))
    for writer, reader in zip(writers, readers, strict=True):
        dcp.save(state, storage_writer=writer)
        wanted: dict[str, Any] = {"train": {"losses": io.BytesIO(), "raw": io.BytesIO()}}
        dcp.load(wanted, storage_reader=reader)
        assert wanted["train"]["raw"].getvalue() == b"raw"
        loaded = wanted["train"]["losses"]
        assert loaded.getvalue() == losses.getvalue()
        loaded.seek(0)
        assert torch.load(loaded) == [1.5, 2.5]
    where = str(tmp_path / "locked")
    given: list[Any] = [SnapshotStorageWriter(where, fsync=False, allow_pickle=True)]
    given.append(TorchStoreWriter("locked", allow_pickle=True))
    taken: list[Any] = [SnapshotStorageReader(where, allow_pickle=True)]
    taken.append(TorchStoreReader("locked", allow_pickle=True))
    for writer, reader in zip(given, taken, strict=True):
        dcp.save({"n": 4}, storage_writer=writer, planner=Locked())
        locked: dict[str, Any] = {"n": 0}
        dcp.load(locked, storage_reader=reader, planner=Unlocked())
        assert locked["n"] == b"locked"


class Changing(DefaultSavePlanner):
    """Saves other values than those in the state dict."""

    def transform_object(self, write_item: Any, object: Any) -> Any:
        if isinstance(object, torch.Tensor):
            return object + 1
        made = io.BytesIO()
        torch.save(object * 2, made)
        return made


class Changed(DefaultLoadPlanner):
    """Loads into memory of its own, and says when it is there."""

    def resolve_tensor(self, read_item: Any) -> torch.Tensor:
        return torch.zeros(tuple(read_item.lengths))

    def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
        self.lookup_tensor(read_item.dest_index).copy_(tensor * 10)


def test_planners_that_change_what_is_saved_and_loaded(tmp_path: Path, store: ts.Client) -> None:
    where = str(tmp_path / "s")
    for writer, reader in (
        (SnapshotStorageWriter(where, fsync=False), SnapshotStorageReader(where)),
        (TorchStoreWriter(where), TorchStoreReader(where)),
    ):
        state = {"w": torch.ones(3), "n": 4}
        dcp.save(state, storage_writer=writer, planner=Changing())
        wanted = {"w": torch.zeros(3), "n": 0}
        dcp.load(wanted, storage_reader=reader, planner=Changed())
        assert wanted["w"].tolist() == [20, 20, 20]
        assert wanted["n"] == 8
    other = {"w": torch.zeros(3, dtype=torch.float64), "n": 0}
    dcp.load(other, storage_reader=SnapshotStorageReader(where))  # torch casts, as for its files
    assert other["w"].tolist() == [2, 2, 2]


def test_an_existing_snapshot_is_replaced_only_if_asked_for(tmp_path: Path) -> None:
    where = str(tmp_path / "s")
    save(where, {"w": torch.ones(2)})
    files = sorted(path.name for path in Path(where).iterdir())
    with pytest.raises(CheckpointException) as refused:
        save(where, {"w": torch.zeros(2)})
    assert causes(refused.value) == ["SnapshotExistsError"]
    assert sorted(path.name for path in Path(where).iterdir()) == files
    writer = SnapshotStorageWriter(overwrite=True, fsync=False)
    dcp.save({"w": torch.zeros(2)}, checkpoint_id=where, storage_writer=writer)
    dcp.save({"w": torch.zeros(3)}, checkpoint_id=f"{where}2", storage_writer=writer)
    assert len([*Path(where).glob("*.safetensors")]) == 1
    wanted = {"w": torch.ones(2)}
    dcp.load(wanted, checkpoint_id=where, storage_reader=SnapshotStorageReader())
    assert wanted["w"].tolist() == [0, 0]


async def test_no_other_process_saves_to_its_own_memory() -> None:
    """As that of an async_save does, to which the writer is sent."""
    state: dict[str, Any] = {"m": {"w": torch.ones(2)}}
    writer = SnapshotStorageWriter("memory://there")
    sent = pickle.dumps(writer)
    dcp.save(state, storage_writer=writer)
    assert Snapshot("memory://there").verify() == {}
    body = f"""
    import pickle, torch.distributed.checkpoint as dcp
    try:
        dcp.save({{"w": torch.ones(2)}}, storage_writer=pickle.loads({sent!r}), no_dist=True)
    except dcp.CheckpointException as error:
        print(repr(error.failures[0][0]))
    """
    said = await run_script(body)
    assert said.startswith("ConfigurationError")
    assert "use a thread" in said


@pytest.mark.parametrize("name", ["base", "memory_budget", "progress", "unheard_of"])
def test_options_that_a_save_does_not_have(name: str) -> None:
    with pytest.raises(ts.ConfigurationError, match=f"{name}: a save has no such option"):
        SnapshotStorageWriter("there", **{name: None})


def test_damage_is_found_before_anything_is_written(tmp_path: Path) -> None:
    save(str(tmp_path), {"w": torch.ones(2000), "v": torch.ones(3)})
    (file,) = tmp_path.glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-20] ^= 1
    file.write_bytes(data)
    wanted = {"w": torch.zeros(2000), "v": torch.zeros(3)}
    with pytest.raises(CheckpointException) as found:
        dcp.load(wanted, storage_reader=SnapshotStorageReader(tmp_path))
    assert causes(found.value) == ["SnapshotCorruptError"]
    assert not wanted["w"].any()
    with pytest.raises(CheckpointException, match="there is no snapshot"):
        dcp.load(wanted, storage_reader=SnapshotStorageReader(tmp_path / "none"))


def test_only_what_is_needed_is_read(tmp_path: Path) -> None:
    state = {f"t{n}": torch.full((100, 1000), float(n)) for n in range(20)}
    save(str(tmp_path), state)
    wanted = {"t7": torch.zeros(100, 1000)}
    planner = DefaultLoadPlanner(allow_partial_load=True)
    reader = SnapshotStorageReader(tmp_path, verify=False)
    with acts.counted_reads() as sizes:
        dcp.load(wanted, storage_reader=reader, planner=planner)
    assert torch.equal(wanted["t7"], state["t7"])
    assert sum(sizes) == wanted["t7"].nbytes


def test_tensors_equal_those_of_torchs_own_files(tmp_path: Path) -> None:
    model, optimizer = trained()
    state = {"model": model.state_dict(), "optim": optimizer.state_dict(), "step": torch.tensor(3)}
    save(str(tmp_path / "s"), state)
    dcp.save(state, storage_writer=FileSystemWriter(tmp_path / "f"))
    found = []
    for reader in (SnapshotStorageReader(tmp_path / "s"), FileSystemReader(tmp_path / "f")):
        other, other_optimizer = trained()
        wanted = {
            "model": other.state_dict(),
            "optim": other_optimizer.state_dict(),
            "step": torch.tensor(0),
        }
        dcp.load(wanted, storage_reader=reader)
        found.append(wanted)
    ours, theirs = found
    assert ours["optim"]["param_groups"] == theirs["optim"]["param_groups"]
    for name, tensor in ours["model"].items():
        assert torch.equal(tensor, theirs["model"][name])
    for number, entries in ours["optim"]["state"].items():
        for name, tensor in entries.items():
            assert torch.equal(tensor, theirs["optim"]["state"][number][name])
    dcp_to_torch_save(tmp_path / "f", tmp_path / "theirs.pt")
    assert int(torch.load(tmp_path / "theirs.pt")["step"]) == int(ours["step"]) == 3


def test_versions_in_a_store(store: ts.Client, tmp_path: Path) -> None:
    key = str(tmp_path)
    writer = TorchStoreWriter(key, keep=2)
    for number in range(3):  # as a trainer does, which gives each step an id of its own
        state = {"w": torch.full((50_000,), float(number)), "n": {"step": number}}
        dcp.save(state, checkpoint_id=f"step-{number}", storage_writer=writer)
    assert store.versions(key) == [2, 3]
    assert store.get_state_dict(key)["n"] == {"step": 2}
    for version, number in ((2, 1), (None, 2)):
        wanted = {"w": torch.zeros(50_000), "n": {"step": -1}}
        dcp.load(wanted, storage_reader=TorchStoreReader(key, version=version))
        assert wanted["w"][0] == number
        assert wanted["n"]["step"] == number
    with pytest.raises(CheckpointException, match="no version 1"):
        dcp.load(wanted, storage_reader=TorchStoreReader(key, version=1))
    with pytest.raises(CheckpointException, match="no such key"):
        dcp.load(wanted, storage_reader=TorchStoreReader(f"{key}/none"))


def test_what_put_state_dict_put_is_loaded(store: ts.Client, tmp_path: Path) -> None:
    model, optimizer = trained()
    key = str(tmp_path)
    state = {"model": model.state_dict(), "optim": optimizer.state_dict()}
    store.put_state_dict(state, key)
    other, other_optimizer = trained()
    wanted = {"model": other.state_dict(), "optim": other_optimizer.state_dict()}
    with warnings.catch_warnings():
        warnings.simplefilter("error", ResourceWarning)
        dcp.load(wanted, checkpoint_id=key, storage_reader=TorchStoreReader())
    assert torch.equal(other[0].weight, model[0].weight)
    assert wanted["optim"]["param_groups"] == optimizer.state_dict()["param_groups"]


_FORKED = """
import os, weakref
import torch.distributed.checkpoint as dcp
from torchstore_snapshot.dcp import SnapshotStorageWriter

class Forking(SnapshotStorageWriter):
    def write_data(self, plan, planner):
        child = os.fork()
        if not child:
            weakref.finalize._exitfunc()  # as it ends normally
            os._exit(0)
        os.waitpid(child, 0)
        return super().write_data(plan, planner)

dcp.save({{"w": torch.ones(3)}}, storage_writer=Forking({folder!r}, fsync=False), no_dist=True)
"""


async def test_a_child_that_is_forked_within_a_save_does_not_end_it(tmp_path: Path) -> None:
    assert await run_script(_FORKED.format(folder=str(tmp_path / "s"))) == ""
    assert Snapshot(tmp_path / "s").verify() == {}


async def test_a_collection_as_a_claim_is_renewed_may_end_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It runs in any thread: in the one that renews the claim, it waited for that for ever."""
    monkeypatch.setattr(claims, "_RENEWED_S", 0.001)
    writer = SnapshotStorageWriter(tmp_path / "s", fsync=False)

    def collect(frame: FrameType, event: str, _: object) -> None:
        if frame.f_code is Claim._publish.__code__:
            gc.collect()

    threading.settrace(collect)
    try:
        writer.set_up_storage_writer(True)
    finally:
        threading.settrace(None)  # type: ignore[arg-type]
    claim = writer._claim
    assert claim is not None

    def is_lost() -> bool:
        try:
            claim._found()
        except TakeLostError:
            return True
        return False

    gc.disable()
    try:
        vars(writer)["itself"] = writer  # only a collection finds it
        del writer
        await until(is_lost, 20)
    finally:
        gc.enable()
