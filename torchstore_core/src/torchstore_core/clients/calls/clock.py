"""The deadline of one operation, and the measurements that observers receive. Torch-free."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Iterable
from contextlib import nullcontext
from typing import TYPE_CHECKING, TypeVar

from torchstore_core.clients.session.channel import Channel
from torchstore_core.clients.session.handshake import NO_DESCRIPTOR
from torchstore_core.contracts.observer import Operation
from torchstore_core.errors import StoreTimeoutError, TorchStoreError, in_seconds

if TYPE_CHECKING:
    from torchstore_core.clients.session.session import Session
    from torchstore_core.clients.stores.joined import JoinedStore

T = TypeVar("T")


class Measurements:
    """The measurements of one operation; taken only if there are observers."""

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
        """Add a transfer by these transports (names joined by ``+``), to or from these volumes."""
        if nbytes:
            self.nbytes += nbytes
            self.transports.update(transports.split("+"))
            self.volumes.update(volumes)


class Clock:
    """Keeps the deadline of one operation, holds its session, and reports its end to the observers.

    The operation ends when the context manager exits, unless it ``outlives_call``.

    Args:
        timeout: in seconds; None: there is no deadline.
        name, key: see ``contracts.observer.Operation``.
        joined: the store whose observers to call.

    Attributes:
        measured: None if there are no observers.
        session: the session that this operation holds; None if it holds none yet.
    """

    __slots__ = (
        "_deadline",
        "_joined",
        "_start",
        "entries",
        "key",
        "measured",
        "name",
        "outlives_call",
        "session",
        "timeout",
        "version",
    )

    def __init__(
        self,
        timeout: float | None,
        name: str = "",
        key: object = "",
        joined: JoinedStore | None = None,
    ) -> None:
        self._start = time.perf_counter()
        self.timeout = timeout
        self._deadline = None if timeout is None else self._start + timeout
        self.name = name
        self.key = key
        self.version = 0
        self.entries = 1
        self.outlives_call = False
        self.measured: Measurements | None = None
        self._joined = joined
        self.session: Session | None = None
        if joined is not None and joined.observe is not None:
            self.measured = Measurements(self._start)

    def __enter__(self) -> Clock:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self.session is not None:
            self.session.leave(self)
        if error is not None:
            self._add_details(error)
        if self.measured is not None and not self.outlives_call:
            self.end(error)

    def hold(self, session: Session) -> bool:
        """Hold a session until the operation ends. Returns False if the session was closed."""
        if self.session is not None:
            self.session.leave(self)
        self.session = session if session.use(self) else None
        return self.session is not None

    def on_session(self) -> None:
        """Called when there is a session: only then it is known whether there are observers."""
        if self.measured is None and self._joined is not None and self._joined.observe:
            self.measured = Measurements(self._start)

    def put(self, keys: Iterable[str], version: int) -> None:
        """Record what was put; see ``incarnations.Renewed``."""
        self.version = version
        if self._joined is not None and self._joined.renewed is not None:
            self._joined.renewed.has_put(keys, version)

    def end(self, error: BaseException | None) -> None:
        """End the operation, with this error or without one, and call the observers."""
        if error is not None:
            self._add_details(error)
        measured, joined = self.measured, self._joined
        if measured is None or joined is None or joined.observe is None:
            return
        code = ""
        if error is not None:
            code = error.code if isinstance(error, TorchStoreError) else type(error).__name__
        joined.observe(
            Operation(
                self.name,
                joined.store_name,
                self.entries,
                measured.nbytes,
                "+".join(sorted(measured.transports)),
                time.perf_counter() - self._start,
                measured.phases,
                code,
                self.key if isinstance(self.key, str) else "",
                self.version,
                tuple(sorted(measured.volumes)),
            )
        )

    @property
    def deadline(self) -> float | None:
        """When the operation ends, by ``time.perf_counter()``; None: it has no time limit."""
        return self._deadline

    def left(self) -> float | None:
        """Return the seconds left; raises StoreTimeoutError if there are none."""
        if self._deadline is None:
            return None
        left = self._deadline - time.perf_counter()
        if left <= 0:
            raise self._timeout_error()
        return left

    async def within(self, work: Awaitable[T], channel: Channel | None = None) -> T:
        """Await ``work``. When no time is left, cancel it and raise StoreTimeoutError.

        If a channel is given and its server is gone, also cancel ``work``, and raise the channel's
        error.
        """
        left = None
        if self._deadline is not None:
            left = max(0.0, self._deadline - time.perf_counter())
        limit = asyncio.timeout(left)
        try:
            with nullcontext() if channel is None else channel.expire_on_loss(limit):
                async with limit:
                    return await work
        except TimeoutError as error:
            if limit.expired():
                raise self._timeout_error() from error
            raise

    def _timeout_error(self) -> StoreTimeoutError:
        return StoreTimeoutError(
            f"{self._key_prefix()}`{self.name}` at {self._store_text()} did not end within "
            f"{in_seconds(self.timeout)}",
            details={"timeout": self.timeout},
        )

    def _add_details(self, error: BaseException) -> None:
        """Add what was not known of the operation where its time-out was raised. Idempotent."""
        if not isinstance(error, StoreTimeoutError) or self._joined is None:
            return
        if error.key is None and isinstance(self.key, str):
            error.key = self.key or None
        known = error.details
        if known.get("answered") is False:
            accepted = known.get("accepted")  # None: there was a connection already
            more = NO_DESCRIPTOR if accepted else ""
            if accepted is False:
                more = ", and more clients wait than its queue holds"
            error.message = (
                f"{self._key_prefix()}{self._store_text()} did not answer `{self.name}` within "
                f"{in_seconds(self.timeout)}: it is stopped, or busy{more}"
            )
            error.args = (error.message,)
        if why := known.get("waiting_for"):
            error.message = f"{self._timeout_error().message}: {why}"
            error.args = (error.message,)
        error.details = {
            "address": self._joined.address,
            **known,
            "operation": self.name,
            "timeout": self.timeout,
        }

    def _key_prefix(self) -> str:
        return f"{self.key!r}: " if self.key and isinstance(self.key, str) else ""

    def _store_text(self) -> str:
        joined = self._joined
        if joined is None:
            return "the store"
        return f"store {joined.store_name!r} ({joined.address})"

    def phase(self, name: str) -> None:
        """Add the time since the end of the last phase to the phase ``name``."""
        if self.measured is not None:
            self.measured.phase(name)
