"""The stores that this process has joined, by name; what a fork means for them. Torch-free."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any

from torchstore_core.clients.calls.arguments import check_store_name
from torchstore_core.clients.session.session import Session
from torchstore_core.clients.stores import ancestors, environment
from torchstore_core.clients.stores.environment import (
    ADDRESS,
    DEFAULT_NAME,
    allows_pickle,
    lock,
)
from torchstore_core.clients.stores.joined import DEFAULT_TIMEOUT_S, JoinedStore, sessions
from torchstore_core.clients.stores.lookup import address_of, missing_engine
from torchstore_core.errors import (
    ConfigurationError,
    StoreClosedError,
    StoreTimeoutError,
    in_seconds,
)
from torchstore_core.machine.threads import at_fork
from torchstore_core.plugins.ranking import Policy

_stores: dict[str, JoinedStore] = {}
# Names of those that its user has left, or ended.
_left: set[str] = set()
# Stores that this process is starting: done when they have, or have not.
_starting: dict[str, futures.Future[None]] = {}


@contextlib.contextmanager
def reserve(store_name: str) -> Iterator[JoinedStore | None]:
    """Reserve a name while its server starts. Gives the store that this process owned by that name
    if its server has ended: it is not in the table any more, and has to be left.

    Raises:
        ConfigurationError: this process owns such a store already, or is starting one;
            ``details["taken"]`` is its name.
    """
    over: futures.Future[None] = futures.Future()
    over.set_running_or_notify_cancel()  # who waits for it cannot cancel it
    with lock:
        before = _stores.get(store_name)
        owner = None if before is None else before.runtime
        owned = owner is not None and not owner.shared
        if store_name in _starting:
            raise ConfigurationError(
                f"store {store_name!r} is being initialized in this process at this moment; wait "
                "for that to return",
                details={"taken": store_name},
            )
        ended = before if owned and owner is not None and owner.ended else None
        if ended is not None:
            del _stores[store_name]
        elif owned:
            raise ConfigurationError(
                f"store {store_name!r} is initialized in this process already: use it, "
                f"{shutdown_call(store_name)} first, or call connect_or_initialize, which returns "
                "it",
                details={"taken": store_name},
            )
        _starting[store_name] = over
    try:
        yield ended
    finally:
        _starting.pop(store_name, None)
        over.set_result(None)


async def until_started(store_name: str, timeout: float | None) -> None:
    """Wait for another thread or task of this process that is starting this store; it may fail.

    Raises:
        StoreTimeoutError: it has not ended within ``timeout`` seconds.
    """
    over = _starting.get(store_name)
    if over is None:
        return
    try:
        async with asyncio.timeout(timeout):
            await asyncio.wrap_future(over)
    except TimeoutError as error:
        raise StoreTimeoutError(
            f"store {store_name!r} is being initialized by another thread or task of this process, "
            f"which has not ended within {in_seconds(timeout)}",
            details={"timeout": timeout},
        ) from error


def shutdown_call(store_name: str) -> str:
    """How a user leaves a store, or ends it."""
    return f"`await shutdown({'' if store_name == DEFAULT_NAME else repr(store_name)})`"


def find(store_name: str) -> JoinedStore:
    """The store of that name; joined where it is (see ``lookup``) if it was not yet.

    Raises:
        StoreClosedError: no such store here, and none in the environment.
        ConfigurationError: that is no name of a store, or the environment prefers or blocks what
            nobody has installed here.
    """
    # Every call comes here: known() with its check is for those that are about to fail.
    store = _stores.get(store_name) if type(store_name) is str else known(store_name)
    if store is not None:
        return store
    check_store_name(store_name)
    address = address_of(store_name)
    if address is None:
        since = f" since its {shutdown_call(store_name)}" if store_name in _left else ""
        raise StoreClosedError(
            f"there is no store {store_name!r} in this process{since}{_nor_in_its_parents()}: "
            f"`await initialize()` one, `await connect(address)`, or set {ADDRESS}"
            f"{missing_engine()}"
        )
    with lock:
        return _stores.setdefault(
            store_name,
            JoinedStore(store_name, address, Policy.make(), DEFAULT_TIMEOUT_S, allows_pickle()),
        )


def _nor_in_its_parents() -> str:
    made_by = ancestors.parent()
    return "" if made_by is None else f", nor in its living parents (process {made_by})"


def known(store_name: str) -> JoinedStore | None:
    """The store of that name, if this process has joined it already.

    Raises:
        ConfigurationError: that is no name of a store.
    """
    return _stores.get(check_store_name(store_name))


def is_known(address: str) -> bool:
    """Whether this process has joined a store at that address, by whatever name."""
    return any(store.address == address for store in [*_stores.values()])


async def connect(
    address: str,
    store_name: str,
    policy: Policy,
    timeout: float | None,
    allow_pickle: bool,
) -> JoinedStore:
    """Join the store that listens at an address, under a name; see ``api.connect``."""
    before = known(store_name)
    if before is not None and before.runtime is not None and before.address != address:
        raise ConfigurationError(
            f"this process owns a store {store_name!r}; give the other one another store_name"
        )
    if before is not None and before.leads_to(address, policy):
        # The same store again: earlier clients of it remain unchanged.
        await before.session(timeout)
        return before
    runtime = before.runtime if before is not None else None
    store = JoinedStore(store_name, address, policy, timeout, allow_pickle, runtime)
    store.connected = runtime is None
    await store.session(timeout)
    return join(store, before)


def add(store: JoinedStore) -> None:
    """Make it the one of its name; one that was there before is left."""
    with lock:
        before = _stores.get(store.store_name)
        _stores[store.store_name] = store
    if before is not None:
        before.close()


def join(store: JoinedStore, before: JoinedStore | None) -> JoinedStore:
    """Make it the one of its name, unless another thread or task has joined the same store in the
    same way since ``before`` was there: then that one counts, and this is left.
    """
    with lock:
        now = _stores.get(store.store_name)
        if now is None or now is before or not now.leads_to(store.address, store.policy):
            add(store)
            return store
    store.close()
    return now


def remove(store_name: str, only: JoinedStore | None = None) -> JoinedStore | None:
    """Forget the store of that name, which its user leaves or ends; if ``only`` is given, that
    one alone, which has ended by itself.

    Raises:
        ConfigurationError: that is no name of a store.
    """
    check_store_name(store_name)
    with lock:
        if only is not None and _stores.get(store_name) is not only:
            return None
        store = _stores.pop(store_name, None)
        if store is not None and only is None:
            _left.add(store_name)
        return store


# ---- fork ---------------------------------------------------------------------------------


def _before_fork() -> None:
    _each(lambda session: session.before_fork())


def _after_in_parent() -> None:
    _each(lambda session: session.after_fork_in_parent())


def _after_in_child() -> None:
    _each(lambda session: session.after_fork_in_child())
    sessions.clear()
    _starting.clear()  # by threads of the parent
    environment.forget_what_was_replaced()
    for store in _stores.values():
        store.after_fork_in_child()


def _each(call: Callable[[Session], Any]) -> None:
    for session in list(sessions):
        with contextlib.suppress(OSError):  # a fork must not fail for want of a descriptor
            call(session)


at_fork(lock, before=_before_fork, in_parent=_after_in_parent, in_child=_after_in_child)
