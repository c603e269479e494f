"""Modules and optimizers of real jobs: from any parallelism to any other, and on with training."""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.integration.dtensors.layouts import same
from tests.integration.dtensors.ranks import Jobs, Nursery
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import torchstore_core as ts

EXAMPLES = Path(__file__).parents[3] / "examples"
_numbers = itertools.count()
pytestmark = pytest.mark.usefixtures("shared")


@pytest.fixture(scope="module")
def jobs() -> Iterator[Jobs]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        with Nursery("transformers.models.bert.modeling_bert", __name__) as nursery:
            yield nursery.jobs


@pytest.fixture
def key() -> str:
    """Never used before: its versions begin with 1."""
    return f"key-{next(_numbers)}"


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Gathered from all ranks, if it is sharded."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


# ---- modules ------------------------------------------------------------------------------


class Block(nn.Module):
    """What tensor parallelism cuts by columns, what it cuts by rows, and what it leaves alone; of
    sizes that no number of ranks divides.
    """

    def __init__(self, seed: int, hidden: int = 11) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.up = nn.Linear(7, hidden)
        self.down = nn.Linear(hidden, 7)
        self.norm = nn.LayerNorm(7)
        for parameter in self.parameters():
            nn.init.normal_(parameter)
        self.register_buffer("seed", torch.tensor(seed))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.down(torch.relu(self.up(x))))


@functools.cache
def named_mesh(**extents: int) -> DeviceMesh:
    return init_device_mesh("cpu", tuple(extents.values()), mesh_dim_names=tuple(extents))


