"""Leaving a store, and ending one that this process owns."""

from __future__ import annotations

from torchstore_core.clients.stores import environment, lookup, table
from torchstore_core.clients.stores.joined import JoinedStore

#: How long a server may take to end before it is killed, in seconds, by default.
STOP_TIMEOUT_S = 10.0


async def shut_down(store_name: str, limit: float) -> None:
    """See ``api.shutdown``; ``limit`` in seconds.

    Raises:
        ConfigurationError: that is no name of a store.
    """
    store = table.remove(store_name)
    if store is not None:
        await leave(store, limit)
    if store is None or not (store.connected or store.runtime):
        await lookup.end_in_job(store_name, None if store is None else store.address, limit)


async def leave(store: JoinedStore, limit: float = STOP_TIMEOUT_S) -> None:
    """Leave a store that was removed from the table, and end its server if this process owns it."""
    store.close()
    runtime = store.runtime
    if runtime is not None:
        published = runtime.local_address or store.address
        if environment.inherited_address(store.store_name) == published:
            environment.publish(store.store_name, None)
        await runtime.stop(limit)


async def leave_opened(store: JoinedStore) -> None:
    """Shut down the store that a call has started or joined, at the end of the block of its client;
    unless it was left before, or another one has its name now.
    """
    if table.known(store.store_name) is store:
        await shut_down(store.store_name, STOP_TIMEOUT_S)
