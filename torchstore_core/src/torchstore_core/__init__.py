"""The tensor store: ``import torchstore_core as ts``.

>>> import asyncio, torch
>>> import torchstore_core as ts
>>> async def main():
...     await ts.initialize(capacity=64 << 20)
...     ref = await ts.put("greeting", torch.tensor([1, 2, 3]))
...     print(ref.version, (await ts.get("greeting")).tolist())
...     await ts.shutdown()
>>> asyncio.run(main())
1 [1, 2, 3]

The server imports this package, too, so torch is not imported until a name that needs it is used.
"""

from __future__ import annotations

import gc
import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any

from torchstore_core.errors import (
    ConfigurationError,
    DrainError,
    EvictedError,
    KeyNotFoundError,
    LayoutMismatchError,
    ObjectLostError,
    OutOfMemoryError,
    PartialPutError,
    PluginError,
    ProtocolError,
    StoreClosedError,
    StoreFullError,
    StoreTimeoutError,
    TorchStoreError,
    TransportError,
    TransportNotReadyError,
    TransportUnavailableError,
    UnsafeObjectError,
    UnsupportedValueError,
    VersionGoneError,
)
from torchstore_core.values import ObjectRef, Request, TensorSlice

if TYPE_CHECKING:
    from torchstore_core import blocking as blocking
    from torchstore_core.api import (
        address,
        client,
        connect,
        connect_or_initialize,
        delete,
        delete_batch,
        drain,
        empty,
        exists,
        explain,
        free,
        get,
        get_batch,
        get_state_dict,
        hold,
        initialize,
        initialize_spmd,
        keys,
        latest_version,
        put,
        put_batch,
        put_object,
        put_state_dict,
        refs,
        reset_client,
        shutdown,
        stat,
        status,
        versions,
        wait,
        wait_any,
    )
    from torchstore_core.clients.client import Client
    from torchstore_core.clients.packed.packed import TensorReference, TorchStoreStateDict
    from torchstore_core.clients.session.held_ref import HeldRef
    from torchstore_core.clients.state_dicts.putting import PendingPut
    from torchstore_core.clients.stores.discovery import RunningStore, stores
    from torchstore_core.clients.values.differences import StateDictReport
    from torchstore_core.clients.values.sharding import TensorShard
    from torchstore_core.contracts.ranks import SPMDEnv

__version__ = "0.1.0"

__all__ = [
    "Client",
    "ConfigurationError",
    "DrainError",
    "EvictedError",
    "HeldRef",
    "KeyNotFoundError",
    "LayoutMismatchError",
    "ObjectLostError",
    "ObjectRef",
    "OutOfMemoryError",
    "PartialPutError",
    "PendingPut",
    "PluginError",
    "ProtocolError",
    "Request",
    "RunningStore",
    "SPMDEnv",
    "StateDictReport",
    "StoreClosedError",
    "StoreFullError",
    "StoreTimeoutError",
    "TensorReference",
    "TensorShard",
    "TensorSlice",
    "TorchStoreError",
    "TorchStoreStateDict",
    "TransportError",
    "TransportNotReadyError",
    "TransportUnavailableError",
    "UnsafeObjectError",
    "UnsupportedValueError",
    "VersionGoneError",
    "address",
    "client",
    "connect",
    "connect_or_initialize",
    "delete",
    "delete_batch",
    "drain",
    "empty",
    "exists",
    "explain",
    "free",
    "get",
    "get_batch",
    "get_state_dict",
    "hold",
    "initialize",
    "initialize_spmd",
    "keys",
    "latest_version",
    "put",
    "put_batch",
    "put_object",
    "put_state_dict",
    "refs",
    "reset_client",
    "shutdown",
    "stat",
    "status",
    "stores",
    "versions",
    "wait",
    "wait_any",
]


_HOMES = {
    "Client": "clients.client",
    "HeldRef": "clients.session.held_ref",
    "PendingPut": "clients.state_dicts.putting",
    "RunningStore": "clients.stores.discovery",
    "SPMDEnv": "contracts.ranks",
    "StateDictReport": "clients.values.differences",
    "TensorReference": "clients.packed.packed",
    "TensorShard": "clients.values.sharding",
    "TorchStoreStateDict": "clients.packed.packed",
    "stores": "clients.stores.discovery",
}

# The strategies of the package torchstore-strategies, by the names that users use. They are not in
# __all__, because this package does not depend on that one.
_STRATEGIES = {
    "ControllerStorageVolumes": "singleton",
    "HashStrategy": "hash",
    "HostStrategy": "host",
    "LocalRankStrategy": "local-rank",
    "ReplicatedStrategy": "replicated",
    "SingletonStrategy": "singleton",
    "SpreadStrategy": "spread",
}


def _strategy(name: str) -> Any:
    registry = importlib.import_module("torchstore_core.plugins.registry").Registry()
    try:
        return registry.strategy(_STRATEGIES[name])
    except PluginError as error:
        hint = f"{name} is in a package of its own: pip install torchstore-strategies"
        raise PluginError(f"{hint} ({error.message})") from error


def _load(module: str) -> ModuleType:
    """Import a module of the package. The garbage collector pauses meanwhile: what modules make
    stays, and a full collection would look at all that torch has made, for longer than this takes.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return importlib.import_module(f"torchstore_core.{module}")
    finally:
        if collects:
            gc.enable()


def __getattr__(name: str) -> Any:
    if name in _STRATEGIES:
        return _strategy(name)
    if name == "blocking":
        return _load(name)
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(_load(_HOMES.get(name, "api")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