def block(kind: str, seed: int, hidden: int = 11) -> Block:
    """A block of this job's ranks."""
    made = Block(seed, hidden)
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    size = dist.get_world_size()
    if kind == "TP":
        parallelize_module(made, named_mesh(tp=size), plan)
    elif kind == "FSDP":
        fully_shard(made)
    elif kind == "HSDP":
        fully_shard(made, mesh=named_mesh(replicas=2, shards=size // 2))
    elif kind == "FSDP of a slice":
        fully_shard(made, mesh=named_mesh(replicas=2, shards=size // 2)["shards"])
    elif kind == "FSDP + TP":
        mesh = named_mesh(dp=2, tp=size // 2)
        parallelize_module(made, mesh["tp"], plan)
        fully_shard(made, mesh=mesh["dp"])
    return made


async def put_block(key: str, kind: str, seed: int) -> tuple[int, set[str]]:
    """The version, and which placements there are."""
    tensors = block(kind, seed).state_dict()
    ref = await ts.put_state_dict(tensors, key)
    found = {
        type(placement).__name__
        for tensor in tensors.values()
        if isinstance(tensor, DTensor)
        for placement in tensor.placements
    }
    return ref.version, found


async def get_block(key: str, kind: str, seed: int) -> None:
    """Into a block that is another one before, in place."""
    mine = block(kind, seed + 1)
    await ts.get_state_dict(key, mine.state_dict(), min_version=1)
    expected = Block(seed).state_dict()
    for name, tensor in mine.state_dict().items():
        assert same(whole(tensor), expected[name]), name


# Which job, and a placement that is sure to be among those of the module.
KINDS = {
    "FSDP": ("two", "Shard"),
    "TP": ("other", "Shard"),
    "HSDP": ("four", "Replicate"),
    "FSDP of a slice": ("four", "Shard"),
    "FSDP + TP": ("four", "_StridedShard"),
}


@pytest.mark.parametrize("readers", KINDS)
@pytest.mark.parametrize("writers", KINDS)
async def test_a_module_goes_from_any_parallelism_to_any_other(
    jobs: Jobs, key: str, writers: str, readers: str
):
    job, placement = KINDS[writers]
    for version, placements in await jobs[job].run(put_block, key, writers, 5):
        assert version == 1
        assert placement in placements
    job, _ = KINDS[readers]
    await jobs[job].run(get_block, key, readers, 5)
    got = await ts.get_state_dict(key)
    expected = Block(5).state_dict()
    assert list(got) == list(expected)
    assert all(same(got[name], tensor) for name, tensor in expected.items())


async def put_steps(key: str, kind: str, seeds: list[int]) -> list[tuple[set[int], int]]:
    """Step by step, as fast as this rank can: versions of its tensors, and of its state dict."""
    steps = []
    for seed in seeds:
        tensors = block(kind, seed).state_dict()
        sharded = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, DTensor)}
        refs = [await ts.put(f"{key} {name}", tensor) for name, tensor in sharded.items()]
        ref = await ts.put_state_dict(tensors, key)
        steps.append(({ref.version for ref in refs}, ref.version))
    return steps


@pytest.mark.parametrize("kind", KINDS)
async def test_every_put_of_a_rank_is_its_next_version(jobs: Jobs, key: str, kind: str):
    """Also if the meshes are slices of a larger one, so that several ranks are at the same place:
    else a slow one could complete what a fast one has begun with the next step.
    """
    steps = await jobs[KINDS[kind][0]].run(put_steps, key, kind, [3, 4, 5])
    assert steps == [[({1}, 1), ({2}, 2), ({3}, 3)]] * len(steps)
    assert await ts.versions(key) == [3]
    expected = Block(5).state_dict()
    alone = [name for name in expected if await ts.exists(f"{key} {name}")]
    assert len(alone) > 3
    for name, tensor in expected.items():
        assert same(await ts.get(f"{key}/{name}"), tensor), name
        if name in alone:
            assert same(await ts.get(f"{key} {name}"), tensor), name


# ---- optimizers ---------------------------------------------------------------------------


def train(module: Block, optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Every rank on the same data."""
    data = torch.linspace(-1, 1, 21).view(3, 7)
    for _ in range(steps):
        optimizer.zero_grad()
        module(data).square().sum().backward()
        optimizer.step()


def trainer(kind: str, seed: int) -> tuple[Block, torch.optim.Optimizer]:
    module = block(kind, seed, 12)  # tensor parallelism does not compute with uneven shards
    decayed = [p for name, p in module.named_parameters() if name.endswith("weight")]
    rest = [p for name, p in module.named_parameters() if not name.endswith("weight")]
    groups = [{"params": decayed, "weight_decay": 0.1 * seed}, {"params": rest, "lr": 0.05 / seed}]
    return module, torch.optim.AdamW(groups, lr=0.01)


def state_of(
    module: Block, optimizer: torch.optim.Optimizer, *, flat: bool, full: bool = False
) -> dict[str, Any]:
    options = StateDictOptions(flatten_optimizer_state_dict=flat, full_state_dict=full)
    return {
        "model": get_model_state_dict(module, options=options),
        "optimizer": get_optimizer_state_dict(module, optimizer, options=options),
    }


def values_in(tree: Any, at: str = "") -> dict[str, Any]:
    """Every value by its place; tensors gathered, as lists: what a test can be told."""
    if isinstance(tree, dict):
        found = [values_in(inner, f"{at}/{name}") for name, inner in tree.items()]
    elif isinstance(tree, list | tuple):  # torch itself may make a list of a tuple
        found = [values_in(inner, f"{at}/{number}") for number, inner in enumerate(tree)]
    elif isinstance(tree, torch.Tensor):
        tensor = whole(tree)
        return {at: (str(tensor.dtype), tensor.tolist())}
    else:
        return {at: tree}
    return {name: value for inner in found for name, value in inner.items()}


async def put_trainer(key: str, kind: str, flat: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """What it puts after some steps; and its weights, some steps later."""
    module, optimizer = trainer(kind, 2)
    train(module, optimizer, 3)
    state = state_of(module, optimizer, flat=flat)
    await ts.put_state_dict(state, key)
    put = values_in(state)
    train(module, optimizer, 2)
    return put, values_in(module.state_dict())


async def get_trainer(
    key: str, kind: str, flat: bool, in_place: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What another trainer has after it got this; and its weights, some steps later."""
    module, optimizer = trainer(kind, 1)
    options = StateDictOptions(flatten_optimizer_state_dict=flat, full_state_dict=not in_place)
    state = await ts.get_state_dict(
        key, state_of(module, optimizer, flat=flat) if in_place else None, min_version=1
    )
    set_model_state_dict(module, state["model"], options=options)
    set_optimizer_state_dict(module, optimizer, state["optimizer"], options=options)
    got = values_in(state_of(module, optimizer, flat=flat))
    train(module, optimizer, 2)
    return got, values_in(module.state_dict())


TRAINERS = {"plain": "one", "FSDP": "two", "HSDP": "four", "FSDP + TP": "four"}


@pytest.mark.parametrize(
    ("writers", "readers"),
    [("FSDP", "HSDP"), ("FSDP", "FSDP + TP"), ("FSDP + TP", "FSDP"), ("FSDP", "plain")],
)
@pytest.mark.parametrize(
    ("flat", "in_place"),
    [(False, True), (True, True), (False, False)],
    ids=["nested, in place", "flat, in place", "nested, as whole tensors"],
)
async def test_a_trainer_goes_on_where_another_one_was(
    jobs: Jobs, key: str, writers: str, readers: str, flat: bool, in_place: bool
):
    (put, after), *others = await jobs[TRAINERS[writers]].run(put_trainer, key, writers, flat)
    assert all(other == (put, after) for other in others)
    assert any("exp_avg_sq" in name for name in put)
    for got, then in await jobs[TRAINERS[readers]].run(get_trainer, key, readers, flat, in_place):
        assert got == put
        assert then.keys() == after.keys()
        for name, (_, numbers) in after.items():
            torch.testing.assert_close(torch.tensor(then[name][1]), torch.tensor(numbers))


# ---- a real model -------------------------------------------------------------------------

SENTENCES = ["The trainer publishes.", "Whoever serves, takes.", "A parcel is late."]


def example() -> Any:
    """What the examples know of the model, and of how to cut it."""
    if str(EXAMPLES) not in sys.path:  # of this rank
        sys.path.append(str(EXAMPLES))
    import fsdp_to_tp

    return fsdp_to_tp


def embed(policy: Any) -> list[list[float]]:
    policy.model.eval()
    with torch.no_grad():
        return policy.embed(SENTENCES).tolist()


async def put_minilm(key: str) -> list[list[float]]:
    """From FSDP2 ranks. How it embeds, whole."""
    policy = example().MiniLM(pretrained=True)
    vectors = embed(policy)
    for layer in policy.model.encoder.layer:
        fully_shard(layer)
    fully_shard(policy.model)
    await ts.put_state_dict(policy.model.state_dict(), key)
    return vectors


async def serve_minilm(key: str, parallel: bool) -> tuple[int, list[list[float]]]:
    """Into a model that knew nothing, tensor-parallel or whole. Bytes of what this rank has of it,
    and how it embeds.
    """
    policy = example().MiniLM(pretrained=False)
    if parallel:
        mesh = named_mesh(tp=dist.get_world_size())
        parallelize_module(policy.model, mesh, example().tensor_parallel_plan(policy.model))
    tensors = policy.model.state_dict()
    await ts.get_state_dict(key, tensors)
    expected = example().MiniLM(pretrained=True).model.state_dict()
    assert tensors.keys() == expected.keys()
    for name, tensor in tensors.items():
        assert same(whole(tensor), expected[name]), name
    if parallel:
        await ts.put_state_dict(tensors, f"{key} again")
    return example().local_bytes(tensors), embed(policy)


@pytest.mark.soak  # so it does in an example, which is run
async def test_a_real_model_goes_from_fsdp_to_tensor_parallel_to_one_process(jobs: Jobs, key: str):
    expected, *others = await jobs["two"].run(put_minilm, key)
    assert others == [expected]
    found = [
        *await jobs["other"].run(serve_minilm, key, True),
        *await jobs["one"].run(serve_minilm, f"{key} again", False),
    ]
    nbytes = (await ts.stat(key)).nbytes
    assert [size < 0.6 * nbytes for size, _ in found] == [True, True, False]
    for _, vectors in found:
        torch.testing.assert_close(torch.tensor(vectors), torch.tensor(expected))
