"""A store with volumes in processes of their own, which can be killed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from multiprocessing.process import BaseProcess
from typing import Any

import psutil
import torch
from tests.processes import fork
from tests.support import open_files, until

import torchstore_core as ts
from torchstore_core.contracts.strategy import Strategy
from torchstore_core.plugins.registry import Registry
from torchstore_core.plugins.strategy_data import encode_strategy
from torchstore_core.server.memory.volume import Volume
from torchstore_core.server.remote.attached import VolumeConnection
from torchstore_core.server.server import Server, ServerOptions

__all__ = [
    "COPIER",
    "LARGE",
    "MB",
    "VOLUMES",
    "Store",
    "connected",
    "data",
    "lost",
    "repaired",
    "store_of",
]

LARGE = 300_000
COPIER = "torchstore_core.clients.copying"
REPAIRED_S = 60.0
VOLUMES = 3
MB = 1 << 20


def _volume(path: str, index: int, directory: str, capacity: int) -> None:
    """A volume in a process of its own, until its server is gone."""

    async def main() -> None:
        ended = asyncio.Event()
        volume = Volume("lossy", index, capacity, Registry(), directory)
        await VolumeConnection.open(path, volume, await volume.start(), ended.set, 30)
        await ended.wait()
        await volume.close()

    asyncio.run(main())


class Store:
    """A server on a thread, and its volumes, which can be killed or hidden.

    Args:
        capacities: of the volumes, in bytes.
        options: others of ``ServerOptions``.
    """

    def __init__(
        self, strategy: Strategy, capacities: Sequence[int] = (64 * MB,) * VOLUMES, **options: Any
    ) -> None:
        self._capacities = capacities
        self._sockets = [tempfile.mkdtemp() for _ in capacities]
        name, fields = encode_strategy(strategy)
        self._options = ServerOptions(
            store_name="lossy",
            num_storage_volumes=len(capacities),
            attached=True,
            prefault=0,
            strategy=name,
            strategy_fields=fields,
            **options,
        )
        self.address = ""
        self._ready = threading.Event()
        self._volumes: list[BaseProcess] = []
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self._thread.start()
        assert self._ready.wait(60)
        assert self.address

    async def _run(self) -> None:
        try:
            self._loop = asyncio.get_running_loop()
            self._server = Server(self._options)
            address = await self._server.start()
            path = address.partition(":")[2]
            self._volumes = [
                fork(_volume, path, i, directory, size, files={}, environment=os.environ)
                for i, (directory, size) in enumerate(
                    zip(self._sockets, self._capacities, strict=True)
                )
            ]
            await self._server.attached(30)
            self.address = address
            self._ready.set()
            await self._server.serve()
        finally:
            await self._server.close()
            self._ready.set()

    def kill(self, index: int) -> None:
        self._volumes[index].kill()
        self._volumes[index].join()

    def hide(self, index: int) -> None:
        """Nobody who has no link to the volume can make one. It lives on."""
        shutil.rmtree(self._sockets[index])

    def copiers(self) -> list[psutil.Process]:
        """The processes that copy for the store."""
        found: list[psutil.Process] = []
        for volume in self._volumes:
            if volume.exitcode is None:
                for child in psutil.Process(volume.pid).children():
                    with contextlib.suppress(psutil.Error):
                        if COPIER in child.cmdline():
                            found.append(child)
        return found

    def target(self) -> int | None:
        """A volume beside which a process copies for the store."""
        pids = [volume.pid for volume in self._volumes]
        for copier in self.copiers():
            with contextlib.suppress(psutil.Error):
                return pids.index(copier.ppid())
        return None

    def written(self) -> int:
        """The bytes of memory of living volumes that were ever written to, in whole pages."""
        nbytes = 0
        for volume in self._volumes:
            if volume.exitcode is None:
                for link, file in open_files(volume.pid).items():
                    if "memfd:torchstore:lossy-" in file:
                        with contextlib.suppress(FileNotFoundError):  # others come and go
                            nbytes += os.stat(link).st_blocks * 512
        return nbytes

    def stop(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._server.stop_soon)
            self._thread.join(60)
        for volume in self._volumes:
            volume.join(60)
            volume.kill()
            volume.join()
        for directory in self._sockets:
            shutil.rmtree(directory, ignore_errors=True)
        assert not self._thread.is_alive()


@contextmanager
def store_of(strategy: Strategy, *arguments: Any, **options: Any) -> Iterator[Store]:
    made = Store(strategy, *arguments, **options)
    try:
        yield made
    finally:
        made.stop()


@asynccontextmanager
async def connected(store: Store, **arguments: Any) -> AsyncIterator[ts.Client]:
    client = await ts.connect(store.address, store_name="here", timeout=20, **arguments)
    try:
        yield client
    finally:
        await ts.shutdown("here")


async def repaired(client: ts.Client) -> None:
    """Nothing lacks copies any more."""

    async def done() -> bool:
        repair = (await client.status()).repair
        return not (repair.values or repair.scanning)

    await until(done, REPAIRED_S)


async def lost(client: ts.Client, count: int) -> None:
    async def so_many() -> bool:
        return sum(bool(v.lost) for v in (await client.status()).volumes) == count

    await until(so_many)


def data(seed: int, nbytes: int = LARGE) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)
