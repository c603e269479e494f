"""Ending with the processes that use a store, when none of them owns it. Torch-free.

Each member holds a connection to a socket of its own, beside the control socket. That is not its
session: a session may be dropped and opened again, may be a child's, and lives on as long as a
zero-copy tensor; a member stays until it says that it leaves, or until its process ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import cast

from torchstore_core.server.serving.listening import Listener, speaking

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
        self._listener = Listener(speaking(lambda pid: Member(self)))

    def open(self, directory: Path) -> str:
        """Let members in; the address for them. The socket goes with its directory."""
        path = directory / "members.sock"
        self._listener.open(str(path))
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

    def freed(self) -> None:
        """A member's connection has closed."""
        self._listener.freed()

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
        if not self._members.join(self):
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
        self._members.freed()
        self._transport = None
