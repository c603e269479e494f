"""A process's use of its Monarch job: finds, reaches and ends stores, from any host."""

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
from torchstore_monarch.protocol import FoundStore, Offer, Placement, result

log = logging.getLogger(__name__)

T = TypeVar("T")
_NAME = "torchstore_directory"
# The context variable in which Monarch keeps the actor whose endpoint is running.
_MONARCHS = "monarch.actor_mesh._context"
_MAKE_S = 60.0
_END_S = 10.0
_lock = threading.Lock()
# Things that are being made for this process, see _once.
_making: dict[str, concurrent.futures.Future[Any]] = {}
_context: contextvars.Context | None = None
_rank: int | None = None
# Relays of this process, by the address of the server that they lead to.
_relays: dict[str, tuple[Any, str]] = {}
# Actors of this process whose relay has ended, which can start another one.
_spare: list[Any] = []
# Ends of stores that are under way, including those that nobody waits for any more.
_ending: set[asyncio.Task[bool]] = set()
# For each store that was found, by its id: the address at which it was, and the actors that have
# its volumes, by volume id.
_volumes: dict[str, tuple[str, dict[str, Any]]] = {}


async def directory() -> Any:
    """Return the job's directory of stores."""
    return await get_or_spawn_controller(_NAME, Directory)


def use_this_actor() -> None:
    """Let this process make its calls as the calling actor from now on."""
    global _context
    with _lock:
        _context = contextvars.copy_context()


async def as_store_actor(work: Callable[[], Coroutine[Any, Any, T]], timeout: float | None) -> T:
    """Run ``work`` as an actor of the store, which this process gets with its first call.

    Then it does not matter which thread calls (a plain thread does not know which actor's process
    it is in). And when the engine cannot deliver a call, because its receiver has died, it does not
    blame the user's actor.

    Raises:
        StoreTimeoutError: the work took longer than ``timeout`` seconds.
    """
    try:
        async with asyncio.timeout(timeout):
            known = _context
            if known is not None:
                try:
                    return await _run(work, known)
                except (TorchStoreError, asyncio.CancelledError):
                    raise
                except Exception as error:  # noqa: BLE001 - the actor's owner may have been stopped
                    log.debug("calling as a new actor: %s", type(error).__name__)
            return await _run(work, await _new_context(known))
    except TimeoutError as error:
        raise StoreTimeoutError(
            f"the Monarch job did not answer within {in_seconds(timeout)}",
            details={"timeout": timeout},
        ) from error


async def _new_context(before: contextvars.Context | None) -> contextvars.Context:
    """Return the context of an actor of this process, other than ``before``.

    Raises:
        StoreClosedError: the process runs actors, but the caller belongs to none of them.
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
    """Return the result of ``make``, which runs only once for all callers that ask for ``what``
    meanwhile, in any thread and event loop. It runs in a thread of its own, so that it does not end
    with the first caller.
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
    # In a copy, because two threads cannot be in one context at the same time.
    return await asyncio.get_running_loop().create_task(work(), context=known.copy())


def rank() -> int | None:
    """Return the rank, in its mesh, of the actor that first used a store in this process; None if
    no actor has.
    """
    return _rank


def volume_actor(volume: Offer) -> Any | None:
    """Return the actor that has that volume; None if this process has not found its store."""
    _, actors = _volumes.get(volume.store_id, ("", {}))
    return actors.get(volume.volume_id)


async def find(store_name: str, timeout: float | None) -> str | None:
    """Return the Unix socket of this host that leads to a store of the job; None: no such store.

    Raises:
        StoreTimeoutError: there was no answer within ``timeout`` seconds.
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
        there = [relay for relay in relays if _is_there(relay)]  # those whose process is alive
        address = there[0] if there else await _own_relay(found, controller, volumes)
    for store_id, (at, _) in list(_volumes.items()):  # a copy, as other threads change it meanwhile
        if not _is_there(at):
            _volumes.pop(store_id, None)
    _volumes[found.store_id] = address, volumes
    return address


def _is_there(address: str) -> bool:
    return Path(address.partition(":")[2]).exists()


async def _own_relay(found: FoundStore, controller: Any, volumes: dict[str, Any]) -> str:
    """Return the address of this process's relay, because no agent of the store is on this host."""

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
    """Return the actor and the address of this process's relay to that server. If there is none, a
    spare actor that can start one, or None, and an empty address.
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
    """End a store of the job; return False if there was none.

    Args:
        token: end only the store of the ``StoreRequest`` with that token.

    Raises:
        StoreTimeoutError: the store did not end within ``timeout`` seconds.
    """

    within = _END_S if timeout is None else timeout

    async def work() -> bool:
        finish = (await directory()).finish
        ended: Awaitable[bool] = finish.call_one(store_name, token, within)
        return await ended

    # If the caller stops waiting, the store must end all the same.
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
