"""Connections of relays to a server in another process.

Each connection of a relay is one to the server's socket. It begins with a ``Via``; after that, what
comes from either side is passed on as it is.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import cast

from torchstore_core.machine.sockets.unix import connect, unix_socket
from torchstore_core.wire import messages as m
from torchstore_core.wire.framing import HEADER, encode

log = logging.getLogger(__name__)


class Line(asyncio.Protocol):
    """One of them; see ``relay_server.Conversing``.

    Args:
        path: of the server's socket.
        write: sends what the server says to the client.
        end: closes the connection of the client.
        via: how the client reaches this process.
    """

    def __init__(
        self,
        path: str,
        write: Callable[[bytearray], None],
        end: Callable[[], None],
        via: m.Via,
    ) -> None:
        self._write_to_client = write
        self._end = end
        self._unsent = encode(via)  # until there is a connection
        self._transport: asyncio.Transport | None = None
        self._closed = False
        self._connecting = asyncio.get_running_loop().create_task(self._connect(path))

    async def _connect(self, path: str) -> None:
        try:
            with unix_socket() as sock:
                await connect(sock, path)
                loop = asyncio.get_running_loop()
                await loop.create_unix_connection(lambda: self, sock=sock)
        except Exception as error:  # noqa: BLE001 - whatever it is, there is no way to the server
            log.info("the server cannot be reached: %s", error)
            self.connection_lost(None)

    # ---- relay_server.Conversing ----------------------------------------------------------

    def handle(self, body: bytes) -> None:
        """See ``Conversing``."""
        self._write(len(body).to_bytes(HEADER, "little") + body)

    def process_died(self) -> None:
        """See ``Conversing``."""
        self._write(encode(m.ClientDied()))

    def relay_lost(self, why: str) -> None:
        """See ``Conversing``."""
        self._write(encode(m.RelayLost(why)))
        self.ended()

    def ended(self) -> None:
        """See ``Conversing``."""
        self._closed = True
        if self._transport is not None:
            self._transport.close()

    def _write(self, data: bytes | bytearray) -> None:
        if self._closed:
            return
        if self._transport is None:
            self._unsent += data
        else:
            self._transport.write(data)

    # ---- asyncio.Protocol -----------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(self._unsent)
        self._unsent = bytearray()
        if self._closed:
            self._transport.close()

    def data_received(self, data: bytes) -> None:
        if not self._closed:
            self._write_to_client(bytearray(data))

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if not self._closed:
            self._closed = True
            self._end()
