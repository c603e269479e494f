"""What has arrived over a link that fails is not moved again by the next one, whatever the two can.

Whatever has arrived is spoilt in the segment before the next link goes on, so that a byte that is
moved once more shows.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import AsyncIterator, Sequence
from typing import Any, ClassVar

import pytest
import torch

from torchstore_core.clients.transfer import executor
from torchstore_core.clients.transfer.moves import Batch, get_batches, put_batches
from torchstore_core.clients.transfer.sources import prepare
from torchstore_core.clients.transfer.targets import Results, resolve
from torchstore_core.contracts.transport import (
    Copy,
    LinkContext,
    Mapping,
    Memory,
    Segment,
    ServerContext,
    Window,
)
from torchstore_core.errors import TransportError, UnsupportedValueError
from torchstore_core.machine.topology import probe
from torchstore_core.machine.virtual_memory import map_private
from torchstore_core.server.memory.segment import open_memory
from torchstore_core.values import TensorMeta, TensorSlice
from torchstore_core.wire import messages as m
from torchstore_inprocess.transport import InProcessLink, InProcessServer

MB = 1 << 20
SIZE = 20 * MB
SPOILT = 255


class Plain(InProcessLink):
    """Contiguous host memory. Fails after so many copies as it is allowed; counts what it moves."""

    allowed: int = 1 << 60
    moved: int = 0

    async def write(self, copies: Sequence[Copy]) -> None:
        self._run(copies, into=True)

    async def read(self, copies: Sequence[Copy]) -> None:
        self._run(copies, into=False)

    def _run(self, copies: Sequence[Copy], *, into: bool) -> None:
        for at, copy in enumerate(copies):
            if not self.allowed:
                raise TransportError("it has failed", details={"done": at})
            self.allowed -= 1
            assert self.rows or copy.rows == 1
            assert not copy.device or self.devices
            for row in range(copy.rows):
                here = copy.address + row * copy.stride
                offset = copy.offset + row * copy.step
                there = self._at(Copy(0, copy.segment, offset, copy.nbytes))
                ctypes.memmove(*((there, here) if into else (here, there)), copy.nbytes)
                self.moved += copy.nbytes


class Rows(Plain):
    rows: ClassVar[bool] = True


class Devices(Rows):
    """This host's memory passes for that of a device."""

    devices: ClassVar[frozenset[str]] = frozenset(("cpu",))


class DevicesWithoutRows(Devices):
    rows: ClassVar[bool] = False


class Registering(Rows):
    """Is told whose memory it is."""

    async def write_from(self, copies: Sequence[Copy], memory: Sequence[Memory]) -> None:
        assert memory
        self._run(copies, into=True)

    async def read_into(self, copies: Sequence[Copy], memory: Sequence[Memory]) -> None:
        assert memory
        self._run(copies, into=False)


class Windowed(Plain):
    """Its window fails after so many chunks."""

    def window(self, segment: int) -> Window:
        return Window(self._at(Copy(0, segment, 0, 0)), SIZE)

    def prepare(self, segment: int, offset: int, nbytes: int, *, fresh: bool) -> None:
        if self.allowed <= 0:
            raise TransportError("no page is left")
        self.allowed -= 1


KINDS = (Plain, Rows, Devices, DevicesWithoutRows, Registering, Windowed)


class Volume:
    """A segment, and links to it."""

    def __init__(self) -> None:
        self.fd = open_memory("try", SIZE)
        self.server = InProcessServer()
        self.memory = torch.from_file(f"/proc/self/fd/{self.fd}", True, SIZE, dtype=torch.uint8)

    async def start(self) -> None:
        here = probe()
        self.context = LinkContext(here, here, same_host=True, offered=True)
        context = ServerContext("store", "volume", "/tmp", here)
        self.offer = await self.server.start(context, [Segment(0, self.fd, SIZE)])

    async def link(self, kind: type[Plain], allowed: int = 1 << 60) -> Any:
        made = await kind.connect(self.offer, self.context)
        made.allowed = allowed  # type: ignore[attr-defined]
        return made

    async def fails(self, kind: type[Plain], batch: Batch, allowed: int) -> int:
        """Move a part of a batch; how many bytes went over the wire, if that is known."""
        link = await self.link(kind, allowed)
        with pytest.raises(TransportError):
            await executor.by_link(link, batch)
        assert not link.allowed, "it was to fail in the middle"
        return int(link.moved)


@pytest.fixture
async def volume() -> AsyncIterator[Volume]:
    made = Volume()
    await made.start()
    yield made
    await made.server.close()
    os.close(made.fd)


_PATTERN = (torch.arange(250) + 1).to(torch.uint8).repeat(SIZE // 250 + 1)


def _fill(count: int) -> torch.Tensor:
    """Bytes from 1 to 250."""
    return _PATTERN[:count].clone()


def _fail_after(kind: type[Plain], copies: int) -> int:
    """What a link may move before it fails: copies, or chunks of a window."""
    return 2 if kind is Windowed else copies


@pytest.mark.parametrize("second", KINDS)
@pytest.mark.parametrize("first", KINDS)
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
        there[there != 0] = SPOILT  # it has arrived
    arrived = there != 0
    assert 0 < int(arrived.sum()) < len(expected)
    link = await volume.link(first)
    await executor.by_link(link, batch)
    assert bool((there[arrived] == SPOILT).all()), "it was sent again"
    assert torch.equal(there[~arrived], expected[~arrived])
    assert batch.prepared is None
    if Windowed not in (first, second):
        assert moved + link.moved == len(expected)


@pytest.mark.parametrize("second", KINDS)
@pytest.mark.parametrize("first", KINDS)
async def test_get(volume: Volume, first: type[Plain], second: type[Plain]) -> None:
    volume.memory.copy_(_fill(SIZE))
    before = volume.memory.clone()
    wanted: list[tuple[torch.Tensor, torch.Tensor]] = []  # destinations, and their places
    targets = []

    def want(into: torch.Tensor, offset: int, shape: tuple[int, ...], *part: Any) -> None:
        stored = torch.arange(offset, offset + torch.Size(shape).numel()).view(shape)
        piece = TensorSlice(*part, shape) if part else None
        grant = m.Grant(0, 0, offset)
        entry = m.Entry(1, TensorMeta("uint8", shape), stored.numel(), grant=grant)
        at = len(targets)
        targets.append(resolve(at, at, f"k{at}", entry, into, piece))
        if part:
            (top, left), (rows, columns) = part
            stored = stored[top : top + rows, left : left + columns]
        wanted.append((into, stored))

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
    (batch,) = get_batches(targets, Results())
    moved = 0
    for kind, copies in ((first, 30), (second, 3 if first is Windowed else 300)):
        moved += await volume.fails(kind, batch, _fail_after(kind, copies))
        for into, stored in wanted:
            volume.memory[stored[into != 0]] = SPOILT  # it has arrived
    arrived = sum(int((into != 0).sum()) for into, _ in wanted)
    total = sum(into.numel() for into, _ in wanted)
    assert 0 < arrived < total
    link = await volume.link(first)
    await executor.by_link(link, batch)
    for into, stored in wanted:
        assert torch.equal(into, before[stored])
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
    results = Results()
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
    tensors = [tensor for one in mapped for _, tensor in one.tensors]
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
    (batch,) = get_batches(targets, Results())
    await volume.fails(Plain, batch, 2)
    wide.untyped_storage().resize_(0)
    with pytest.raises(UnsupportedValueError, match="freed or shrunk"):
        await executor.by_link(await volume.link(Windowed), batch)
