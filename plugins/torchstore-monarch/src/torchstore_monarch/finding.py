"""How a process of a Monarch job reaches a store of it, on whatever host it is."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import threading
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from monarch.actor import context, get_or_spawn_controller, this_proc

from torchstore_core import topology
from torchstore_core.errors import StoreClosedError, StoreTimeoutError, TorchStoreError
from torchstore_monarch.directory import Directory
from torchstore_monarch.plugin import is_worker
from torchstore_monarch.protocol import FoundStore, Placement, result

__all__ = ["adopt", "directory", "end", "find", "in_context", "rank", "volume_actor"]

log = logging.getLogger(__name__)

T = TypeVar("T")
_NAME = "torchstore_directory"
# The context variable in which Monarch keeps whose endpoint runs.
_MONARCHS = "monarch.actor_mesh._context"
_lock = threading.Lock()
_context: contextvars.Context | None = None
_rank: int | None = None
# Relays of this process, by the server they lead to.
_relays: dict[str, tuple[Any, str]] = {}
# Actors of this process whose relay has ended.
_spare: list[Any] = []
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
            return await _run(work, await _adopted())
    except TimeoutError as error:
        raise StoreTimeoutError(f"the Monarch job did not answer within {timeout} s") from error


async def _adopted() -> contextvars.Context:
    """The context of a fresh actor of this process.

    Raises:
        StoreClosedError: the caller is no part of an actor, but the process is of actors.
    """
    global _rank
    if is_worker() and not _knows_its_actor():
        raise StoreClosedError(
            "this thread does not know which actor's process it is in: make the first call to the "
            "store in an endpoint (`await ts.client()`, say), or run the thread's function with "
            "asyncio.to_thread or contextvars.copy_context().run"
        )
    _rank = int(context().actor_instance.rank.rank)
    guest = await (await directory()).guest.call_one(this_proc())
    await guest.adopt.call_one()
    with _lock:
        if _context is None:
            raise StoreClosedError("this process got no actor of the store")
        return _context


def _knows_its_actor() -> bool:
    found = [value for var, value in contextvars.copy_context().items() if var.name == _MONARCHS]
    return any(value is not None for value in found)


async def _run(work: Callable[[], Coroutine[Any, Any, T]], known: contextvars.Context) -> T:
    return await asyncio.get_running_loop().create_task(work(), context=known)


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
    for server, (agent, address) in list(_relays.items()):
        if not _is_there(address):
            _spare.append(agent)
            del _relays[server]
    if found.address in _relays:
        return _relays[found.address][1]
    agent = _spare.pop() if _spare else await (await directory()).guest.call_one(this_proc())
    wanted = msgspec.msgpack.encode(Placement(found.store_name, "", (), (), 60.0))
    address = result(await agent.begin.call_one(wanted, controller))
    await agent.introduce.call_one(volumes)
    _relays[found.address] = agent, address
    return address


async def end(store_name: str, timeout: float | None) -> bool:
    """End a store of the job; False if there was none.

    Raises:
        StoreTimeoutError: not within ``timeout`` seconds.
    """

    async def work() -> bool:
        ended: Awaitable[bool] = (await directory()).finish.call_one(store_name)
        return await ended

    return await in_context(work, timeout)
