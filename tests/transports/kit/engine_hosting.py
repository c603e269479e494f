"""What the server half of ``monarch-rpc`` needs beside a volume, without an engine: the agent of a
host, which calls the endpoints of the volume's actor. Here the call is all that is left of that.
"""

from __future__ import annotations

from typing import Any

from torchstore_core.testing.transports.ends.host import Answer, Ask, Hosting, Opened
from torchstore_monarch.actors.hosting import Host, hosting
from torchstore_monarch.protocol import outcome
from torchstore_monarch.rpc.forwarder import Forwarder
from torchstore_monarch.rpc.server import RpcServer


class _Endpoint:
    def __init__(self, work: Any) -> None:
        self._work = work

    async def call_one(self, volume: str, *args: Any) -> Any:
        async def work() -> Any:
            return await self._work(*args)

        return await outcome(work())


class _Actor:
    def __init__(self, half: RpcServer) -> None:
        self.read = _Endpoint(half.read)
        self.write = _Endpoint(half.write)


class RpcHosting(Hosting):
    """A volume, and an agent in the same process."""

    async def open(self) -> Opened:
        self._forwarder = Forwarder(self.order.directory)
        with hosting(Host(self.order.store_name, self._agent_of)):
            opened = await super().open()
        self._forwarder.volumes = {self.volume.id: _Actor(RpcServer.of(self.volume.id))}
        await self._forwarder.start()
        return opened

    async def _agent_of(self, peer: bytes) -> str:
        return self._forwarder.path

    async def open_another(self) -> Opened:
        with hosting(Host(self.order.store_name, self._agent_of)):
            opened = await super().open_another()
        name = self.volumes[opened.volume].id
        self._forwarder.volumes[name] = _Actor(RpcServer.of(name))
        return opened

    async def close(self) -> None:
        await self._forwarder.close()
        await super().close()

    async def _call(self, ask: Ask) -> Answer:
        if ask.method == "close" and ask.volume == 0:
            await self._forwarder.close()
        return await super()._call(ask)
