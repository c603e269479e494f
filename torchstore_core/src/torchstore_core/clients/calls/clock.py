"""The deadline of one operation, and the measurements that observers receive. Torch-free."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Iterable
from contextlib import nullcontext
from typing import TYPE_CHECKING, TypeVar

import msgspec

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


class Clock(msgspec.Struct, eq=False, gc=False):
    """Keeps the deadline of one operation, holds its session, and reports its end to the observers.

    The operation ends when the context manager exits, unless it ``outlives_call``.

    Args:
        timeout: in seconds; None: there is no deadline.
        name, key, entries, version: see ``contracts.observer.Operation``.
        joined: the store whose observers to call.
        measured: None if there are no observers.
        session: the session that this operation holds; None if it holds none yet.
    """

    timeout: float | None
    name: str = ""
    key: object = ""
    joined: JoinedStore | None = None
    version: int = 0
    entries: int = 1
    outlives_call: bool = False
    measured: Measurements | None = None
    session: Session | None = None
    start: float = msgspec.field(default_factory=time.perf_counter)

    def __enter__(self) -> Clock:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self.session is not None:
            self.session.leave(self)
        if error is not None:
            self._add_details(error)
        if self.measured is not None and not self.outlives_call:
            self.end(error)

    def on_session(self) -> None:
        """Called when there is a session: only then it is known whether there are observers."""
        if self.measured is None and self.joined is not None and self.joined.observe:
            self.measured = Measurements(self.start)

    def put(self, keys: Iterable[str], version: int) -> None:
        """Record what was put; see ``incarnations.Renewed``."""
        self.version = version
        if self.joined is not None and self.joined.renewed is not None:
            self.joined.renewed.has_put(keys, version)

    def end(self, error: BaseException | None) -> None:
        """End the operation, with this error or without one, and call the observers."""
        if error is not None:
            self._add_details(error)
        measured, joined = self.measured, self.joined
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
                time.perf_counter() - self.start,
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
        return None if self.timeout is None else self.start + self.timeout

    def left(self) -> float | None:
        """Return the seconds left; raises StoreTimeoutError if there are none."""
        if self.timeout is None:
            return None
        left = self.start + self.timeout - time.perf_counter()
        if left <= 0:
            raise self._timeout_error()
        return left

    async def within(self, work: Awaitable[T], channel: Channel | None = None) -> T:
        """Await ``work``. When no time is left, cancel it and raise StoreTimeoutError.

        If a channel is given and its server is gone, also cancel ``work``, and raise the channel's
        error.
        """
        left = None
        if self.timeout is not None:
            left = max(0.0, self.start + self.timeout - time.perf_counter())
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
        if not isinstance(error, StoreTimeoutError) or self.joined is None:
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
            "address": self.joined.address,
            **known,
            "operation": self.name,
            "timeout": self.timeout,
        }

    def _key_prefix(self) -> str:
        return f"{self.key!r}: " if self.key and isinstance(self.key, str) else ""

    def _store_text(self) -> str:
        joined = self.joined
        if joined is None:
            return "the store"
        return f"store {joined.store_name!r} ({joined.address})"

    def phase(self, name: str) -> None:
        """Add the time since the end of the last phase to the phase ``name``."""
        if self.measured is not None:
            self.measured.phase(name)
