"""The module-level API: the same operations as :class:`~torchstore_core.Client`, by store name.

Every function except ``initialize``, ``initialize_spmd``, ``connect``, ``connect_or_initialize``,
``shutdown`` and ``reset_client`` raises ``StoreClosedError`` if this process knows no store of that
name and the environment does not name one either.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from types import FunctionType
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

from torchstore_core.clients.calls.arguments import check_timeout
from torchstore_core.clients.calls.reference_operations import R
from torchstore_core.clients.client import Client
from torchstore_core.clients.session.handshake import running_loop
from torchstore_core.clients.session.held_ref import HeldRef
from torchstore_core.clients.stores import environment, leaving, lookup, starting, table
from torchstore_core.clients.stores.environment import DEFAULT_NAME
from torchstore_core.clients.stores.joined import DEFAULT_TIMEOUT_S
from torchstore_core.clients.stores.leaving import STOP_TIMEOUT_S
from torchstore_core.contracts.ranks import SPMDEnv
from torchstore_core.contracts.runtime import StoreOptions
from torchstore_core.contracts.strategy import Strategy
from torchstore_core.contracts.when_full import check_spill, check_when_full
from torchstore_core.errors import ConfigurationError, StoreClosedError, TorchStoreError
from torchstore_core.plugins.ranking import Policy
from torchstore_core.plugins.registry import Registry
from torchstore_core.reports.bandwidths import repair_bandwidth as check_bandwidth
from torchstore_core.reports.refs import RefReport
from torchstore_core.reports.repairs import DrainReport
from torchstore_core.reports.stat import Found
from torchstore_core.reports.status import StatusReport
from torchstore_core.values import ObjectRef, Request, TensorSlice

if TYPE_CHECKING:
    import torch
    from torch.distributed._shard.sharded_tensor.api import ShardedTensor

    from torchstore_core.clients.packed.packed import TorchStoreStateDict
    from torchstore_core.clients.state_dicts.put_arguments import StorePutArguments
    from torchstore_core.clients.state_dicts.putting import PendingPut
    from torchstore_core.clients.values.differences import StateDictReport
    from torchstore_core.clients.values.sharding import TensorShard


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
    spill: str | os.PathLike[str] | None = None,
    spill_capacity: int | None = None,
    when_full: str | None = None,
    repair_bandwidth: int | None = None,
    keeper: bool | None = None,
) -> Client:
    """Start a store that is owned by this process. The store ends when the process does, however
    the process ends.

    Children of this process find the store through the environment (``TORCHSTORE_ADDRESS``);
    children of a fork server that was started earlier find it as their parent's. If such a store is
    already running, or this process has joined one of this name, this call starts a second one and
    issues a RuntimeWarning; :func:`connect_or_initialize` joins the first instead.

    Args:
        num_storage_volumes: how many volumes share ``capacity``.
        strategy: decides where puts go: a Strategy, its entry-point name, or None (``singleton``).
        store_name: distinguishes several stores.
        mesh: for runtimes that span several processes or hosts.
        runtime: entry-point name, or ``"auto"``: the best one for this process and ``mesh``.
        capacity: total bytes; None: half of the memory limit. Memory is only allocated when used.
        timeout: seconds for the start, and default for every operation; None waits forever.
        prefault: bytes of memory to prefault in the background, so that first puts run at full
            speed; None: up to 1 GiB; 0: never prefault.
        allow_pickle: False refuses values that need pickle, by default for every operation.
        prefer: transports to use first (also TORCHSTORE_PREFER, comma-separated).
        block: plug-ins of any kind that must not be loaded, here and in the server (also
            TORCHSTORE_BLOCK).
        spill: where values that may be spilled are written to when memory is nearly full, the least
            recently used first; a get reads them back. Either a directory, on a disk of the
            server's host (if volumes are in other processes, of the host of each), for an unnamed
            file; nothing is left there when the server ends, however it ends. Or any URL of fsspec,
            such as ``s3://bucket/prefix``, for objects in a folder of this store's own, which are
            deleted when it ends; if its processes are killed, by the next store of the host that
            spills there. Credentials and addresses are those of the environment and of
            ``fsspec.config.conf``.
        spill_capacity: the most bytes that the whole store spills, of which each volume has an
            equal part if volumes are in other processes; None: as many as are free at the start,
            and 1 TiB at a URL.
        when_full: what is done with the values of puts that do not say, when memory is full, see
            :meth:`Client.put`; None: ``"pinned"``, but ``"spillable"`` for state dicts of which
            older versions are kept (``keep=``), if there is ``spill``.
        repair_bandwidth: the most bytes per second that the store copies by itself: when a volume
            was lost and values have fewer copies than their strategy wants, and when a volume is
            drained; 0: no limit; None: TORCHSTORE_REPAIR_BANDWIDTH, else 256 MiB.
        keeper: if the server dies (``kill -9``, out of memory, a fault of its own), start it again,
            with every key, version, reference and lease that it had, also on disk (``spill``).
            Clients pause for a moment, calls in progress go on, and tensors stay valid. It costs a
            process that adds 9 MB, and a second copy of what small values take. None: where the
            runtime can; False: what is in the store is lost when the server dies.

    Raises:
        ConfigurationError: an argument is invalid or names a plug-in that is not installed, or
            nothing can be written to ``spill`` or the package for such URLs is not installed, or
            the runtime has no keeper, or this process
            already has such a store: :func:`connect_or_initialize` returns that one.
        PluginError: an unknown or broken runtime or strategy, or two packages claim one name.
        StoreFullError: the system does not provide enough address space for a volume.
        StoreTimeoutError, StoreClosedError: the server did not start.

    >>> async def main():  # 64 GB of activations in 8 GB of memory
    ...     await ts.initialize(capacity=8 << 30, spill="/local/disk", when_full="spillable")
    ...     for step in range(1000):
    ...         await ts.put(f"activations/{step}", torch.randn(1 << 24))
    ...     print((await ts.get("activations/0")).shape)  # read back from disk
    ...     await ts.shutdown()
    """
    timeout = starting.check(num_storage_volumes, store_name, capacity, prefault, timeout, keeper)
    place = check_spill(spill, spill_capacity)
    check_when_full(when_full, place)
    bandwidth = check_bandwidth(repair_bandwidth, os.environ)
    policy, pickles = Policy.make(prefer, block), environment.allows_pickle(allow_pickle)
    registry = Registry(block=policy.block)
    with table.reserve(store_name) as ended:
        if ended is not None:
            await leaving.leave(ended)
        host = starting.runtime(registry, runtime, mesh)
        if keeper and not host.keeps:
            raise ConfigurationError(
                f"{type(host).__name__} cannot start its server again when it dies: it takes no "
                "keeper"
            )
        if not host.shared:  # an engine that keeps track of stores refuses a second one itself
            await starting.warn_of_another(store_name)
        return await starting.start(
            StoreOptions(
                store_name=store_name,
                num_storage_volumes=num_storage_volumes,
                strategy=starting.strategy(registry, strategy),
                capacity=capacity,
                prefault=prefault,
                timeout=DEFAULT_TIMEOUT_S if timeout is None else timeout,
                block=policy.block,
                spill=place,
                spill_capacity=spill_capacity,
                when_full=when_full,
                repair_bandwidth=bandwidth,
                keeper=keeper,
            ),
            host,
            mesh,
            policy,
            timeout,
            pickles,
        )


async def initialize_spmd(
    strategy: Strategy | str | None = None,
    store_name: str = DEFAULT_NAME,
    env: SPMDEnv | None = None,
    *,
    num_storage_volumes: int | None = None,
    capacity: int | None = None,
    timeout: float | None = DEFAULT_TIMEOUT_S,
    prefault: int | None = None,
    allow_pickle: bool | None = None,
    prefer: Sequence[str] = (),
    block: Sequence[str] = (),
    spill: str | os.PathLike[str] | None = None,
    spill_capacity: int | None = None,
    when_full: str | None = None,
    repair_bandwidth: int | None = None,
    keeper: bool | None = None,
) -> Client:
    """Start one store for all ranks of a job, for example one started by torchrun. Every rank calls
    this with the same arguments; it returns when all of them have joined.

    On a single host, rank 0 starts the server. No rank owns the store: it ends when the last rank
    has shut it down or has ended, however it ended. If there are ranks on several hosts, the
    package of a distributed engine is needed as well; the error names one. This function needs the
    package ``torchstore-spmd``. It makes no difference whether ``torch.distributed`` is
    initialised.

    If the environment names a store that is already running, this call starts a second one, and the
    first rank of each host issues a RuntimeWarning; :func:`connect_or_initialize`, called by all
    ranks, joins the first instead.

    Args:
        strategy: as for :func:`initialize`.
        store_name: distinguishes several stores.
        env: this rank's place in the job; None: taken from RANK, LOCAL_RANK, WORLD_SIZE,
            LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
        num_storage_volumes: how many volumes share ``capacity``; None: one per rank, with the
            strategy ``host`` one per host, with ``singleton`` one.
        capacity, prefault, allow_pickle, prefer, block, spill, spill_capacity, when_full,
            repair_bandwidth, keeper: as for :func:`initialize`. Only stores of a single host can
            spill.
        timeout: seconds until all ranks must have joined, and default for every operation.

    Raises:
        ConfigurationError: the environment is not that of a rank (the error lists everything that
            is wrong with it), an argument is invalid, or this process already has such a store.
        StoreTimeoutError: ranks did not join in time; ``details["missing_ranks"]`` lists them.
        PluginError: ``torchstore-spmd`` is not installed, or, with ranks on several hosts, no
            engine that spans them; or the strategy is unknown.
        TorchStoreError: the error that kept another rank from joining, raised by every rank.

    >>> async def main():  # python -m torch.distributed.run --nproc-per-node=2 script.py
    ...     await ts.initialize_spmd(capacity=1 << 30)
    ...     await ts.put(f"from {os.environ['RANK']}", torch.ones(3))
    ...     print(await ts.wait(["from 0", "from 1"]))
    ...     await ts.shutdown()
    """
    ranks = starting.rank_runtime()
    place = SPMDEnv.from_environment() if env is None else env
    if not isinstance(place, SPMDEnv):
        raise ConfigurationError(f"env is an SPMDEnv, or None, not {place!r}")
    host = ranks(place)
    with contextlib.ExitStack() as reserved:
        try:
            policy = Policy.make(prefer, block)
            registry = Registry(block=policy.block)
            registry.runtime(starting.SPMD)  # raises if it is blocked
            placing = starting.strategy(registry, strategy)
            volumes = num_storage_volumes
            if volumes is None:
                volumes = host.default_volumes(placing)
            timeout = starting.check(volumes, store_name, capacity, prefault, timeout, keeper)
            spill_to = check_spill(spill, spill_capacity)
            check_when_full(when_full, spill_to)
            bandwidth = check_bandwidth(repair_bandwidth, os.environ)
            allow_pickle = environment.allows_pickle(allow_pickle)
            ended = reserved.enter_context(table.reserve(store_name))
            if ended is not None:
                await leaving.leave(ended)
            if place.local_rank == 0:  # once per host is enough
                await starting.warn_of_another(store_name)
        except (TorchStoreError, RuntimeWarning) as error:  # the others must not wait for this rank
            await host.withdraw(store_name, error)
            raise
        options = StoreOptions(
            store_name=store_name,
            num_storage_volumes=volumes,
            strategy=placing,
            capacity=capacity,
            prefault=prefault,
            timeout=DEFAULT_TIMEOUT_S if timeout is None else timeout,
            block=policy.block,
            spill=spill_to,
            spill_capacity=spill_capacity,
            when_full=when_full,
            repair_bandwidth=bandwidth,
            keeper=keeper,
        )
        return await starting.start(options, host, None, policy, timeout, allow_pickle)


async def connect(
    address: str,
    *,
    store_name: str = DEFAULT_NAME,
    timeout: float | None = DEFAULT_TIMEOUT_S,
    allow_pickle: bool | None = None,
    prefer: Sequence[str] = (),
    block: Sequence[str] = (),
) -> Client:
    """Join the store that listens at ``address`` (``unix:/path``, or the path alone), under
    ``store_name`` in this process.

    Raises:
        StoreClosedError: nothing listens at the address.
        StoreTimeoutError: no answer within ``timeout`` seconds.
        ProtocolError: the listener is not a store, or has a different protocol version.
        ConfigurationError: an argument is invalid, or this process owns another store of that name.
        PluginError: two packages claim one transport.
    """
    timeout = starting.check(1, store_name, None, None, timeout)
    address = environment.as_address(address)
    allow_pickle = environment.allows_pickle(allow_pickle)
    policy = Policy.make(prefer, block)
    before = table.known(store_name)
    store = await table.connect(address, store_name, policy, timeout, allow_pickle)
    leave = None if store is before else leaving.leave_opened
    return Client(store, timeout=timeout, allow_pickle=allow_pickle, leave=leave)


async def connect_or_initialize(
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
    spill: str | os.PathLike[str] | None = None,
    spill_capacity: int | None = None,
    when_full: str | None = None,
    repair_bandwidth: int | None = None,
    keeper: bool | None = None,
) -> Client:
    """Join the store of that name if there is one, otherwise start it.

    Stores are looked up in this order: a store that this process has already initialised or joined
    (so that a notebook cell can run again), the store of the distributed job that this process
    belongs to, and the store that ``TORCHSTORE_ADDRESS`` names. A store whose server has ended does
    not count. An existing store is joined as by :func:`connect`, unchanged:
    ``num_storage_volumes``, ``strategy``, ``mesh``, ``runtime``, ``capacity``, ``prefault``,
    ``spill``, ``spill_capacity``, ``when_full`` and ``keeper`` apply only to a new store, which is
    then owned by this process, as with :func:`initialize`.

    Threads and tasks of this process may call this at the same time: one of them starts the store
    and the others join it. If two processes call it before either has a store, however, each may
    start one of its own: have their parent call it before starting them, or use `torchstore serve`.
    The ranks of torchrun share a new store by :func:`initialize_spmd`.

    Args:
        num_storage_volumes, strategy, store_name, mesh, runtime, capacity, timeout, prefault,
            allow_pickle, prefer, block, spill, spill_capacity, when_full, repair_bandwidth,
            keeper: as for :func:`initialize`.

    Raises:
        StoreTimeoutError: the existing store does not answer within ``timeout`` seconds: it hangs,
            and no other one is started in its place. Or another thread or task takes longer than
            that to start the store.
        ProtocolError: what was found is not a store, or has a different protocol version.
        StoreClosedError: the store of this rank's :func:`initialize_spmd` has ended; a store that
            is started by a single rank would not be shared.
        TorchStoreError: everything that :func:`initialize` raises.
    """
    starting.check(num_storage_volumes, store_name, capacity, prefault, timeout, keeper)
    check_when_full(when_full, check_spill(spill, spill_capacity))
    check_bandwidth(repair_bandwidth, os.environ)

    async def join(where: str) -> Client:
        joined = await connect(
            where,
            store_name=store_name,
            timeout=timeout,
            allow_pickle=allow_pickle,
            prefer=prefer,
            block=block,
        )
        await joined.status()  # an earlier session may not have noticed yet that its server is gone
        return joined

    begun = time.monotonic()
    while True:
        waited = time.monotonic() - begun
        await table.until_started(
            store_name, None if timeout is None else max(0.0, timeout - waited)
        )
        before = table.known(store_name)
        if before is not None:
            try:
                return await join(before.address)
            except StoreClosedError:
                if before.runtime is not None:
                    if before.runtime.ranks is not None:
                        raise
                    if table.remove(store_name, before) is not None:
                        await leaving.leave(before)
        where = lookup.address_of(store_name)
        if where is not None and (before is None or before.address != where):
            with contextlib.suppress(StoreClosedError):
                return await join(where)
        before = table.known(store_name)
        try:
            return await initialize(
                num_storage_volumes,
                strategy,
                store_name,
                mesh,
                runtime=runtime,
                capacity=capacity,
                timeout=timeout,
                prefault=prefault,
                allow_pickle=allow_pickle,
                prefer=prefer,
                block=block,
                spill=spill,
                spill_capacity=spill_capacity,
                when_full=when_full,
                repair_bandwidth=repair_bandwidth,
                keeper=keeper,
            )
        except ConfigurationError as error:
            # If another thread or task has started the store meanwhile, join that one.
            if "taken" not in error.details and table.known(store_name) is before:
                raise


async def shutdown(
    store_name: str = DEFAULT_NAME, *, timeout: float | None = STOP_TIMEOUT_S
) -> None:
    """End the store if this process owns it, otherwise just leave it. If there is none, do nothing.

    The store of a distributed job can be ended by any process of the job except those that joined
    it by :func:`connect`. A store that is shared by the ranks of torchrun ends when the last rank
    has left it. Tensors that zero-copy gets returned stay valid. A server that does not end within
    ``timeout`` seconds is killed.

    Raises:
        ConfigurationError: the timeout or the name is invalid, or no event loop runs the call.
    """
    running_loop()
    limit = check_timeout(timeout)
    await leaving.shut_down(store_name, STOP_TIMEOUT_S if limit is None else limit)


async def address(store_name: str = DEFAULT_NAME, *, timeout: float | None = None) -> str:
    """Return the address that other processes pass to :func:`connect`, or find in
    ``TORCHSTORE_ADDRESS``.

    Raises:
        StoreClosedError: this process knows no such store.
    """
    check_timeout(timeout)
    return table.find(store_name).address


async def client(store_name: str = DEFAULT_NAME, *, timeout: float | None = None) -> Client:
    """Return a connected client of a store.

    Raises:
        StoreClosedError: this process knows no such store, or its server is gone.
        StoreTimeoutError: no answer within ``timeout`` seconds.
    """
    limit = check_timeout(timeout)
    store = table.find(store_name)
    await store.session(store.timeout if timeout is None else limit)
    return Client(store)


async def reset_client(store_name: str = DEFAULT_NAME, *, timeout: float | None = None) -> None:
    """Drop this process's connections; the next operation opens new ones. Tensors stay valid, and
    calls that are in progress, for example in other threads, finish on the old connections.

    Does nothing if this process knows no such store.

    Raises:
        ConfigurationError: the timeout or the name is invalid.
    """
    check_timeout(timeout)
    store = table.known(store_name)
    if store is not None:
        store.reset()


def _client(store_name: str) -> Client:
    store = table.find(store_name)
    client: Client | None = store.client
    if client is None:
        client = store.client = Client(store)
    return client


async def put(
    key: str,
    value: Any,
    tensor_slice_spec: TensorSlice | None = None,
    *,
    version: int | None = None,
    rewind: bool = False,
    when_full: str | None = None,
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
        rewind=rewind,
        when_full=when_full,
        timeout=timeout,
        allow_pickle=allow_pickle,
    )


async def put_object(
    value: Any,
    *,
    when_full: str | None = None,
    store_name: str = DEFAULT_NAME,
    timeout: float | None = None,
    allow_pickle: bool | None = None,
) -> HeldRef:
    """See :meth:`Client.put_object`; raises the same."""
    return await _client(store_name).put_object(
        value, when_full=when_full, timeout=timeout, allow_pickle=allow_pickle
    )


async def empty(
    shape: int | Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    store_name: str = DEFAULT_NAME,
    timeout: float | None = None,
) -> torch.Tensor:
    """See :meth:`Client.empty`; raises the same."""
    return await _client(store_name).empty(shape, dtype=dtype, timeout=timeout)


async def put_batch(
    items: Mapping[str, Any],
    *,
    version: int | None = None,
    rewind: bool = False,
    when_full: str | None = None,
    store_name: str = DEFAULT_NAME,
    timeout: float | None = None,
    allow_pickle: bool | None = None,
) -> dict[str, ObjectRef]:
    """See :meth:`Client.put_batch`; raises the same."""
    return await _client(store_name).put_batch(
        items,
        version=version,
        rewind=rewind,
        when_full=when_full,
        timeout=timeout,
        allow_pickle=allow_pickle,
    )


async def get(
    key_or_ref: str | ObjectRef | HeldRef | Request,
    inplace_tensor: torch.Tensor | TensorShard | ShardedTensor | None = None,
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
    keys: Iterable[str | ObjectRef | HeldRef | Request] | Mapping[str, Any],
    *,
    store_name: str = DEFAULT_NAME,
    timeout: float | None = None,
    allow_pickle: bool | None = None,
) -> dict[str, Any]:
    """See :meth:`Client.get_batch`; raises the same."""
    made = _client(store_name)
    return await made.get_batch(keys, timeout=timeout, allow_pickle=allow_pickle)


@overload
async def put_state_dict(
    state_dict: Mapping[str, Any] | TorchStoreStateDict,
    key: str,
    *,
    blocking: Literal[True] = True,
    **arguments: Unpack[StorePutArguments],
) -> ObjectRef: ...


@overload
async def put_state_dict(
    state_dict: Mapping[str, Any] | TorchStoreStateDict,
    key: str,
    *,
    blocking: Literal[False],
    **arguments: Unpack[StorePutArguments],
) -> PendingPut: ...


@overload
async def put_state_dict(
    state_dict: Mapping[str, Any] | TorchStoreStateDict,
    key: str,
    *,
    blocking: bool,
    **arguments: Unpack[StorePutArguments],
) -> ObjectRef | PendingPut: ...


async def put_state_dict(
    state_dict: Mapping[str, Any] | TorchStoreStateDict,
    key: str,
    *,
    version: int | None = None,
    rewind: bool = False,
    participants: int | None = None,
    participant: str | int | None = None,
    transfer_dtype: torch.dtype | Mapping[str, torch.dtype | None] | None = None,
    partial: bool = False,
    keep: int | None = None,
    blocking: bool = True,
    when_full: str | None = None,
    store_name: str = DEFAULT_NAME,
    timeout: float | None = None,
    allow_pickle: bool | None = None,
) -> ObjectRef | PendingPut:
    """See :meth:`Client.put_state_dict`; raises the same."""
    return await _client(store_name).put_state_dict(
        state_dict,
        key,
        version=version,
        rewind=rewind,
        participants=participants,
        participant=participant,
        transfer_dtype=transfer_dtype,
        partial=partial,
        keep=keep,
        blocking=blocking,
        when_full=when_full,
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
    after: ObjectRef | None = None,
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
        after=after,
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
    after: ObjectRef | None = None,
    store_name: str = DEFAULT_NAME,
    timeout: float | None = None,
) -> dict[str, ObjectRef]:
    """See :meth:`Client.wait`; raises the same."""
    made = _client(store_name)
    return await made.wait(keys, min_version=min_version, after=after, timeout=timeout)


async def hold(
    key_or_ref: str | ObjectRef | HeldRef,
    *,
    store_name: str = DEFAULT_NAME,
    timeout: float | None = None,
) -> HeldRef:
    """See :meth:`Client.hold`; raises the same."""
    return await _client(store_name).hold(key_or_ref, timeout=timeout)


async def wait_any(
    refs: Iterable[R],
    *,
    num_returns: int = 1,
    store_name: str = DEFAULT_NAME,
    timeout: float | None = None,
) -> tuple[list[R], list[R]]:
    """See :meth:`Client.wait_any`; raises the same."""
    return await _client(store_name).wait_any(refs, num_returns=num_returns, timeout=timeout)


async def free(
    refs: Iterable[ObjectRef | HeldRef],
    *,
    store_name: str = DEFAULT_NAME,
    timeout: float | None = None,
) -> int:
    """See :meth:`Client.free`; raises the same."""
    return await _client(store_name).free(refs, timeout=timeout)


async def refs(*, store_name: str = DEFAULT_NAME, timeout: float | None = None) -> list[RefReport]:
    """See :meth:`Client.refs`; raises the same."""
    return await _client(store_name).refs(timeout=timeout)


async def stat(
    key: str,
    *,
    version: int | None = None,
    store_name: str = DEFAULT_NAME,
    timeout: float | None = None,
) -> Found:
    """See :meth:`Client.stat`; raises the same."""
    return await _client(store_name).stat(key, version=version, timeout=timeout)


async def status(*, store_name: str = DEFAULT_NAME, timeout: float | None = None) -> StatusReport:
    """See :meth:`Client.status`; raises the same."""
    return await _client(store_name).status(timeout=timeout)


async def drain(
    volume: str | int,
    *,
    undo: bool = False,
    wait: bool = True,
    store_name: str = DEFAULT_NAME,
    timeout: float | None = None,
) -> DrainReport:
    """See :meth:`Client.drain`; raises the same."""
    return await _client(store_name).drain(volume, undo=undo, wait=wait, timeout=timeout)


async def explain(
    nbytes: int = 1 << 30, *, store_name: str = DEFAULT_NAME, timeout: float | None = None
) -> list[dict[str, Any]]:
    """See :meth:`Client.explain`; raises the same."""
    return await _client(store_name).explain(nbytes, timeout=timeout)


def _explain_calls() -> None:
    """Give the calls that a client has, too, the docstrings of these: ``help`` shows them. In the
    source they stand once.
    """
    for name, call in globals().items():
        method = getattr(Client, name, None)
        if isinstance(call, FunctionType) and isinstance(method, FunctionType) and method.__doc__:
            text = inspect.cleandoc(method.__doc__)
            call.__doc__ = f"{text}\n\n``store_name`` is the name of the store."


_explain_calls()
