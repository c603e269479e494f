"""Which stores this process belongs to: joined by name, found through the environment. Torch-free.

A membership survives what its session does not: a fork (the child opens a session of its own), a
restarted server, ``reset_client``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any

import msgspec

from torchstore_core.clients.calls import observers as observing
from torchstore_core.clients.session.handshake import Ranks
from torchstore_core.clients.session.session import Session
from torchstore_core.clients.stores import ancestors
from torchstore_core.contracts.engine import Engine
from torchstore_core.contracts.observer import Operation
from torchstore_core.contracts.runtime import Runtime, RuntimeSpec
from torchstore_core.errors import (
    ConfigurationError,
    StoreClosedError,
    StoreTimeoutError,
    in_seconds,
)
from torchstore_core.plugins.ranking import Policy
from torchstore_core.plugins.registry import Registry, load_class

__all__ = [
    "ADDRESS",
    "ADDRESSES",
    "DEFAULT_NAME",
    "DEFAULT_TIMEOUT_S",
    "Membership",
    "add",
    "as_address",
    "find",
    "inherited_address",
    "join",
    "not_a_socket",
    "publish",
    "remove",
    "shutdown_call",
    "started",
]

log = logging.getLogger(__name__)

DEFAULT_NAME = "torchstore"
DEFAULT_TIMEOUT_S = 60.0
#: Environment variable with the address of the default store; children inherit it.
ADDRESS = "TORCHSTORE_ADDRESS"
#: Environment variable with a JSON object of name to address, for stores of other names.
ADDRESSES = "TORCHSTORE_ADDRESSES"


class Membership:
    """This process at one store.

    Args:
        store_name: the name here.
        address: where its server listens (``unix:/path``), or which store of a job it is
            (``<runtime>:<store>``): then it is looked up whenever a session opens.
        policy: the user's word on transports.
        timeout: default of every operation, seconds; None waits for ever.
        allow_pickle: default of every operation.
        runtime: what started the server, in the process that owns it.

    Attributes:
        ranks: which rank this process is, if the runtime knows better than the environment.
        guest: it was joined by ``connect``; leaving it ends nothing.
    """

    def __init__(
        self,
        store_name: str,
        address: str,
        policy: Policy,
        timeout: float | None,
        allow_pickle: bool,
        runtime: Runtime | None = None,
    ) -> None:
        self.store_name = store_name
        self.address = address
        self.policy = policy
        self.timeout = timeout
        self.allow_pickle = allow_pickle
        self.runtime = runtime
        self.ranks: Ranks | None = None if runtime is None else runtime.ranks
        self.guest = False
        self.observe: Callable[[Operation], None] | None = None
        self._session: Session | None = None
        self._before: weakref.WeakSet[Session] = weakref.WeakSet()  # with calls under way, maybe
        self._closed = False
        self._found = ""  # where the address led to, the last time, in process _found_by
        self._found_by = 0

    def leads_to(self, address: str, policy: Policy) -> bool:
        """Whether it is at the store at that address, in the same way."""
        return (self.address, self.policy) == (address, policy)

    def session_here(self) -> Session | None:
        """The session of this process, if it is open."""
        session = self._session
        return session if session is not None and session.usable else None

    async def session(self, timeout: float | None) -> Session:
        """The session of this process, opened when there is none.

        Raises:
            StoreClosedError: shut down, or no server answers.
        """
        session = self.session_here()
        if session is not None:
            return session
        self._check_open()
        where = await self._where(timeout)
        try:
            made = await Session.open(where, self.policy, timeout, self.ranks, self._what_to_do())
        except StoreClosedError as error:
            raise StoreClosedError(
                f"{self._no_server()} ({error.message}). {self._what_to_do()}, `await "
                "connect(address)` joins it where it is",
                details=error.details,
            ) from error
        with _lock:
            session = self._session
            if session is not None and session.usable:
                made.close()  # another thread was faster
                return session
            try:
                self._check_open()  # so it may have been
            except StoreClosedError:
                made.close()
                raise
            self._session = made
            _sessions.add(made)
        self.observe = observing.watch(made.registry)
        return made

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosedError(
                f"store {self.store_name!r} was shut down in this process; initialize or connect"
            )

    def _what_to_do(self) -> str:
        """When the server is gone."""
        if self.runtime is not None and self.runtime.ranks is not None:
            again = "`await initialize_spmd()`, in every rank,"
        else:
            name = self.store_name
            given = "" if name == DEFAULT_NAME else f"store_name={name!r}"
            again = f"`await connect_or_initialize({given})`"
        return (
            "Calls go on by themselves when it is started again at that address; "
            f"{again} starts a new one"
        )

    def _no_server(self) -> str:
        if self._session is not None:
            return f"the server of store {self.store_name!r} is gone"
        return f"no server of store {self.store_name!r} answers"

    async def _where(self, timeout: float | None) -> str:
        """The Unix socket that leads to the server now."""
        scheme, _, name = self.address.partition(":")
        if scheme == "unix":
            return self.address
        if self._found and self._found_by != os.getpid():
            return self._found  # a forked child: the engine is the parent's
        registry = Registry()
        known = scheme in registry.names("torchstore.runtimes")
        spec = registry.runtime(scheme) if known else None
        if spec is None or (spec.here is not None and not spec.here()):
            raise StoreClosedError(self._of_no_job_here())
        engine = engine_of(spec)
        if engine is None:
            raise StoreClosedError(
                f"the runtime {spec.name!r} cannot find stores; connect to a socket"
            )
        found = await engine.find(name, timeout)
        if not ("RANK" in os.environ or "LOCAL_RANK" in os.environ):
            self.ranks = None, engine.local_rank()
        if found is None and self.runtime is None:
            named = inherited_address(self.store_name) or ""
            found = named if named.startswith("unix:") else None
        if found is None:
            raise StoreClosedError(
                f"there is no store {name!r} in this job: `await initialize()` one in any of its "
                "processes"
            )
        self._found, self._found_by = found, os.getpid()
        return found

    def _of_no_job_here(self) -> str:
        variable = ADDRESS if self.store_name == DEFAULT_NAME else ADDRESSES
        unset = (
            f"unset {variable}, or " if self.address == inherited_address(self.store_name) else ""
        )
        return not_a_socket(
            self.address,
            f"{unset}`await connect(address)` with the unix:/path of a store that runs on this "
            f"host (stores() lists them){missing_engine()}",
        )

    def reset(self) -> None:
        """Drop the session; the next operation opens a new one, those under way end on theirs. Live
        tensors stay valid.
        """
        with _lock:
            session, self._session = self._session, None
            if session is not None:
                self._before.add(session)
        if session is not None and session.pid == os.getpid():
            session.close(now=False)

    def close(self) -> None:
        """Leave the store for good."""
        self._closed = True
        self.reset()
        for session in list(self._before):
            if session.pid == os.getpid():
                session.close()


_lock = threading.RLock()
_memberships: dict[str, Membership] = {}
# Stores that this process is starting: done when they have, or have not.
_starting: dict[str, futures.Future[None]] = {}
# Addresses that this process was started with, of stores whose names it has given to its own.
_inherited: dict[str, str | None] = {}
_sessions: weakref.WeakSet[Session] = weakref.WeakSet()


@contextlib.contextmanager
def starting(store_name: str) -> Iterator[Membership | None]:
    """Reserve a name while its server starts; gives the store that this process owned by that name,
    if its server has ended: it is no member any more, and has to be left.

    Raises:
        ConfigurationError: this process owns such a store already, or is starting one;
            ``details["taken"]`` is its name.
    """
    over: futures.Future[None] = futures.Future()
    over.set_running_or_notify_cancel()  # who waits for it cannot cancel it
    with _lock:
        before = _memberships.get(store_name)
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
            del _memberships[store_name]
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


async def started(store_name: str, timeout: float | None) -> None:
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


def as_address(text: str) -> str:
    """An address as it is written: the path of a socket needs no ``unix:``.

    >>> as_address("/run/ts/control.sock"), as_address("unix:/run/ts/control.sock")
    ('unix:/run/ts/control.sock', 'unix:/run/ts/control.sock')
    """
    return f"unix:{text}" if text.startswith("/") else text


def not_a_socket(address: str, otherwise: str) -> str:
    """Why this process cannot look an address up, and what to do instead."""
    return (
        f"{address!r} is no socket of this host. An address like RUNTIME:NAME says which store of "
        "its own job a process means, and only processes of that job can look it up. Here, "
        f"{otherwise}"
    )


def find(store_name: str) -> Membership:
    """The membership of that name; joins through the environment if there is none.

    Raises:
        StoreClosedError: no such store here, and none in the environment.
        ConfigurationError: the environment prefers or blocks what nobody has installed here.
    """
    membership = _memberships.get(store_name)
    if membership is not None:
        return membership
    address = address_of(store_name)
    if address is None:
        raise StoreClosedError(
            f"there is no store {store_name!r} in this process{_nor_in_its_parents()}: `await "
            f"initialize()` one, `await connect(address)`, or set {ADDRESS}{missing_engine()}"
        )
    with _lock:
        return _memberships.setdefault(
            store_name,
            Membership(
                store_name, address, Policy.make(), DEFAULT_TIMEOUT_S, allow_pickle_default()
            ),
        )


def address_of(store_name: str) -> str | None:
    """Where a store is that this process has not joined: in its job, as the environment says, or
    that of a process that made this one; None: none of them knows any. Nobody need be there.
    """
    address = _of_job(store_name) or inherited_address(store_name)
    if address is None or _is_gone(address):
        address = ancestors.found(store_name) or address
    return address


def _is_gone(address: str) -> bool:
    """Whether its socket is: an environment may be older than the store it is about."""
    return address.startswith("unix:") and not os.path.exists(address.removeprefix("unix:"))


def _nor_in_its_parents() -> str:
    made_by = ancestors.parent()
    return "" if made_by is None else f", nor in its living parents (process {made_by})"


def missing_engine(registry: Registry | None = None) -> str:
    """What to say to a process that lacks the package for stores of its job; empty for others."""
    advice = (registry or Registry()).advice()
    return f". {advice}" if advice else ""


def _of_job(store_name: str) -> str | None:
    """The address by which the engine that runs this process, if one does, finds the store."""
    for spec in Registry().runtimes():
        if spec.engine is not None and spec.here is not None and spec.here():
            return f"{spec.name}:{store_name}"
    return None


def engine_of(spec: RuntimeSpec) -> Engine | None:
    """The engine behind a runtime, if it has one; raises PluginError."""
    made: Engine | None = None if spec.engine is None else load_class(spec.engine)()
    return made


async def end(store_name: str, address: str | None, timeout: float | None) -> bool:
    """End a store of the job that this process belongs to, though another process began it; False
    if there is none.

    Args:
        address: of this process's membership; None: it has none.
    """
    address = address or _of_job(store_name) or ""
    scheme, _, name = address.partition(":")
    registry = Registry() if scheme not in ("", "unix") else None
    if registry is None or scheme not in registry.names("torchstore.runtimes"):
        return False
    engine = engine_of(registry.runtime(scheme))
    if engine is None:
        return False
    try:
        return await engine.end(name, timeout)
    except StoreTimeoutError as error:
        log.warning("store %r was not ended: %s", store_name, error)
        return False


def known(store_name: str) -> Membership | None:
    """The membership of that name, if this process has one already."""
    return _memberships.get(store_name)


def allow_pickle_default() -> bool:
    """TORCHSTORE_ALLOW_PICKLE, by default 1."""
    text = os.environ.get("TORCHSTORE_ALLOW_PICKLE", "1").lower()
    if text not in ("0", "1", "true", "false"):
        raise ConfigurationError(f"TORCHSTORE_ALLOW_PICKLE is 0 or 1, not {text!r}")
    return text in ("1", "true")


def add(membership: Membership) -> None:
    """Make it the one of its name; one that was there before is left."""
    with _lock:
        before = _memberships.get(membership.store_name)
        _memberships[membership.store_name] = membership
    if before is not None:
        before.close()


def join(membership: Membership, before: Membership | None) -> Membership:
    """Make it the one of its name, unless another thread or task has joined the same store in the
    same way since ``before`` was there: then that one counts, and this is left.
    """
    with _lock:
        now = _memberships.get(membership.store_name)
        if now is None or now is before or not now.leads_to(membership.address, membership.policy):
            add(membership)
            return membership
    membership.close()
    return now


def remove(store_name: str, only: Membership | None = None) -> Membership | None:
    """Forget the membership of that name; if ``only`` is given, no other than that."""
    with _lock:
        if only is not None and _memberships.get(store_name) is not only:
            return None
        return _memberships.pop(store_name, None)


def inherited_address(store_name: str) -> str | None:
    """The address that the environment gives for a store."""
    named = _in_environment(store_name)
    return None if named is None else as_address(named)


def _in_environment(store_name: str) -> str | None:
    if store_name == DEFAULT_NAME:
        return os.environ.get(ADDRESS) or None
    return _others().get(store_name)


def publish(store_name: str, address: str | None) -> None:
    """Put an address into the environment, for children; None brings back what was there before.

    Raises:
        ConfigurationError: what is there is unreadable.
    """
    with _lock:
        if address is not None:
            _inherited.setdefault(store_name, _in_environment(store_name))
        _publish(store_name, _inherited.pop(store_name, None) if address is None else address)
    ancestors.note(store_name, address)


def _publish(store_name: str, address: str | None) -> None:
    if store_name == DEFAULT_NAME:
        if address is None:
            os.environ.pop(ADDRESS, None)
        else:
            os.environ[ADDRESS] = address
        return
    others = _others()
    others.pop(store_name, None)
    if address is not None:
        others[store_name] = address
    if others:
        os.environ[ADDRESSES] = msgspec.json.encode(others).decode()
    else:
        os.environ.pop(ADDRESSES, None)


def _others() -> dict[str, str]:
    text = os.environ.get(ADDRESSES, "")
    if not text:
        return {}
    try:
        return msgspec.json.decode(text, type=dict[str, str])
    except msgspec.DecodeError as error:
        raise ConfigurationError(
            f"{ADDRESSES} is a JSON object of store name to address: {error}"
        ) from error


# ---- fork ---------------------------------------------------------------------------------


def _before_fork() -> None:
    _lock.acquire()
    _each(lambda session: session.before_fork())


def _after_in_parent() -> None:
    _each(lambda session: session.after_fork_in_parent())
    _lock.release()


def _after_in_child() -> None:
    global _lock
    _lock = threading.RLock()
    _each(lambda session: session.after_fork_in_child())
    _sessions.clear()
    _starting.clear()  # by threads of the parent
    _inherited.clear()  # what the child was started with is what the parent has published
    for membership in _memberships.values():
        membership.runtime = None  # the parent owns the server
        membership.reset()


def _each(call: Callable[[Session], Any]) -> None:
    for session in list(_sessions):
        with contextlib.suppress(OSError):  # a fork must not fail for want of a descriptor
            call(session)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before_fork,
        after_in_parent=_after_in_parent,
        after_in_child=_after_in_child,
    )
