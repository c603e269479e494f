"""What is staged in a store, for the writer process: it reads bytes, and does not import torch."""

from __future__ import annotations

import contextlib

from torchstore_core.clients.calls import base, thread_loops
from torchstore_core.clients.calls.key_operations import KeyOperations
from torchstore_core.clients.moving.reading import read_bytes
from torchstore_core.clients.stores import table
from torchstore_core.clients.stores.joined import DEFAULT_TIMEOUT_S
from torchstore_core.errors import TorchStoreError
from torchstore_core.plugins.ranking import Policy

__all__ = ["STORE", "delete", "read", "wait_released"]

#: The name that the writer has for stores in which takes are staged.
STORE = "staged"


class _Client(KeyOperations):
    """One that has no tensors."""

    async def read(self, key: str) -> dict[str, memoryview]:
        with self._watch("get_state_dict", None, key) as clock:
            session, channel = self._here(clock) or await self._join(clock)
            return await read_bytes(session, channel, key, clock)


async def _connect(address: str) -> _Client:
    policy = Policy.make()
    return _Client(await table.connect(address, STORE, policy, DEFAULT_TIMEOUT_S, False))


def read(address: str, key: str) -> dict[str, memoryview]:
    """Return the bytes of what is staged under a key. While they are referred to, they stay.

    Raises:
        StoreClosedError: the store has ended.
    """

    async def call() -> dict[str, memoryview]:
        return await (await _connect(address)).read(key)

    return thread_loops.run(call(), "async_take")


def delete(address: str, key: str) -> None:
    """Take what is staged under a key out of the store.

    Raises:
        TorchStoreError: it is not there, or the store has ended.
    """

    async def call() -> None:
        await (await _connect(address)).delete(key)

    thread_loops.run(call(), "async_take")


def wait_released(address: str, timeout: float) -> None:
    """Wait until nothing in the store is leased any more that was written."""

    async def call() -> None:
        await base.wait_released(await _connect(address), timeout)

    with contextlib.suppress(TorchStoreError):  # the store has ended; what was read is written
        thread_loops.run(call(), "async_take")
