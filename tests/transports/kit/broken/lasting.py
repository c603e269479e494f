"""Halves whose faults show only when they are used for long."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Sequence
from typing import Any

from tests.transports.kit.broken.simple import Plugin, Simple, SimpleLink, named

from torchstore_core.contracts.transport import Copy, Segment, ServerContext

_LEFT = 1 << 20


class Keeper(SimpleLink):
    """Keeps what it has written."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.kept: list[bytes] = []

    async def write(self, copies: Sequence[Copy]) -> None:
        await super().write(copies)
        self.kept += [ctypes.string_at(copy.address, copy.nbytes) for copy in copies]


class Caching(SimpleLink):
    """Remembers what it has read or written, and reads it no more."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.known: dict[tuple[int, int], bytes] = {}

    def piece(self, fd: int, address: int, offset: int, nbytes: int, *, write: bool) -> None:
        known = self.known.get((offset, nbytes))
        if known is not None and not write:
            ctypes.memmove(address, known, nbytes)
            return
        super().piece(fd, address, offset, nbytes, write=write)
        self.known[offset, nbytes] = ctypes.string_at(address, nbytes)


class Blocking(SimpleLink):
    """Moves the bytes in the event loop's thread, and waits for them."""

    async def move(self, copies: Sequence[Copy], *, write: bool) -> None:
        time.sleep(0.1)
        self.work(copies, threading.Event(), write)


class Filling(Simple):
    """Makes all pages of its segments before it serves them."""

    async def start(self, context: ServerContext, segments: Sequence[Segment]) -> bytes:
        for segment in segments:
            os.posix_fallocate(segment.fd, 0, segment.nbytes)
        return await super().start(context, segments)


class Recording(Simple):
    """Keeps what it was asked."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[bytes] = []

    async def handshake(self, peer: bytes, request: bytes) -> bytes:
        self.asked.append(bytes(request))
        return await super().handshake(peer, request)


class Mourning(Simple):
    """Keeps the buffers of clients that have left."""

    def __init__(self) -> None:
        super().__init__()
        self.left: list[bytes] = []

    async def disconnect(self, peer: bytes) -> None:
        self.left.append(b"\x01" * _LEFT)
        await super().disconnect(peer)


def __getattr__(name: str) -> Plugin:
    """``plugin_X``: the plug-in with the half ``X``."""
    return named(name, globals())
