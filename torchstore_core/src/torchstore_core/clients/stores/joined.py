"""One store that this process has joined. Torch-free."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from torchstore_core.clients.calls import observers as observing
from torchstore_core.clients.calls.incarnations import Renewed
from torchstore_core.clients.session.handshake import Ranks
from torchstore_core.clients.session.session import Session
from torchstore_core.clients.stores import discovery
from torchstore_core.clients.stores.environment import (
    DEFAULT_NAME,
    inherited_address,
    lock,
    not_a_socket,
    variable_of,
)
from torchstore_core.clients.stores.lookup import (
    find_by,
    missing_engine,
    next_address,
    runtime_here,
)
from torchstore_core.contracts.observer import Operation
from torchstore_core.contracts.runtime import Runtime
from torchstore_core.errors import StoreClosedError
from torchstore_core.plugins.ranking import Policy
from torchstore_core.plugins.registry import load_class

log = logging.getLogger(__name__)

DEFAULT_TIMEOUT_S = 60.0
#: Every session that was opened and that somebody still refers to.
sessions: weakref.WeakSet[Session] = weakref.WeakSet()


class JoinedStore:
    """This process at one store.

    It survives what its session does not: a fork (the child opens a session of its own), a
    restarted server, ``reset_client``, and in a child the store of its parent, if the parent starts
    another one of the same name.

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
        connected: it was joined by ``connect``: leaving it ends nothing.
        observe: tells the observers of an operation; None: there are none.
        renewed: set once the store was found to have started again without its memory.
        client: what the calls of the module use.
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
        self.connected = False
        self.observe: Callable[[Operation], None] | None = None
        self.renewed: Renewed | None = None
        self.client: Any = None
        self._incarnation = 0  # of the last session; 0: there was none
        self._session: Session | None = None
        self._earlier: weakref.WeakSet[Session] = weakref.WeakSet()  # with calls under way, maybe
        self._closed = False
        self._blocks = 0
        self._leave: Callable[[JoinedStore], Awaitable[None]] | None = None
        # Where the address led the last time that it was looked up, and in which process.
        self._socket = ""
        self._looked_up_by = 0

    def enter(self, leave: Callable[[JoinedStore], Awaitable[None]] | None) -> None:
        """A block of one of its clients begins. ``leave``: as for ``ClientBase``."""
        with lock:
            self._blocks += 1
            self._leave = self._leave or leave

    async def exit(self) -> None:
        """Such a block has ended. The last one leaves the store, if that is for a block to do."""
        with lock:
            self._blocks -= 1
            leave = None if self._blocks else self._leave
        if leave is not None:
            await leave(self)

    def leads_to(self, address: str, policy: Policy) -> bool:
        """Whether it is at the store at that address, in the same way."""
        return (self.address, self.policy) == (address, policy)

    def session_here(self) -> Session | None:
        """The session of this process, if it is open."""
        session = self._session
        if session is None or session.lost or session.closing:
            return None
        # If this process ends the store, because it exits, the session may not know yet.
        return None if self.runtime is not None and self.runtime.exiting else session

    async def session(self, timeout: float | None) -> Session:
        """The session of this process, opened when there is none.

        Raises:
            StoreClosedError: shut down, or no server answers.
        """
        session = self.session_here()
        if session is not None:
            return session
        self._check_open()
        where = await self._socket_of_server(timeout)
        try:
            made = await self._open(where, timeout)
        except StoreClosedError as error:
            if self.runtime is not None and self.runtime.exiting:
                raise StoreClosedError(
                    f"store {self.store_name!r} has ended with this process, which started it and "
                    "is exiting. What uses it at the exit must be registered (`atexit.register`) "
                    "after `initialize`: what was registered last is called first"
                ) from error
            if self.connected and not self._incarnation:
                raise StoreClosedError(
                    f"{error.message}. {discovery.where_else()}", details=error.details
                ) from error
            raise StoreClosedError(
                f"{self._no_server()} ({error.message}). {self._what_to_do()}, `await "
                "connect(address)` joins it where it is",
                details=error.details,
            ) from error
        with lock:
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
            sessions.add(made)
            if self._incarnation not in (0, made.welcome.incarnation):
                self.renewed = Renewed()
                log.info(
                    "store %r has started again without its memory; refs of before are gone",
                    self.store_name,
                )
            self._incarnation = made.welcome.incarnation
        self.observe = observing.watch(made.registry)
        return made

    async def _open(self, where: str, timeout: float | None) -> Session:
        """A session at the server there; or, if that has ended, at the next one of this name, for a
        process that nobody but its environment, or its parents, has told where the store is.
        """

        def there(address: str) -> Coroutine[Any, Any, Session]:
            return Session.open(address, self.policy, timeout, self.ranks, self._what_to_do())

        try:
            return await there(where)
        except StoreClosedError:
            is_told = self.runtime is None and not self.connected and where == self.address
            again = next_address(self.store_name, where) if is_told else None
            if again is None:
                raise
        made = await there(again)
        self.address = again
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
            return f"the server of store {self.store_name!r} {self._session.gone}"
        return f"no server of store {self.store_name!r} answers"

    async def _socket_of_server(self, timeout: float | None) -> str:
        """The Unix socket that leads to the server now."""
        runtime, _, name = self.address.partition(":")
        if runtime == "unix":
            return self.address
        if self._socket and self._looked_up_by != os.getpid():
            return self._socket  # a forked child: the engine is the parent's
        spec = runtime_here(runtime)
        if spec is None:
            raise StoreClosedError(self._of_no_job_here())
        found = await find_by(spec, name, timeout)
        if spec.rank is not None and not ("RANK" in os.environ or "LOCAL_RANK" in os.environ):
            self.ranks = None, load_class(spec.rank)()
        if found is None and self.runtime is None:
            named = inherited_address(self.store_name) or ""
            found = named if named.startswith("unix:") else None
        if found is None:
            raise StoreClosedError(
                f"there is no store {name!r} in this job: `await initialize()` one in any of its "
                "processes"
            )
        self._socket, self._looked_up_by = found, os.getpid()
        return found

    def _of_no_job_here(self) -> str:
        unset = ""
        if self.address == inherited_address(self.store_name):
            unset = f"unset {variable_of(self.store_name)}, or "
        return not_a_socket(
            self.address,
            f"{unset}`await connect(address)` with the unix:/path of a store that runs on this "
            f"host (stores() lists them){missing_engine()}",
        )

    def reset(self) -> None:
        """Drop the session; the next operation opens a new one, those under way end on theirs. Live
        tensors stay valid.
        """
        with lock:
            session, self._session = self._session, None
            if session is not None:
                self._earlier.add(session)
        if session is not None and session.pid == os.getpid():
            session.close(now=False)

    def close(self) -> None:
        """Leave the store for good."""
        self._closed = True
        self.client = None  # which refers to it
        self.reset()
        with lock:  # a reset in another thread adds one
            earlier = list(self._earlier)
        for session in earlier:
            if session.pid == os.getpid():
                session.close()

    def after_fork_in_child(self) -> None:
        """The parent keeps the server and the session."""
        self.runtime = None
        self.reset()
