"""How a process of a Monarch job reaches a store of it, on whatever host it is."""

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
from torchstore_monarch.core_thread import CoreThread
from torchstore_monarch.directory import Directory
from torchstore_monarch.plugin import is_worker
from torchstore_monarch.protocol import FoundStore, Placement, result

__all__ = ["adopt", "directory", "end", "find", "in_context", "rank", "volume_actor"]

log = logging.getLogger(__name__)

T = TypeVar("T")
_NAME = "torchstore_directory"
# The context variable in which Monarch keeps whose endpoint runs.
_MONARCHS = "monarch.actor_mesh._context"
_MAKE_S = 60.0
_END_S = 10.0
_lock = threading.Lock()
# What is being made for this process, by what it is.
_making: dict[str, concurrent.futures.Future[Any]] = {}
_context: contextvars.Context | None = None
_rank: int | None = None
# Relays of this process, by the server they lead to.
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


def adopt() -> None:
    """From now on this process's calls are made by the actor that calls this."""
    global _context
    with _lock:
        _context = contextvars.copy_context()


async def in_context(work: Callable[[], Coroutine[Any, Any, T]], timeout: float | None) -> T:
    """Run ``work`` as an actor of the store's own, which this process gets when it first asks.

    Then it does not matter which thread asks (a plain one does not know whose actor's process it
    is in), and what the engine cannot deliver, because somebody has died, is nothing that the
    user's actor has to answer for.

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
                    log.debug("asking anew: %s", type(error).__name__)
            return await _run(work, await _adopted(known))
    except TimeoutError as error:
        raise StoreTimeoutError(
            f"the Monarch job did not answer within {in_seconds(timeout)}",
            details={"timeout": timeout},
        ) from error


async def _adopted(before: contextvars.Context | None) -> contextvars.Context:
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
            guest = await (await directory()).guest.call_one(this_proc())
            await guest.adopt.call_one()
        if _context is None:
            raise StoreClosedError("this process got no actor of the store")
        return _context

    return await _once("guest", make)


async def _once(what: str, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """What ``make`` gives, which one makes for all who ask for it meanwhile, on whatever threads
    and event loops. It has a thread for itself, so that it does not end with who was first.
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
            core = CoreThread("torchstore-finding")
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
    """Which of its mesh's actors first asked for a store in this process; None: none did."""
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
    return await in_context(lambda: _find(store_name), timeout)


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
    for control in [control for control in _volumes if not _is_there(f"unix:{control}")]:
        del _volumes[control]
    _volumes[address.partition(":")[2]] = volumes
    return address


def _is_there(address: str) -> bool:
    return Path(address.partition(":")[2]).exists()


async def _own_relay(found: FoundStore, controller: Any, volumes: dict[str, Any]) -> str:
    """No agent of the store is on this host: this process has one of its own."""

    async def make() -> str:
        agent, address = _known_relay(found.address)
        if address:
            return address
        if agent is None:
            agent = await (await directory()).guest.call_one(this_proc())
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
    """The address of this process's relay to that server, or else an actor to be one, if there is
    one to spare.
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
    """End a store of the job (``token``: only the one of that ``Asked``); False if there was none.

    Raises:
        StoreTimeoutError: not within ``timeout`` seconds.
    """

    within = _END_S if timeout is None else timeout

    async def work() -> bool:
        finish = (await directory()).finish
        ended: Awaitable[bool] = finish.call_one(store_name, token, within)
        return await ended

    # Who does not wait for it has asked for it all the same.
    ending = asyncio.ensure_future(in_context(work, within + _END_S))
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
