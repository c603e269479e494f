"""What a process does in its Monarch job: it finds, reaches and ends stores, from any host."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import logging
import threading
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from monarch.actor import context, get_or_spawn_controller, this_proc

from torchstore_core.errors import (
    StoreClosedError,
    StoreTimeoutError,
    TorchStoreError,
    in_seconds,
)
from torchstore_core.machine import topology
from torchstore_monarch.actors.core_thread import CoreThread
from torchstore_monarch.actors.directory import Directory
from torchstore_monarch.plugin import is_worker
from torchstore_monarch.protocol import FoundStore, Placement, result

__all__ = ["as_store_actor", "directory", "end", "find", "rank", "use_this_actor", "volume_actor"]

log = logging.getLogger(__name__)

T = TypeVar("T")
_NAME = "torchstore_directory"
# The context variable in which Monarch keeps whose endpoint runs.
_MONARCHS = "monarch.actor_mesh._context"
_MAKE_S = 60.0
_END_S = 10.0
_lock = threading.Lock()
# What is being made for this process.
_making: dict[str, concurrent.futures.Future[Any]] = {}
_context: contextvars.Context | None = None
_rank: int | None = None
# Relays of this process, by the address of the server that they lead to.
_relays: dict[str, tuple[Any, str]] = {}
# Actors of this process whose relay has ended.
_spare: list[Any] = []
# Ends of stores that are under way, also those that nobody waits for any more.
_ending: set[asyncio.Task[bool]] = set()
# The actors that have volumes, by id, of the stores found at each socket.
_volumes: dict[str, dict[str, Any]] = {}


async def directory() -> Any:
    """The job's directory of stores."""
    return await get_or_spawn_controller(_NAME, Directory)


def use_this_actor() -> None:
    """From now on this process makes its calls as the actor that calls this."""
    global _context
    with _lock:
        _context = contextvars.copy_context()


async def as_store_actor(work: Callable[[], Coroutine[Any, Any, T]], timeout: float | None) -> T:
    """Run ``work`` as an actor of the store's, which this process gets with its first call.

    So it does not matter which thread calls (a plain one does not know in whose actor's process it
    is), and when the engine cannot deliver a call, because its receiver has died, that is not held
    against the user's actor.

    Raises:
        StoreTimeoutError: not within ``timeout`` seconds.
    """
    try:
        async with asyncio.timeout(timeout):
            known = _context
            if known is not None:
                try:
                    return await _run(work, known)
                except (TorchStoreError, asyncio.CancelledError):
                    raise
                except Exception as error:  # noqa: BLE001 - its owner may have been stopped
                    log.debug("calling as a new actor: %s", type(error).__name__)
            return await _run(work, await _new_context(known))
    except TimeoutError as error:
        raise StoreTimeoutError(
            f"the Monarch job did not answer within {in_seconds(timeout)}",
            details={"timeout": timeout},
        ) from error


async def _new_context(before: contextvars.Context | None) -> contextvars.Context:
    """The context of an actor of this process, other than ``before``.

    Raises:
        StoreClosedError: the caller is no part of an actor, but the process is of actors.
    """
    if is_worker() and not _knows_its_actor():
        raise StoreClosedError(
            "this thread does not know which actor's process it is in: make the first call to the "
            "store in an endpoint (`await ts.client()`, say), or run the thread's function with "
            "asyncio.to_thread or contextvars.copy_context().run"
        )

    async def make() -> contextvars.Context:
        global _rank
        if _context is None or _context is before:
            _rank = int(context().actor_instance.rank.rank)
            caller = await (await directory()).spawn_caller.call_one(this_proc())
            await caller.use_this_actor.call_one()
        if _context is None:
            raise StoreClosedError("this process got no actor of the store")
        return _context

    return await _once("caller", make)


