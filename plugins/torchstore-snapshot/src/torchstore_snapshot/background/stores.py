"""The stores that takes are staged in: that of the program, or one that is started for takes.

Takes with a memory budget have a store apart. A store keeps memory ready for a next put, and the
memory of what was deleted for a while; one that takes without a budget use should, so that they
block the program for as short as possible, but it would take more than a budget allows.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from typing import Any

import torch

import torchstore_core as ts
from torchstore_core.clients.stores import table
from torchstore_core.clients.stores.environment import DEFAULT_NAME
from torchstore_core.errors import StoreClosedError, StoreFullError, TorchStoreError

__all__ = ["bounded", "bounded_name", "own_name", "own_store", "put", "unstage"]

# Seconds after which a store for takes with a budget ends if there is no further such take.
_IDLE_S = 1.0


def own_name() -> str:
    """Return the name of the store that is started for takes without a budget, and kept."""
    return f"snapshot-{os.getpid()}"


def bounded_name() -> str:
    """Return the name of the store that is started for takes with a budget."""
    return f"snapshot-{os.getpid()}-bounded"


async def own_store(prefault: int | None) -> Any:
    """Return a client of the store for takes without a budget; start it if there is none.

    Args:
        prefault: bytes of memory that it keeps ready.
    """
    return await ts.connect_or_initialize(store_name=own_name(), runtime="local", prefault=prefault)


class Bounded:
    """The store for takes with a budget: none of its memory is kept ready, and soon after the last
    take it ends, which gives all of it back. Its methods are called in the background loop.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """There is none: this process is a new one."""
        self._users = 0
        self._idle: asyncio.TimerHandle | None = None
        self._ending: asyncio.Task[None] | None = None

    async def client(self) -> Any:
        """Return a client of the store; start it if there is none."""
        while self._ending is not None:
            await asyncio.wait([self._ending])
        return await ts.connect_or_initialize(
            store_name=bounded_name(), runtime="local", prefault=0
        )

    def begin(self) -> None:
        """A take with a budget has begun."""
        self._users += 1
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None

    def end(self) -> None:
        """A take with a budget has ended, however it did."""
        self._users -= 1
        if not self._users and table.known(bounded_name()) is not None:
            loop = asyncio.get_running_loop()
            self._idle = loop.call_later(_IDLE_S, self._end_store)

    def _end_store(self) -> None:
        self._idle = None
        self._ending = asyncio.get_running_loop().create_task(self._shut_down())

    async def _shut_down(self) -> None:
        try:
            with contextlib.suppress(TorchStoreError, OSError):
                await ts.shutdown(bounded_name())
        finally:
            self._ending = None


#: The one of this process.
bounded = Bounded()


async def put(key: str, values: dict[str, torch.Tensor], ready: int | None) -> str:
    """Put into the store of this process if there is one with room; otherwise, into one of its own.

    Args:
        ready: bytes of memory that a store of its own keeps ready; None: the take has a budget.

    Returns:
        The address of the store.
    """
    client: Any
    if table.known(DEFAULT_NAME) is not None:
        try:
            client = await ts.client(DEFAULT_NAME)
            await client.put_state_dict(values, key)
            return await ts.address(DEFAULT_NAME)
        except (StoreClosedError, StoreFullError):
            pass  # a store of its own it is
    if ready is None:
        client, name = await bounded.client(), bounded_name()
    else:
        client, name = await own_store(ready), own_name()
    await client.put_state_dict(values, key)
    return await ts.address(name)


async def unstage(keys: list[str]) -> None:
    """Take what is staged out of the stores."""
    for name in (DEFAULT_NAME, own_name(), bounded_name()):
        if table.known(name) is not None:
            for key in keys:
                with contextlib.suppress(TorchStoreError):  # written, or the store has ended
                    client: Any = await ts.client(name)
                    await client.delete(key)


os.register_at_fork(after_in_child=bounded.forget)
