"""What the ranks of tests do."""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.integration.dtensors.layouts import mesh_of
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import torchstore_core as ts
from torchstore_snapshot import (
    RankFailedError,
    RNGState,
    Series,
    Snapshot,
    SnapshotExistsError,
    StateDict,
)
from torchstore_snapshot.background import process
from torchstore_snapshot.ranks import Ranks
from torchstore_snapshot.storage import local
from torchstore_snapshot.taking import take as taking

SHAPES = {"even": (8, 6), "uneven": (7, 5), "small": (1, 3), "cube": (5, 4, 3), "wide": (2, 4096)}


def full(name: str) -> torch.Tensor:
    shape = SHAPES[name]
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape) + 0.5


def placements(spec: str) -> list[Any]:
    return [Replicate() if c == "R" else Shard(int(c)) for c in spec]


def distributed(mesh_shape: list[int], spec: str, values: bool) -> dict[str, DTensor]:
    mesh = mesh_of(tuple(mesh_shape))
    made = {name: full(name) if values else torch.zeros(SHAPES[name]) for name in SHAPES}
    return {name: distribute_tensor(t, mesh, placements(spec)) for name, t in made.items()}


def take_sharded(folder: str, mesh_shape: list[int], spec: str, background: bool) -> int:
    state = {"m": StateDict(**distributed(mesh_shape, spec, True), rank=dist.get_rank(), same=3)}
    state["m"]["mine"] = torch.full((4,), float(dist.get_rank()))
    state["m"]["equal"] = torch.arange(3)
    if background:
        snapshot = Snapshot.async_take(folder, state, fsync=False).wait(300)
    else:
        snapshot = Snapshot.take(folder, state, fsync=False)
    return snapshot.manifest.world_size


def restore_sharded(folder: str, mesh_shape: list[int], spec: str) -> None:
    state = StateDict(**distributed(mesh_shape, spec, False), same=0, equal=torch.zeros(3).long())
    Snapshot(folder).restore({"m": state})
    for name in SHAPES:
        assert torch.equal(state[name].full_tensor(), full(name)), name
    assert state["same"] == 3
    assert state["equal"].tolist() == [0, 1, 2]


def large(mesh_shape: list[int], spec: str, factor: int) -> DTensor:
    values = torch.arange(300 * 4096, dtype=torch.int32).view(300, 4096) * factor
    return distribute_tensor(values, mesh_of(tuple(mesh_shape)), placements(spec))


def take_large(folder: str, mesh_shape: list[int], spec: str) -> None:
    Snapshot.take(folder, {"m": StateDict(w=large(mesh_shape, spec, 1))}, fsync=False)


@contextmanager
def counted_reads() -> Iterator[list[int]]:
    """The sizes of all reads of files from here on; nothing is read from a mapping."""
    sizes: list[int] = []

    class Counting(local.LocalReader):
        def read_into(self, offset: int, buffer: Any) -> None:
            sizes.append(memoryview(buffer).nbytes)
            super().read_into(offset, buffer)

        def map(self) -> Any:
            raise OSError("what is read from a mapping cannot be counted")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local, "LocalReader", Counting)
        yield sizes


def restore_large(folder: str, mesh_shape: list[int], spec: str) -> tuple[int, int]:
    """How many bytes this rank reads from files of tensors, and how many its part has."""
    tensor = large(mesh_shape, spec, 0)
    with counted_reads() as sizes:
        Snapshot(folder).restore({"m": StateDict(w=tensor)}, verify="streaming")
    expected = large(mesh_shape, spec, 1).to_local()
    assert torch.equal(tensor.to_local(), expected)
    return sum(sizes), expected.nbytes


def _sharded_tensor(name: str, values: bool) -> Any:
    """As FSDP1 and torchrec have them."""
    places: list[Any] = [f"rank:{rank}/cpu" for rank in range(dist.get_world_size())]
    made = sharded_tensor.empty(ChunkShardingSpec(dim=0, placements=places), *SHAPES[name])
    for shard in made.local_shards():
        begin, rows = shard.metadata.shard_offsets[0], shard.metadata.shard_sizes[0]
        shard.tensor.copy_(full(name)[begin : begin + rows] * values)
    return made