async def _once(what: str, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """The result of ``make``, made once for all who ask for ``what`` meanwhile, on any threads and
    event loops. It runs in a thread of its own: it does not end with the one who asked first.
    """

    async def bounded() -> T:
        async with asyncio.timeout(_MAKE_S):
            return await make()

    def end(_: object) -> None:
        with _lock:
            del _making[what]
        core.close()

    with _lock:
        made = _making.get(what)
        first = made is None
        if made is None:
            core = CoreThread("torchstore-job")
            made = _making[what] = asyncio.run_coroutine_threadsafe(bounded(), core.loop)
    if first:
        made.add_done_callback(end)
    return await asyncio.shield(asyncio.wrap_future(made))


def _knows_its_actor() -> bool:
    found = [value for var, value in contextvars.copy_context().items() if var.name == _MONARCHS]
    return any(value is not None for value in found)


async def _run(work: Callable[[], Coroutine[Any, Any, T]], known: contextvars.Context) -> T:
    # A copy: two threads cannot be in one context at the same time.
    return await asyncio.get_running_loop().create_task(work(), context=known.copy())


def rank() -> int | None:
    """The rank, in its mesh, of the actor that first used a store in this process; None: none
    has.
    """
    return _rank


async def volume_actor(control: str, volume_id: str) -> Any | None:
    """The actor that has a volume of the store that was found at the socket ``control``; None if
    none was found there by this process.
    """
    return _volumes.get(control, {}).get(volume_id)


async def find(store_name: str, timeout: float | None) -> str | None:
    """The Unix socket of this host that leads to a store of the job; None: there is no such store.

    Raises:
        StoreTimeoutError: no answer within ``timeout`` seconds.
    """
    return await as_store_actor(lambda: _find(store_name), timeout)


async def _find(store_name: str) -> str | None:
    data, controller, volumes = await (await directory()).find.call_one(store_name)
    if not data:
        return None
    found = msgspec.msgpack.decode(data, type=FoundStore)
    here = topology.probe().host_id
    address = found.address
    if here != found.host_id:
        relays = found.relays.get(here, ())
        there = [relay for relay in relays if _is_there(relay)]  # those whose process lives
        address = there[0] if there else await _own_relay(found, controller, volumes)
    for control in list(_volumes):  # other threads change it meanwhile
        if not _is_there(f"unix:{control}"):
            _volumes.pop(control, None)
    _volumes[address.partition(":")[2]] = volumes
    return address


def _is_there(address: str) -> bool:
    return Path(address.partition(":")[2]).exists()


async def _own_relay(found: FoundStore, controller: Any, volumes: dict[str, Any]) -> str:
    """The relay of this process: no agent of the store is on this host."""

    async def make() -> str:
        agent, address = _known_relay(found.address)
        if address:
            return address
        if agent is None:
            agent = await (await directory()).spawn_caller.call_one(this_proc())
        wanted = msgspec.msgpack.encode(Placement(found.store_name, "", (), (), _MAKE_S))
        try:
            address = result(await agent.begin.call_one(wanted, controller))
        except TorchStoreError:
            with _lock:
                _spare.append(agent)
            raise
        await agent.introduce.call_one(volumes)
        with _lock:
            _relays[found.address] = agent, address
        return address

    return await _once(found.address, make)


def _known_relay(server: str) -> tuple[Any, str]:
    """This process's relay to that server: its actor and address. If there is none yet, an actor
    that can become one, if one is spare, and no address.
    """
    with _lock:
        for other, (agent, address) in list(_relays.items()):
            if not _is_there(address):
                _spare.append(agent)
                del _relays[other]
        if server in _relays:
            return _relays[server]
        return (_spare.pop() if _spare else None), ""


async def end(store_name: str, timeout: float | None, token: str = "") -> bool:
    """End a store of the job; False if there was none.

    Args:
        token: only the store of the ``StoreRequest`` with that token.

    Raises:
        StoreTimeoutError: not within ``timeout`` seconds.
    """

    within = _END_S if timeout is None else timeout

    async def work() -> bool:
        finish = (await directory()).finish
        ended: Awaitable[bool] = finish.call_one(store_name, token, within)
        return await ended

    # A caller who stops waiting wants the store to end all the same.
    ending = asyncio.ensure_future(as_store_actor(work, within + _END_S))
    _ending.add(ending)
    ending.add_done_callback(_ended)
    try:
        return await asyncio.wait_for(asyncio.shield(ending), timeout)
    except TimeoutError as error:
        raise StoreTimeoutError(
            f"the Monarch job did not answer within {in_seconds(timeout)}",
            details={"timeout": timeout},
        ) from error


def _ended(ending: asyncio.Task[bool]) -> None:
    _ending.discard(ending)
    if not ending.cancelled() and (error := ending.exception()) is not None:
        log.debug("while ending a store: %r", error)
