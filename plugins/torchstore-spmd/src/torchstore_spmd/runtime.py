"""Stores of ranks that a launcher such as torchrun has started: one server for all of a host, which
rank 0 starts and which lives until the last rank has left. Several hosts go through Monarch.
"""

from __future__ import annotations

import contextlib
import threading

import msgspec

from torchstore_core.clients.calls.thread_loops import in_thread
from torchstore_core.contracts.runtime import Runtime, RuntimeSpec, StoreOptions
from torchstore_core.errors import ConfigurationError, PluginError, TorchStoreError
from torchstore_core.plugins.registry import Registry, load_class
from torchstore_core.plugins.strategy_data import encode_strategy
from torchstore_core.runtimes.local import LocalRuntime
from torchstore_spmd.env import SPMDEnv
from torchstore_spmd.membership import Member
from torchstore_spmd.rendezvous import Meeting

__all__ = ["SPMDEnv", "SPMDRuntime", "default_volumes", "tell"]

_SEVERAL_HOSTS = "monarch"
_END_FAILED_S = 3.0
_TELL_S = 5.0


class _Place(msgspec.Struct, frozen=True):
    """Where the server is, as rank 0 tells the others."""

    address: str
    members: str


class _Terms(msgspec.Struct, frozen=True):
    """What all ranks have to ask for alike."""

    strategy: str
    num_storage_volumes: int
    capacity: int | None
    prefault: int | None
    world_size: int
    local_world_size: int

    @classmethod
    def of(cls, options: StoreOptions, env: SPMDEnv) -> _Terms:
        strategy = "singleton"
        if options.strategy is not None:
            name, fields = encode_strategy(options.strategy)
            strategy = f"{name} {fields.decode()}"
        return cls(
            strategy,
            options.num_storage_volumes,
            options.capacity,
            options.prefault,
            env.world_size,
            env.local_world_size,
        )


class SPMDRuntime(Runtime):
    """This rank's part in a store of all ranks.

    Args:
        env: who this is.
        registry: where the runtime for several hosts is looked up.
    """

    def __init__(self, env: SPMDEnv, registry: Registry) -> None:
        self._env = env
        self.ranks = env.rank, env.local_rank
        self._registry = registry
        self._member: Member | None = None
        self._server: LocalRuntime | None = None
        self._waiter: threading.Thread | None = None
        self._inner: Runtime | None = None

    async def start(self, options: StoreOptions, mesh: object | None) -> str:
        """Meet the other ranks; the address of the server, once all of them have joined it."""
        several: str | None = None
        try:
            terms = _Terms.of(options, self._env)
            if not self._env.one_host:
                several = _several_hosts(self._registry)
        except TorchStoreError as error:
            await tell(self._env, options.store_name, error)
            raise
        meeting = await Meeting.open(self._env, options.store_name, options.timeout)
        try:
            await _agree(terms, meeting)
            if several is None:
                address = await self._start_here(options, meeting)
            else:
                start = load_class(several)
                address, self._inner = await start(options, self._env, meeting)
                if self._inner is not None:
                    self.local_address = self._inner.local_address
            await meeting.gather("joined")
            await meeting.part()
            return str(address)
        except BaseException as error:
            await meeting.fail(error)
            await self.stop(_END_FAILED_S)
            raise

    async def _start_here(self, options: StoreOptions, meeting: Meeting) -> str:
        if self._env.rank == 0:
            self._server = server = LocalRuntime(members=True)
            address = await meeting.during(server.start(options, None))
            place = _Place(address, server.members_address)
            self._member = await Member.join(place.members, meeting.left())
            self._waiter = server.release()
            await meeting.say("place", place)
        else:
            place = await meeting.hear("place", 0, _Place)
            self._member = await Member.join(place.members, meeting.left())
        return place.address

    @property
    def ended(self) -> bool:
        inner, member = self._inner, self._member
        return (inner is not None and inner.ended) or (member is not None and member.ended)

    async def stop(self, timeout: float) -> None:
        """Leave; the last rank waits until the server has ended. Idempotent."""
        inner, self._inner = self._inner, None
        member, self._member = self._member, None
        server, self._server = self._server, None
        waiter, self._waiter = self._waiter, None
        if inner is not None:
            await inner.stop(timeout)
        ended = member is not None and await member.leave(timeout)
        if server is not None and waiter is None:  # nobody has joined it
            await server.stop(timeout)
        if waiter is not None and ended:
            await in_thread(lambda: waiter.join(timeout))


async def _agree(terms: _Terms, meeting: Meeting) -> None:
    """Refuse arguments that are not those of rank 0.

    Raises:
        ConfigurationError: names those that differ.
    """
    if meeting.env.rank == 0:
        await meeting.say("terms", terms)
        return
    first = await meeting.hear("terms", 0, _Terms)
    differ = {
        name: [getattr(first, name), getattr(terms, name)]
        for name in _Terms.__struct_fields__
        if getattr(first, name) != getattr(terms, name)
    }
    if differ:
        said = "; ".join(
            f"{name} is {a!r} on rank 0, {b!r} here" for name, (a, b) in differ.items()
        )
        raise ConfigurationError(
            f"rank {meeting.env.rank} calls initialize_spmd({meeting.env.world_size} ranks) with "
            f"other arguments than rank 0: {said}. All ranks have to ask for the same store",
            details={"differ": differ},
        )


async def tell(env: SPMDEnv, store_name: str, error: Exception) -> None:
    """Tell the other ranks that this one does not come because of ``error``, which happened before
    it could meet them. If they cannot be told within a few seconds they are not; raises nothing.
    """
    if type(store_name) is not str:
        return
    with contextlib.suppress(TorchStoreError):
        meeting = await Meeting.open(env, store_name, _TELL_S)
        await meeting.fail(error)


def default_volumes(strategy: object | None, env: SPMDEnv) -> int:
    """How many volumes a store gets if nobody says it: one a rank, or fewer if its strategy does
    not tell the ranks of a host apart.

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


def _several_hosts(registry: Registry) -> str:
    """What starts a store over several hosts.

    Raises:
        PluginError: it is not installed.
    """
    spec: RuntimeSpec | None = None
    if _SEVERAL_HOSTS in registry.names("torchstore.runtimes"):
        spec = registry.runtime(_SEVERAL_HOSTS)
    if spec is None or spec.spmd is None:
        raise PluginError(
            "the ranks are on several hosts (LOCAL_WORLD_SIZE is below WORLD_SIZE), which takes "
            "Monarch: pip install torchstore-monarch"
        )
    return spec.spmd
