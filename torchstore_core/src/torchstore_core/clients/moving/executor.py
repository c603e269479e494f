"""Executes transfer plans: the only place where the bytes of values are moved.

This module is responsible for concurrency and for the choice of links. If a link has a window, this
process copies directly to and from that memory (:mod:`.windows`); for others see :mod:`.staging`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from torchstore_core.clients.calls.clock import Clock
from torchstore_core.clients.moving import staging
from torchstore_core.clients.moving.batches import Batch, Mapped, ReadsInPlace
from torchstore_core.clients.moving.windows import at_once, by_window
from torchstore_core.clients.session.channel import Channel
from torchstore_core.clients.session.links import has_map, has_window
from torchstore_core.clients.session.session import Session
from torchstore_core.clients.session.stalls import StallWatch
from torchstore_core.clients.session.volume_links import VolumeLinks
from torchstore_core.contracts.transport import Link
from torchstore_core.errors import (
    StoreClosedError,
    StoreTimeoutError,
    TransportError,
    TransportNotReadyError,
)
from torchstore_core.machine import copying
from torchstore_core.machine.tasks import together
from torchstore_core.plugins.ranking import Candidate

# Up to this many bytes, the volumes of this host are processed one after another: creating a task
# for each would take longer.
_ONE_BY_ONE = 1 << 20


# The time that a transfer to another process may take, however long the operation's timeout is: a
# peer that has been stopped says nothing.
_LEAST_S = 60.0
_SLOWEST_BYTES_PER_S = 1e6


class Moved(msgspec.Struct, frozen=True):
    """The outcome of a batch.

    Args:
        transport: the name of the transport that moved it. Empty if the volume was lost in the
            meantime; the server decides what that means for a put.
        mappings: the parts that were mapped instead of copied.
    """

    batch: Batch
    transport: str
    mappings: Sequence[Mapped] = ()


class _Rest(NamedTuple):
    """Of a batch: what has been mapped, and a batch of the rest."""

    mapped: Sequence[Mapped]
    rest: ReadsInPlace


async def execute(
    session: Session, batches: Sequence[Batch], deadline: float | None = None
) -> list[Moved]:
    """Move all batches; those of different volumes move concurrently.

    If this raises, or is cancelled, no transfer is still running afterwards.

    Args:
        deadline: when the caller will cancel this, by ``time.perf_counter()``; None: never. What
            stalls is moved over another link, if there is time for that.

    Raises:
        TransportError: no link could move one of the batches.
        StoreClosedError: that was so because the store has ended.
        UnsupportedValueError: a tensor has changed in the meantime.
    """
    if len(batches) == 1:
        return [await _execute(session, batches[0], deadline)]
    if sum([batch.nbytes for batch in batches]) <= _ONE_BY_ONE and all(
        session.volumes[batch.volume].context.same_host for batch in batches
    ):
        return [await _execute(session, batch, deadline) for batch in batches]
    return await together([_execute(session, batch, deadline) for batch in batches])


async def _execute(session: Session, batch: Batch, deadline: float | None) -> Moved:
    """Move a batch over the best link; if that fails, over the next best."""
    links = session.volumes[batch.volume]
    last: TransportError | None = None
    try:
        with links.in_use():
            candidates = links.candidates(batch.nbytes)
            for candidate in candidates:
                try:
                    if links.copies_itself(candidate):
                        mapped = await _by_candidate(session, links, candidate, batch)
                    else:
                        is_last = candidate is candidates[-1]
                        work = _watched(session, links, candidate, batch, deadline, is_last)
                        mapped = await links.until_lost(work, _limit_s(batch))
                    links.worked(candidate)
                    return Moved(batch, candidate.spec.name, mapped)
                except TransportError as error:
                    links.failed(candidate, error)
                    last = error
                    if batch.unsettled:
                        await _settle(session, batch, error)
            if last is not None and not isinstance(last, TransportNotReadyError):
                await session.check_server()  # of a store that has ended, volumes may go first
            raise links.unreachable_error(batch.nbytes, last) from last
    except TransportError:
        if not (links.lost and batch.into_segment):
            raise
    return Moved(batch, "")


async def execute_within(
    clock: Clock, session: Session, channel: Channel, batches: Sequence[Batch]
) -> list[Moved]:
    """As :func:`execute`, within the time of an operation; what was moved is measured for it."""
    moved = _at_once(session, batches[0]) if len(batches) == 1 else None
    if moved is not None:
        done = [moved]
    else:
        done = await clock.within(execute(session, batches, clock.deadline), channel)
    if clock.measured is not None:
        for moved in done:
            if moved.transport:
                volume = session.volumes[moved.batch.volume].info.id
                clock.measured.moved(moved.batch.nbytes, moved.transport, (volume,))
    return done


def _at_once(session: Session, batch: Batch) -> Moved | None:
    """Move a batch in the calling thread, if that is quick and nothing has to be waited for: the
    best link is connected and has a window, and what is not mapped is small. None if it is not so,
    or fails; then :func:`execute` begins anew.
    """
    links = session.volumes[batch.volume]
    may_fit = batch.nbytes <= copying.DIRECT_MAX or isinstance(batch, ReadsInPlace)
    if batch.on_device or links.lost or not may_fit:
        return None
    try:
        with links.in_use():
            candidates = links.candidates(batch.nbytes)
            link = links.connected(candidates[0]) if candidates else None
            if link is None:
                return None
            mapped, rest = _map(link, batch)
            is_done = isinstance(rest, ReadsInPlace) and rest.is_empty
            if not is_done and rest.nbytes <= copying.DIRECT_MAX and has_window(link):
                is_done = at_once(link, rest)
            if is_done:
                links.worked(candidates[0])
                return Moved(batch, candidates[0].spec.name, mapped)
    except TransportError:
        return None
    return None


def _limit_s(batch: Batch) -> float:
    return _LEAST_S + batch.nbytes / _SLOWEST_BYTES_PER_S


async def _watched(
    session: Session,
    links: VolumeLinks,
    candidate: Candidate,
    batch: Batch,
    deadline: float | None,
    is_last: bool,
) -> Sequence[Mapped]:
    """Move a batch by way of another process or host, or of a cable, each of which may hang; what
    stands still has failed.

    If the operation's time ends while nothing moves, the next operation begins with another
    transport.

    Raises:
        TransportError: the link has failed or stalled.
    """
    if deadline is None:
        return await _by_candidate(session, links, candidate, batch)
    watch = StallWatch(candidate, batch.nbytes, deadline, last=is_last)
    try:
        return await watch.until_stalled(_by_candidate(session, links, candidate, batch, watch))
    except asyncio.CancelledError:
        if not links.lost and (stalled := watch.at_deadline()) is not None:
            links.failed(candidate, stalled)
        raise


async def _by_candidate(
    session: Session,
    links: VolumeLinks,
    candidate: Candidate,
    batch: Batch,
    watch: StallWatch | None = None,
) -> Sequence[Mapped]:
    link = await links.connect(candidate)
    if watch is not None:
        watch.on_link(link)
    if batch.on_device and has_window(link):
        await session.keep_memory()
    try:
        return await by_link(link, batch, links.info.capacity_bytes)
    except BaseException as error:
        # Nothing is awaited here: the collector may be closing this, after the event loop's end.
        if batch.into_segment and (link.unsettled or isinstance(error, GeneratorExit)):
            batch.unsettled = candidate.spec.name
            links.close_when_unused(link)
        raise


async def _settle(session: Session, batch: Batch, failed: TransportError) -> None:
    """Wait until no byte of a failed write can arrive: whatever moves the batch next would be
    overwritten, also when the memory is somebody else's.
    """
    try:
        await session.settle(batch.volume, batch.unsettled)
    except (StoreClosedError, StoreTimeoutError):
        raise failed from None
    batch.unsettled = ""


async def by_link(link: Link, batch: Batch, room: int | None = None) -> Sequence[Mapped]:
    """Move a batch over a link, in the best way that the link supports.

    Args:
        room: size of the segment in bytes, if it is known.
    """
    mapped, batch = _map(link, batch)
    if isinstance(batch, ReadsInPlace) and batch.is_empty:
        return mapped
    if has_window(link):
        await by_window(link, batch)
    else:
        await staging.by_copies(link, batch, room)
    return mapped


def _map(link: Link, batch: Batch) -> tuple[Sequence[Mapped], Batch]:
    """Map what can be mapped, or decode it where it is stored; returns the rest, too."""
    mapped: Sequence[Mapped] = ()
    if not isinstance(batch, ReadsInPlace):
        return mapped, batch
    if isinstance(batch.prepared, _Rest):  # mappings outlive the link that made them
        mapped, batch = batch.prepared
    elif has_map(link) and batch.prepared is None:
        whole = batch
        mapped, batch = batch.map(link)
        if mapped:
            whole.prepared = _Rest(mapped, batch)
    if has_window(link) and batch.prepared is None and not batch.is_empty:
        batch.decode(link)
    return mapped, batch
