"""Where a store is that this process has not joined: in its job, as the environment says, or as a
process that this one descends from does. Torch-free.
"""

from __future__ import annotations

import logging
import os

from torchstore_core.clients.stores import ancestors
from torchstore_core.clients.stores.environment import inherited_address
from torchstore_core.contracts.runtime import RuntimeSpec
from torchstore_core.errors import StoreClosedError, StoreTimeoutError
from torchstore_core.plugins.installed import RUNTIMES
from torchstore_core.plugins.registry import Registry, load_class

log = logging.getLogger(__name__)


def address_of(store_name: str) -> str | None:
    """The address of a store; None: nobody here knows any. The store need not be there."""
    address = _address_in_job(store_name) or inherited_address(store_name)
    if address is None or _socket_is_gone(address):
        address = ancestors.find(store_name) or address
    return address


def next_address(store_name: str, ended: str) -> str | None:
    """Where the next store of a name is, when no server answers any more where the last one was;
    None: nobody here knows any.
    """
    for address in (inherited_address(store_name), ancestors.find(store_name)):
        if address is not None and address.startswith("unix:") and address != ended:
            return address
    return None


def _socket_is_gone(address: str) -> bool:
    """An environment may be older than the store it is about."""
    return address.startswith("unix:") and not os.path.exists(address.removeprefix("unix:"))


def _address_in_job(store_name: str) -> str | None:
    """The address by which the engine that runs this process, if one does, finds the store."""
    for spec in Registry().runtimes():
        if spec.find is not None and spec.here is not None and spec.here():
            return f"{spec.name}:{store_name}"
    return None


def runtime_here(name: str) -> RuntimeSpec | None:
    """The runtime of that name, if this process belongs to a job of its engine.

    Raises:
        PluginError: it is broken.
    """
    registry = Registry()
    if name not in registry.names(RUNTIMES):
        return None
    spec = registry.runtime(name)
    return spec if spec.here is None or spec.here() else None


async def find_by(spec: RuntimeSpec, store_name: str, timeout: float | None) -> str | None:
    """``Engine.find``; raises what that does, and ``StoreClosedError`` if there is none."""
    if spec.find is None:
        raise StoreClosedError(f"the runtime {spec.name!r} cannot find stores; connect to a socket")
    found: str | None = await load_class(spec.find)(store_name, timeout)
    return found


async def end_in_job(store_name: str, address: str | None, timeout: float | None) -> bool:
    """End a store of the job that this process belongs to, though another process began it; False
    if there is none.

    Args:
        address: where this process has joined it; None: it has not.
    """
    address = address or _address_in_job(store_name) or ""
    runtime, _, name = address.partition(":")
    registry = Registry() if runtime not in ("", "unix") else None
    if registry is None or runtime not in registry.names(RUNTIMES):
        return False
    spec = registry.runtime(runtime)
    if spec.end is None:
        return False
    try:
        ended: bool = await load_class(spec.end)(name, timeout)
    except StoreTimeoutError as error:
        log.warning("store %r was not ended: %s", store_name, error)
        return False
    return ended


def missing_engine(registry: Registry | None = None) -> str:
    """What to tell a process that lacks the package for stores of its job; empty for others."""
    advice = (registry or Registry()).advice()
    return f". {advice}" if advice else ""
