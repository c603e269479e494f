"""The deadline of one operation, and what observers are told of it. Torch-free."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Iterable
from contextlib import nullcontext
from typing import TYPE_CHECKING, TypeVar

from torchstore_core.clients.session.lane import Lane
from torchstore_core.contracts.observer import Operation
from torchstore_core.errors import StoreTimeoutError, TorchStoreError, in_seconds

if TYPE_CHECKING:
    from torchstore_core.clients.session.session import Session
    from torchstore_core.clients.stores.joined import JoinedStore

__all__ = ["Clock", "Seen"]

T = TypeVar("T")


class Seen:
    """What observers will be told of an operation beside its outcome; made if there are any."""

    __slots__ = ("_last", "nbytes", "phases", "transports", "volumes")

    def __init__(self, start: float) -> None:
        self._last = start
        self.phases: dict[str, float] = {}
        self.nbytes = 0
        self.transports: set[str] = set()
        self.volumes: set[str] = set()

    def phase(self, name: str) -> None:
        """See :meth:`Clock.phase`."""
        now = time.perf_counter()
        self.phases[name] = self.phases.get(name, 0.0) + now - self._last
        self._last = now

    def moved(self, nbytes: int, transports: str, volumes: Iterable[str] = ()) -> None:
        """So many bytes went by these transports (joined by ``+``), to or from these volumes."""
        if nbytes:
            self.nbytes += nbytes
            self.transports.update(transports.split("+"))
            self.volumes.update(volumes)


class Clock:
    """Deadline of one operation; its hold on a session; and what observers are told when it has
    ended: on leaving it as a context manager, unless it ``goes_on``.

    Args:
        timeout: seconds; None: there is no deadline.
        name, key: see ``contracts.observer.Operation``.
        membership: who has observers.

    Attributes:
        seen: None where nobody observes.
        session: that it holds; None: none yet.
    """

    __slots__ = (
        "_deadline",
        "_membership",
        "_start",
        "entries",
        "goes_on",
        "key",
        "name",
        "seen",
        "session",
        "timeout",
        "version",
    )

    def __init__(
        self,
        timeout: float | None,
        name: str = "",
        key: object = "",
        membership: JoinedStore | None = None,
    ) -> None:
        self._start = time.perf_counter()
        self.timeout = timeout
        self._deadline = None if timeout is None else self._start + timeout
        self.name = name
        self.key = key
        self.version = 0
        self.entries = 1
        self.goes_on = False
        self.seen: Seen | None = None
        self._membership = membership
        self.session: Session | None = None
        if membership is not None and membership.observe is not None:
            self.seen = Seen(self._start)

    def __enter__(self) -> Clock:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self.session is not None:
            self.session.leave(self)
        if error is not None:
            self._complete(error)
        if self.seen is not None and not self.goes_on:
            self.end(error)

    def uses(self, session: Session) -> bool:
        """Hold a session until the operation ends; False: this process has turned away from it."""
        if self.session is not None:
            self.session.leave(self)
        self.session = session if session.use(self) else None
        return self.session is not None

    def joined(self) -> None:
        """There is a session now, which knows whether anybody observes."""
        if self.seen is None and self._membership is not None and self._membership.observe:
            self.seen = Seen(self._start)

    def end(self, error: BaseException | None) -> None:
        """It has ended, with this error; tell the observers."""
        if error is not None:
            self._complete(error)
        seen, membership = self.seen, self._membership
        if seen is None or membership is None or membership.observe is None:
            return
        code = ""
        if error is not None:
            code = error.code if isinstance(error, TorchStoreError) else type(error).__name__
        membership.observe(
            Operation(
                self.name,
                membership.store_name,
                self.entries,
                seen.nbytes,
                "+".join(sorted(seen.transports)),
                time.perf_counter() - self._start,
                seen.phases,
                code,
                self.key if isinstance(self.key, str) else "",
                self.version,
                tuple(sorted(seen.volumes)),
            )
        )

    def left(self) -> float | None:
        """Seconds left; StoreTimeoutError when there are none."""
        if self._deadline is None:
            return None
        left = self._deadline - time.perf_counter()
        if left <= 0:
            raise self._over()
        return left

    async def within(self, work: Awaitable[T], lane: Lane | None = None) -> T:
        """Await ``work``; cancel it, and raise StoreTimeoutError, when no time is left.

        Given a lane, cancel it, and raise the lane's error, also when that is lost.
        """
        left = None
        if self._deadline is not None:
            left = max(0.0, self._deadline - time.perf_counter())
        limit = asyncio.timeout(left)
        try:
            with nullcontext() if lane is None else lane.ending(limit):
                async with limit:
                    return await work
        except TimeoutError as error:
            if limit.expired():
                raise self._over() from error
            raise

    def _over(self) -> StoreTimeoutError:
        return StoreTimeoutError(
            f"{self._of_key()}`{self.name}` at {self._store()} did not end within "
            f"{in_seconds(self.timeout)}",
            details={"timeout": self.timeout},
        )

    def _complete(self, error: BaseException) -> None:
        """What a time-out does not know of its operation where it is raised; once is enough."""
        if not isinstance(error, StoreTimeoutError) or self._membership is None:
            return
        if error.key is None and isinstance(self.key, str):
            error.key = self.key or None
        known = error.details
        if known.get("answered") is False:
            full = known.get("accepted") is False
            error.message = (
                f"{self._of_key()}{self._store()} did not answer `{self.name}` within "
                f"{in_seconds(self.timeout)}: it is stopped, or busy"
                f"{', and more clients wait than its queue holds' if full else ''}"
            )
            error.args = (error.message,)
        error.details = {
            "address": self._membership.address,
            **known,
            "operation": self.name,
            "timeout": self.timeout,
        }

    def _of_key(self) -> str:
        return f"{self.key!r}: " if self.key and isinstance(self.key, str) else ""

    def _store(self) -> str:
        membership = self._membership
        if membership is None:
            return "the store"
        return f"store {membership.store_name!r} ({membership.address})"

    def phase(self, name: str) -> None:
        """The time since the last phase belongs to ``name``."""
        if self.seen is not None:
            self.seen.phase(name)
