"""Both halves of ``inprocess``. They can share a module because they run in the same process."""

from __future__ import annotations

import asyncio
import ctypes
import secrets
from collections.abc import Sequence

from torchstore_core.contracts.transport import (
    Copy,
    Link,
    LinkContext,
    Segment,
    ServerContext,
    TransportServer,
)
from torchstore_core.errors import TransportError, TransportUnavailableError
from torchstore_core.machine.virtual_memory import map_shared, unmap

# Bytes after which other tasks of the event loop have a turn: about a millisecond.
_PIECE = 4 << 20
# The segments that this process serves: token -> segment id -> (address, nbytes).
_served: dict[bytes, dict[int, tuple[int, int]]] = {}


class InProcessServer(TransportServer):
    """Server half: maps the segments and records their addresses under a token, the offer."""

    def __init__(self) -> None:
        self._token = b""

    async def start(self, context: ServerContext, segments: Sequence[Segment]) -> bytes:
        self._token = secrets.token_bytes(16)
        _served[self._token] = {s.id: (map_shared(s.fd, s.nbytes), s.nbytes) for s in segments}
        return self._token

    async def close(self) -> None:
        for address, nbytes in _served.pop(self._token, {}).values():
            unmap(address, nbytes)


class InProcessLink(Link):
    """Client half: looks up the mappings by token, and copies."""

    def __init__(self, token: bytes) -> None:
        self._token = token

    @classmethod
    async def connect(cls, offer: bytes, context: LinkContext) -> InProcessLink:
        if offer not in _served:
            raise TransportUnavailableError("the volume is not served in this process")
        return cls(offer)

    async def write(self, copies: Sequence[Copy]) -> None:
        await self._move(copies, write=True)

    async def read(self, copies: Sequence[Copy]) -> None:
        await self._move(copies, write=False)

    def close(self) -> None:
        self._token = b""

    async def _move(self, copies: Sequence[Copy], *, write: bool) -> None:
        moved = 0
        for copy in copies:
            self._at(copy)  # a copy of no bytes is checked, too
            for at in range(0, copy.nbytes, _PIECE):
                # Looked up each time: meanwhile the volume may have been closed.
                here, there = copy.address + at, self._at(copy) + at
                nbytes = min(_PIECE, copy.nbytes - at)
                ctypes.memmove(*((there, here) if write else (here, there)), nbytes)
                moved += nbytes
                if moved >= _PIECE:
                    moved = 0
                    await asyncio.sleep(0)

    def _at(self, copy: Copy) -> int:
        """Return the address in the segment, after checking the range."""
        segments = _served.get(self._token)
        if segments is None or copy.segment not in segments:
            raise TransportError(f"segment {copy.segment} is not served in this process any more")
        address, nbytes = segments[copy.segment]
        if not 0 <= copy.offset <= copy.offset + copy.nbytes <= nbytes:
            raise TransportError(f"[{copy.offset}, +{copy.nbytes}) is outside of the segment")
        return address + copy.offset
