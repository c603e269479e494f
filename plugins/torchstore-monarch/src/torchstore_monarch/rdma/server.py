"""Server half of ``monarch-rdma``: the volume's segments, mapped and registered once."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torchstore_core.errors import TransportError
from torchstore_core.machine.virtual_memory import map_shared, unmap
from torchstore_monarch.actors.hosting import HostedServer
from torchstore_monarch.rdma.bouncing import is_direct, keep
from torchstore_monarch.rpc.wire import Place

__all__ = ["RdmaServer"]

_TIMEOUT_S = 60


class RdmaServer(HostedServer):
    """Moves bytes between segments and buffers that clients have registered."""

    def __init__(self) -> None:
        super().__init__()
        self._mapped: dict[int, tuple[int, int]] = {}  # address and bytes, by segment
        # Moves run on the actor's event loop, close runs on the volume's.
        self._lock = threading.Lock()
        self._moves = 0
        self._closed = False
        # After a transfer has failed, the engine may continue the rest of it, so the memory that it
        # may touch stays mapped.
        self._failed = False

    async def close(self) -> None:
        await super().close()
        with self._lock:
            self._closed = True
            self._unmap_if_idle()

    def _unmap_if_idle(self) -> None:
        if self._closed and not self._moves and not self._failed:
            while self._mapped:
                unmap(*self._mapped.popitem()[1])

    @contextmanager
    def _moving(self) -> Iterator[None]:
        """A context in which the engine may touch the memory, so that it stays mapped."""
        with self._lock:
            if self._closed:
                raise TransportError("this volume has ended")
            self._moves += 1
        try:
            yield
        finally:
            with self._lock:
                self._moves -= 1
                self._unmap_if_idle()

    async def move(
        self, groups: Sequence[Sequence[Place]], buffers: Sequence[Any], *, write: bool
    ) -> int:
        """Fill places from a client's registered buffers (``write``), or buffers from places. Each
        buffer has the bytes of one group of places, in order. Return the number of bytes.

        Raises:
            TransportError: a place is not in its segment, or the transfer failed.
        """
        with self._moving():
            return await self._move(groups, buffers, write=write)

    async def _move(
        self, groups: Sequence[Sequence[Place]], buffers: Sequence[Any], *, write: bool
    ) -> int:
        from monarch.rdma import RDMAAction  # heavy, so it is imported only when used

        action = RDMAAction()
        spread: list[tuple[list[memoryview], memoryview]] = []
        total = 0
        for places, buffer in zip(groups, buffers, strict=True):
            parts = [self._memory(*place) for place in places]
            nbytes = sum(len(part) for part in parts)
            if buffer.size() != nbytes or not nbytes:
                raise TransportError(f"a buffer of {buffer.size()} bytes for {nbytes}")
            total += nbytes
            memory = parts[0]
            if len(parts) > 1 or (write and not is_direct()):
                memory = memoryview(bytearray(nbytes) if write else b"".join(parts))
                spread.append((parts, memory))
            if write:
                action.read_remote(memory, buffer)
            else:
                action.write_remote(buffer, memory)
        try:
            await action.submit(timeout=_TIMEOUT_S)
        except BaseException as error:
            self._failed = True
            keep(spread)
            if isinstance(error, Exception):
                raise TransportError(f"the transfer failed: {error}") from error
            raise
        for parts, memory in spread if write else ():
            for part in parts:
                part[:], memory = memory[: len(part)], memory[len(part) :]
        return total

    def _memory(self, segment: int, offset: int, nbytes: int) -> memoryview:
        found = self.checked(segment, offset, nbytes)
        if segment not in self._mapped:
            self._mapped[segment] = map_shared(found.fd, found.nbytes, 0), found.nbytes
        address = self._mapped[segment][0] + offset
        return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")
