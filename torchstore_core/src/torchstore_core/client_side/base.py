"""What every operation of a client needs: the way to the server, the clock, the observers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from torchstore_core.client_side.operations import Clock
from torchstore_core.client_side.session import Use
from torchstore_core.contracts.observer import Operation
from torchstore_core.errors import StoreClosedError
from torchstore_core.timeouts import check_timeout
from torchstore_core.wire import messages as m

if TYPE_CHECKING:
    from torchstore_core.client_side.stores import Membership

__all__ = ["ClientBase"]

# Requests that the server answers faster than a task switch takes.
_QUICK = frozenset(("delete", "exists", "stat", "versions"))
R = TypeVar("R", bound=m.Message)


class Seen:
    """What an observer is told of an operation; filled in while it runs."""

    __slots__ = ("entries", "nbytes", "transport")

    def __init__(self) -> None:
        self.entries = 1
        self.nbytes = 0
        self.transport = ""


class ClientBase:
    """One membership of a store, and its defaults."""

    def __init__(
        self,
        membership: Membership,
        *,
        timeout: float | None = None,
        allow_pickle: bool | None = None,
    ) -> None:
        self._membership = membership
        self._timeout = membership.timeout if timeout is None else timeout
        self._allow_pickle = membership.allow_pickle if allow_pickle is None else allow_pickle

    def __repr__(self) -> str:
        return f"<Client of store {self._membership.store_name!r} at {self._membership.address}>"

    @property
    def address(self) -> str:
        """What other processes give to ``connect``."""
        return self._membership.address

    @property
    def store_name(self) -> str:
        """The store's name."""
        return self._membership.store_name

    def _here(self) -> Use | None:
        """Session and lane if both are open: the path of every call but the first."""
        session = self._membership.session_here()
        lane = None if session is None else session.lane_here()
        return None if session is None or lane is None else session.use(lane)

    async def _join(self, clock: Clock) -> Use:
        while True:
            session = await self._membership.session(clock.left())
            try:
                use = session.use(await session.lane(clock.left()))
            except StoreClosedError:
                if not session.retired:
                    raise
                use = None
            if use is not None:
                return use
            # It was reset meanwhile. Nothing has been sent: on, with the next one.

    def _clock(self, timeout: float | None) -> Clock:
        return Clock(self._timeout if timeout is None else check_timeout(timeout))

    async def _call(
        self,
        name: str,
        expect: type[R],
        message: type[Any],
        timeout: float | None,
        *args: Any,
        entries: int = 1,
    ) -> R:
        clock = self._clock(timeout)
        error = ""
        try:
            with self._here() or await self._join(clock) as (_, lane):
                request = message(lane.next_id(), *args)
                return await lane.call(request, expect, clock.left(), quick=name in _QUICK)
        except BaseException as caught:
            error = getattr(caught, "code", type(caught).__name__)
            raise
        finally:
            self._observe(name, clock, entries, 0, "", error)

    @contextmanager
    def _watch(self, name: str, clock: Clock) -> Iterator[Seen]:
        """Tell the observers how it went."""
        seen = Seen()
        error = ""
        try:
            yield seen
        except BaseException as caught:
            error = getattr(caught, "code", type(caught).__name__)
            raise
        finally:
            self._observe(name, clock, seen.entries, seen.nbytes, seen.transport, error)

    def _observe(
        self, name: str, clock: Clock, entries: int, nbytes: int, transport: str, error: str
    ) -> None:
        observe = self._membership.observe
        if observe is not None:
            seconds = time.perf_counter() - clock.start
            observe(
                Operation(
                    name,
                    self.store_name,
                    entries,
                    nbytes,
                    transport,
                    seconds,
                    clock.phases,
                    error,
                )
            )
