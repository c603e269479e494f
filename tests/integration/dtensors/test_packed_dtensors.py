"""Packed state dicts of DTensors in real gloo process groups: put by one layout, got by another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.integration.dtensors.layouts import mesh_of
from tests.integration.dtensors.ranks import Nursery, Ranks
from tests.trees import assert_same
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import torchstore_core as ts

# In every process the same values, so that nobody has to send them.
W = torch.arange(13 * 7.0).reshape(13, 7)
S = torch.arange(8 * 3.0).reshape(8, 3)


# ---- what the ranks do --------------------------------------------------------------------


def distributed(value: torch.Tensor, placement: Any) -> DTensor:
    mesh = mesh_of((dist.get_world_size(),))
    return distribute_tensor(value, mesh, [placement], src_data_rank=None)


async def publish(folder: str) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    interleaved = _StridedShard(0, split_factor=2)
    own = interleaved._split_tensor(S, world, with_padding=False)[0][rank].clone()
    model: dict[str, Any] = {
        "layers": [{"w": distributed(W, Shard(0))}],
        "norm": distributed(torch.ones(5), Replicate()),
        "strided": DTensor.from_local(
            own, mesh_of((world,)), [interleaved], run_check=False, shape=S.shape, stride=S.stride()
        ),
        "step": 3,
    }
    packed = ts.TorchStoreStateDict.from_state_dict(model)
    assert packed.participants == 2
    assert packed.participant == str(rank)
    assert sum(r.nbytes for parts in packed.references.values() for r in parts) < 7 * 28 + 69
    assert len(packed.references["strided"]) == 2  # its rows are not neighbours

    # Training goes on; the snapshot does not see it, and can undo it.
    for value in (model["layers"][0]["w"], model["norm"], model["strided"]):
        value.to_local().zero_()
    await ts.put("m", packed)
    await ts.wait("m", min_version=1)
    packed.save(f"{folder}/{rank}")
    assert packed.to_state_dict(model) is model
    assert torch.equal(model["layers"][0]["w"].full_tensor(), W)
    assert torch.equal(model["strided"].to_local(), own)

    # What is not here cannot be filled: another layout needs the store.
    columns = distributed(torch.zeros_like(W), Shard(1))
    with pytest.raises(ts.LayoutMismatchError) as caught:
        packed.to_state_dict({**model, "layers": [{"w": columns}]})
    assert list(caught.value.details["mismatched"]) == ["layers.0.w"]
    await ts.get("m/layers.0.w", columns)
    assert torch.equal(columns.full_tensor(), W)


async def fetch() -> None:
    for placement in (Shard(1), Shard(0), Replicate()):
        mine = distributed(torch.zeros_like(W), placement)
        assert await ts.get("m/layers.0.w", mine) is mine
        assert torch.equal(mine.full_tensor(), W), placement
        mine = distributed(torch.zeros_like(S), placement)
        await ts.get("m/strided", mine)
        assert torch.equal(mine.full_tensor(), S), placement


# ---- the test -----------------------------------------------------------------------------


async def test_ranks_put_packed_shards_and_others_fetch_one_entry_in_another_layout(
    store: ts.Client, tmp_path: Path
) -> None:
    with Nursery(__name__) as nursery:
        await nursery.jobs["two"].run(publish, str(tmp_path))
        three = Ranks(nursery, 3)
        try:
            await three.run(fetch)
        finally:
            three.kill()

    expected = {"layers": [{"w": W}], "norm": torch.ones(5), "strided": S, "step": 3}
    assert_same((await ts.get("m")).to_state_dict(), expected)

    # The files of both ranks, put by one process that is no rank.
    for rank in (0, 1):
        packed = ts.TorchStoreStateDict.load(tmp_path / str(rank), mmap=bool(rank))
        assert await ts.put("from files", packed) == ts.ObjectRef("from files", 1)
    assert_same((await ts.get("from files")).to_state_dict(), expected)
