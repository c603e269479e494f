"""The runtime ``monarch``: controller and volumes are actors of the job."""

from __future__ import annotations

import msgspec

from torchstore_core import topology
from torchstore_core.contracts.runtime import Runtime, StoreOptions
from torchstore_core.strategy_data import encode_strategy
from torchstore_monarch import finding
from torchstore_monarch.protocol import Asked, FoundStore, result

__all__ = ["MonarchRuntime"]


class MonarchRuntime(Runtime):
    """Asks the job's directory to start and end the store."""

    shared = True

    def __init__(self) -> None:
        self._store_name = ""

    async def start(self, options: StoreOptions, mesh: object | None) -> str:
        name, fields = "singleton", b"{}"
        if options.strategy is not None:
            name, fields = encode_strategy(options.strategy)
        asked = Asked(
            options.store_name,
            options.num_storage_volumes,
            name,
            fields,
            options.capacity,
            options.prefault,
            options.timeout,
            options.block,
        )

        async def work() -> bytes:
            directory = await finding.directory()
            return result(await directory.create.call_one(msgspec.msgpack.encode(asked), mesh))

        data = await finding.in_context(work, options.timeout)
        found = msgspec.msgpack.decode(data, type=FoundStore)
        if found.host_id == topology.probe().host_id:
            self.local_address = found.address
        self._store_name = options.store_name
        return f"monarch:{options.store_name}"

    async def stop(self, timeout: float) -> None:
        name, self._store_name = self._store_name, ""
        if name:
            await finding.end(name, timeout)
