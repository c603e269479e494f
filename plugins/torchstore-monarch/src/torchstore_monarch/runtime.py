"""The runtime ``monarch``: the controller and the volumes are actors of the job."""

from __future__ import annotations

import asyncio
import logging
import uuid

import msgspec

from torchstore_core.contracts.runtime import Runtime, StoreOptions
from torchstore_core.errors import StoreTimeoutError, TorchStoreError
from torchstore_core.machine import topology
from torchstore_monarch import job
from torchstore_monarch.protocol import FoundStore, StoreRequest, result

log = logging.getLogger(__name__)

_UNDO_S = 8.0
# Tasks that end stores whose caller has given up; a task without a reference may be collected.
_undoing: set[asyncio.Task[None]] = set()


class MonarchRuntime(Runtime):
    """Asks the job's directory to start and end the store."""

    shared = True
    keeps = True

    def __init__(self) -> None:
        self._store_name = ""

    async def start(self, options: StoreOptions, mesh: object | None) -> str:
        request = StoreRequest.of(options, uuid.uuid4().hex)
        sent = False

        async def work() -> bytes:
            nonlocal sent
            directory = await job.directory()
            sent = True
            return result(await directory.create.call_one(msgspec.msgpack.encode(request), mesh))

        try:
            data = await job.as_store_actor(work, options.timeout)
        except (asyncio.CancelledError, StoreTimeoutError):
            if sent:
                task = asyncio.ensure_future(_undo(request))
                _undoing.add(task)
                task.add_done_callback(_undoing.discard)
                await asyncio.shield(task)
            raise
        found = msgspec.msgpack.decode(data, type=FoundStore)
        if found.host_id == topology.probe().host_id:
            self.local_address = found.address
        self._store_name = options.store_name
        return f"monarch:{options.store_name}"

    async def stop(self, timeout: float) -> None:
        name, self._store_name = self._store_name, ""
        if not name:
            return
        try:
            await job.end(name, timeout)
        except StoreTimeoutError as error:
            log.warning("store %r was not seen to end: %s", name, error)


async def _undo(request: StoreRequest) -> None:
    """End a store whose caller has stopped waiting, however far its start has come."""
    try:
        await job.end(request.store_name, _UNDO_S, request.token)
    except TorchStoreError as error:
        log.warning("store %r, which was given up, was not ended: %s", request.store_name, error)
