"""Commands of a rank: its parts of a state dict, through files of torch.distributed.checkpoint."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

import torch
from inputs import layouts
from measured.dicts import Dicts

from torchstore_cli.bench import workload
from torchstore_core import TensorShard

_PATIENCE = timedelta(seconds=60)


class Checkpoints:
    """Commands on the parts that ``dicts`` holds, as a rank of a gloo group; the tensors that are
    saved and loaded are DTensors on the very memory of the parts.
    """

    def __init__(self, dicts: Dicts) -> None:
        self._dicts = dicts
        self._state: dict[str, Any] = {}

    def join(self, meeting: str, rank: int, world: int, layout: str) -> None:
        """Make the group (by a file that all its ranks name) and the DTensors."""
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Replicate, Shard

        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group(
            "gloo", init_method=f"file://{meeting}", rank=rank, world_size=world, timeout=_PATIENCE
        )
        mesh = init_device_mesh("cpu", (world,))
        (part,) = self._dicts.parts
        for name, value in part.items():
            if not isinstance(value, TensorShard):
                raise TypeError(f"{name} is no shard")
            shape = torch.Size(value.tensor_slice.global_shape)
            dim = layouts.DIMS[layout]
            self._state[name] = DTensor.from_local(
                value.tensor,
                mesh,
                [Shard(dim) if dim < len(shape) else Replicate()],
                run_check=False,
                shape=shape,
                stride=torch.empty(shape, dtype=workload.DTYPE, device="meta").stride(),
            )

    def leave(self) -> None:
        """End the group."""
        import torch.distributed as dist

        self._state = {}
        dist.destroy_process_group()

    def save(self, folder: str) -> dict[str, float]:
        """One checkpoint, of all ranks together."""
        import torch.distributed.checkpoint as dcp

        start = time.perf_counter()
        dcp.save(self._state, checkpoint_id=folder)
        return {"start": start, "end": time.perf_counter()}

    def load(self, folder: str) -> dict[str, float]:
        """Fill the DTensors in place from a checkpoint."""
        import torch.distributed.checkpoint as dcp

        start = time.perf_counter()
        dcp.load(self._state, checkpoint_id=folder)
        return {"start": start, "end": time.perf_counter()}
