"""The volume of a store of the engine, as endpoints of the conformance kit: for a transport whose
halves work between actors only. This process is the root of the job.
"""

from __future__ import annotations

import asyncio
import itertools
import mmap
import os
from typing import Any

from tests.support import open_files

import torchstore_core as ts
from torchstore_core.clients.session.session import Session as StoreSession
from torchstore_core.plugins.ranking import Policy
from torchstore_core.plugins.registry import Registry
from torchstore_core.testing.transports.ends.endpoints import SEGMENT, Endpoints
from torchstore_core.testing.transports.ends.host import Answer, Plugin
from torchstore_core.testing.transports.ends.session import Reach, Session

_numbers = itertools.count()


class _StoreSession(Session):
    """A session of the store. What the server half is asked goes through the store's server."""

    def __init__(self, reach: Reach, store: str) -> None:
        super().__init__(reach)
        self._store = store
        self._address = reach.control
        self._session: StoreSession | None = None
        self._loop: asyncio.AbstractEventLoop | None = None  # the one that has opened it

    async def _ask(self, method: str, data: bytes = b"") -> Answer:
        if method == "close":
            await ts.shutdown(self._store)
            return Answer(0)
        try:
            if self._session is None:
                policy = Policy.make()
                self._session = await StoreSession.open(self._address, policy, 10, None, "")
                self._loop = asyncio.get_running_loop()
            (volume,) = self._session.volumes
            if method == "handshake":
                return Answer(0, await volume._handshake(self.spec.name, data))
            if method == "disconnect":
                await self._session.settle(volume.info.index, self.spec.name)
        except ts.StoreClosedError as error:
            raise ts.TransportUnavailableError("the volume is gone") from error
        return Answer(0)

    async def leave_loop(self) -> None:
        if self._session is not None and self._loop is asyncio.get_running_loop():
            self._session.close()
            self._session = None


class StoreEndpoints(Endpoints):
    """A store of its own, with one volume in another process."""

    def __init__(self, plugin: Plugin) -> None:
        names = Registry().installed("torchstore.transports")
        arguments: dict[str, Any] = {"runtime": "monarch", "capacity": SEGMENT, "prefault": 0}
        arguments["block"] = [name for name in names if name != plugin.name]
        self._taken = 0
        self._name = f"kit-engine-{next(_numbers)}"
        volume, control = asyncio.run(_start(self._name, arguments))
        self.reach = Reach(
            plugin, control, volume.topology, True, volume.offers.get(plugin.name, b"")
        )
        self.refusal = "" if plugin.name in volume.offers else "no offer"
        self.root = volume.pid
        self.nbytes = volume.capacity_bytes
        fd = _segment(volume.pid, volume.id)
        self.segments = [mmap.mmap(fd, self.nbytes)]
        found = os.fstat(fd)
        self._files = {(found.st_dev, found.st_ino)}
        os.close(fd)

    def take(self, nbytes: int) -> int:
        if self._taken + nbytes + 8192 > self.nbytes:
            self._taken = 0
        offset = self._taken + 13
        self._taken += nbytes + 8192
        return offset

    def session(self) -> Session:
        return _StoreSession(self.reach, self._name)

    def close(self) -> None:
        self.segments[0].close()
        asyncio.run(ts.shutdown(self._name))


async def _start(name: str, arguments: dict[str, Any]) -> Any:
    client = await ts.initialize(store_name=name, timeout=60, **arguments)
    session = await client._joined.session(10)
    (volume,) = session.volumes
    return volume.info, session.address


def _segment(pid: int, volume: str) -> int:
    """A descriptor of the memory of a volume of another process."""
    for link, file in open_files(pid).items():
        if f"memfd:torchstore:{volume} " in f"{file} ":
            return os.open(link, os.O_RDWR)
    raise AssertionError(f"process {pid} has no memory of {volume}")
