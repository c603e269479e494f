"""Server half of ``monarch-rdma``: the volume's segments, mapped and registered once."""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torchstore_core.errors import TransportError
from torchstore_core.machine.virtual_memory import map_shared, unmap
from torchstore_monarch.actors.hosting import HostedServer
from torchstore_monarch.rdma.bouncing import buffer, copy, keep
from torchstore_monarch.rdma.wire import GREETING
from torchstore_monarch.rpc.wire import Place
from torchstore_monarch.threads import finish_torch, in_thread, is_torch_unfinished

_TIMEOUT_S = 60
# Addresses and sizes of the places of each buffer.
_Places = Sequence[Sequence[tuple[int, int]]]


class RdmaServer(HostedServer):
    """Moves bytes between segments and buffers that clients have registered.

    The engine never writes to a segment, because nothing tells when it has stopped: bytes arrive in
    a buffer, and are copied from there for clients that have not been disconnected.
    """

    greeting = GREETING

    def __init__(self) -> None:
        super().__init__()
        self._mapped: dict[int, tuple[int, int]] = {}  # address and bytes, by segment
        # Moves run on the actor's event loop, close runs on the volume's.
        self._lock = threading.Lock()
        self._moves = 0
        self._closed = False
        # After a read has failed, the engine may continue the rest of it, so the memory that it may
        # touch stays mapped.
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
        self,
        ticket: bytes,
        groups: Sequence[Sequence[Place]],
        buffers: Sequence[Any],
        *,
        write: bool,
    ) -> int:
        """Fill places from a client's registered buffers (``write``), or buffers from places. Each
        buffer has the bytes of one group of places, in order. Return the number of bytes.

        Raises:
            TransportError: a place is not in its segment, the transfer failed, or the client was
                disconnected.
        """
        self.admitted(ticket)
        with self._moving():
            found = [[self._place(*place) for place in places] for places in groups]
            sizes = [sum(nbytes for _, nbytes in places) for places in found]
            for nbytes, remote in zip(sizes, buffers, strict=True):
                if remote.size() != nbytes or not nbytes:
                    raise TransportError(f"a buffer of {remote.size()} bytes for {nbytes}")
            if write:
                await self._write(ticket, found, sizes, buffers)
            else:
                await self._read(found, sizes, buffers)
        return sum(sizes)

    async def _write(
        self, ticket: bytes, found: _Places, sizes: Sequence[int], buffers: Sequence[Any]
    ) -> None:
        received = [buffer(nbytes) for nbytes in sizes]
        await self._transfer(received, buffers, write=True)

        def spread() -> None:
            with self.writing(ticket):
                for places, memory in zip(found, received, strict=True):
                    copy(places, memory, into=False)

        await in_thread(spread)

    async def _read(self, found: _Places, sizes: Sequence[int], buffers: Sequence[Any]) -> None:
        sent = []
        for places, nbytes in zip(found, sizes, strict=True):
            if len(places) == 1:
                memory = _memory(*places[0])
            else:
                memory = buffer(nbytes)
                await in_thread(functools.partial(copy, places, memory, into=True))
            sent.append(memory)
        await self._transfer(sent, buffers, write=False)

    async def _transfer(
        self, own: Sequence[memoryview], buffers: Sequence[Any], *, write: bool
    ) -> None:
        from monarch.rdma import RDMAAction  # heavy, so it is imported only when used

        while is_torch_unfinished():  # another thread may begin when this one has looked
            await in_thread(finish_torch)
        action = RDMAAction()
        for memory, remote in zip(own, buffers, strict=True):
            if write:
                action.read_remote(memory, remote)
            else:
                action.write_remote(remote, memory)
        try:
            await action.submit(timeout=_TIMEOUT_S)
        except BaseException as error:
            self._failed = self._failed or not write
            keep(own)
            if isinstance(error, Exception):
                raise TransportError(f"the transfer failed: {error}") from error
            raise

    def _place(self, segment: int, offset: int, nbytes: int) -> tuple[int, int]:
        """The address of bytes of a segment, and their number."""
        found = self.checked(segment, offset, nbytes)
        if segment not in self._mapped:
            self._mapped[segment] = map_shared(found.fd, found.nbytes, 0), found.nbytes
        return self._mapped[segment][0] + offset, nbytes


def _memory(address: int, nbytes: int) -> memoryview:
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")
