"""Ending with the processes that use a store, when none of them owns it. Torch-free.

Each member holds a connection to a socket of its own, beside the control socket. That is not its
session: a session may be dropped and opened again, may be a child's, and lives on as long as a
zero-copy tensor; a member stays until it says that it leaves, or until its process ends.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import cast

__all__ = ["Members"]

_JOINED = b"+"  # you are counted
_GO = b"-"  # you have left, and others stay


class Members:
    """Counts the members; calls ``ended`` when the last one has left or died.

    Args:
        ended: called once.
    """

    def __init__(self, ended: Callable[[], None]) -> None:
        self.joined = False
        self._ended = ended
        self._open: set[Member] = set()
        self._over = False
        self._listener: asyncio.AbstractServer | None = None

    async def listen(self, directory: Path) -> str:
        """Let members in; the address for them. The socket goes with its directory."""
        path = directory / "members.sock"
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_unix_server(lambda: Member(self), str(path), backlog=512)
        path.chmod(0o600)
        return f"unix:{path}"

    def starter_ended(self) -> None:
        """Whoever started the server is gone: it ends, unless the members keep it."""
        if not self.joined:
            self._end()

    def join(self, member: Member) -> bool:
        """Count one more; False if the server is ending already."""
        if self._over:
            return False
        self.joined = True
        self._open.add(member)
        return True

    def leave(self, member: Member) -> bool:
        """Count one less; whether it was the last one."""
        if member not in self._open:
            return False
        self._open.discard(member)
        if self._open:
            return False
        self._end()
        return True

    def _end(self) -> None:
        if not self._over:
            self._over = True
            self._ended()


class Member(asyncio.Protocol):
    """Server side of a member's connection."""

    def __init__(self, members: Members) -> None:
        self._members = members
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Count it, and say so."""
        self._transport = cast(asyncio.Transport, transport)
        if _foreign(transport) or not self._members.join(self):
            self._transport.abort()
            return
        self._transport.write(_JOINED)

    def eof_received(self) -> bool:
        """It leaves. The connection of the last one closes with this process: that tells it when
        there is nothing left.
        """
        last = self._members.leave(self)
        if not last and self._transport is not None:
            self._transport.write(_GO)
        return last

    def connection_lost(self, exc: Exception | None) -> None:
        """It has left or died."""
        self._members.leave(self)
        self._transport = None


def _foreign(transport: asyncio.BaseTransport) -> bool:
    """Whether another user is at the other end (the directory's mode keeps them out as well)."""
    if not hasattr(socket, "SO_PEERCRED"):
        return False
    size = struct.calcsize("3i")
    sock = transport.get_extra_info("socket")
    uid = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))[1]
    return bool(uid != os.getuid())
