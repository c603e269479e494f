"""What has arrived over a link that fails is not moved again by the next one, whatever the two can.

Whatever has arrived is spoilt in the segment before the next link goes on, so that a byte that is
moved once more shows.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Sequence
from itertools import product
from typing import Any, ClassVar

import pytest
import torch
from tests.profiles import one_of_each
from tests.transports.faults.segments import (
    MB,
    SIZE,
    Devices,
    DevicesWithoutRows,
    Plain,
    Registering,
    Rows,
    Volume,
    Windowed,
    volume_of_this_process,
)

from torchstore_core.clients.moving import executor, staging
from torchstore_core.clients.transfer.moves import get_batches, put_batches
from torchstore_core.clients.transfer.sources import prepare
from torchstore_core.clients.transfer.targets import Results, resolve
from torchstore_core.contracts.transport import Mapping
from torchstore_core.errors import UnsupportedValueError
from torchstore_core.machine.virtual_memory import map_private
from torchstore_core.values import TensorMeta, TensorSlice
from torchstore_core.wire import messages as m

SPOILT = 255


KINDS = (Plain, Rows, Devices, DevicesWithoutRows, Registering, Windowed)


@pytest.fixture
async def volume(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Volume]:
    # How large the chunks of a window are, and so where it fails, is not up to this machine.
    monkeypatch.setenv("TORCHSTORE_COPY_THREADS", "2")
    async with volume_of_this_process() as made:
        yield made


@pytest.fixture
def _cut(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a batch moves in parts, although it is small."""
    if request.param:
        monkeypatch.setattr(staging, "_PART", 32 << 10)
        monkeypatch.setattr(staging, "_MANY", 7)


_IN_PARTS = (Plain, DevicesWithoutRows, Windowed)


def _pairs(kinds: Sequence[type[Plain]], cut: bool) -> list[Any]:
    """Each that fails, and each that comes after it; with the soak tests, each with each."""
    pairs = [*product(kinds, repeat=2)]
    kept = one_of_each(pairs)
    return [
        pytest.param(*pair, cut, marks=() if at in kept else pytest.mark.soak)
        for at, pair in enumerate(pairs)
    ]


_PAIRS = [*_pairs(KINDS, cut=False), *_pairs(_IN_PARTS, cut=True)]
_every_pair = pytest.mark.parametrize(("first", "second", "_cut"), _PAIRS, indirect=["_cut"])


