"""The blocking API, for scripts that are not async: ``import torchstore_core.blocking as ts``.

>>> import torch
>>> import torchstore_core.blocking as ts
>>> client = ts.initialize(capacity=64 << 20)
>>> ts.put("w", torch.arange(3))
ObjectRef(key='w', version=1)
>>> ts.get("w")
tensor([0, 1, 2])
>>> ts.shutdown()

Names (including those of the strategies), arguments, results and errors are the same as in
:mod:`torchstore_core`. Functions that return a client there return a :class:`Client` whose methods
block, and ``put_state_dict(..., blocking=False)`` returns a :class:`PendingPut` with ``result()``.

Each thread has an event loop of its own, which runs while a call of that thread waits, so that no
call is handed to another thread. Any number of threads may make calls at once, also after a fork.
``KeyboardInterrupt`` cancels the operation under way, like cancelling an ``await``. In a function
that is compiled (``torch.compile``), a call breaks the graph.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine, Mapping
from concurrent import futures
from typing import (
    Any,
    Concatenate,
    Literal,
    ParamSpec,
    Protocol,
    Self,
    TypeVar,
    Unpack,
    cast,
    overload,
)

import torch

import torchstore_core
from torchstore_core import api, errors, values
from torchstore_core.clients import client as async_client
from torchstore_core.clients.calls import thread_loops
from torchstore_core.clients.calls.arguments import check_timeout
from torchstore_core.clients.packed import packed
from torchstore_core.clients.session import held_ref
from torchstore_core.clients.state_dicts import putting
from torchstore_core.clients.state_dicts.put_arguments import PutArguments, StorePutArguments
from torchstore_core.clients.stores import discovery
from torchstore_core.clients.values import differences, sharding
from torchstore_core.contracts import ranks

# The same names as there: a test compares them.
__all__ = list(torchstore_core.__all__)

ConfigurationError = errors.ConfigurationError
DrainError = errors.DrainError
EvictedError = errors.EvictedError
KeyNotFoundError = errors.KeyNotFoundError
LayoutMismatchError = errors.LayoutMismatchError
ObjectLostError = errors.ObjectLostError
OutOfMemoryError = errors.OutOfMemoryError
PartialPutError = errors.PartialPutError
PluginError = errors.PluginError
ProtocolError = errors.ProtocolError
StoreClosedError = errors.StoreClosedError
StoreFullError = errors.StoreFullError
StoreTimeoutError = errors.StoreTimeoutError
TorchStoreError = errors.TorchStoreError
TransportError = errors.TransportError
TransportNotReadyError = errors.TransportNotReadyError
TransportUnavailableError = errors.TransportUnavailableError
UnsafeObjectError = errors.UnsafeObjectError
UnsupportedValueError = errors.UnsupportedValueError
VersionGoneError = errors.VersionGoneError

ObjectRef = values.ObjectRef
HeldRef = held_ref.HeldRef
Request = values.Request
TensorSlice = values.TensorSlice
TensorShard = sharding.TensorShard
StateDictReport = differences.StateDictReport
TensorReference = packed.TensorReference
SPMDEnv = ranks.SPMDEnv
TorchStoreStateDict = packed.TorchStoreStateDict
RunningStore = discovery.RunningStore

__version__ = torchstore_core.__version__

P = ParamSpec("P")
T = TypeVar("T")


# ---- the calls ------------------------------------------------------------------------------


def _uncompiled(run: Callable[P, T]) -> Callable[P, T]:
    """Keep Dynamo out of a function and out of all that it calls: in a compiled function, a call of
    it breaks the graph. ``torch.compiler.disable`` does the same, but has to import Dynamo.
    """
    run._torchdynamo_disable = True  # type: ignore[attr-defined]
    frames: Any = torch._C._dynamo.eval_frame
    if hasattr(frames, "_FrameExecStrategy"):  # since torch 2.7
        skip = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
        frames.set_code_exec_strategy(run.__code__, skip)
    return run


def _blocking(call: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, T]:
    """Return a blocking version of an async function."""

    @_uncompiled
    @functools.wraps(call)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        return thread_loops.run(call(*args, **kwargs), call.__name__)

    run.__module__ = __name__
    return run


def _opening(call: Callable[P, Coroutine[Any, Any, async_client.Client]]) -> Callable[P, Client]:
    """Return a blocking version of an async function that returns a client."""

    @_uncompiled
    @functools.wraps(call)
    def run(*args: P.args, **kwargs: P.kwargs) -> Client:
        return Client(thread_loops.run(call(*args, **kwargs), call.__name__))

    run.__module__ = __name__
    return run


class _PutMethod(Protocol):
    """The method ``put_state_dict``."""

    @overload
    def __call__(
        self,
        state_dict: Mapping[str, Any] | TorchStoreStateDict,
        key: str,
        *,
        blocking: Literal[True] = True,
        **arguments: Unpack[PutArguments],
    ) -> ObjectRef: ...

    @overload
    def __call__(
        self,
        state_dict: Mapping[str, Any] | TorchStoreStateDict,
        key: str,
        *,
        blocking: Literal[False],
        **arguments: Unpack[PutArguments],
    ) -> PendingPut: ...

    @overload
    def __call__(
        self,
        state_dict: Mapping[str, Any] | TorchStoreStateDict,
        key: str,
        *,
        blocking: bool,
        **arguments: Unpack[PutArguments],
    ) -> ObjectRef | PendingPut: ...


class _PutFunction(Protocol):
    """The function ``put_state_dict``."""

    @overload
    def __call__(
        self,
        state_dict: Mapping[str, Any] | TorchStoreStateDict,
        key: str,
        *,
        blocking: Literal[True] = True,
        **arguments: Unpack[StorePutArguments],
    ) -> ObjectRef: ...

    @overload
    def __call__(
        self,
        state_dict: Mapping[str, Any] | TorchStoreStateDict,
        key: str,
        *,
        blocking: Literal[False],
        **arguments: Unpack[StorePutArguments],
    ) -> PendingPut: ...

    @overload
    def __call__(
        self,
        state_dict: Mapping[str, Any] | TorchStoreStateDict,
        key: str,
        *,
        blocking: bool,
        **arguments: Unpack[StorePutArguments],
    ) -> ObjectRef | PendingPut: ...


def _putting(
    call: Callable[P, Coroutine[Any, Any, ObjectRef | putting.PendingPut]],
) -> _PutFunction:
    """Return a blocking version of the function ``put_state_dict``."""

    @_uncompiled
    @functools.wraps(call)
    def run(*args: P.args, **kwargs: P.kwargs) -> ObjectRef | PendingPut:
        thread_loops.may_block(call.__name__)
        put = _put_state_dict(call(*args, **kwargs), kwargs.get("blocking", True))
        return thread_loops.run(put, call.__name__)

    run.__module__ = __name__
    return cast(_PutFunction, run)


def _method(
    call: Callable[Concatenate[async_client.Client, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Client, P], T]:
    """Return a blocking version of an async method of the client."""

    @_uncompiled
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
) -> _PutMethod:
    """Return a blocking version of the method ``put_state_dict``."""

    @_uncompiled
    @functools.wraps(call)
    def run(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> ObjectRef | PendingPut:
        thread_loops.may_block(call.__name__)
        put = _put_state_dict(call(self._client, *args, **kwargs), kwargs.get("blocking", True))
        return thread_loops.run(put, call.__name__)

    run.__module__ = __name__
    return cast(_PutMethod, run)


class PendingPut:
    """A put whose commit is still under way, although its state dict may already be changed again;
    returned by ``put_state_dict(blocking=False)``. It commits whether or not anyone waits for it.
    """

    def __init__(self, key: str, ref: futures.Future[ObjectRef]) -> None:
        self.key = key
        self._ref = ref

    def __repr__(self) -> str:
        return f"<PendingPut of {self.key!r}, {'done' if self.done() else 'committing'}>"

    def done(self) -> bool:
        """Return whether the commit has ended, successfully or not."""
        return self._ref.done()

    @_uncompiled
    def result(self, timeout: float | None = None) -> ObjectRef:
        """Wait for the commit, and return the version that was put.

        Args:
            timeout: seconds to wait; None: only the put's own time-out applies.

        Raises:
            StoreTimeoutError: the commit took longer than ``timeout`` seconds; it continues.
            ConfigurationError: the timeout is not a number of at least 0.
            TorchStoreError: the put failed with this error.
        """
        limit = check_timeout(timeout)
        # A put that has ended raises its own error, which may be a time-out, too.
        if not self._ref.done() and not futures.wait([self._ref], limit).done:
            raise StoreTimeoutError(
                f"the commit of {self.key!r} is not done within {errors.in_seconds(limit)}",
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
    # The commit needs an event loop that keeps running after this call.
    handed = asyncio.run_coroutine_threadsafe(_in_background(put), thread_loops.background())
    return await asyncio.wrap_future(handed)


class Client:
    """A process's access to one store, like :class:`torchstore_core.Client`, but with methods that
    block. Safe to use from several threads.

    >>> import torchstore_core.blocking as ts
    >>> with ts.initialize(capacity=64 << 20) as store:
    ...     store.put("step", 7)
    ...     store.get("step")
    ObjectRef(key='step', version=1)
    7
    """

    def __init__(self, client: async_client.Client) -> None:
        self._client = client

    def __enter__(self) -> Self:
        self._client._joined.enter(self._client._leave)
        return self

    @_uncompiled
    def __exit__(self, kind: object, error: object, trace: object) -> None:
        thread_loops.run(self._client.__aexit__(kind, error, trace), "shutdown")

    def __repr__(self) -> str:
        return f"<blocking {repr(self._client)[1:]}"

    @property
    def address(self) -> str:
        """The address that other processes pass to ``connect``."""
        return self._client.address

    @property
    def store_name(self) -> str:
        """The name of the store."""
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
    put_object = _method(async_client.Client.put_object)
    empty = _method(async_client.Client.empty)
    hold = _method(async_client.Client.hold)
    wait_any = _method(async_client.Client.wait_any)
    free = _method(async_client.Client.free)
    refs = _method(async_client.Client.refs)
    stat = _method(async_client.Client.stat)
    status = _method(async_client.Client.status)
    explain = _method(async_client.Client.explain)
    drain = _method(async_client.Client.drain)


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
put_object = _blocking(api.put_object)
empty = _blocking(api.empty)
hold = _blocking(api.hold)
wait_any = _blocking(api.wait_any)
free = _blocking(api.free)
refs = _blocking(api.refs)
stat = _blocking(api.stat)
status = _blocking(api.status)
drain = _blocking(api.drain)

explain = _blocking(api.explain)


def __getattr__(name: str) -> Any:
    """Look up the strategies, whose package may not be installed."""
    if name in torchstore_core._STRATEGIES:
        return getattr(torchstore_core, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
