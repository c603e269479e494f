"""A server and volumes that attach to it over real sockets, in a thread of the test's."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.unit.remote.relays import Backstage

import torchstore_core as ts
from torchstore_core.plugins.registry import Registry
from torchstore_core.server.memory.volume import Volume
from torchstore_core.server.remote.attached import VolumeConnection
from torchstore_core.server.remote.spill_files import VolumeFile
from torchstore_core.server.server import Server, ServerOptions

__all__ = ["CAPACITY", "Attached", "attached"]

CAPACITY = 64 << 20


class Attached:
    """A server and its volumes, whose lines are real: on one event loop of a thread."""

    def __init__(self, stage: Backstage, base: Path, volumes: int, options: dict[str, Any]) -> None:
        self.stage = stage
        self.base = base
        self.count = volumes
        self.options = ServerOptions(
            num_storage_volumes=volumes,
            attached=True,
            directory=str(base),
            **{"prefault": 0, "strategy": "spread", **options},
        )
        self.volumes: list[Volume] = []
        self.lines: list[VolumeConnection] = []
        self.gone: list[int] = []

    async def start(self) -> None:
        self.server = Server(self.options)
        self.address = await self.server.start()

    async def attach(
        self, index: int, store_name: str = "torchstore", capacity: int = CAPACITY
    ) -> None:
        volume = Volume(store_name, index, capacity, Registry(), str(self.base / f"{index}"))
        (self.base / f"{index}").mkdir(exist_ok=True)
        self.volumes.append(volume)
        spill = None
        if self.options.spill is not None:
            share = self.options.spill_capacity and self.options.spill_capacity // self.count
            spill = VolumeFile(self.options.spill, share, self.count, volume.memory.fd)
        line = await VolumeConnection.open(
            self.address.partition(":")[2],
            volume,
            await volume.start(),
            lambda: self.gone.append(index),
            10,
            spill,
        )
        self.lines.append(line)

    async def close(self) -> None:
        for line in self.lines:
            line.close()
        await self.server.close()
        for volume in self.volumes:
            await volume.close()


@asynccontextmanager
async def attached(
    stage: Backstage, base: Path, volumes: int = 1, **options: Any
) -> AsyncIterator[Attached]:
    """Its volumes are not attached yet."""
    made = Attached(stage, base, volumes, options)
    stage.do(made.start())
    try:
        yield made
    finally:
        await ts.shutdown("attached")
        stage.do(made.close())
