"""A server in the test's own process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

import torchstore_core as ts
from torchstore_core.server.server import Server, ServerOptions

__all__ = ["CAPACITY", "ServerThread", "connected", "server"]

CAPACITY = 64 << 20


class ServerThread:
    """A server on an event loop of its own, in this process."""

    def __init__(self, **options: Any) -> None:
        self._options = ServerOptions(capacity=CAPACITY, prefault=0, **options)
        self._ready = threading.Event()
        self.address = ""
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self._thread.start()
        assert self._ready.wait(60)
        assert self.address

    async def _run(self) -> None:
        try:
            self._loop = asyncio.get_running_loop()
            self.server = Server(self._options)
            self.address = await self.server.start()
            self._ready.set()
            await self.server.serve()
            await self.server.close()
        finally:
            self._ready.set()

    def __enter__(self) -> ServerThread:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self.server.stop_soon)
            self._thread.join(60)
        assert not self._thread.is_alive()


@asynccontextmanager
async def connected(address: str, **arguments: Any) -> AsyncIterator[ts.Client]:
    """A client of a store, besides the default one."""
    client = await ts.connect(address, store_name="here", timeout=20, **arguments)
    try:
        yield client
    finally:
        await ts.shutdown("here")


@pytest.fixture
def server() -> Iterator[ServerThread]:
    """A store in this process."""
    with ServerThread() as made:
        yield made
