"""A client of a hosted volume, with its links and their handshakes."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket

import msgspec

from torchstore_core.contracts.transport import Link, LinkContext, TransportSpec
from torchstore_core.errors import TransportError, TransportUnavailableError
from torchstore_core.machine import topology
from torchstore_core.machine.tasks import begin
from torchstore_core.plugins.registry import load_class
from torchstore_core.testing.transports.ends.host import (
    MAX_FRAME,
    Answer,
    Ask,
    Opened,
    Plugin,
)
from torchstore_core.wire.calls import Calls
from torchstore_core.wire.framing import FrameReader, framed

__all__ = ["Reach", "Session"]

_SETTLE_S = 60.0


class Reach(msgspec.Struct, frozen=True):
    """How a client reaches a hosted volume, from this process or another. ``number``: which volume
    of the host.
    """

    plugin: Plugin
    control: str
    volume: topology.Topology
    same_host: bool
    offer: bytes
    number: int = 0


class _HostConnection:
    """A connection to the process that hosts a volume; it belongs to one event loop."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._calls: Calls[Answer] = Calls()
        # Apart from the calls, which may be cancelled: half a frame would break all others, too.
        self._sends: set[asyncio.Task[None]] = set()
        self._sending = asyncio.Lock()
        self._ended = False
        self._reading = asyncio.get_running_loop().create_task(self._read())

    async def ask(self, method: str, peer: bytes, data: bytes, volume: int) -> Answer:
        def send(number: int) -> None:
            ask = Ask(number, method, peer, data, volume)
            begin(self._send(framed(ask)), self._sends)

        return await self._calls.make(send)

    async def close(self) -> None:
        self._reading.cancel()
        await asyncio.wait([self._reading])

    async def _send(self, data: bytes) -> None:
        async with self._sending:
            if not self._ended:
                with contextlib.suppress(OSError):
                    await asyncio.get_running_loop().sock_sendall(self._sock, data)

    async def _read(self) -> None:
        reader = FrameReader(MAX_FRAME)
        loop = asyncio.get_running_loop()
        try:
            while data := await loop.sock_recv(self._sock, 1 << 18):
                for body in reader.feed(data):
                    self._calls.answered(msgspec.msgpack.decode(body, type=Answer))
        except OSError:
            return
        finally:
            self._ended = True
            self._sock.close()
            self._calls.fail(_gone)


def _gone() -> TransportUnavailableError:
    return TransportUnavailableError("the volume is gone")


class Session:
    """A client as the server half knows it: one peer, with any number of links.

    It is an async context manager, whose end closes the links and disconnects the peer.

    Attributes:
        requests: the first thousand handshake requests of its links.
    """

    def __init__(self, reach: Reach) -> None:
        self.peer = secrets.token_bytes(16)
        self.spec: TransportSpec = reach.plugin.spec()
        self.requests: list[bytes] = []
        self._reach = reach
        self._connections: dict[asyncio.AbstractEventLoop, _HostConnection] = {}
        self._links: list[Link] = []
        self.context = LinkContext(
            topology.probe(),
            reach.volume,
            reach.same_host,
            offered=True,
            offer=reach.offer,
            handshake=self.handshake,
        )

    async def __aenter__(self) -> Session:
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        for link in self._links:
            link.close()
        try:
            with contextlib.suppress(TransportUnavailableError):
                await asyncio.wait_for(self.disconnect(), _SETTLE_S)
        except TimeoutError:
            if error is None:  # otherwise the test fails with that error
                hangs = f"the server half's 'disconnect' has not returned within {_SETTLE_S:g} s"
                raise TransportError(hangs) from None
        finally:
            await self.leave_loop()

    async def connect(self, offer: bytes | None = None) -> Link:
        """Return a new link, which is closed at the end of the session at the latest."""
        cls: type[Link] = load_class(str(self.spec.client))
        link = await cls.connect(self.context.offer if offer is None else offer, self.context)
        self._links.append(link)
        return link

    async def handshake(self, request: bytes) -> bytes:
        """Send a handshake to the server half, as ``LinkContext.handshake``."""
        if len(self.requests) < 1000:
            self.requests.append(request)
        return (await self._ask("handshake", request)).data

    async def disconnect(self) -> None:
        """Ask the server half to end everything that it has under way for this peer."""
        await self._ask("disconnect")

    async def registered(self) -> int:
        """Return the ``registered()`` of the server half."""
        return (await self._ask("registered")).number

    async def give_back(self) -> None:
        """Have the process that hosts the volume give free memory back, if it can be asked."""
        with contextlib.suppress(TransportError):
            await self._ask("trim")

    async def close_volume(self) -> None:
        """Close the volume, and with it the server half."""
        await self._ask("close")

    async def open_another(self) -> Opened:
        """Have the process that hosts the volume host another one as well."""
        return msgspec.json.decode((await self._ask("open")).data, type=Opened)

    async def leave_loop(self) -> None:
        """Close the running event loop's connection to the host."""
        connection = self._connections.pop(asyncio.get_running_loop(), None)
        if connection is not None:
            await connection.close()

    async def _ask(self, method: str, data: bytes = b"") -> Answer:
        loop = asyncio.get_running_loop()
        connection = self._connections.get(loop)
        if connection is None:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            sock.setblocking(False)
            try:
                sock.connect(self._reach.control)
            except OSError as error:
                sock.close()
                raise _gone() from error
            connection = self._connections[loop] = _HostConnection(sock)
        return await connection.ask(method, self.peer, data, self._reach.number)
