"""Stores of ranks that a launcher such as torchrun has started: one server for all of a host, which
rank 0 starts and which lives until the last rank has left. Several hosts go through Monarch.
"""

from __future__ import annotations

import asyncio
import threading

import msgspec

from torchstore_core.contracts.runtime import Runtime, RuntimeSpec, StoreOptions
from torchstore_core.errors import PluginError
from torchstore_core.plugins import Registry, load_class
from torchstore_core.runtimes.local import LocalRuntime
from torchstore_core.runtimes.membership import Member
from torchstore_core.runtimes.rendezvous import Meeting
from torchstore_core.runtimes.spmd_env import SPMDEnv

__all__ = ["SPMDEnv", "SPMDRuntime", "default_volumes"]

_SEVERAL_HOSTS = "monarch"
_END_FAILED_S = 3.0


class _Place(msgspec.Struct, frozen=True):
    """Where the server is, as rank 0 tells the others."""

    address: str
    members: str


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
        several = None if self._env.one_host else _several_hosts(self._registry)
        meeting = await Meeting.open(self._env, options.store_name, options.timeout)
        try:
            if several is not None:
                start = load_class(several)
                address, inner = await start(options, self._env, meeting.store, meeting.left())
                self._inner = inner
                self.local_address = None if inner is None else inner.local_address
                return str(address)
            return await self._start_here(options, meeting)
        except BaseException as error:
            await meeting.fail(error)
            await self.stop(_END_FAILED_S)
            raise

    async def _start_here(self, options: StoreOptions, meeting: Meeting) -> str:
        if self._env.rank == 0:
            self._server = server = LocalRuntime(members=True)
            address = await server.start(options, None)
            place = _Place(address, server.members_address)
            self._member = await Member.join(place.members, meeting.left())
            self._waiter = server.release()
            await meeting.say("place", place)
        else:
            place = await meeting.hear("place", 0, _Place)
            self._member = await Member.join(place.members, meeting.left())
        await meeting.gather("joined")
        await meeting.part()
        return place.address

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
            await asyncio.to_thread(waiter.join, timeout)


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
