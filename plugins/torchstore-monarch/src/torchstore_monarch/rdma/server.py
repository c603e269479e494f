"""Server half of ``monarch-rdma``: the volume's segments, mapped and registered once."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from typing import Any

from torchstore_core.contracts.transport import Segment, ServerContext, TransportServer
from torchstore_core.errors import TransportError, TransportUnavailableError
from torchstore_core.virtual_memory import map_shared, unmap
from torchstore_monarch.hosting import Hosted, is_hosting
from torchstore_monarch.rpc.wire import Place

__all__ = ["RdmaServer"]

log = logging.getLogger(__name__)

_TIMEOUT_S = 60


class RdmaServer(TransportServer):
    """Moves bytes between segments and buffers that clients have registered."""

    hosted: Hosted[RdmaServer] = Hosted()

    def __init__(self) -> None:
        self._segments: dict[int, Segment] = {}
        self._addresses: dict[int, int] = {}
        self._volume_id = ""

    async def start(self, context: ServerContext, segments: Sequence[Segment]) -> bytes:
        if not is_hosting():
            raise TransportUnavailableError("this server is not hosted by a Monarch actor")
        self._segments = {segment.id: segment for segment in segments}
        self._volume_id = context.volume_id
        self.hosted.add(context.volume_id, self)
        return context.volume_id.encode()

    async def close(self) -> None:
        self.hosted.remove(self._volume_id, self)
        addresses, self._addresses = self._addresses, {}
        for segment, address in addresses.items():
            unmap(address, self._segments[segment].nbytes)
        self._segments = {}

    async def move(
        self, groups: Sequence[Sequence[Place]], buffers: Sequence[Any], *, write: bool
    ) -> int:
        """Fill places from a client's registered buffers (``write``), or buffers from places; the
        number of bytes. Each buffer has the bytes of one group of places, one after the other.

        Raises:
            TransportError: a place is not in its segment, or the transfer failed.
        """
        from monarch.rdma import RDMAAction  # heavy; only where it is used

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
            if len(parts) > 1:
                memory = memoryview(bytearray(nbytes) if write else b"".join(parts))
                spread.append((parts, memory))
            if write:
                action.read_remote(memory, buffer)
            else:
                action.write_remote(buffer, memory)
        try:
            await action.submit(timeout=_TIMEOUT_S)
        except Exception as error:
            raise TransportError(f"the transfer failed: {error}") from error
        for parts, memory in spread if write else ():
            for part in parts:
                part[:], memory = memory[: len(part)], memory[len(part) :]
        return total

    def _memory(self, segment: int, offset: int, nbytes: int) -> memoryview:
        found = self._segments.get(segment)
        if found is None or offset < 0 or nbytes <= 0 or offset + nbytes > found.nbytes:
            raise TransportError(f"{nbytes} bytes at {offset} are not in segment {segment}")
        address = self._addresses.get(segment)
        if address is None:
            address = self._addresses[segment] = map_shared(found.fd, found.nbytes, 0)
        return memoryview((ctypes.c_char * nbytes).from_address(address + offset)).cast("B")