def take_sharded_tensors(folder: str) -> None:
    state = StateDict(**{name: _sharded_tensor(name, True) for name in SHAPES})
    state.update(same=3, equal=torch.arange(3))
    Snapshot.take(folder, {"m": state}, fsync=False)


def restore_sharded_tensors(folder: str) -> None:
    state = StateDict(**{name: _sharded_tensor(name, False) for name in SHAPES})
    Snapshot(folder).restore({"m": state}, strict=False)
    one = _sharded_tensor("wide", False)
    assert Snapshot(folder).read_object("m/wide", one) is one
    for name, made in [*[(name, state[name]) for name in SHAPES], ("wide", one)]:
        right = _sharded_tensor(name, True).local_shards()
        for mine, other in zip(made.local_shards(), right, strict=True):
            assert torch.equal(mine.tensor, other.tensor)


def own_values(folder: str) -> tuple[int, list[float]]:
    state = StateDict(rank=-1, mine=torch.zeros(4))
    Snapshot(folder).restore({"m": state}, strict=False)
    return state["rank"], state["mine"].tolist()


def take_replicated(folder: str, how: str) -> None:
    torch.manual_seed(0)
    model: torch.nn.Module = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)])
    if how == "ddp":
        model = DistributedDataParallel(model)
        Snapshot.take(folder, {"model": model}, fsync=False)
    else:
        Snapshot.take(folder, {"model": model}, replicated=["model/**"], fsync=False)


def train_fsdp(folder: str) -> None:
    torch.manual_seed(0)
    model, optimizer = fsdp_model()
    for _ in range(2):
        model(torch.ones(2, 6)).sum().backward()
        optimizer.step()
    Snapshot.take(folder, {"model": model, "optimizer": optimizer}, fsync=False)


def fsdp_model() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.ReLU(), torch.nn.Linear(5, 3))
    if dist.get_world_size() > 1:
        fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def resume_fsdp(folder: str) -> list[float]:
    model, optimizer = fsdp_model()
    Snapshot(folder).restore({"model": model, "optimizer": optimizer})
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    return [float(p.detach().sum()) for p in whole]


def take_with_a_failing_rank(folder: str) -> str:
    state = StateDict(x=torch.ones(2))
    if dist.get_rank() == 1:
        state["x"] = torch.ones(2, device="meta")
    try:
        Snapshot.take(folder, {"m": state}, fsync=False)
    except (RankFailedError, ts.UnsupportedValueError) as error:
        return type(error).__name__
    return "taken"


def take_in_background_with_a_failing_rank(folder: str, how: str) -> tuple[str, float]:
    """Rank 1 fails: its arguments are wrong, or its writer cannot create files, or nothing at
    all. Returns the error, and after how many seconds it was raised.
    """
    failing = dist.get_rank() == 1
    state = StateDict(x=torch.full((100_000,), float(dist.get_rank())))
    options: dict[str, Any] = {}
    Snapshot.async_take(folder + "-before", {"m": state}, fsync=False).wait(300)
    writer = process.the_writer().pid
    if failing and how == "arguments":
        options["memory_budget"] = 0
    elif failing and how in ("file", "nothing"):
        limit = resource.RLIMIT_FSIZE if how == "file" else resource.RLIMIT_NOFILE
        resource.prlimit(writer, limit, (50_000, 50_000) if how == "file" else (3, 3))
    dist.barrier()
    begun = time.monotonic()
    try:
        Snapshot.async_take(folder, {"m": state}, fsync=False, **options).wait(300)
    except (ts.TorchStoreError, OSError) as error:
        return type(error).__name__, time.monotonic() - begun
    finally:
        if failing and how != "arguments":
            process.the_writer().close()  # the limits are for its life
    return "taken", 0.0


