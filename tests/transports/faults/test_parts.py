"""Over a link that takes no rows, a large batch moves in parts: one is packed or unpacked while
another one moves. One that takes rows is given rows, however short they are.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import AsyncIterator, Callable, Sequence

import pytest
import torch
from tests.support import until
from tests.transports.faults.segments import MB, Plain, Rows, Volume, volume_of_this_process

from torchstore_core.clients.moving import executor
from torchstore_core.clients.moving.batches import Batch
from torchstore_core.clients.transfer.moves import get_batches, put_batches
from torchstore_core.clients.transfer.sources import prepare
from torchstore_core.clients.transfer.targets import Results, resolve
from torchstore_core.contracts.transport import Copy
from torchstore_core.errors import TransportError
from torchstore_core.server.memory.segment import open_memory
from torchstore_core.values import TensorMeta, TensorSlice
from torchstore_core.wire import messages as m

EACH = 48 * MB
SHAPE = (6 << 10, 8 << 10)


class Waiting(Plain):
    """Before a batch of copies moves, something must be true."""

    conditions: list[Callable[[], bool]]
    batches: int = 0
    largest: int = 0

    async def write(self, copies: Sequence[Copy]) -> None:
        await self._wait(copies)
        await super().write(copies)

    async def read(self, copies: Sequence[Copy]) -> None:
        await self._wait(copies)
        await super().read(copies)

    async def _wait(self, copies: Sequence[Copy]) -> None:
        self.batches += 1
        self.largest = max(self.largest, sum(copy.nbytes for copy in copies))
        if self.conditions:
            await until(self.conditions.pop(0), 20)


@pytest.fixture
async def volume() -> AsyncIterator[Volume]:
    async with volume_of_this_process(3 * EACH) as made:
        yield made


def _put_of(tensors: Sequence[torch.Tensor]) -> Batch:
    sources = [
        one
        for at, tensor in enumerate(tensors)
        for one in prepare(f"k{at}", tensor, allow_pickle=False)
    ]
    grants = [m.Grant(0, 0, at * EACH) for at in range(len(tensors))]
    (batch,) = put_batches(zip(sources, grants, strict=True))
    return batch


def _get_into(tensors: Sequence[torch.Tensor]) -> Batch:
    targets = []
    for at, into in enumerate(tensors):
        meta = TensorMeta("uint8", tuple(into.shape))
        entry = m.Entry(1, meta, into.nbytes, grant=m.Grant(0, 0, at * EACH))
        targets.append(resolve(at, at, f"k{at}", entry, into))
    (batch,) = get_batches(targets, Results(allow_pickle=True))
    return batch


@pytest.mark.parametrize("one_row", [False, True])
async def test_what_follows_is_packed_while_a_part_moves(volume: Volume, one_row: bool) -> None:
    # A hole of a file is given a page when it is read, which shows that it has been packed.
    files = [open_memory(f"values {at}", EACH) for at in range(3)]
    try:
        tensors = [
            torch.from_file(f"/proc/self/fd/{fd}", True, EACH, dtype=torch.uint8).view(SHAPE).t()
            for fd in files
        ]
        if one_row:
            tensors = [tensor[None] for tensor in tensors]
        link = await volume.link(Waiting)
        tensors[0].fill_(3)
        # Of each tensor, most is a part of its own, and the rest moves with the next tensor.
        link.conditions = [
            lambda: os.fstat(files[1]).st_blocks > 0,
            lambda: os.fstat(files[2]).st_blocks > 0,
        ]
        await executor.by_link(link, _put_of(tensors))
        assert link.largest <= EACH
        assert link.batches == 4
        assert link.moved == 3 * EACH
        assert bool((volume.memory[:EACH] == 3).all())
        assert not volume.memory[EACH:].any()
    finally:
        for fd in files:
            os.close(fd)


async def test_a_part_is_unpacked_while_the_next_moves(volume: Volume) -> None:
    volume.memory.fill_(7)
    tensors = [torch.zeros(SHAPE, dtype=torch.uint8).t() for _ in range(3)]
    link = await volume.link(Waiting)
    link.conditions = [
        lambda: not bool(tensors[0].any()),
        lambda: bool(tensors[0][0].all()),
    ]
    await executor.by_link(link, _get_into(tensors))
    assert link.batches >= 4
    assert all(bool((tensor == 7).all()) for tensor in tensors)


async def test_what_had_arrived_is_unpacked_although_the_link_fails(volume: Volume) -> None:
    volume.memory.fill_(7)
    tensors = [torch.zeros(SHAPE, dtype=torch.uint8).t() for _ in range(3)]
    batch = _get_into(tensors)
    link = await volume.link(Waiting, 2)  # copies: that of the first part, and one of the next
    link.conditions = []
    with pytest.raises(TransportError):
        await executor.by_link(link, batch)
    assert not all(bool((tensor == 7).all()) for tensor in tensors)
    volume.memory[: link.moved] = 0  # it has arrived
    await executor.by_link(await volume.link(Plain), batch)
    assert all(bool((tensor == 7).all()) for tensor in tensors)


@pytest.mark.parametrize("large", [False, True])
async def test_what_needs_no_packing_moves_as_one(volume: Volume, large: bool) -> None:
    tensors = [torch.ones(EACH if large else 100, dtype=torch.uint8) for _ in range(3)]
    link = await volume.link(Waiting)
    link.conditions = []
    await executor.by_link(link, _put_of(tensors))
    assert link.batches == 1


async def test_a_put_that_is_cancelled_packs_no_more(volume: Volume) -> None:
    moving = asyncio.Event()

    class Hanging(Waiting):
        async def write(self, copies: Sequence[Copy]) -> None:
            moving.set()
            await asyncio.Event().wait()

    files = [open_memory(f"values {at}", EACH) for at in range(3)]
    try:
        tensors = [
            torch.from_file(f"/proc/self/fd/{fd}", True, EACH, dtype=torch.uint8).view(SHAPE).t()
            for fd in files
        ]
        task = asyncio.create_task(executor.by_link(await volume.link(Hanging), _put_of(tensors)))
        await asyncio.wait_for(moving.wait(), 50)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        # Beyond the part that was next, nothing has been read.
        assert os.fstat(files[2]).st_blocks == 0
    finally:
        for fd in files:
            os.close(fd)


class _Counting(Rows):
    copies: int = 0

    async def read(self, copies: Sequence[Copy]) -> None:
        self.copies += len(copies)
        await super().read(copies)


@pytest.mark.parametrize(
    ("shape", "start", "extents", "copies"),
    [
        ((5000, 64), (0, 60), (5000, 3), 1),
        ((50, 100, 64), (0, 0, 60), (50, 100, 3), 1),  # the same rows
        ((50, 100, 64), (0, 1, 60), (50, 98, 3), 50),
    ],
)
async def test_short_rows_are_one_copy(
    volume: Volume,
    shape: tuple[int, ...],
    start: tuple[int, ...],
    extents: tuple[int, ...],
    copies: int,
) -> None:
    """A copy for each takes a hundred times as long: some 25 µs for a row of 3 bytes."""
    stored = volume.memory[: math.prod(shape)].view(shape)
    stored.copy_(torch.arange(stored.numel()).view(shape) % 251)
    into = torch.zeros(extents, dtype=torch.uint8)
    piece = TensorSlice(start, extents, shape)
    grant = m.Grant(0, 0, 0)
    entry = m.Entry(1, TensorMeta("uint8", shape), stored.numel(), grant=grant)
    (batch,) = get_batches([resolve(0, 0, "k", entry, into, piece)], Results(allow_pickle=True))
    link = await volume.link(_Counting)
    await executor.by_link(link, batch)
    for dim, (at, extent) in enumerate(zip(start, extents, strict=True)):
        stored = stored.narrow(dim, at, extent)
    assert torch.equal(into, stored)
    assert link.copies == copies
