"""The steps of a put and of a get, on an open session and lane."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Sequence
from contextlib import nullcontext
from typing import Any, TypeVar

import msgspec

from torchstore_core.client_side import reading, writing
from torchstore_core.client_side.lane import Lane
from torchstore_core.client_side.session import Session
from torchstore_core.errors import (
    StoreFullError,
    StoreTimeoutError,
    TorchStoreError,
    UnsupportedValueError,
    VersionGoneError,
)
from torchstore_core.values import ObjectRef, Request, TensorSlice
from torchstore_core.wire import messages as m

__all__ = ["Clock", "Want", "cancel_wait", "get_wants", "put_sources"]

# The server answers requests on up to this many entries faster than a task switch takes.
_QUICK_ENTRIES = 32
T = TypeVar("T")
R = TypeVar("R", bound=m.Message)


class Clock:
    """Deadline and phases of one operation."""

    __slots__ = ("_deadline", "_last", "phases", "start", "timeout")

    def __init__(self, timeout: float | None) -> None:
        self.start = self._last = time.perf_counter()
        self.timeout = timeout
        self._deadline = None if timeout is None else self.start + timeout
        self.phases: dict[str, float] = {}

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
        return StoreTimeoutError(f"the operation did not end within {self.timeout} s")

    def phase(self, name: str) -> None:
        """The time since the last phase belongs to ``name``."""
        now = time.perf_counter()
        self.phases[name] = self.phases.get(name, 0.0) + now - self._last
        self._last = now


class Want(msgspec.Struct, frozen=True):
    key: str
    version: int
    tensor: Any
    part: TensorSlice | None

    @classmethod
    def make(cls, what: Any, tensor: Any = None, part: TensorSlice | None = None) -> Want:
        if part is not None and not isinstance(part, TensorSlice):
            raise UnsupportedValueError(
                f"tensor_slice_spec is a TensorSlice, not a {type(part).__qualname__}"
            )
        if isinstance(what, ObjectRef):
            return cls(writing.check_key(what.key), _exact(what.key, what.version), tensor, part)
        if isinstance(what, Request):
            version = 0 if what.version is None else _exact(what.key, what.version)
            return cls(writing.check_key(what.key), version, tensor, part or what.tensor_slice)
        return cls(writing.check_key(what), 0, tensor, part)


def _exact(key: str, version: int) -> int:
    """A version that may exist: 0 would ask the server for the newest."""
    if not isinstance(version, int):
        raise UnsupportedValueError(f"a version is an int, not a {type(version).__qualname__}")
    if not 0 < version < 1 << 63:
        raise VersionGoneError(f"there never was a version {version} of {key!r}", key=key)
    return version


async def put_sources(
    session: Session, lane: Lane, sources: Sequence[writing.Source], nbytes: int, clock: Clock
) -> tuple[list[int], str]:
    """One message for small puts; else begin, write, commit. Undone if anything goes wrong."""
    if nbytes == 0 or nbytes <= session.inline_max():
        items = [m.PutItem(s.key, s.meta, s.nbytes, writing.inline_bytes(s)) for s in sources]
        reply = await _begin(session, lane, session.next_id(), items, m.Committed, clock)
        clock.phase("plan")
        return reply.versions, "inline" if nbytes else ""
    items = [m.PutItem(s.key, s.meta, s.nbytes, None if s.nbytes else b"") for s in sources]
    placed = [s for s in sources if s.nbytes]
    txn = session.begin()
    try:
        granted = await _begin(session, lane, txn, items, m.Granted, clock)
        clock.phase("plan")
        transport = await clock.within(writing.write(session, placed, granted.grants), lane)
        clock.phase("copy")
        commit = m.Commit(lane.next_id(), txn)
        quick = len(items) <= _QUICK_ENTRIES
        done = await lane.call(commit, m.Committed, clock.left(), quick=quick)
        clock.phase("commit")
    except BaseException:
        # Unknown ids are ignored, so this is right whether or not the server has begun it.
        try:
            lane.send(m.Abort([txn]))
        except TorchStoreError:
            session.abort(txn)
        raise
    finally:
        session.end(txn)
    return done.versions, transport


async def _begin(
    session: Session,
    lane: Lane,
    txn: int,
    items: list[m.PutItem],
    expect: type[R],
    clock: Clock,
) -> R:
    """Send a Put; a second time if tensors that died here just now held the room it lacks."""
    quick = expect is m.Committed and len(items) <= _QUICK_ENTRIES
    put = m.Put(lane.next_id(), txn, items)
    try:
        return await lane.call(put, expect, clock.left(), quick=quick)
    except StoreFullError as full:
        if not full.details.get("leased_bytes"):
            raise
    await session.let_go()
    return await lane.call(m.Put(lane.next_id(), txn, items), expect, clock.left())


async def get_wants(
    session: Session, lane: Lane, wants: Sequence[Want], clock: Clock, allow_pickle: bool
) -> tuple[reading.Result, int]:
    """Locate and lease, check everything, then move bytes; give back what is not mapped."""
    lease = session.begin()
    mapped: set[int] = set()
    leased = True
    try:
        request = m.Locate(
            lane.next_id(),
            lease,
            [m.Want(want.key, want.version) for want in wants],
            session.inline_max(),
        )
        quick = len(wants) <= _QUICK_ENTRIES
        located = await lane.call(request, m.Located, clock.left(), quick=quick)
        leased = located.leased
        clock.phase("plan")
        targets = [
            reading.resolve(at, want.key, entry, want.tensor, want.part)
            for at, (want, entry) in enumerate(zip(wants, located.entries, strict=True))
        ]
        if leased:
            result = await clock.within(
                reading.read(session, lease, targets, allow_pickle=allow_pickle)
            )
            mapped = result.mapped
        else:
            values = {t.at: reading.from_message(t, allow_pickle) for t in targets}
            result = reading.Result(values, mapped, "inline")
        clock.phase("copy")
    finally:
        if leased and len(mapped) < len(wants):
            _release(session, lane, lease, mapped, len(wants))
        session.end(lease)
    return result, sum(target.nbytes for target in targets)


def _release(session: Session, lane: Lane, lease: int, mapped: set[int], count: int) -> None:
    """Give back the lease, or all of it but what lives on in mapped tensors."""
    rest = [at for at in range(count) if at not in mapped] if mapped else None
    message = m.Release([lease]) if rest is None else m.Release([], [(lease, rest)])
    try:
        lane.send(message)
    except TorchStoreError:
        session.give_back(lease, rest)


def cancel_wait(lane: Lane, request_id: int) -> None:
    try:
        lane.send(m.Cancel(request_id))
    except TorchStoreError:
        return  # the server is gone, and the wait with it
