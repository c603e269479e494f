"""Client half of ``tcp``: batches over several connections at once, rows included."""

from __future__ import annotations

import asyncio
import errno
import os
import ssl
import sys
import threading
import time
from collections.abc import Sequence
from typing import ClassVar

import msgspec

from torchstore_core.contracts.transport import Copy, Link, LinkContext
from torchstore_core.errors import (
    ConfigurationError,
    TransportError,
    TransportNotReadyError,
    TransportUnavailableError,
)
from torchstore_core.machine.networks import namespace_id, networks
from torchstore_core.machine.switches import is_on
from torchstore_core.machine.tasks import wait_ended
from torchstore_transports.tcp.moving.connection_sets import ConnectionSet, shared
from torchstore_transports.tcp.moving.dialing import Dialer
from torchstore_transports.tcp.moving.transfers import Transfer
from torchstore_transports.tcp.wire.authentication import encryption
from torchstore_transports.tcp.wire.connection import Connection
from torchstore_transports.tcp.wire.protocol import (
    VERSION,
    Greeting,
    Offer,
    Welcome,
    decode,
)

__all__ = ["CHECKSUM", "TcpLink"]

#: Environment variable: if it is on, the receiver of every unit checks the unit's CRC-32.
CHECKSUM = "TORCHSTORE_TCP_CHECKSUM"

# How long a cancelled write waits for units in flight, so that its outcome is certain.
_SETTLE_S = 0.5


class TcpLink(Link):
    """A :class:`~torchstore_core.contracts.transport.Link` for all event loops of the process."""

    rows: ClassVar[bool] = True

    def __init__(self, connections: ConnectionSet, volume: int) -> None:
        self._connections = connections
        self._streams = connections.streams
        self._reads, self._writes = connections.reads, connections.writes
        self._volume = volume
        self._transfers: set[Transfer] = set()
        self._closed = False
        self._pid = os.getpid()

    @classmethod
    async def connect(cls, offer: bytes, context: LinkContext) -> TcpLink:
        offered = decode(offer, Offer, "an offer")
        if offered.version != VERSION:
            raise TransportUnavailableError(
                f"the volume speaks version {offered.version} of tcp, this process {VERSION}"
            )
        secure, checked = _configuration(offered)
        if context.handshake is None:
            raise TransportUnavailableError("tcp needs a store that carries handshakes")
        greeting = Greeting(VERSION, namespace_id(), networks())
        answer = await context.handshake(msgspec.msgpack.encode(greeting))
        welcome = decode(answer, Welcome, "an answer")
        dialer = Dialer(welcome, secure)
        connections = shared(welcome.ticket, dialer, checked=checked)
        try:
            if not connections.streams.connected:
                connections.streams.keep(await _first(dialer))
        except BaseException:
            connections.release()
            raise
        return cls(connections, welcome.volume)

    async def write(self, copies: Sequence[Copy]) -> None:
        await self._move(copies, write=True)

    async def read(self, copies: Sequence[Copy]) -> None:
        await self._move(copies, write=False)

    def progress(self) -> int:
        """See ``contracts.transport.SupportsProgress``."""
        return self._streams.moved()

    def close(self) -> None:
        if os.getpid() != self._pid:
            self._streams.close_in_child()
        elif not self._closed:
            self._closed = True
            for transfer in list(self._transfers):
                transfer.fail(TransportError("the link was closed"))
            self._connections.release()

    def __del__(self) -> None:
        if not sys.is_finalizing() and hasattr(self, "_pid"):
            self.close()

    # ---- inside ---------------------------------------------------------------------------

    async def _move(self, copies: Sequence[Copy], *, write: bool) -> None:
        nbytes = sum([copy.nbytes * copy.rows for copy in copies])
        widths = self._writes if write else self._reads
        width = widths.choose(nbytes)
        began = time.perf_counter()
        if self._closed:
            raise TransportError("the link is closed")
        transfer = self._streams.start(
            copies, write=write, nbytes=nbytes, width=width, volume=self._volume
        )
        self._transfers.add(transfer)
        try:
            await self._ended(transfer)
            if transfer.error is None and self._streams.alone:
                widths.record(width, nbytes, time.perf_counter() - began)
        finally:
            # A connection that was shut with something in flight has failed, too.
            if write and transfer.began and transfer.error is not None:
                self.unsettled = True
            self._transfers.discard(transfer)
            self._streams.forget(transfer)
        if transfer.error is not None:
            raise TransportError(
                str(transfer.error) or repr(transfer.error), details={"done": transfer.done}
            ) from transfer.error

    async def _ended(self, transfer: Transfer) -> None:
        """Wait for the end. If this raises, no thread touches the batch's memory any more."""
        try:
            await transfer.ended()
        except asyncio.CancelledError:
            if transfer.write:
                transfer.stop()
                rest = asyncio.ensure_future(transfer.ended())
                await wait_ended(rest, _SETTLE_S)
                rest.cancel()
            transfer.abort()
            raise
        except BaseException:  # the coroutine was closed
            transfer.abort()
            raise


def _configuration(offered: Offer) -> tuple[ssl.SSLContext | None, bool]:
    """What the environment says: how to encrypt, and whether to check what arrives."""
    try:
        secure, checked = encryption(server=False), is_on(CHECKSUM)
    except ConfigurationError as error:
        raise TransportUnavailableError(error.message) from error
    if (secure is not None) != offered.encrypted:
        which, other = ("this process", "the volume")[:: 1 if secure is not None else -1]
        raise TransportUnavailableError(
            f"{which} has certificates for tcp (TORCHSTORE_TCP_CERT), but {other} has none"
        )
    return secure, checked


async def _first(dialer: Dialer) -> Connection:
    """Make one connection, to find out at once whether the link can work."""
    made: list[Connection] = []
    lock = threading.Lock()
    given_up = False

    def dial() -> None:
        connection = dialer.dial()
        with lock:
            if not given_up:
                made.append(connection)
                return
        connection.close()  # nobody waits for it any more, and the event loop may be gone

    try:
        await asyncio.to_thread(dial)
    except asyncio.CancelledError:
        with lock:
            given_up = True
        for connection in made:
            connection.close()
        raise
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise TransportNotReadyError(f"no socket is left: {error}") from error
        raise TransportNotReadyError(f"the volume cannot be reached: {error}") from error
    return made.pop()
