"""Server half of ``shm``: hands the segments' descriptors to whoever connects and may."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import struct
from collections.abc import Sequence

import msgspec

from torchstore_core.contracts.transport import Segment, ServerContext, TransportServer

__all__ = ["HEADER_MAX", "Offer", "ShmServer"]

log = logging.getLogger(__name__)

#: Largest message that comes with the descriptors, bytes.
HEADER_MAX = 4096


class Offer(msgspec.Struct, frozen=True, array_like=True):
    """Where to connect, and which segments (id, bytes) come, in descriptor order."""

    path: str
    segments: tuple[tuple[int, int], ...]


class ShmServer(TransportServer):
    """Listens on a Unix socket in the server's private directory.

    A connection is answered at once with all descriptors and closed; the client asks nothing, so
    there is nothing to parse.
    """

    def __init__(self) -> None:
        self._listener: socket.socket | None = None
        self._fds: list[int] = []
        self._path = ""

    async def start(self, context: ServerContext, segments: Sequence[Segment]) -> bytes:
        self._path = os.path.join(context.socket_dir, f"shm-{secrets.token_hex(4)}.sock")
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            listener.bind(self._path)
            os.chmod(self._path, 0o600)
            listener.listen(256)
            listener.setblocking(False)
        except OSError:
            listener.close()
            raise
        self._listener = listener
        self._fds = [s.fd for s in segments]
        asyncio.get_running_loop().add_reader(listener.fileno(), self._accept)
        offer = Offer(self._path, tuple((s.id, s.nbytes) for s in segments))
        return msgspec.msgpack.encode(offer)

    async def close(self) -> None:
        listener, self._listener = self._listener, None
        if listener is None:
            return
        asyncio.get_running_loop().remove_reader(listener.fileno())
        listener.close()
        try:
            os.unlink(self._path)
        except FileNotFoundError:
            log.debug("%s was already gone", self._path)

    def _accept(self) -> None:
        if self._listener is None:
            return
        try:
            peer, _ = self._listener.accept()
        except OSError as error:  # gone again, or out of descriptors: the client will say
            log.debug("accept: %s", error)
            return
        with peer:
            if not _same_user(peer):
                return
            try:
                socket.send_fds(peer, [b"torchstore-shm-1"], self._fds)
            except OSError as error:
                log.debug("a client went away while it was given segments: %s", error)


def _same_user(peer: socket.socket) -> bool:
    if not hasattr(socket, "SO_PEERCRED"):
        return True  # the directory's mode 0700 has already decided
    size = struct.calcsize("3i")
    _, uid, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return bool(uid == os.getuid())
