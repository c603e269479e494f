"""ShardedTensors, the predecessors of DTensors, which FSDP1 and torchrec still have."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.integration.dtensors.ranks import Jobs, Nursery
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import torchstore_core as ts

pytestmark = pytest.mark.usefixtures("shared")


@pytest.fixture(scope="module")
def jobs() -> Iterator[Jobs]:
    with Nursery(__name__) as nursery:
        yield nursery.jobs


# ---- what the ranks do --------------------------------------------------------------------


def sharded(full: torch.Tensor, ranks: list[int], dim: int) -> Any:
    """Chunks of ``full`` on these ranks, as ``torch.chunk`` makes them."""
    places: list[Any] = [f"rank:{rank}/cpu" for rank in ranks]
    made = sharded_tensor.empty(ChunkShardingSpec(dim=dim, placements=places), *full.shape)
    for shard in made.local_shards():
        at = shard.metadata
        box = [slice(o, o + n) for o, n in zip(at.shard_offsets, at.shard_sizes, strict=True)]
        shard.tensor.copy_(full[tuple(box)])
    return made


def values(made: Any) -> list[torch.Tensor]:
    return [shard.tensor for shard in made.local_shards()]


def weights() -> dict[str, torch.Tensor]:
    shapes = {"w": (7, 10), "tall": (11, 3), "small": (1, 3)}
    return {name: torch.arange(float(m * n)).view(m, n) for name, (m, n) in shapes.items()}


async def publish(key: str, ranks: list[int], dim: int) -> int:
    state = {name: sharded(full, ranks, dim) for name, full in weights().items()}
    return (await ts.put_state_dict(state, key)).version


async def read(key: str, ranks: list[int], dim: int) -> None:
    """Into ShardedTensors of another layout, and into DTensors."""
    expected = {name: sharded(full, ranks, dim) for name, full in weights().items()}
    state = {name: sharded(full * 0, ranks, dim) for name, full in weights().items()}
    assert await ts.get_state_dict(key, state) is state
    for name, made in state.items():
        for mine, right in zip(values(made), values(expected[name]), strict=True):
            assert torch.equal(mine, right)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for name, full in weights().items():
        empty = distribute_tensor(full * 0, mesh, [Shard(1 - dim)])
        found = await ts.get(f"{key}/{name}", empty)
        assert isinstance(found, DTensor)
        assert torch.equal(found.full_tensor(), full)


async def put_one(key: str, dim: int) -> int:
    full = weights()["w"]
    ref = await ts.put(key, sharded(full, list(range(dist.get_world_size())), dim))
    return ref.version


# ---- tests --------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [0, 1])
async def test_a_state_dict_of_any_ranks_is_read_by_any_others(jobs: Jobs, dim: int) -> None:
    key = f"sharded-{dim}"
    assert await jobs["four"].run(publish, key, [0, 1, 2, 3], dim) == [1] * 4
    await jobs["two"].run(read, key, [1, 0], 1 - dim)
    whole = await ts.get_state_dict(key)
    assert all(torch.equal(whole[name], full) for name, full in weights().items())
    assert await jobs["two"].run(publish, key, [1, 0], dim) == [2, 2]  # ranks in another order
    await jobs["four"].run(read, key, [3, 1, 0, 2], dim)


async def test_ranks_without_a_shard_are_not_waited_for(jobs: Jobs) -> None:
    assert await jobs["four"].run(publish, "some", [2, 0], 0) == [1, 0, 1, 0]
    assert torch.equal((await ts.get_state_dict("some"))["w"], weights()["w"])


async def test_a_single_one(jobs: Jobs) -> None:
    assert await jobs["two"].run(put_one, "single", 1) == [1, 1]
    assert torch.equal(await ts.get("single"), weights()["w"])
