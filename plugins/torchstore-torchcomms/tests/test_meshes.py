"""DTensors on meshes that torchcomms made are put and got like any other."""

from __future__ import annotations

import asyncio

import pytest
import torch
from tests.processes import Script
from tests.support import free_port, running_store

import torchstore_core as ts
from torchstore_torchcomms.plugin import torchstore_transport

_probe = torchstore_transport().probe
if _probe is not None and (reason := _probe()) is not None:
    pytest.skip(reason, allow_module_level=True)

_RANK = """
    import os, warnings
    os.environ.update(
        RANK="{rank}", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="{port}",
        RES_OPTIONS="timeout:1 attempts:1", GLOG_minloglevel="2",
    )
    import torchcomms
    from torch.distributed.tensor import DTensor, Shard
    from torchcomms.device_mesh import init_device_mesh

    here = dict(hostname="127.0.0.1")
    comm = torchcomms.new_comm("gloo", torch.device("cpu"), "mesh", hints=here)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, about torchcomms
        mesh = init_device_mesh(mesh_dim_comms=(comm,), mesh_dim_names=("dp",))
    client = await ts.connect({address!r}, prefer=["torchcomms"])

    full = torch.arange(1 << 20).view(1024, 1024)
    rows = DTensor.from_local(full.chunk(2)[{rank}].clone(), mesh, [Shard(0)])
    await client.put("d", rows, version=1)
    await client.wait("d", min_version=1)
    columns = DTensor.from_local(torch.zeros(1024, 512, dtype=torch.int64), mesh, [Shard(1)])
    await client.get("d", columns)
    assert torch.equal(columns.to_local(), full.chunk(2, dim=1)[{rank}])
    assert {{e["chosen"] for e in await client.explain()}} == {{"torchcomms"}}
    assert os.environ["RANK"] == "{rank}" and "TORCHCOMM_RANK" not in os.environ
    print("done", flush=True)
    os._exit(0)  # the communicator of the mesh would wait for its peer
    """


async def test_two_ranks() -> None:
    async with running_store() as client:
        address, port = await ts.address(), free_port()
        bodies = [_RANK.format(rank=rank, port=port, address=address) for rank in (0, 1)]
        with Script(bodies[0]) as first, Script(bodies[1]) as second:
            assert await asyncio.gather(first.output(), second.output()) == ["done\n", "done\n"]
        assert torch.equal(await client.get("d"), torch.arange(1 << 20).view(1024, 1024))
