"""Server half of ``shm``: sends the segments' descriptors to every authorised client."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
from collections.abc import Sequence

import msgspec

from torchstore_core.contracts.transport import Segment, ServerContext, TransportServer
from torchstore_core.server.serving.listening import Listener

__all__ = ["HEADER_MAX", "Offer", "ShmServer"]

log = logging.getLogger(__name__)

#: Largest message that is sent with the descriptors, in bytes.
HEADER_MAX = 4096


class Offer(msgspec.Struct, frozen=True, array_like=True):
    """Where to connect, and the segments (id, bytes) in the order of their descriptors."""

    path: str
    segments: tuple[tuple[int, int], ...]


class ShmServer(TransportServer):
    """Listens on a Unix socket in the server's private directory.

    Every connection immediately receives all descriptors and is closed. The client sends no
    request, so there is nothing to parse.
    """

    def __init__(self) -> None:
        self._listener = Listener(self._hand_over, keeps=False)
        self._fds: list[int] = []
        self._path = ""

    async def start(self, context: ServerContext, segments: Sequence[Segment]) -> bytes:
        self._path = os.path.join(context.socket_dir, f"shm-{secrets.token_hex(4)}.sock")
        self._fds = [s.fd for s in segments]
        self._listener.open(self._path)
        offer = Offer(self._path, tuple((s.id, s.nbytes) for s in segments))
        return msgspec.msgpack.encode(offer)

    async def close(self) -> None:
        self._listener.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)

    def _hand_over(self, client: socket.socket, _pid: int) -> None:
        with client:
            try:
                socket.send_fds(client, [b"torchstore-shm-1"], self._fds)
            except OSError as error:  # it went away, or too many are in flight: it will try again
                log.debug("a client was not given segments: %s", error)
