"""What every operation of a client needs: a connection to the server, and a clock."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Self, TypeVar

from torchstore_core.clients.calls.arguments import check_bools, check_timeout
from torchstore_core.clients.calls.clock import Clock
from torchstore_core.clients.session.channel import Channel
from torchstore_core.clients.session.session import Session
from torchstore_core.errors import StoreClosedError, UnsupportedValueError
from torchstore_core.wire import messages as m

if TYPE_CHECKING:
    from torchstore_core.clients.stores.joined import JoinedStore

#: Requests to which the server replies in less time than a task switch takes.
QUICK = frozenset(("delete", "exists", "latest_version", "stat", "versions"))
R = TypeVar("R", bound=m.Message)


class ClientBase:
    """One joined store, and the defaults of its calls.

    Args:
        leave: shuts the store down at the end of a block (``async with``), if the call that returns
            this client has opened the store; None: it was there before, and stays.
    """

    def __init__(
        self,
        joined: JoinedStore,
        *,
        timeout: float | None = None,
        allow_pickle: bool | None = None,
        leave: Callable[[JoinedStore], Awaitable[None]] | None = None,
    ) -> None:
        self._joined = joined
        self._leave = leave
        self._timeout = joined.timeout if timeout is None else timeout
        self._allow_pickle = joined.allow_pickle
        if allow_pickle is not None:
            self._allow_pickle = self._pickles(allow_pickle)

    def _pickles(self, wanted: bool | None) -> bool:
        """Whether an operation may pickle; None: what is the default of this client."""
        if wanted is None:
            return self._allow_pickle
        check_bools(allow_pickle=wanted)
        return wanted

    async def __aenter__(self) -> Self:
        self._joined.enter(self._leave)
        return self

    async def __aexit__(self, kind: object, error: object, trace: object) -> None:
        await self._joined.exit()

    def __repr__(self) -> str:
        return f"<Client of store {self._joined.store_name!r} at {self._joined.address}>"

    def __getstate__(self) -> Any:
        raise UnsupportedValueError(
            "a Client belongs to its process. A child finds the store by itself; elsewhere, "
            f"`await connect({self.address!r})`"
        )

    @property
    def address(self) -> str:
        """The address that other processes pass to ``connect``."""
        return self._joined.address

    @property
    def store_name(self) -> str:
        """The store's name."""
        return self._joined.store_name

    def _here(self, clock: Clock) -> tuple[Session, Channel] | None:
        """Return session and channel if both are open, as they are in every call but the first."""
        session = self._joined.session_here()
        if session is not None and (channel := session.use(clock)) is not None:
            return session, channel
        return None

    async def _join(self, clock: Clock) -> tuple[Session, Channel]:
        while True:
            session = await self._joined.session(clock.left())
            clock.on_session()
            try:
                await session.channel(clock.left())
            except StoreClosedError:
                if not session.closing:
                    raise
            else:
                if (channel := session.use(clock)) is not None:
                    return session, channel
            # The session was reset meanwhile. Nothing has been sent yet, so try the next session.

    def _watch(self, name: str, timeout: float | None, key: object = "") -> Clock:
        """Start the clock of one operation, which reports to the observers when it ends."""
        timeout = self._timeout if timeout is None else check_timeout(timeout)
        clock = Clock(timeout, name, key, self._joined)
        if self._joined.observe is not None:
            clock.on_session()
        return clock

    async def _call(self, clock: Clock, expect: type[R], message: type[Any], *args: Any) -> R:
        _, channel = self._here(clock) or await self._join(clock)
        request = message(channel.next_id(), *args)
        return await channel.call(request, expect, clock.left(), quick=clock.name in QUICK)


async def wait_released(client: ClientBase, timeout: float | None = None) -> bool:
    """Wait until the server has back the memory of all tensors that have died in this process. What
    is put next, by any process, can use it.

    Args:
        timeout: seconds; None: no limit.

    Returns:
        Whether that was so within the timeout.

    Raises:
        StoreClosedError: the server is gone.
    """
    session = await client._joined.session(timeout)
    return await session.wait_released(await session.channel(timeout), timeout)
