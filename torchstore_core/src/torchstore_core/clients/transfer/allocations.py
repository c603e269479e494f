"""Tensors that are made in the memory of a store, and are put without a copy.

The memory is that of a put which stays unfinished until the tensor is put, or dies. The tensor is
on a mapping of its own, and what is written to it is in the segment, until it is put: then the
mapping is made private, as that of a zero-copy get, and the put is committed under its key.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from torchstore_core.clients.calls.clock import Clock
from torchstore_core.clients.session.allocation import Allocation
from torchstore_core.clients.session.channel import Channel
from torchstore_core.clients.session.links import has_map_through, link_errors
from torchstore_core.clients.session.session import Session
from torchstore_core.clients.transfer.granting import PutOptions, give_up_put
from torchstore_core.clients.transfer.sources import Source
from torchstore_core.clients.values.tensors import describe, dtype_of, from_buffer
from torchstore_core.contracts.transport import Mapping, SupportsMapThrough
from torchstore_core.errors import TransportError, UnsupportedValueError
from torchstore_core.machine import copying
from torchstore_core.wire import messages as m

# Less than this is copied sooner than it is mapped.
_LEAST_BYTES = 1 << 20
# Until it has another one; each has its own, as that may decide the volume.
_KEY = f"{m.HIDDEN}allocated"


def blank(shape: int | Sequence[int], dtype: torch.dtype | None) -> torch.Tensor:
    """A tensor without memory, which says what is to be made.

    Raises:
        UnsupportedValueError: there is none like that, or it could not be stored.
    """
    try:
        like = torch.empty(shape, dtype=dtype, device="meta")
    except (TypeError, ValueError, RuntimeError) as error:
        raise UnsupportedValueError(f"empty({shape!r}, dtype={dtype}): {error}") from error
    dtype_of(describe(like), "empty")
    return like


async def allocate(
    session: Session, channel: Channel, like: torch.Tensor, clock: Clock
) -> torch.Tensor:
    """Make a tensor like that in memory of the store; in ordinary memory if it is small, or if this
    process has none in common with the volume that would have it, or several would.

    Raises:
        StoreFullError: there is no room.
    """
    meta, nbytes = describe(like), like.nbytes
    # A relay that dies ends the session of a process that lives, and its unfinished puts with it.
    if nbytes < _LEAST_BYTES or session.welcome.via is not None:
        return torch.empty_like(like, device="cpu")
    txn = session.begin()
    done = False
    try:
        key = f"{_KEY}-{session.welcome.session.hex()}-{txn}"
        items = [m.PutItem(key, meta, nbytes)]
        granted = await PutOptions().begin(session, channel, clock, txn, items, m.Granted)
        clock.phase("plan")
        found = await _mapped(session, granted.grants, nbytes)
        if found is None:
            return torch.empty_like(like, device="cpu")
        link, grant, mapping = found
        tensor = from_buffer(mapping.owner, mapping.offset, meta.shape, like.dtype)
        place = grant.volume, grant.segment, grant.offset
        allocation = Allocation(txn, meta, place, link, mapping)
        session.allocations[mapping.address] = allocation
        session.watch(mapping.owner, functools.partial(_died, session, allocation))
        if session.lost:  # checked last: it may have ended before it saw this
            allocation.leave()
        clock.phase("copy")
        done = True
        return tensor
    finally:
        if not done:
            give_up_put(session, channel, txn)
            session.end(txn)


async def _mapped(
    session: Session, grants: Sequence[m.Grant | None], nbytes: int
) -> tuple[SupportsMapThrough, m.Grant, Mapping] | None:
    grant = grants[0] if len(grants) == 1 else None
    if grant is None:
        return None
    links = session.volumes[grant.volume]
    with links.in_use():
        candidates = links.candidates(nbytes)
        if not candidates:
            return None
        try:
            link: object = await links.connect(candidates[0])
            if not has_map_through(link):
                return None
            mappings: list[Mapping] = []

            def work() -> None:
                with link_errors():
                    mappings.append(link.map_through(grant.segment, grant.offset, nbytes))

            await copying.run([work], nbytes)
        except TransportError:  # a put goes another way
            return None
        return link, grant, mappings[0]


def _died(session: Session, allocation: Allocation) -> None:
    """The tensor is gone. If it was not put, its memory is free."""
    _forget(session, allocation)
    session.abort_if_unfinished(allocation.txn)


def _forget(session: Session, allocation: Allocation) -> None:
    if session.allocations.get(allocation.address) is allocation:
        session.allocations.pop(allocation.address, None)


def allocation_of(
    session: Session, sources: object, how: PutOptions
) -> tuple[Allocation, str] | None:
    """The allocation that a put of these sources fills, if it only has to be committed, and under
    which key.
    """
    if type(sources) is not list or len(sources) != 1 or how.version or how.group is not None:
        return None
    source: Source = sources[0]
    tensor = source.tensor
    if tensor is None or source.part is not None or source.cast is not None or not tensor.is_cpu:
        return None
    found = session.allocations.get(source.address(tensor))
    if found is None or found.meta != source.meta or not tensor.is_contiguous():
        return None
    is_there = found.owner() is not None and not session.volumes[found.volume].lost
    return (found, source.key) if is_there else None


async def seal(
    session: Session,
    channel: Channel,
    allocation: Allocation,
    key: str,
    clock: Clock,
    how: PutOptions,
) -> m.Committed | None:
    """Put a tensor that was allocated in the store. None: it has to be copied after all.

    If this fails, or is cancelled, the tensor has memory of its own, and the put is undone.
    """
    if not allocation.claim():
        return None
    owner = allocation.owner()
    lease = session.next_id()
    session.leases_in_use.add(lease)
    try:
        try:
            with link_errors():
                allocation.make_private()
        except TransportError:
            allocation.give_back()
            return None
        reply = await _sealed(session, channel, allocation, key, lease, clock, how)
        session.hold(owner, lease, None)
        session.end(allocation.txn)
    finally:
        session.leases_in_use.discard(lease)
    _forget(session, allocation)  # only now: until then a forked child has nothing that keeps it
    clock.phase("commit")
    return reply


async def _sealed(
    session: Session,
    channel: Channel,
    allocation: Allocation,
    key: str,
    lease: int,
    clock: Clock,
    how: PutOptions,
) -> m.Committed:
    try:
        hold, where = how.held_as or (0, "")
        name = "" if how.held_as else key
        number = channel.next_id()
        request = m.Seal(number, allocation.txn, name, lease, hold, where, how.when_full)
        return await channel.call(request, m.Committed, clock.left(), quick=True)
    except BaseException:
        if allocation.make_own():
            _forget(session, allocation)
            give_up_put(session, channel, allocation.txn)
            session.end(allocation.txn)
            session.release(lease)
        else:  # until the tensor dies
            session.hold(allocation.owner(), lease, None)
        raise
