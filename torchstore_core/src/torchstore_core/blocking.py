"""The same calls for scripts that are not async: ``import torchstore_core.blocking as ts``.

>>> import torch
>>> import torchstore_core.blocking as ts
>>> client = ts.initialize(capacity=64 << 20)
>>> ts.put("w", torch.arange(3))
ObjectRef(key='w', version=1)
>>> ts.get("w")
tensor([0, 1, 2])
>>> ts.shutdown()

Names (those of the strategies, too), arguments, results and errors are those of
:mod:`torchstore_core`. What returns a client there returns a :class:`Client` whose methods block,
and ``put_state_dict(..., blocking=False)`` a :class:`PendingPut` with ``result()``.

Each thread has an event loop of its own, which runs while a call of that thread waits: there is no
other thread to hand the call to. Any number of threads may call at once, also after a fork.
``KeyboardInterrupt`` cancels the operation under way, as a cancelled ``await`` does.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from concurrent import futures
from typing import Any, Concatenate, ParamSpec, TypeVar

import torchstore_core
from torchstore_core import api, values
from torchstore_core.clients import client as async_client
from torchstore_core.clients.calls import thread_loops
from torchstore_core.clients.calls.timeouts import check_timeout
from torchstore_core.clients.packed import packed
from torchstore_core.clients.state_dicts import getting, putting
from torchstore_core.clients.stores import discovery
from torchstore_core.clients.values import sharding
from torchstore_core.contracts import ranks
from torchstore_core.errors import (
    ConfigurationError,
    EvictedError,
    KeyNotFoundError,
    LayoutMismatchError,
    ObjectLostError,
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
    in_seconds,
)

__all__ = [
    "Client",
    "ConfigurationError",
    "EvictedError",
    "KeyNotFoundError",
    "LayoutMismatchError",
    "ObjectLostError",
    "ObjectRef",
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
    "exists",
    "explain",
    "get",
    "get_batch",
    "get_state_dict",
    "initialize",
    "initialize_spmd",
    "keys",
    "latest_version",
    "put",
    "put_batch",
    "put_state_dict",
    "reset_client",
    "shutdown",
    "stat",
    "status",
    "stores",
    "versions",
    "wait",
]

ObjectRef = values.ObjectRef
Request = values.Request
TensorSlice = values.TensorSlice
TensorShard = sharding.TensorShard
StateDictReport = getting.StateDictReport
TensorReference = packed.TensorReference
SPMDEnv = ranks.SPMDEnv
TorchStoreStateDict = packed.TorchStoreStateDict
RunningStore = discovery.RunningStore

__version__ = torchstore_core.__version__

P = ParamSpec("P")
T = TypeVar("T")


# ---- the calls ------------------------------------------------------------------------------


def _blocking(call: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, T]:
    """The call without its ``await``."""

    @functools.wraps(call)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        return thread_loops.run(call(*args, **kwargs), call.__name__)

    run.__module__ = __name__
    return run


def _opening(call: Callable[P, Coroutine[Any, Any, async_client.Client]]) -> Callable[P, Client]:
    """The same of a call that returns a client."""

    @functools.wraps(call)
    def run(*args: P.args, **kwargs: P.kwargs) -> Client:
        return Client(thread_loops.run(call(*args, **kwargs), call.__name__))

    run.__module__ = __name__
    return run


def _putting(
    call: Callable[P, Coroutine[Any, Any, ObjectRef | putting.PendingPut]],
) -> Callable[P, ObjectRef | PendingPut]:
    """The same of ``put_state_dict``."""

    @functools.wraps(call)
    def run(*args: P.args, **kwargs: P.kwargs) -> ObjectRef | PendingPut:
        thread_loops.may_block(call.__name__)
        put = _put_state_dict(call(*args, **kwargs), kwargs.get("blocking", True))
        return thread_loops.run(put, call.__name__)

    run.__module__ = __name__
    return run


def _method(
    call: Callable[Concatenate[async_client.Client, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Client, P], T]:
    """The same of a method."""

    @functools.wraps(call)
    def run(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return thread_loops.run(call(self._client, *args, **kwargs), call.__name__)

    run.__module__ = __name__
    return run


def _putting_method(
    call: Callable[
        Concatenate[async_client.Client, P],
        Coroutine[Any, Any, ObjectRef | putting.PendingPut],
    ],
) -> Callable[Concatenate[Client, P], ObjectRef | PendingPut]:
    """The same of the method ``put_state_dict``."""

    @functools.wraps(call)
    def run(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> ObjectRef | PendingPut:
        thread_loops.may_block(call.__name__)
        put = _put_state_dict(call(self._client, *args, **kwargs), kwargs.get("blocking", True))
        return thread_loops.run(put, call.__name__)

    run.__module__ = __name__
    return run


class PendingPut:
    """A state dict whose values may be changed again, while its commit is under way; returned by
    ``put_state_dict(blocking=False)``. It commits whether or not anyone waits for it.
    """

    def __init__(self, key: str, ref: futures.Future[ObjectRef]) -> None:
        self.key = key
        self._ref = ref

    def __repr__(self) -> str:
        return f"<PendingPut of {self.key!r}, {'done' if self.done() else 'committing'}>"

    def done(self) -> bool:
        """Whether the commit has ended, one way or the other."""
        return self._ref.done()

    def result(self, timeout: float | None = None) -> ObjectRef:
        """Wait for the commit; which version it is.

        Args:
            timeout: seconds; None: the put's own time-out is all that counts.

        Raises:
            StoreTimeoutError: not within ``timeout`` seconds; it goes on.
            ConfigurationError: a timeout that is no number of at least 0.
            TorchStoreError: what went wrong.
        """
        limit = check_timeout(timeout)
        # One that is over raises what went wrong, which may be a time-out too.
        if not self._ref.done() and not futures.wait([self._ref], limit).done:
            raise StoreTimeoutError(
                f"the commit of {self.key!r} is not done within {in_seconds(limit)}",
                key=self.key,
                details={"operation": "result", "timeout": limit},
            )
        return self._ref.result()


async def _in_background(
    put: Coroutine[Any, Any, ObjectRef | putting.PendingPut],
) -> ObjectRef | PendingPut:
    made = await put
    if not isinstance(made, putting.PendingPut):
        return made
    ref: futures.Future[ObjectRef] = futures.Future()
    ref.set_running_or_notify_cancel()
    task = asyncio.ensure_future(_awaited(made))

    def over(task: asyncio.Task[ObjectRef]) -> None:
        if task.cancelled():
            ref.set_exception(StoreClosedError("the commit was cancelled", key=made.key))
        elif (error := task.exception()) is not None:
            ref.set_exception(error)
        else:
            ref.set_result(task.result())

    task.add_done_callback(over)
    return PendingPut(made.key, ref)


async def _awaited(pending: putting.PendingPut) -> ObjectRef:
    return await pending


async def _put_state_dict(
    put: Coroutine[Any, Any, ObjectRef | putting.PendingPut], blocking: object
) -> ObjectRef | PendingPut:
    if blocking:
        made = await put
        return await made if isinstance(made, putting.PendingPut) else made
    # What is still to be committed needs a loop that goes on running.
    handed = asyncio.run_coroutine_threadsafe(_in_background(put), thread_loops.background())
    return await asyncio.wrap_future(handed)


class Client:
    """A process's door to one store, as :class:`torchstore_core.Client`, with methods that block.
    Safe to use from several threads.
    """

    def __init__(self, client: async_client.Client) -> None:
        self._client = client

    def __repr__(self) -> str:
        return f"<blocking {repr(self._client)[1:]}"

    @property
    def address(self) -> str:
        """What other processes give to ``connect``."""
        return self._client.address

    @property
    def store_name(self) -> str:
        """The store's name."""
        return self._client.store_name

    put = _method(async_client.Client.put)
    put_batch = _method(async_client.Client.put_batch)
    get = _method(async_client.Client.get)
    get_batch = _method(async_client.Client.get_batch)
    put_state_dict = _putting_method(async_client.Client.put_state_dict)
    get_state_dict = _method(async_client.Client.get_state_dict)
    versions = _method(async_client.Client.versions)
    latest_version = _method(async_client.Client.latest_version)
    delete = _method(async_client.Client.delete)
    delete_batch = _method(async_client.Client.delete_batch)
    exists = _method(async_client.Client.exists)
    keys = _method(async_client.Client.keys)
    wait = _method(async_client.Client.wait)
    stat = _method(async_client.Client.stat)
    status = _method(async_client.Client.status)
    explain = _method(async_client.Client.explain)


initialize = _opening(api.initialize)
initialize_spmd = _opening(api.initialize_spmd)
connect = _opening(api.connect)
connect_or_initialize = _opening(api.connect_or_initialize)
client = _opening(api.client)
address = _blocking(api.address)
reset_client = _blocking(api.reset_client)
stores = _blocking(discovery.stores)
shutdown = _blocking(api.shutdown)
put = _blocking(api.put)
put_batch = _blocking(api.put_batch)
get = _blocking(api.get)
get_batch = _blocking(api.get_batch)
put_state_dict = _putting(api.put_state_dict)
get_state_dict = _blocking(api.get_state_dict)
versions = _blocking(api.versions)
latest_version = _blocking(api.latest_version)
delete = _blocking(api.delete)
delete_batch = _blocking(api.delete_batch)
exists = _blocking(api.exists)
keys = _blocking(api.keys)
wait = _blocking(api.wait)
stat = _blocking(api.stat)
status = _blocking(api.status)

explain = _blocking(api.explain)


def __getattr__(name: str) -> Any:
    """The strategies, whose package need not be installed."""
    if name in torchstore_core._STRATEGIES:
        return getattr(torchstore_core, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
