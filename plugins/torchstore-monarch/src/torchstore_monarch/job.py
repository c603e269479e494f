"""A process's use of its Monarch job: finds, reaches and ends stores, from any host."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import contextvars
import itertools
import logging
import threading
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

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
from torchstore_monarch.protocol import FoundStore, Offer

if TYPE_CHECKING:
    from torchstore_monarch.actors.host import HostActor

log = logging.getLogger(__name__)

T = TypeVar("T")
_NAME = "torchstore_directory"
# The context variable in which Monarch keeps the actor whose endpoint is running.
_MONARCHS = "monarch.actor_mesh._context"
_MAKE_S = 60.0
_END_S = 10.0
# As how many actors a call is made, if one after the other fails.
_TRIES = 3
_lock = threading.Lock()
# Things that are being made for this process, see _once.
_making: dict[str, concurrent.futures.Future[Any]] = {}
# The actors of the store in this process. The first one calls, the others have relays, or had one.
_actors: list[StoreActor] = []
# The actor as which the running task calls.
_caller: contextvars.ContextVar[StoreActor] = contextvars.ContextVar("torchstore_caller")
_rank: int | None = None
# Relays of this process, by the address of the server that they lead to.
_relays: dict[str, tuple[StoreActor, str]] = {}
# Ends of stores that are under way, including those that nobody waits for any more.
_ending: set[asyncio.Task[bool]] = set()
# For each store that was found, by its id: the address at which it was, and the actors that have
# its volumes, by volume id.
_volumes: dict[str, tuple[str, dict[str, Any]]] = {}


class _EndedError(StoreClosedError):
    """The actor as which this process was calling has ended."""


class StoreActor:
    """An actor of the store in this process. Made in an endpoint of that actor.

    The engine ends an actor that calls one that has stopped. After that no call of it returns, and
    no actor can be started in its process any more. Whoever waits for a call of it learns that it
    has ended.

    Attributes:
        host: the actor.
        relaying: it has a relay, or is about to.
    """

    def __init__(self, host: HostActor) -> None:
        self.host = host
        self.relaying = False
        self._context = contextvars.copy_context()
        self._context.run(_caller.set, self)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._ended = False

    async def run(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run ``work`` as this actor.

        Raises:
            StoreClosedError: the actor has ended; what the work has called may have been done.
        """
        # In a copy, because two threads cannot be in one context at the same time.
        context = self._context.copy()
        task = asyncio.get_running_loop().create_task(work(), context=context)
        with _lock:
            self._tasks.add(task)
        if self._ended:
            task.cancel()
        try:
            return await task
        except asyncio.CancelledError as error:
            running = asyncio.current_task()
            if not self._ended or (running is not None and running.cancelling()):
                raise
            raise _EndedError("the actor as which this process called has ended") from error
        finally:
            with _lock:
                self._tasks.discard(task)

    def end(self) -> None:
        """End what runs as this actor, because it has ended."""
        retire(self)
        with _lock:
            self._ended = True
            tasks = list(self._tasks)
        for task in tasks:
            with contextlib.suppress(RuntimeError):  # its loop is closed
                task.get_loop().call_soon_threadsafe(task.cancel)


async def directory() -> Any:
    """Return the job's directory of stores."""
    return await get_or_spawn_controller(_NAME, Directory)


def use_this_actor(host: HostActor) -> StoreActor:
    """Let this process use stores as the calling actor from now on."""
    actor = StoreActor(host)
    with _lock:
        _actors.append(actor)
    return actor


def retire(actor: StoreActor) -> None:
    """Do not call as that actor any more."""
    with _lock, contextlib.suppress(ValueError):
        _actors.remove(actor)


async def as_store_actor(work: Callable[[], Coroutine[Any, Any, T]], timeout: float | None) -> T:
    """Run ``work``, which may be done again, as an actor of the store.

    Then it does not matter which thread calls (a plain thread does not know which actor's process
    it is in). And when the engine cannot deliver a call, because its receiver has died, it does not
    blame the user's actor.

    Raises:
        StoreTimeoutError: the work took longer than ``timeout`` seconds.
        StoreClosedError: this process gets no actor.
    """
    try:
        async with asyncio.timeout(timeout):
            tries = itertools.count(1)
            while True:
                actor = await store_actor()
                try:
                    return await actor.run(work)
                except Exception as error:  # the actor's owner may have been stopped
                    kept = isinstance(error, TorchStoreError) and not isinstance(error, _EndedError)
                    if kept or next(tries) == _TRIES:
                        raise
                    log.debug("calling as another actor: %s", type(error).__name__)
                    retire(actor)
    except TimeoutError as error:
        raise _no_answer(timeout) from error


