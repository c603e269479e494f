"""The module-level API: the same operations as :class:`~torchstore_core.Client`, by store name.

Every call but ``initialize``, ``connect``, ``shutdown`` and ``reset_client`` raises
``StoreClosedError`` when this process knows no store of that name and the environment names none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from torchstore_core.client_side import stores
from torchstore_core.client_side.client import Client
from torchstore_core.client_side.stores import DEFAULT_NAME, DEFAULT_TIMEOUT_S, Membership
from torchstore_core.contracts.runtime import Runtime, StoreOptions
from torchstore_core.contracts.strategy import Strategy
from torchstore_core.errors import ConfigurationError, PluginError
from torchstore_core.plugins import Registry, load_class
from torchstore_core.ranking import Policy
from torchstore_core.values import ObjectRef, Request, TensorSlice
from torchstore_core.wire import messages as m

if TYPE_CHECKING:
    import torch

    from torchstore_core.client_side.packed import TorchStoreStateDict
    from torchstore_core.client_side.state_dicts import PendingPut, StateDictReport

__all__ = [
    "address",
    "client",
    "connect",
    "delete",
    "delete_batch",
    "exists",
    "explain",
    "get",
    "get_batch",
    "get_state_dict",
    "initialize",
    "keys",
    "latest_version",
    "put",
    "put_batch",
    "put_state_dict",
    "reset_client",
    "shutdown",
    "stat",
    "status",
    "versions",
    "wait",
]

_STOP_TIMEOUT_S = 10.0


async def initialize(
    num_storage_volumes: int = 1,
    strategy: Strategy | str | None = None,
    store_name: str = DEFAULT_NAME,
    mesh: object | None = None,
    *,
    runtime: str = "auto",
    capacity: int | None = None,
    timeout: float | None = DEFAULT_TIMEOUT_S,
    prefault: int | None = None,
    allow_pickle: bool | None = None,
    prefer: Sequence[str] = (),
    block: Sequence[str] = (),
) -> Client:
    """Start a store owned by this process; it ends with it, however it ends.

    Children of this process find it through the environment (``TORCHSTORE_ADDRESS``).

    Args:
        num_storage_volumes: how many volumes share ``capacity``.
        strategy: where puts go: a Strategy, its entry-point name, or None (``singleton``).
        store_name: several stores are told apart by it.
        mesh: for runtimes that spread over processes or hosts.
        runtime: entry-point name, or ``"auto"``: the best one for this process and ``mesh``.
        capacity: bytes in all; None: half of the memory limit. Memory is taken when used.
        timeout: seconds for the start, and default of every operation; None waits for ever.
        prefault: bytes of memory to warm up in the background, so that first puts run at full
            speed; None: up to 1 GiB; 0: nothing, ever.
        allow_pickle: False refuses values that need pickle, by default for every operation.
        prefer: transports to use first (also TORCHSTORE_PREFER, comma-separated).
        block: plug-ins not to load (also TORCHSTORE_BLOCK).

    Raises:
        ConfigurationError: a bad argument, or this process has such a store already.
        PluginError: an unknown or broken runtime or strategy, or two packages claim one name.
        StoreFullError: the system does not give so much address space to a volume.
        StoreTimeoutError, StoreClosedError: the server did not come up.
    """
    _check(num_storage_volumes, store_name, capacity, prefault, timeout)
    policy = Policy.make(prefer, block)
    with stores.starting(store_name):
        return await _start(
            StoreOptions(
                store_name=store_name,
                num_storage_volumes=num_storage_volumes,
                capacity=capacity,
                prefault=prefault,
                timeout=DEFAULT_TIMEOUT_S if timeout is None else timeout,
                block=policy.block,
            ),
            strategy,
            mesh,
            runtime,
            policy,
            timeout,
            stores.allow_pickle_default() if allow_pickle is None else allow_pickle,
        )


async def _start(
    options: StoreOptions,
    strategy: Strategy | str | None,
    mesh: object | None,
    runtime: str,
    policy: Policy,
    timeout: float | None,
    allow_pickle: bool,
) -> Client:
    """Start the server, join it, and make it findable."""
    registry = Registry(block=policy.block)
    if isinstance(strategy, str):
        strategy = registry.strategy(strategy)()
    host = _make_runtime(registry, runtime, mesh)
    where = await host.start(msgspec.structs.replace(options, strategy=strategy), mesh)
    membership = Membership(options.store_name, where, policy, timeout, allow_pickle, host)
    try:
        await membership.session(timeout)
    except BaseException:
        await host.stop(_STOP_TIMEOUT_S)
        raise
    stores.add(membership)
    stores.publish(options.store_name, host.local_address or where)
    return Client(membership)


def _check(
    volumes: int, store_name: str, capacity: int | None, prefault: int | None, timeout: float | None
) -> None:
    for name, number in (("capacity", capacity), ("prefault", prefault)):
        if number is not None and type(number) is not int:
            raise ConfigurationError(f"{name} is a whole number of bytes, not {number!r}")
    if type(volumes) is not int or volumes < 1:
        raise ConfigurationError(f"num_storage_volumes is at least 1, not {volumes!r}")
    if type(store_name) is not str or not store_name:
        raise ConfigurationError(f"store_name is a non-empty str, not {store_name!r}")
    if capacity is not None and capacity < 4096 * volumes:
        raise ConfigurationError(f"capacity is bytes, at least a page a volume, not {capacity!r}")
    if prefault is not None and prefault < 0:
        raise ConfigurationError(f"prefault is bytes, not {prefault!r}")
    if timeout is not None and not (type(timeout) in (int, float) and timeout > 0):
        raise ConfigurationError(f"timeout is seconds above 0, or None, not {timeout!r}")


def _make_runtime(registry: Registry, name: str, mesh: object | None) -> Runtime:
    if name != "auto":
        spec = registry.runtime(name)
    else:
        ranked = [(spec.applies(mesh), spec) for spec in registry.runtimes()]
        fit = [(rank, spec) for rank, spec in ranked if rank is not None]
        if not fit:
            raise PluginError(
                "no installed runtime takes this mesh; for a Monarch mesh: "
                "pip install torchstore-monarch"
            )
        spec = max(fit, key=lambda item: item[0])[1]
    made: Runtime = load_class(spec.factory)()
    return made


async def connect(
    address: str,
    *,
    store_name: str = DEFAULT_NAME,
    timeout: float | None = DEFAULT_TIMEOUT_S,
    allow_pickle: bool | None = None,
    prefer: Sequence[str] = (),
    block: Sequence[str] = (),
) -> Client:
    """Join the store that listens at ``address``, under ``store_name`` in this process.

    Raises:
        StoreClosedError: nobody listens there.
        StoreTimeoutError: no answer within ``timeout`` seconds.
        ProtocolError: what listens there is no store, or one of another protocol version.
        ConfigurationError: a bad argument, or this process owns another store of that name.
        PluginError: two packages claim one transport.
    """
    _check(1, store_name, None, None, timeout)
    before = stores.known(store_name)
    if before is not None and before.runtime is not None and before.address != address:
        raise ConfigurationError(
            f"this process owns a store {store_name!r}; give the other one another store_name"
        )
    if allow_pickle is None:
        allow_pickle = stores.allow_pickle_default()
    policy = Policy.make(prefer, block)
    if before is not None and (before.address, before.policy) == (address, policy):
        # The same store again: earlier clients of it stay what they are.
        await before.session(timeout)
        return Client(before, timeout=timeout, allow_pickle=allow_pickle)
    runtime = before.runtime if before is not None else None
    membership = Membership(store_name, address, policy, timeout, allow_pickle, runtime)
    await membership.session(timeout)
    stores.add(membership)
    return Client(membership)


async def shutdown(
    store_name: str = DEFAULT_NAME, *, timeout: float | None = _STOP_TIMEOUT_S
) -> None:
    """End the store if this process owns it, else only leave it. Does nothing if there is none.

    A store of a Monarch job is ended from any of its processes. Tensors that zero-copy gets
    returned stay valid. Raises nothing of its own: a server that does not end within ``timeout``
    seconds is killed.
    """
    timeout = _STOP_TIMEOUT_S if timeout is None else timeout
    membership = stores.remove(store_name)
    runtime = None if membership is None else membership.runtime
    if membership is not None:
        membership.close()
        if runtime is not None:
            published = runtime.local_address or membership.address
            if stores.inherited_address(store_name) == published:
                stores.publish(store_name, None)
    if runtime is not None:
        await runtime.stop(timeout)
    else:
        await stores.end(store_name, None if membership is None else membership.address, timeout)


async def address(store_name: str = DEFAULT_NAME, *, timeout: float | None = None) -> str:
    """What other processes give to :func:`connect` (or find in ``TORCHSTORE_ADDRESS``).

    Raises:
        StoreClosedError: this process knows no such store.
    """
    return stores.find(store_name).address


async def client(store_name: str = DEFAULT_NAME, *, timeout: float | None = None) -> Client:
    """The client of a store, connected.

    Raises:
        StoreClosedError: this process knows no such store, or its server is gone.
        StoreTimeoutError: no answer within ``timeout`` seconds.
    """
    membership = stores.find(store_name)
    await membership.session(membership.timeout if timeout is None else timeout)
    return Client(membership)


async def reset_client(store_name: str = DEFAULT_NAME, *, timeout: float | None = None) -> None:
    """Drop this process's connections; the next operation makes new ones. Tensors stay valid.

    Raises nothing; does nothing if this process knows no such store.
    """
    membership = stores.known(store_name)
    if membership is not None:
        membership.reset()


def _client(store_name: str) -> Client:
    return Client(stores.find(store_name))


async def put(
    key: str,
    value: Any,
    tensor_slice_spec: TensorSlice | None = None,
    *,
    version: int | None = None,
    store_name: str = DEFAULT_NAME,
    timeout: float | None = None,
    allow_pickle: bool | None = None,
) -> ObjectRef:
    """See :meth:`Client.put`; raises the same."""
    return await _client(store_name).put(
        key,
        value,
        tensor_slice_spec,
        version=version,
        timeout=timeout,
        allow_pickle=allow_pickle,
    )


async def put_batch(
    items: Mapping[str, Any],
    *,
    version: int | None = None,
    store_name: str = DEFAULT_NAME,
    timeout: float | None = None,
    allow_pickle: bool | None = None,
) -> dict[str, ObjectRef]:
    """See :meth:`Client.put_batch`; raises the same."""
    made = _client(store_name)
    return await made.put_batch(items, version=version, timeout=timeout, allow_pickle=allow_pickle)


async def get(
    key_or_ref: str | ObjectRef | Request,
    inplace_tensor: torch.Tensor | None = None,
    tensor_slice_spec: TensorSlice | None = None,
    *,
    store_name: str = DEFAULT_NAME,
    timeout: float | None = None,
    allow_pickle: bool | None = None,
) -> Any:
    """See :meth:`Client.get`; raises the same."""
    return await _client(store_name).get(
        key_or_ref, inplace_tensor, tensor_slice_spec, timeout=timeout, allow_pickle=allow_pickle
    )


async def get_batch(
    keys: Iterable[str | ObjectRef | Request] | Mapping[str, Any],
    *,
    store_name: str = DEFAULT_NAME,
    timeout: float | None = None,
    allow_pickle: bool | None = None,
) -> dict[str, Any]:
    """See :meth:`Client.get_batch`; raises the same."""
    made = _client(store_name)
    return await made.get_batch(keys, timeout=timeout, allow_pickle=allow_pickle)


async def put_state_dict(
    state_dict: Mapping[str, Any] | TorchStoreStateDict,
    key: str,
    *,
    version: int | None = None,
    participants: int | None = None,
    participant: str | int | None = None,
    transfer_dtype: torch.dtype | Mapping[str, torch.dtype | None] | None = None,
    partial: bool = False,
    keep: int | None = None,
    blocking: bool = True,
    store_name: str = DEFAULT_NAME,
    timeout: float | None = None,
    allow_pickle: bool | None = None,
) -> ObjectRef | PendingPut:
    """See :meth:`Client.put_state_dict`; raises the same."""
    return await _client(store_name).put_state_dict(
        state_dict,
        key,
        version=version,
        participants=participants,
        participant=participant,
        transfer_dtype=transfer_dtype,
        partial=partial,
        keep=keep,
        blocking=blocking,
        timeout=timeout,
        allow_pickle=allow_pickle,
    )


async def get_state_dict(
    key: str,
    user_state_dict: Any = None,
    strict: bool = True,
    *,
    version: int | None = None,
    min_version: int | None = None,
    cast: bool = False,
    report: StateDictReport | None = None,
    store_name: str = DEFAULT_NAME,
    timeout: float | None = None,
    allow_pickle: bool | None = None,
) -> Any:
    """See :meth:`Client.get_state_dict`; raises the same."""
    return await _client(store_name).get_state_dict(
        key,
        user_state_dict,
        strict,
        version=version,
        min_version=min_version,
        cast=cast,
        report=report,
        timeout=timeout,
        allow_pickle=allow_pickle,
    )


async def versions(
    key: str, *, store_name: str = DEFAULT_NAME, timeout: float | None = None
) -> list[int]:
    """See :meth:`Client.versions`; raises the same."""
    return await _client(store_name).versions(key, timeout=timeout)


async def latest_version(
    key: str, *, store_name: str = DEFAULT_NAME, timeout: float | None = None
) -> int:
    """See :meth:`Client.latest_version`; raises the same."""
    return await _client(store_name).latest_version(key, timeout=timeout)


async def delete(key: str, *, store_name: str = DEFAULT_NAME, timeout: float | None = None) -> None:
    """See :meth:`Client.delete`; raises the same."""
    await _client(store_name).delete(key, timeout=timeout)


async def delete_batch(
    keys: Iterable[str], *, store_name: str = DEFAULT_NAME, timeout: float | None = None
) -> int:
    """See :meth:`Client.delete_batch`; raises the same."""
    return await _client(store_name).delete_batch(keys, timeout=timeout)


async def exists(key: str, *, store_name: str = DEFAULT_NAME, timeout: float | None = None) -> bool:
    """See :meth:`Client.exists`; raises the same."""
    return await _client(store_name).exists(key, timeout=timeout)


async def keys(
    prefix: str | None = None, *, store_name: str = DEFAULT_NAME, timeout: float | None = None
) -> list[str]:
    """See :meth:`Client.keys`; raises the same."""
    return await _client(store_name).keys(prefix, timeout=timeout)


async def wait(
    keys: str | Iterable[str],
    *,
    min_version: int | None = None,
    store_name: str = DEFAULT_NAME,
    timeout: float | None = None,
) -> dict[str, ObjectRef]:
    """See :meth:`Client.wait`; raises the same."""
    return await _client(store_name).wait(keys, min_version=min_version, timeout=timeout)


async def stat(
    key: str, *, store_name: str = DEFAULT_NAME, timeout: float | None = None
) -> m.Found:
    """See :meth:`Client.stat`; raises the same."""
    return await _client(store_name).stat(key, timeout=timeout)


async def status(*, store_name: str = DEFAULT_NAME, timeout: float | None = None) -> m.StatusReport:
    """See :meth:`Client.status`; raises the same."""
    return await _client(store_name).status(timeout=timeout)


async def explain(
    nbytes: int = 1 << 30, *, store_name: str = DEFAULT_NAME, timeout: float | None = None
) -> list[dict[str, Any]]:
    """See :meth:`Client.explain`; raises the same."""
    return await _client(store_name).explain(nbytes, timeout=timeout)