def stage_state(values: bool, spec: str) -> tuple[int, StateDict]:
    """Two stages of a pipeline with two ranks each; names count from 0 in both."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "shard"))
    stage = dist.get_rank() // 2
    made = {
        "w": full("even") + 100 * stage,
        "size": torch.full((5 + stage, 3), float(stage)),
        "same": full("uneven"),
        "declared": full("cube"),
    }
    tensors = {
        name: distribute_tensor(
            t if values else torch.zeros_like(t), mesh["shard"], placements(spec)
        )
        for name, t in made.items()
    }
    if stage:
        tensors["last"] = distribute_tensor(
            full("wide") if values else torch.zeros(SHAPES["wide"]), mesh["shard"], placements(spec)
        )
    return stage, StateDict(**tensors)


def take_stages(folder: str, background: bool) -> None:
    state = {"m": stage_state(True, "0")[1]}
    if background:
        Snapshot.async_take(folder, state, replicated=["m/declared"], fsync=False).wait(300)
    else:
        Snapshot.take(folder, state, replicated=["m/declared"], fsync=False)


def restore_stages(folder: str) -> None:
    stage, state = stage_state(False, "1")
    Snapshot(folder).restore({"m": state})
    assert torch.equal(state["w"].full_tensor(), full("even") + 100 * stage)
    assert torch.equal(state["size"].full_tensor(), torch.full((5 + stage, 3), float(stage)))
    assert torch.equal(state["same"].full_tensor(), full("uneven"))
    assert torch.equal(state["declared"].full_tensor(), full("cube"))
    assert not stage or torch.equal(state["last"].full_tensor(), full("wide"))


def take_contradictions(folder: str, how: str) -> str:
    """On one mesh: ranks that disagree about a shape, of which one has no part of a tensor, or
    which mean two things by one path.
    """
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2,))
    width = 3 + rank if how == "shape" else 3
    shape, stride = torch.Size((4, width)), (width, 1)
    local = torch.zeros(2, width)
    made: Any = DTensor.from_local(
        local, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride
    )
    if how == "part" and rank:
        made = local
    state = {"m": StateDict(w=made)}
    if how == "name":
        state = {"m": StateDict({"x/w": local})} if rank else {"m/x": StateDict(w=local)}
    try:
        Snapshot.take(folder, state, fsync=False)
    except (ts.LayoutMismatchError, ts.UnsupportedValueError) as error:
        return str(error.key)
    return "taken"


def take_and_draw(folder: str) -> None:
    torch.manual_seed(dist.get_rank())
    state = StateDict(equal=1, mine=dist.get_rank())
    Snapshot.take(folder, {"rng": RNGState(), "m": state}, fsync=False)


def restore_and_draw(folder: str) -> tuple[float, str]:
    """What is drawn after a strict restore, and what is missing of values of single ranks."""
    torch.manual_seed(100 + dist.get_rank())
    state = StateDict(equal=0)
    Snapshot(folder).restore({"rng": RNGState(), "m": state})
    assert state["equal"] == 1
    drawn = float(torch.rand(1))
    try:
        own = StateDict(equal=0, mine=-1)
        Snapshot(folder).restore({"m": own})
    except (ts.LayoutMismatchError, RankFailedError) as error:
        assert own == {"equal": 0, "mine": -1}  # on all ranks, since two of them miss something
        return drawn, " ".join(error.details.get("missing", []))
    return drawn, ""


def take_halves(folder: str) -> None:
    rank = dist.get_rank()
    Snapshot.take(
        folder, {"m": StateDict(mine=torch.full((70_000,), float(rank + 1)), n=rank)}, fsync=False
    )


def restore_halves(folder: str, verify: Any) -> tuple[str, str, bool, bool]:
    """What a restore raises on each rank: its type, and what it says of other ranks; whether
    anything was written to, and whether anything was loaded.
    """
    mine = torch.zeros(70_000)
    state = StateDict(mine=mine, n=-1)
    try:
        Snapshot(folder).restore({"m": state}, verify=verify)
    except ts.TorchStoreError as error:
        others = " ".join(error.details.get("ranks", {}).values()).partition(":")[0]
        return type(error).__name__, others, bool(mine.any()), state["n"] != -1
    return "", "", bool(mine.any()), state["n"] != -1


def take_twice(folder: str) -> str:
    state = {"m": StateDict(x=torch.ones(2))}
    Snapshot.take(folder, state, fsync=False)
    try:
        Snapshot.take(folder, state, fsync=False)
    except (SnapshotExistsError, RankFailedError) as error:
        return type(error).__name__
    return "taken"


def give_wrong_arguments(folder: str, call: str, wrong: dict[str, Any]) -> tuple[str, float]:
    """Rank 1 does. Returns the error of this rank, and after how many seconds it was raised."""
    state = {"m": StateDict(x=torch.ones(2))}
    given = wrong if dist.get_rank() == 1 else {}
    calls: dict[str, Any] = {
        "take": partial(Snapshot.take, folder, state),
        "async_take": partial(Snapshot.async_take, folder, state),
        "series": lambda **options: Series(folder).take(options.pop("name", "a"), state, **options),
    }
    begun = time.monotonic()
    try:
        calls[call](**given)
    except (ts.TorchStoreError, TypeError) as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - begun
    return "", 0.0


def stop_in_a_take(folder: str, results: str) -> str:
    """The last rank is stopped for longer than the others wait, which write down that they do not
    any more. Returns what each raises.
    """
    group = dist.new_group(timeout=timedelta(seconds=5))
    rank = dist.get_rank()
    if rank == dist.get_world_size() - 1:
        Path(results, "stopped").write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
    try:
        Snapshot.take(folder, {"m": StateDict(x=torch.ones(2))}, pg=group, fsync=False)
    except RankFailedError as error:
        return str(error)
    finally:
        Path(results, str(rank)).touch()
    return ""


def die_in_a_take(folder: str, moment: str) -> str:
    """Rank 1 is killed: before it writes its file, when it has written half of it, or when it has
    written all of it and has not told anybody.
    """
    rank = dist.get_rank()
    state = {"m": StateDict(mine=torch.full((100_000,), float(rank)), n=rank)}
    if rank == 1:
        write, pwritev = taking.write, os.pwritev

        def die(*_: Any) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        def write_half(file: int, parts: Any, offset: int) -> int:
            if os.readlink(f"/proc/self/fd/{file}").endswith(".safetensors"):
                data = b"".join(parts)
                pwritev(file, [data[: len(data) // 2]], offset)
                die()
            return pwritev(file, parts, offset)

        def write_all(prepared: taking.Prepared) -> Any:
            write(prepared)
            die()

        if moment == "half":
            os.pwritev = write_half
        else:
            taking.write = {"before": die, "after": write_all}[moment]
    try:
        Snapshot.take(folder, state, overwrite=True)
    except RankFailedError as error:
        return type(error).__name__
    return "taken"


def die_in_a_restore(folder: str, moment: int, results: str) -> None:
    """The last rank is killed instead of telling the others something for the ``moment``-th time.
    They write down what they raise, and after how many seconds, and live on.
    """
    rank, exchange, told = dist.get_rank(), Ranks.exchange, []

    def die(ranks: Ranks, *args: Any) -> Any:
        told.append(ranks)
        if len(told) == moment:
            os.kill(os.getpid(), signal.SIGKILL)
        return exchange(ranks, *args)

    if rank == dist.get_world_size() - 1:
        Ranks.exchange = die  # type: ignore[method-assign]
    begun = time.monotonic()
    try:
        Snapshot(folder).restore({"m": StateDict(mine=torch.zeros(70_000), n=-1)}, strict=False)
    except RankFailedError as error:
        Path(results, str(rank)).write_text(f"{time.monotonic() - begun:.0f} {error}")
