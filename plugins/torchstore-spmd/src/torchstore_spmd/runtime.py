"""The runtime ``spmd``: one store for all ranks that a launcher such as torchrun has started.

The ranks meet (``rendezvous``), agree on the store's options, start the store, and become members
of its server (``member``), which ends with the last of them. On one host, rank 0 starts the server
(``one_host``); on several, the installed engine starts it (``contracts.engine``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from torchstore_core.contracts.engine import RankStore, Rendezvous
from torchstore_core.contracts.ranks import RankRuntime, SPMDEnv
from torchstore_core.contracts.runtime import StoreOptions
from torchstore_core.contracts.strategy import Strategy
from torchstore_core.errors import ConfigurationError, PluginError, TorchStoreError
from torchstore_core.plugins.installed import RUNTIMES
from torchstore_core.plugins.registry import Registry, load_class
from torchstore_core.plugins.strategy_data import plain_options
from torchstore_spmd import one_host
from torchstore_spmd.member import Member
from torchstore_spmd.plugin import ENGINE_PACKAGE
from torchstore_spmd.rendezvous import TCPRendezvous

__all__ = ["SPMDRuntime", "default_volumes"]

_Start = Callable[[StoreOptions, SPMDEnv, Rendezvous], Awaitable[RankStore]]

_END_FAILED_S = 3.0
_WITHDRAW_S = 5.0


class _Terms(msgspec.Struct, frozen=True):
    """The options that must be the same on all ranks."""

    strategy: str
    num_storage_volumes: int
    capacity: int | None
    prefault: int | None
    world_size: int
    local_world_size: int
    spill: str | None = None
    spill_capacity: int | None = None
    when_full: str | None = None
    repair_bandwidth: int | None = None
    keeper: bool | None = None

    @classmethod
    def of(cls, options: StoreOptions, env: SPMDEnv) -> _Terms:
        fields = plain_options(options)
        for name in ("store_name", "timeout", "block"):  # how they meet, and what is a rank's own
            del fields[name]
        strategy = fields.pop("strategy", "singleton")
        if encoded := fields.pop("strategy_fields", b""):
            strategy = f"{strategy} {encoded.decode()}"
        world, local = env.world_size, env.local_world_size
        return cls(strategy=strategy, world_size=world, local_world_size=local, **fields)


class SPMDRuntime(RankRuntime):
    """This rank's part in a store of all ranks; see ``RankRuntime``."""

    def __init__(self, env: SPMDEnv | None = None) -> None:
        self._env = SPMDEnv.from_environment() if env is None else env
        self.ranks = self._env.rank, self._env.local_rank
        self._store: RankStore | None = None
        self._member: Member | None = None

    def default_volumes(self, strategy: Strategy | None) -> int:
        return default_volumes(strategy, self._env)

    async def start(self, options: StoreOptions, mesh: object | None) -> str:
        """Meet the other ranks; return the server's address once all ranks are its members."""
        start: _Start = one_host.start
        try:
            terms = _Terms.of(options, self._env)
            if not self._env.one_host:
                start = _over_several_hosts(options.block)
        except TorchStoreError as error:
            await self.withdraw(options.store_name, error)
            raise
        rendezvous = await TCPRendezvous.open(self._env, options.store_name, options.timeout)
        try:
            await _agree(terms, rendezvous)
            self._store = store = await start(options, self._env, rendezvous)
            ranks = self._env.rank, self._env.local_rank
            self._member = await Member.join(store.address, ranks, rendezvous.seconds_left())
            store.joined()
            await rendezvous.barrier("joined")
            await rendezvous.close()
            return store.address
        except BaseException as error:
            await rendezvous.fail(error)
            await self.stop(_END_FAILED_S)
            raise

    @property
    def ended(self) -> bool:
        return self._member is not None and self._member.server_ended

    async def stop(self, timeout: float) -> None:
        """Leave the store; the last rank waits until the server has ended. Idempotent."""
        store, self._store = self._store, None
        member, self._member = self._member, None
        last = member is not None and await member.leave(timeout)
        if store is not None:
            await store.stop(timeout, last=last)

    async def withdraw(self, store_name: str, error: Exception) -> None:
        if type(store_name) is not str:  # the others cannot wait in a store of such a name
            return
        with contextlib.suppress(TorchStoreError):
            rendezvous = await TCPRendezvous.open(self._env, store_name, _WITHDRAW_S)
            await rendezvous.fail(error)


async def _agree(terms: _Terms, rendezvous: Rendezvous) -> None:
    """Refuse options that differ from those of rank 0.

    Raises:
        ConfigurationError: lists the options that differ.
    """
    env = rendezvous.env
    if env.rank == 0:
        await rendezvous.publish("terms", terms)
        return
    first = await rendezvous.read("terms", 0, _Terms)
    differ = {
        name: [getattr(first, name), getattr(terms, name)]
        for name in _Terms.__struct_fields__
        if getattr(first, name) != getattr(terms, name)
    }
    if differ:
        listed = "; ".join(
            f"{name} is {a!r} on rank 0, {b!r} here" for name, (a, b) in differ.items()
        )
        raise ConfigurationError(
            f"rank {env.rank} calls initialize_spmd({env.world_size} ranks) with other arguments "
            f"than rank 0: {listed}. All ranks have to ask for the same store",
            details={"differ": differ},
        )


def default_volumes(strategy: object | None, env: SPMDEnv) -> int:
    """Return how many volumes a store gets by default: one per rank, or fewer if its strategy does
    not distinguish the ranks of a host.

    >>> default_volumes(None, SPMDEnv(0, 0, 4, 2, "localhost", 29500))
    1
    """
    config = getattr(type(strategy), "__struct_config__", None)
    name = "singleton" if strategy is None else getattr(config, "tag", None)
    if name == "singleton":
        return 1
    if name == "host":
        return env.world_size // env.local_world_size
    return env.world_size


def _over_several_hosts(block: Sequence[str]) -> _Start:
    """Return the ``Engine.spmd`` of the installed engine.

    Raises:
        PluginError: no usable engine is installed, or more than one.
    """
    registry = Registry(block=block)
    able = {spec.name: spec.spmd for spec in registry.runtimes() if spec.spmd is not None}
    if not able:
        left_out = registry.left_out(RUNTIMES)
        why = "; ".join(f"{name} is left out: {reason}" for name, reason in left_out.items())
        raise PluginError(
            "the ranks are on several hosts (LOCAL_WORLD_SIZE is below WORLD_SIZE), which takes "
            f"Monarch: pip install {ENGINE_PACKAGE}" + (f" ({why})" if why else "")
        )
    if len(able) > 1:
        raise PluginError(
            f"the ranks are on several hosts, and {' and '.join(able)} can each start a store over "
            "them; block all but one"
        )
    (path,) = able.values()
    start: _Start = load_class(path)
    return start