_PATTERN = (torch.arange(250) + 1).to(torch.uint8).repeat(SIZE // 250 + 1)


def _fill(count: int) -> torch.Tensor:
    """Bytes from 1 to 250."""
    return _PATTERN[:count].clone()


def _fail_after(kind: type[Plain], copies: int) -> int:
    """What a link may move before it fails: copies, or chunks of a window."""
    return 2 if kind is Windowed else copies


@pytest.mark.usefixtures("_cut")
@_every_pair
async def test_put(volume: Volume, first: type[Plain], second: type[Plain]) -> None:
    wide, narrow = _fill(4 * MB).view(1024, 4096), _fill(MB // 2).view(-1, 64)
    values = {f"run{at}": _fill(1000 + at * 400) for at in range(40)}
    values |= {"rows": wide[:, :1024], "more rows": wide[:, 2048:2560]}
    values |= {"short": narrow[:, :16], "shorter": narrow[:, 16:24]}
    values |= {f"large{at}": _fill(MB) for at in range(4)}
    sources = [
        one for key, value in values.items() for one in prepare(key, value, allow_pickle=False)
    ]
    offsets = [sum(source.nbytes for source in sources[:at]) for at in range(len(sources))]
    grants = [m.Grant(0, 0, offset) for offset in offsets]
    (batch,) = put_batches(zip(sources, grants, strict=True))
    expected = torch.cat([value.flatten() for value in values.values()])
    there = volume.memory[: len(expected)]
    moved = 0
    # The first one ends among the runs, the second among what the two treat differently.
    for kind, copies in ((first, 30), (second, 2 if first is Windowed else 15)):
        moved += await volume.fails(kind, batch, _fail_after(kind, copies))
        there.masked_fill_(there != 0, SPOILT)  # it has arrived
    arrived = there != 0
    assert 0 < int(arrived.sum()) < len(expected)
    link = await volume.link(first)
    await executor.by_link(link, batch)
    assert bool((there == SPOILT).logical_or_(~arrived).all()), "it was sent again"
    assert torch.equal(there, expected.masked_fill_(arrived, SPOILT))
    assert batch.prepared is None
    if Windowed not in (first, second):
        assert moved + link.moved == len(expected)


@pytest.mark.usefixtures("_cut")
@_every_pair
async def test_get(volume: Volume, first: type[Plain], second: type[Plain]) -> None:
    volume.memory.copy_(_fill(SIZE))
    before = volume.memory.clone()
    # Destinations, where their bytes are stored, and what was stored there.
    wanted: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
    targets = []

    def want(into: torch.Tensor, offset: int, shape: tuple[int, ...], *part: Any) -> None:
        places = [one[offset:][: math.prod(shape)].view(shape) for one in (volume.memory, before)]
        piece = TensorSlice(*part, shape) if part else None
        grant = m.Grant(0, 0, offset)
        entry = m.Entry(1, TensorMeta("uint8", shape), math.prod(shape), grant=grant)
        at = len(targets)
        targets.append(resolve(at, at, f"k{at}", entry, into, piece))
        if part:
            (top, left), (rows, columns) = part
            places = [one[top : top + rows, left : left + columns] for one in places]
        wanted.append((into, places[0], places[1]))

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(*shape, dtype=torch.uint8)

    for at in range(40):
        want(zeros(1000 + at), at * 2000, (1000 + at,))
    want(zeros(512, 4096)[:, :1024], 2 * MB, (512, 1024))  # rows here, a run there
    want(zeros(512, 1024), 4 * MB, (512, 4096), (0, 64), (512, 1024))  # the reverse
    want(zeros(512, 4096)[:, 256:768], 8 * MB, (512, 2048), (0, 0), (512, 512))  # rows in both
    want(zeros(700, 16), 10 * MB, (700, 64), (0, 8), (700, 16))  # short rows into a run
    want(zeros(700, 64)[:, :16], 11 * MB, (700, 16))
    want(zeros(700, 64)[:, 1:9], 12 * MB, (700, 64), (0, 5), (700, 8))
    for at in range(4):
        want(zeros(MB), (16 + at) * MB, (MB,))
    (batch,) = get_batches(targets, Results(allow_pickle=True))
    moved = 0
    among = 15 if first.rows and second.rows else 300  # to links without rows, each row is a copy
    for kind, copies in ((first, 30), (second, 3 if first is Windowed else among)):
        moved += await volume.fails(kind, batch, _fail_after(kind, copies))
        for into, stored, _ in wanted:
            stored.masked_fill_(into != 0, SPOILT)  # it has arrived
    arrived = sum(int((into != 0).sum()) for into, _, _ in wanted)
    total = sum(into.numel() for into, _, _ in wanted)
    assert 0 < arrived < total
    link = await volume.link(first)
    await executor.by_link(link, batch)
    for into, _, right in wanted:
        assert torch.equal(into, right)
    assert batch.prepared is None
    if Windowed not in (first, second):
        assert moved + link.moved == total


class Mapped(Windowed):
    """Maps, and has no page for what it is to copy."""

    fd: ClassVar[int]
    maps: ClassVar[int]

    def map(self, segment: int, offset: int, nbytes: int) -> Mapping:
        type(self).maps += 1
        address, before, owner = map_private(self.fd, offset, nbytes)
        return Mapping(address, before, nbytes, owner)


async def test_what_was_mapped_stays_mapped(volume: Volume) -> None:
    volume.memory.copy_(_fill(SIZE))
    Mapped.fd, Mapped.maps = volume.fd, 0
    results = Results(allow_pickle=True)
    targets = []
    for at in range(4):
        grant = m.Grant(0, 0, at * MB)
        into = torch.zeros(MB, dtype=torch.uint8) if at % 2 else None
        entry = m.Entry(1, TensorMeta("uint8", (MB,)), MB, grant=grant)
        targets.append(resolve(at, at, f"k{at}", entry, into))
    (batch,) = get_batches(targets, results)
    await volume.fails(Mapped, batch, 0)
    assert Mapped.maps == 1
    link = await volume.link(Plain)
    mapped = await executor.by_link(link, batch)
    assert link.moved == 2 * MB
    tensors = [tensor for one in mapped for _, tensor in one.values]
    assert len(tensors) == 2
    tensors += [target.tensor for target in targets if target.tensor is not None]
    assert all(torch.equal(one[:500], volume.memory[:500]) for one in tensors[:1])
    assert all(bool(one.all()) for one in tensors)


async def test_memory_that_was_freed_in_between_is_refused(volume: Volume) -> None:
    """What was read into staging memory is not written to where a tensor was."""
    volume.memory.copy_(_fill(SIZE))
    wide = torch.zeros(700, 64, dtype=torch.uint8)
    runs = [torch.zeros(100, dtype=torch.uint8) for _ in range(2)]
    targets = []
    for at, into in enumerate((wide[:, :16], *runs)):
        shape = tuple(into.shape)
        grant = m.Grant(0, 0, at * MB)
        entry = m.Entry(1, TensorMeta("uint8", shape), into.numel(), grant=grant)
        targets.append(resolve(at, at, f"k{at}", entry, into))
    (batch,) = get_batches(targets, Results(allow_pickle=True))
    await volume.fails(Plain, batch, 2)
    wide.untyped_storage().resize_(0)
    with pytest.raises(UnsupportedValueError, match="freed or shrunk"):
        await executor.by_link(await volume.link(Windowed), batch)
