"""Stores of one host: rank 0 starts a server process, which outlives it while others use it."""

from __future__ import annotations

import asyncio
import threading

import msgspec

from torchstore_core.clients.calls.thread_loops import in_thread
from torchstore_core.contracts.engine import RankStore, Rendezvous
from torchstore_core.contracts.ranks import SPMDEnv
from torchstore_core.contracts.runtime import StoreOptions
from torchstore_core.runtimes.local import LocalRuntime
from torchstore_spmd.identity import ProcessIdentity

__all__ = ["OneHostStore", "start"]

_POLL_S = 0.005
_END_FAILED_S = 3.0


class _Server(msgspec.Struct, frozen=True):
    """The server, as rank 0 announces it to the other ranks.

    Args:
        process: of the server, or of its keeper, with which it ends.
    """

    address: str
    process: ProcessIdentity


async def start(options: StoreOptions, env: SPMDEnv, rendezvous: Rendezvous) -> OneHostStore:
    """Start a store for ranks on one host, as ``Engine.spmd`` does for ranks on several."""
    if env.rank != 0:
        return OneHostStore(await rendezvous.read("server", 0, _Server))
    runtime = LocalRuntime(members=True)
    try:
        address = await rendezvous.unless_failed(runtime.start(options, None))
        server = _Server(address, ProcessIdentity.of(runtime.pid))
        await rendezvous.publish("server", server)
    except BaseException as error:
        await rendezvous.fail(error)
        await runtime.stop(_END_FAILED_S)
        raise
    return OneHostStore(server, runtime)


class OneHostStore(RankStore):
    """A rank's share in a store of one host.

    Args:
        server: the server of the store.
        runtime: the runtime that has started the server; None on all ranks but 0.
    """

    def __init__(self, server: _Server, runtime: LocalRuntime | None = None) -> None:
        self.address = server.address
        self._server = server
        self._runtime = runtime
        self._reaper: threading.Thread | None = None

    def joined(self) -> None:
        runtime, self._runtime = self._runtime, None
        if runtime is not None:
            self._reaper = runtime.release()

    async def stop(self, timeout: float, *, last: bool) -> None:
        runtime, self._runtime = self._runtime, None
        reaper, self._reaper = self._reaper, None
        if runtime is not None:  # this rank has not become a member
            await runtime.stop(timeout)
        elif last and reaper is not None:
            await in_thread(lambda: reaper.join(timeout))
        elif last:
            await self._until_server_ended(timeout)

    async def _until_server_ended(self, timeout: float) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        process = self._server.process
        while process.is_alive and loop.time() < deadline:  # noqa: ASYNC110 - it is not our child
            await asyncio.sleep(_POLL_S)
