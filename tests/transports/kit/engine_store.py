"""The volume of a store of the engine, as endpoints of the conformance kit: for a transport whose
halves work between actors only. This process is the root of the job.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
from pathlib import Path
from typing import Any

import torchstore_core as ts
from torchstore_core.plugins.registry import Registry
from torchstore_core.testing.transports.ends.endpoints import SEGMENT, Endpoints
from torchstore_core.testing.transports.ends.host import Plugin
from torchstore_core.testing.transports.ends.session import Reach, Session

NAME = "kit-engine"


class _StoreSession(Session):
    """The client that this process is for the store: its links go through actors, and nothing that
    has to be asked of the server half.
    """

    async def handshake(self, request: bytes) -> bytes:
        raise ts.TransportUnavailableError("this transport has no handshake")

    async def disconnect(self) -> None:
        return

    async def registered(self) -> int:
        return 0


class StoreEndpoints(Endpoints):
    """A store with one volume in another process."""

    def __init__(self, plugin: Plugin) -> None:
        names = Registry().installed("torchstore.transports")
        arguments: dict[str, Any] = {"runtime": "monarch", "capacity": SEGMENT, "prefault": 0}
        arguments["block"] = [name for name in names if name != plugin.name]
        self._taken = 0
        self._started = asyncio.run(_start(arguments))
        volume, control = self._started
        self.reach = Reach(
            plugin, control, volume.topology, True, volume.offers.get(plugin.name, b"")
        )
        self.refusal = "" if plugin.name in volume.offers else "no offer"
        self.root = volume.pid
        self.nbytes = volume.capacity_bytes
        fd = _segment(volume.pid, volume.id)
        self.memory = mmap.mmap(fd, self.nbytes)
        os.close(fd)

    def take(self, nbytes: int) -> int:
        if self._taken + nbytes + 8192 > self.nbytes:
            self._taken = 0
        offset = self._taken + 13
        self._taken += nbytes + 8192
        return offset

    def session(self) -> Session:
        return _StoreSession(self.reach)

    def close(self) -> None:
        self.memory.close()
        asyncio.run(ts.shutdown(NAME))


async def _start(arguments: dict[str, Any]) -> Any:
    client = await ts.initialize(store_name=NAME, timeout=60, **arguments)
    session = await client._joined.session(10)
    (volume,) = session.volumes
    return volume.info, volume.context.control


def _segment(pid: int, volume: str) -> int:
    """A descriptor of the memory of a volume of another process."""
    for file in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it was just closed
            if f"memfd:torchstore:{volume} " in f"{file.readlink()} ":
                return os.open(file, os.O_RDWR)
    raise AssertionError(f"process {pid} has no memory of {volume}")