def _no_answer(timeout: float | None) -> StoreTimeoutError:
    return StoreTimeoutError(
        f"the Monarch job did not answer within {in_seconds(timeout)}",
        details={"timeout": timeout},
    )


async def store_actor() -> StoreActor:
    """Return the actor as which this process calls stores, which it gets with its first call.

    Raises:
        StoreClosedError: the process runs actors, but the caller belongs to none of them; or the
            engine starts none here.
    """
    known = next(iter(_actors), None)
    if known is not None:
        return known
    if is_worker() and not _knows_its_actor():
        raise StoreClosedError(
            "this thread does not know which actor's process it is in: make the first call to the "
            "store in an endpoint (`await ts.client()`, say), or run the thread's function with "
            "asyncio.to_thread or contextvars.copy_context().run"
        )

    async def make() -> StoreActor:
        global _rank
        if not _actors:
            _rank = int(context().actor_instance.rank.rank)
            await _start_actor()
        return next(iter(_actors))

    return await _once("caller", make)


async def _start_actor() -> None:
    """Add an actor to those of this process.

    Raises:
        StoreClosedError: the engine starts none here.
    """
    try:
        started = await (await directory()).spawn_caller.call_one(this_proc())
        await started.use_this_actor.call_one()
    except Exception as error:  # whatever the engine raises
        said = str(error).strip().splitlines() or [""]
        raise StoreClosedError(
            "the engine starts no actor of the store in this process; it starts none where one has "
            f"failed ({type(error).__name__}: {said[0]})"
        ) from error


async def _once(what: str, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Return the result of ``make``, which runs only once for all callers that ask for ``what``
    meanwhile, in any thread and event loop. It runs in a thread of its own, so that it does not end
    with the first caller; it does with the actor as which that one calls.
    """
    caller = _caller.get(None)

    async def bounded() -> T:
        async with asyncio.timeout(_MAKE_S):
            return await (make() if caller is None else caller.run(make))

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
    asked = (await directory()).find
    data, _, volumes = await asked.call_one(store_name)
    if not data:
        return None
    found = msgspec.msgpack.decode(data, type=FoundStore)
    here = topology.probe().host_id
    address = found.address
    if here != found.host_id:
        relays = found.relays.get(here, ())
        there = [relay for relay in relays if _is_there(relay)]  # those whose process is alive
        if there:
            address = there[0]
        else:
            data, controller, volumes = await asked.call_one(store_name, True)
            if not data:
                return None
            found = msgspec.msgpack.decode(data, type=FoundStore)
            address = await _own_relay(found, controller, volumes)
    # A copy, as other threads change it meanwhile.
    for store_id, (at, _) in _volumes.copy().items():
        if not _is_there(at):
            _volumes.pop(store_id, None)
    _volumes[found.store_id] = address, volumes
    return address


def _is_there(address: str) -> bool:
    return Path(address.partition(":")[2]).exists()


async def _own_relay(found: FoundStore, controller: Any, volumes: dict[str, Any]) -> str:
    """Return the address of this process's relay, because no agent of the store is on this host."""

    async def make() -> str:
        address = _known_relay(found.address)
        if address:
            return address
        actor = await _relay_actor()
        host = actor.host
        try:
            address = await actor.run(lambda: host.open_relay(found, controller, volumes, _MAKE_S))
        except BaseException as error:
            actor.relaying = False
            if isinstance(error, _EndedError):  # not the caller's actor
                raise StoreClosedError("the actor of the relay has ended") from error
            raise
        with _lock:
            _relays[found.address] = actor, address
        return address

    return await _once(found.address, make)


def _known_relay(server: str) -> str:
    """Return the address of this process's relay to that server; empty if there is none."""
    with _lock:
        for other, (actor, address) in _relays.copy().items():
            if not _is_there(address):
                actor.relaying = False
                del _relays[other]
        return _relays[server][1] if server in _relays else ""


async def _relay_actor() -> StoreActor:
    """Return an actor of this process for a relay: not the one that calls stores, if that can be,
    because the controller that a relay calls may have stopped.

    Raises:
        StoreClosedError: all have relays, and the engine starts no other.
    """
    while (taken := _taken(1)) is None:
        try:
            await _start_actor()
        except StoreClosedError:
            taken = _taken(0)
            if taken is None:
                raise
            break
    return taken


def _taken(start: int) -> StoreActor | None:
    with _lock:
        for actor in _actors[start:]:
            if not actor.relaying:
                actor.relaying = True
                return actor
    return None


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
        raise _no_answer(timeout) from error


def _ended(ending: asyncio.Task[bool]) -> None:
    _ending.discard(ending)
    if not ending.cancelled() and (error := ending.exception()) is not None:
        log.debug("while ending a store: %r", error)
