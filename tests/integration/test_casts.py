"""Casts of state dicts, on every way that bytes take and for every kind of tensor: none is
forgotten, and none is made that was not asked for. (For those of ranks see ``dtensors``.)
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import torch
from tests.integration.test_freed_storage import WAYS, one_rank, server  # noqa: F401 - a fixture
from tests.support import bits, running_store
from torch.distributed.tensor import DTensor, Shard

import torchstore_core as ts

#: Stores whose bytes go elsewhere: over a network, to several volumes, to two of them each.
STORES: dict[str, dict[str, Any]] = {
    "tcp": {"prefer": ["tcp"], "block": ["inline"]},
    "volumes": {"num_storage_volumes": 3, "strategy": "hash"},
    "copies": {"num_storage_volumes": 2, "strategy": "replicated"},
}
STORED = torch.bfloat16
ROWS, COLUMNS = 300, 256  # too many for a message
MANY = 150  # small ones, which would go in columns


@pytest.fixture(params=[*WAYS, *STORES])
async def client(server: Any, request: pytest.FixtureRequest) -> AsyncIterator[ts.Client]:  # noqa: F811
    if request.param in STORES:
        async with running_store(store_name="casts", **STORES[request.param]) as made:
            yield made
    else:
        block = WAYS[request.param]
        made = await ts.connect(server.address, store_name="casts", block=block)
        yield made
        await made.delete_batch(await made.keys())
        await ts.shutdown("casts")


def large() -> torch.Tensor:
    return torch.randn(ROWS, COLUMNS)


def floating(mesh: Any) -> dict[str, Any]:
    """Values that are cast: plain ones, strided ones, those of autograd and of inference mode, and
    shards.
    """
    with torch.inference_mode():
        inferred = large()
    sharded = DTensor.from_local(large(), mesh, [Shard(0)])
    box = ts.TensorSlice((0, 0), (ROWS, COLUMNS), (ROWS, COLUMNS))
    table = large()
    return {
        "large": large(),
        "rows": large()[5:90],
        "columns": large()[:, ::3],
        "transposed": large().t(),
        "expanded": torch.randn(1, COLUMNS).expand(ROWS, -1),
        "parameter": torch.nn.Parameter(large()),
        "inferred": inferred,
        "double": large().double(),
        "dtensor": sharded,
        "dtensor parameter": torch.nn.Parameter(sharded.clone()),
        "shard": ts.TensorShard(large(), box),
        "tied": table,
        "head": table,
        "scalar": torch.tensor(0.3),
        "nothing": torch.empty(0, 3),
        **{f"bias {at:03}": torch.randn(16 + at % 3) for at in range(MANY)},
    }


def kept() -> dict[str, Any]:
    """Values that stay as they are, whatever is asked for."""
    return {
        "step": torch.tensor(12345678),
        "mask": large() > 0,
        "complex": torch.complex(large(), large()),
        "bytes": torch.arange(250).to(torch.uint8),
        "rate": 0.3,
        **{f"index {at:03}": torch.arange(at, at + 16) for at in range(MANY)},
    }


def plain(value: Any) -> torch.Tensor:
    if isinstance(value, ts.TensorShard):
        return value.tensor
    return (value.to_local() if isinstance(value, DTensor) else value).detach()


def same(got: Any, expected: torch.Tensor) -> bool:
    alike = (got.dtype, got.shape) == (expected.dtype, expected.shape)
    return alike and torch.equal(bits(got), bits(expected))


def room_for(value: Any, dtype: torch.dtype) -> Any:
    """A destination of another dtype, with the layout of the value, that is not contiguous."""
    shape = plain(value).shape
    room = torch.zeros(*shape, 2, dtype=dtype)[..., 1]
    if isinstance(value, ts.TensorShard):
        return ts.TensorShard(room, value.tensor_slice)
    if isinstance(value, DTensor):
        return DTensor.from_local(room, value.device_mesh, value.placements)
    return room


@pytest.mark.parametrize("blocking", [True, False], ids=["blocking", "in the background"])
async def test_every_floating_point_value_is_cast_and_nothing_else(
    client: ts.Client, blocking: bool
) -> None:
    """Many together, which may go in columns, and each alone; also if there is nothing to put."""
    with one_rank() as mesh:
        values, others = floating(mesh), kept()
        every = values | others
        alone = [name for name in every if not name.endswith(tuple("123456789"))]
        for state_dict in (every, {}, *({name: every[name]} for name in alone)):
            pending: Any = await client.put_state_dict(
                state_dict, "k", transfer_dtype=STORED, blocking=blocking
            )
            if not blocking:
                await pending
            got = await client.get_state_dict("k")
            assert got.keys() == state_dict.keys()
            for name in state_dict:
                if name in values:
                    assert same(got[name], plain(values[name]).to(STORED)), name
                elif isinstance(others[name], torch.Tensor):
                    assert same(got[name], others[name]), name
                else:
                    assert got[name] == others[name]
            if state_dict is every:
                assert got["tied"].data_ptr() == got["head"].data_ptr()
                once = [plain(value) for name, value in values.items() if name != "head"]
                nbytes = sum(STORED.itemsize * tensor.numel() for tensor in once)
                nbytes += sum(t.nbytes for t in others.values() if isinstance(t, torch.Tensor))
                rest = (await client.stat("k")).nbytes - nbytes
                assert 0 < rest < 16  # of what is no tensor


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16], ids=str)
async def test_every_destination_is_cast_to_if_that_is_asked_for(
    client: ts.Client, dtype: torch.dtype
) -> None:
    with one_rank() as mesh:
        values = floating(mesh)
        await client.put_state_dict(values, "k", transfer_dtype=STORED)

        def mine() -> dict[str, Any]:
            return {name: room_for(value, dtype) for name, value in values.items()}

        into = mine()
        with pytest.raises(ts.LayoutMismatchError, match=rf"{len(values)} mismatched"):
            await client.get_state_dict("k", into)
        assert not any(plain(value).any() for value in into.values())
        before = dict(into)
        await client.get_state_dict("k", into, cast=True)
        for name, value in values.items():
            assert into[name] is before[name]
            assert same(plain(into[name]), plain(value).to(STORED).to(dtype)), name
