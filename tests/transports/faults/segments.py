"""A segment of this process, and links of several kinds to it that fail when they are told to."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, ClassVar

import pytest
import torch

from torchstore_core.clients.moving import executor
from torchstore_core.clients.moving.batches import Batch
from torchstore_core.contracts.transport import (
    Copy,
    LinkContext,
    Memory,
    Segment,
    ServerContext,
    Window,
)
from torchstore_core.errors import TransportError
from torchstore_core.machine.topology import probe
from torchstore_core.server.memory.segment import open_memory
from torchstore_inprocess.transport import InProcessLink, InProcessServer

MB = 1 << 20
SIZE = 20 * MB


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
    """Its window fails after so many chunks, which several threads copy."""

    counting = threading.Lock()

    def window(self, segment: int) -> Window:
        return Window(self._at(Copy(0, segment, 0, 0)), SIZE)

    def prepare(self, segment: int, offset: int, nbytes: int, *, fresh: bool) -> None:
        with self.counting:
            if self.allowed <= 0:
                raise TransportError("no page is left")
            self.allowed -= 1


class Volume:
    """A segment, and links to it."""

    def __init__(self, size: int) -> None:
        self.fd = open_memory("try", size)
        self.size = size
        self.server = InProcessServer()
        self.memory = torch.from_file(f"/proc/self/fd/{self.fd}", True, size, dtype=torch.uint8)

    async def start(self) -> None:
        here = probe()
        self.context = LinkContext(here, here, same_host=True, offered=True)
        context = ServerContext("store", "volume", "/tmp", here)
        self.offer = await self.server.start(context, [Segment(0, self.fd, self.size)])

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


@asynccontextmanager
async def volume_of_this_process(size: int = SIZE) -> AsyncIterator[Volume]:
    made = Volume(size)
    await made.start()
    try:
        yield made
    finally:
        await made.server.close()
        os.close(made.fd)
