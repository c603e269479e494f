"""What the ranks of these tests do."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tests.integration.dtensors.layouts import mesh_of
from torch.distributed.checkpoint import CheckpointException, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module

from torchstore_snapshot import Snapshot, StateDict
from torchstore_snapshot.dcp import (
    SnapshotStorageReader,
    SnapshotStorageWriter,
    TorchStoreReader,
    TorchStoreWriter,
)

SHAPES = {"even": (8, 6), "uneven": (7, 5), "small": (1, 3), "cube": (5, 4, 3), "wide": (2, 4096)}
ROOT = Path(__file__).parents[4]


def full(name: str, plus: float = 0.5) -> torch.Tensor:
    shape = SHAPES[name]
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape) + plus


def sharded(mesh_shape: list[int], spec: str, plus: float | None) -> dict[str, DTensor]:
    mesh = mesh_of(tuple(mesh_shape))
    placements = [Replicate() if c == "R" else Shard(int(c)) for c in spec]
    values = {n: torch.zeros(s) if plus is None else full(n, plus) for n, s in SHAPES.items()}
    return {name: distribute_tensor(t, mesh, placements) for name, t in values.items()}


def writer(kind: str, where: str, **options: Any) -> Any:
    if kind == "store":
        return TorchStoreWriter(where, **options)
    if kind == "files":
        return FileSystemWriter(where)
    return SnapshotStorageWriter(where, fsync=False, **options)


def reader(kind: str, where: str, **options: Any) -> Any:
    if kind == "store":
        return TorchStoreReader(where, **options)
    if kind == "files":
        return FileSystemReader(where)
    return SnapshotStorageReader(where, **options)


# ---- DTensors -----------------------------------------------------------------------------


def state(mesh_shape: list[int], spec: str, plus: float | None) -> dict[str, Any]:
    blank = plus is None
    return {
        "model": sharded(mesh_shape, spec, plus),
        "same": torch.zeros(3) if blank else torch.arange(3.0),
        "step": 0 if blank else 7,
        "groups": [{"lr": 0.0 if blank else 0.1, "names": [] if blank else ["a", "b"]}],
        "loader": {f"rank {dist.get_rank()}": b"" if blank else bytes([dist.get_rank()])},
    }


def save(kind: str, where: str, mesh_shape: list[int], spec: str, plus: float = 0.5) -> None:
    dcp.save(state(mesh_shape, spec, plus), storage_writer=writer(kind, where))


def load(kind: str, where: str, mesh_shape: list[int], spec: str, plus: float = 0.5) -> None:
    wanted = state(mesh_shape, spec, None)
    if dist.get_rank() > 1:
        del wanted["loader"]
    dcp.load(wanted, storage_reader=reader(kind, where))
    check(wanted, plus)


def check(found: dict[str, Any], plus: float) -> None:
    for name, tensor in found["model"].items():
        assert torch.equal(tensor.full_tensor(), full(name, plus)), name
    assert found["same"].tolist() == [0, 1, 2]
    assert found["step"] == 7
    assert found["groups"] == [{"lr": 0.1, "names": ["a", "b"]}]
    if "loader" in found:
        assert found["loader"] == {f"rank {dist.get_rank()}": bytes([dist.get_rank()])}


def load_by_snapshot(where: str, mesh_shape: list[int], spec: str) -> None:
    model = StateDict(**sharded(mesh_shape, spec, None))
    rest = StateDict(same=torch.zeros(3), step=0, groups=[])
    Snapshot(where).restore({"model": model, "state_dict": rest})
    check({"model": model, **rest}, 0.5)


def take_by_snapshot(where: str, mesh_shape: list[int], spec: str) -> None:
    model = StateDict(**sharded(mesh_shape, spec, 0.5))
    mine = StateDict(rank=dist.get_rank())
    Snapshot.take(where, {"model": model, "mine": mine}, fsync=False)


def load_a_take(where: str, mesh_shape: list[int], spec: str) -> int:
    wanted = {"model": sharded(mesh_shape, spec, None), "mine": {"rank": -1}}
    dcp.load(wanted, storage_reader=SnapshotStorageReader(where))
    for name, tensor in wanted["model"].items():
        assert torch.equal(tensor.full_tensor(), full(name)), name
    return wanted["mine"]["rank"]


def save_in_background(kind: str, where: str, process: bool) -> None:
    how = AsyncCheckpointerType.PROCESS if process else AsyncCheckpointerType.THREAD
    made = state([dist.get_world_size()], "0", 0.5)
    if process:
        os.environ["MASTER_ADDR"] = "127.0.0.1"
        os.environ["MASTER_PORT"] = "0"
    future = dcp.async_save(made, storage_writer=writer(kind, where), async_checkpointer_type=how)
    for tensor in made["model"].values():
        tensor.to_local().fill_(-1)  # it was staged
    future.result(timeout=80)


def save_cached(where: str) -> None:
    """The planner keeps the plans of the first save for the others."""
    for number in range(3):
        made = writer("snapshot", f"{where}-{number}")
        planner = DefaultSavePlanner(enable_plan_caching=True)
        dcp.save(state([2], "0", float(number)), storage_writer=made, planner=planner)
    planned = DefaultSavePlanner
    for cache in ("save_plan", "all_plans", "global_plan", "metadata", "final_save_plan"):
        getattr(planned, f"_cached_{cache}").clear()
    for number in range(3):
        load("snapshot", f"{where}-{number}", [2], "1", float(number))


def save_cached_in_store(key: str) -> None:
    for number in range(3):
        planner = DefaultSavePlanner(enable_plan_caching=True)
        dcp.save(
            state([2], "0", float(number)), storage_writer=writer("store", key), planner=planner
        )
        load("store", key, [2], "1", float(number))
    for cache in ("save_plan", "all_plans", "global_plan", "metadata", "final_save_plan"):
        getattr(DefaultSavePlanner, f"_cached_{cache}").clear()


class FailingPlanner(DefaultSavePlanner):
    """Rank 1 cannot give its data."""

    def resolve_data(self, write_item: Any) -> Any:
        if dist.get_rank() == 1:
            raise ConnectionResetError("the device is gone")
        return super().resolve_data(write_item)


def fail(kind: str, where: str) -> list[str]:
    made = writer(kind, where, **({"overwrite": True} if kind == "snapshot" else {}))
    try:
        dcp.save(state([2], "0", 9.5), storage_writer=made, planner=FailingPlanner())
    except CheckpointException as error:
        return [type(failure[0]).__name__ for failure in error.failures.values()]
    return []


def load_damaged(where: str, verify: Any) -> tuple[dict[int, str], bool]:
    """The errors by rank, and whether anything was written to."""
    wanted = {"model": sharded([2], "0", None)}
    errors: dict[int, str] = {}
    try:
        dcp.load(wanted, storage_reader=reader("snapshot", where, verify=verify))
    except CheckpointException as error:
        errors = {rank: type(failure[0]).__name__ for rank, failure in error.failures.items()}
    return errors, any(bool(t.to_local().any()) for t in wanted["model"].values())


def load_some(kind: str, where: str) -> int:
    """Some of what there is, and something that is not there."""
    mesh = mesh_of((dist.get_world_size(),))
    wanted = {
        "model": {"wide": distribute_tensor(torch.zeros(2, 4096), mesh, [Shard(1)])},
        "new": torch.full((2,), 5.0),
    }
    planner = DefaultLoadPlanner(allow_partial_load=True)
    dcp.load(wanted, storage_reader=reader(kind, where), planner=planner)
    assert torch.equal(wanted["model"]["wide"].full_tensor(), full("wide"))
    assert wanted["new"].tolist() == [5, 5]
    return wanted["model"]["wide"].to_local().nbytes


# ---- a real model and its optimizer -------------------------------------------------------


def short(pretrained: bool) -> torch.nn.Module:
    """The model with two of its six layers and an eighth of its words: a sixth of its bytes."""
    model: Any = example().MiniLM(pretrained=pretrained).model
    model.encoder.layer = model.encoder.layer[:2]
    model.resize_token_embeddings(4096)
    return model


def minilm(parallel: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model that has not learnt yet. (The pretrained weights are loaded by ``train``.)"""
    model = short(pretrained=False)
    if parallel == "FSDP":
        for layer in model.encoder.layer:
            fully_shard(layer)
        fully_shard(model)
    elif parallel == "TP":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
        parallelize_module(model, mesh, example().tensor_parallel_plan(model))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def example() -> Any:
    if str(ROOT / "examples") not in sys.path:
        sys.path.insert(0, str(ROOT / "examples"))
    import fsdp_to_tp as module

    return module


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Gradients that depend on nothing but the parameters: with or without parallelism, equal."""
    for parameter in model.parameters():
        parameter.grad = parameter.detach().clone()
    optimizer.step()
    optimizer.zero_grad()


def train(kinds: list[tuple[str, str]]) -> None:
    """Pretrained weights, one step of an optimizer, and a checkpoint of each kind; "take" is one by
    ``Snapshot`` itself, of the model and the optimizer as they are.
    """
    model, optimizer = minilm("FSDP")
    options = StateDictOptions(full_state_dict=True)
    whole = short(pretrained=True).state_dict()
    dcp.state_dict.set_model_state_dict(model, whole, options=options)
    step(model, optimizer)
    for kind, where in kinds:
        if kind == "take":
            Snapshot.take(where, {"model": model, "optimizer": optimizer}, fsync=False)
            continue
        dcp.save(parts_of(model, optimizer), storage_writer=writer(kind, where))


def parts_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))


def resume(
    kinds: list[tuple[str, str]], parallel: str, save_again: str | None = None
) -> dict[str, float]:
    """Load each checkpoint, compare all with the first, save the last one again, and train on.

    Returns:
        The norms of some parameters.
    """
    seen: dict[str, torch.Tensor] = {}
    model, optimizer = minilm(parallel)
    for kind, where in kinds:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        if kind == "take":  # into an optimizer that has not made a step
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
            Snapshot(where).restore({"model": model, "optimizer": optimizer})
            assert {group["lr"] for group in optimizer.param_groups} == {1e-3}
            parts = parts_of(model, optimizer)
        else:
            parts = parts_of(model, optimizer)
            dcp.load(parts, storage_reader=reader(kind, where))
        found = flat(parts)
        seen = seen or found
        assert found.keys() == seen.keys()
        for name, tensor in found.items():
            assert torch.equal(tensor, seen[name]), name
    set_state_dict(
        model, optimizer, model_state_dict=parts["model"], optim_state_dict=parts["optimizer"]
    )
    if save_again is not None:
        dcp.save(parts, storage_writer=SnapshotStorageWriter(save_again, fsync=False))
        Snapshot.take(f"{save_again}-take", {"model": model, "optimizer": optimizer}, fsync=False)
    step(model, optimizer)
    norms: dict[str, float] = {}
    for name, parameter in model.named_parameters():
        if "layer.0" in name:
            value = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            norms[name] = float(value.detach().double().norm())
    return norms


def flat(parts: dict[str, Any]) -> dict[str, torch.Tensor]:
    found = {f"model.{name}": value for name, value in parts["model"].items()}
    for name, entries in parts["optimizer"]["state"].items():
        found |= {f"optimizer.{name}.{which}": value for which, value in entries.items()}
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
        for name, value in found.items()
    }


class DeadlyPlanner(DefaultSavePlanner):
    """Rank 1 dies when it is asked for its last tensor."""

    def resolve_data(self, write_item: Any) -> Any:
        if dist.get_rank() == 1 and write_item.index.fqn == "model.wide":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().resolve_data(write_item)


def die(kind: str, where: str) -> None:
    made = writer(kind, where, **({"overwrite": True} if kind == "snapshot" else {}))
    dcp.save(state([2], "0", 9.5), storage_writer=made, planner=DeadlyPlanner())
