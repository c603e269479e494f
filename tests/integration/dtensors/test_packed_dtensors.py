"""Packed state dicts of DTensors in real gloo process groups: put by one layout, got by another."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from pathlib import Path

import torch
from tests.processes import Script
from tests.trees import assert_same

import torchstore_core as ts

#: In every process the same values, so that nobody has to send them.
VALUES = """
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
mesh = init_device_mesh("cpu", (world,))
W = torch.arange(13 * 7.0).reshape(13, 7)
S = torch.arange(8 * 3.0).reshape(8, 3)
"""

PUBLISH = """
from torch.distributed.tensor.placement_types import _StridedShard

interleaved = _StridedShard(0, split_factor=2)
own = interleaved._split_tensor(S, world, with_padding=False)[0][rank].clone()
model = {
    "layers": [{"w": distribute_tensor(W, mesh, [Shard(0)], src_data_rank=None)}],
    "norm": distribute_tensor(torch.ones(5), mesh, [Replicate()], src_data_rank=None),
    "strided": DTensor.from_local(
        own, mesh, [interleaved], run_check=False, shape=S.shape, stride=S.stride()
    ),
    "step": 3,
}
packed = ts.TorchStoreStateDict.from_state_dict(model)
assert packed.participants == 2 and packed.participant == str(rank)
assert sum(r.nbytes for parts in packed.references.values() for r in parts) < 7 * 28 + 20 + 48 + 1
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
columns = distribute_tensor(torch.zeros_like(W), mesh, [Shard(1)], src_data_rank=None)
try:
    packed.to_state_dict({**model, "layers": [{"w": columns}]})
    raise SystemExit("it was filled")
except ts.LayoutMismatchError as error:
    assert list(error.details["mismatched"]) == ["layers.0.w"]
await ts.get("m/layers.0.w", columns)
assert torch.equal(columns.full_tensor(), W)
dist.destroy_process_group()
"""

FETCH = """
for placement in (Shard(1), Shard(0), Replicate()):
    mine = distribute_tensor(torch.zeros_like(W), mesh, [placement], src_data_rank=None)
    assert await ts.get("m/layers.0.w", mine) is mine
    assert torch.equal(mine.full_tensor(), W), placement
    mine = distribute_tensor(torch.zeros_like(S), mesh, [placement], src_data_rank=None)
    await ts.get("m/strided", mine)
    assert torch.equal(mine.full_tensor(), S), placement
dist.destroy_process_group()
"""


async def run_ranks(world: int, body: str, folder: Path) -> None:
    """``body`` in ``world`` processes, which are one process group."""
    meeting = folder / f"meeting of {world}"
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(
                Script(
                    f"rank, world = {rank}, {world}\n"
                    f"meeting, folder = {str(meeting)!r}, {str(folder)!r}\n{VALUES}{body}"
                )
            )
            for rank in range(world)
        ]
        await asyncio.gather(*[rank.output(80) for rank in ranks])


async def test_ranks_put_packed_shards_and_others_fetch_one_entry_in_another_layout(
    store, tmp_path
):
    await run_ranks(2, PUBLISH, tmp_path)
    await run_ranks(3, FETCH, tmp_path)

    whole = torch.arange(13 * 7.0).reshape(13, 7)
    strided = torch.arange(8 * 3.0).reshape(8, 3)
    expected = {"layers": [{"w": whole}], "norm": torch.ones(5), "strided": strided, "step": 3}
    assert_same((await ts.get("m")).to_state_dict(), expected)

    # The files of both ranks, put by one process that is no rank.
    for rank in (0, 1):
        packed = ts.TorchStoreStateDict.load(tmp_path / str(rank), mmap=bool(rank))
        assert await ts.put("from files", packed) == ts.ObjectRef("from files", 1)
    assert_same((await ts.get("from files")).to_state_dict(), expected)
