"""Copies values from volume to volume, as the server orders."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterable, Iterator, Sequence

from torchstore_core.clients.moving.batches import Run
from torchstore_core.clients.moving.bytes import BytesBatch
from torchstore_core.clients.moving.executor import execute
from torchstore_core.clients.session.channel import Channel
from torchstore_core.clients.session.session import Session
from torchstore_core.contracts.transport import Memory
from torchstore_core.errors import StoreClosedError, TorchStoreError, TransportError
from torchstore_core.machine.virtual_memory import allocate
from torchstore_core.plugins.ranking import Policy
from torchstore_core.wire import messages as m

log = logging.getLogger(__name__)

_CONNECT_S = 60.0
# Bytes that are read before they are written: at most the first, and at most what may be copied in
# an eighth of a second, but at least the last.
_STEP, _SMALLEST_STEP = 16 << 20, 64 << 10

#: A part of a piece: the piece, the first byte, and how many bytes.
Part = tuple[m.Piece, int, int]


async def copy_for(address: str, volumes: Sequence[int]) -> None:
    """Make copies in these volumes until the server has nothing more to copy there.

    Raises:
        StoreClosedError: the store is gone.
    """
    advice = "It had asked this process for copies"
    session = await Session.open(
        address, Policy.unchecked(), _CONNECT_S, (None, None), advice, role=m.COPIER_ROLE
    )
    try:
        channel = await session.channel(_CONNECT_S)
        trouble = ""
        while True:
            txn, lease = session.next_id(), session.next_id()
            take = m.TakeCopies(channel.next_id(), txn, lease, list(volumes), trouble)
            work = await channel.call(take, m.Copies, None)
            if not work.pieces:
                return
            trouble = await _make(session, channel, work, txn)
            channel.send(m.Release([lease]))
    finally:
        session.close()


async def _make(session: Session, channel: Channel, work: m.Copies, txn: int) -> str:
    """Make copies; returns why that has failed, and an empty text if it has not."""
    step = min(_STEP, max(_SMALLEST_STEP, work.rate // 8)) if work.rate else _STEP
    size = min(step, sum(p.nbytes for p in work.pieces))
    address, block = allocate(size)
    buffer = Memory(address, size, block)
    due = 0.0  # when so much may have been copied
    unsettled: list[tuple[int, str]] = []
    try:
        for parts in steps_of(work.pieces, buffer.nbytes):
            due = max(due, time.monotonic())
            await _read(session, buffer, parts)
            await _write(session, buffer, parts, unsettled)
            if work.rate:
                due += sum(nbytes for _, _, nbytes in parts) / work.rate
                await asyncio.sleep(due - time.monotonic())
        await channel.call(m.Commit(channel.next_id(), txn), m.Committed, None)
    except StoreClosedError:
        raise
    except TorchStoreError as error:
        log.warning("values could not be copied: %s", error.message)
        with contextlib.suppress(StoreClosedError):
            channel.send(m.Abort([txn], unsettled))
        return error.message
    return ""


def steps_of(pieces: Iterable[m.Piece], nbytes: int) -> Iterator[list[Part]]:
    """Divide pieces into steps of at most so many bytes, with which a buffer is filled.

    >>> one, two = m.Piece(5, [(0, 0)], (1, 0)), m.Piece(4, [(0, 64)], (1, 64))
    >>> [[(part[1], part[2]) for part in step] for step in steps_of([one, two], 6)]
    [[(0, 5), (0, 1)], [(1, 3)]]
    """
    parts: list[Part] = []
    room = nbytes
    for piece in pieces:
        start = 0
        while start < piece.nbytes:
            count = min(room, piece.nbytes - start)
            parts.append((piece, start, count))
            start += count
            room -= count
            if not room:
                yield parts
                parts, room = [], nbytes
    if parts:
        yield parts


async def _read(session: Session, buffer: Memory, parts: Sequence[Part]) -> None:
    """Fill the buffer, from the first copy of each value that can be read.

    Raises:
        TransportError: none of the copies of a value can be read.
    """
    todo: list[tuple[int, Part]] = []  # with their places in the buffer
    at = 0
    for part in parts:
        todo.append((at, part))
        at += part[2]
    dead: set[int] = set()  # volumes that cannot be reached
    last: TransportError | None = None
    while todo:
        by_volume: dict[int, list[tuple[int, Part]]] = {}
        for into, part in todo:
            living = [volume for volume, _ in part[0].sources if volume not in dead]
            if not living:
                raise last or TransportError("there is no copy to read")
            by_volume.setdefault(living[0], []).append((into, part))
        volume, some = next(iter(by_volume.items()))
        runs = [
            (buffer.address + into, dict(piece.sources)[volume] + start, nbytes)
            for into, (piece, start, nbytes) in some
        ]
        try:
            await execute(session, [BytesBatch((volume, 0), buffer, runs, into=False)])
        except TransportError as error:
            dead.add(volume)
            last = error
        else:
            done = {into for into, _ in some}
            todo = [one for one in todo if one[0] not in done]


async def _write(
    session: Session, buffer: Memory, parts: Sequence[Part], unsettled: list[tuple[int, str]]
) -> None:
    """Write the buffer. ``unsettled``: see ``messages.Abort``; what may still arrive is added."""
    runs: list[Run] = []
    at = 0
    for piece, start, nbytes in parts:
        runs.append((buffer.address + at, piece.target[1] + start, nbytes))
        at += nbytes
    batch = BytesBatch((parts[0][0].target[0], 0), buffer, runs, into=True)
    try:
        await execute(session, [batch])
    finally:
        if batch.unsettled:
            unsettled.append((batch.volume, batch.unsettled))
