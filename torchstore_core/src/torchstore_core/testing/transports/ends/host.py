"""Hosts a real volume with the server half of one transport, for the conformance kit.

The process ``python -m torchstore_core.testing.transports.ends.host`` does this until its standard
input is closed. The kit's clients reach it over a control socket that carries handshakes, as the
store's own control connection would.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import sys
import threading
from typing import Any

import msgspec

from torchstore_core.contracts.transport import Segment, TransportSpec
from torchstore_core.errors import PluginError, ProtocolError, TorchStoreError, TransportError
from torchstore_core.machine.tasks import begin
from torchstore_core.machine.topology import Topology
from torchstore_core.plugins.installed import InstalledPlugin
from torchstore_core.plugins.registry import Registry, load_class
from torchstore_core.server.memory.segment import open_memory
from torchstore_core.server.memory.volume import Volume
from torchstore_core.server.serving.listening import Listener
from torchstore_core.testing.transports.ends.hanging import Alarm, hanging_call
from torchstore_core.testing.transports.ends.memory import give_back
from torchstore_core.wire.framing import FrameReader, framed, portable

__all__ = [
    "CONTROL",
    "MAX_FRAME",
    "Answer",
    "Ask",
    "Hosting",
    "Opened",
    "Order",
    "Plugin",
    "ThreadHost",
]

#: Name of the control socket in the volume's directory.
CONTROL = "control.sock"
#: The largest body of a frame between a client of the kit and a host, in bytes.
MAX_FRAME = 8 << 20
_RECEIVE = 1 << 18
# How much larger the second segment is: what is needed of it grows beyond the size of the first.
_LARGER = 64 << 20
# How long a volume may take to open.
_OPEN_S = 120.0
_ABANDON_S = 3.0
_VOLUME_LOG = "torchstore_core.server.memory.volume"


class Plugin(msgspec.Struct, frozen=True):
    """A transport's entry point: its name, and the object that implements the hook (``"module"`` or
    ``"module:attribute"``).
    """

    name: str
    value: str

    def registry(self) -> Registry:
        """Return a registry that contains only this transport."""
        return Registry([InstalledPlugin("torchstore.transports", self.name, self.value)])

    def spec(self) -> TransportSpec:
        """Return the spec that the hook returns.

        Raises:
            PluginError: the transport does not load.
        """
        return self.registry().transport(self.name)


class Order(msgspec.Struct, frozen=True):
    """Which volume to host.

    Args:
        hosting: ``"module:Class"`` of the :class:`Hosting` to use.
        directory: a private directory for sockets.
        nbytes: the size of the first segment in bytes.
    """

    plugin: Plugin
    store_name: str
    directory: str
    nbytes: int
    hosting: str = f"{__name__}:Hosting"


class Opened(msgspec.Struct, frozen=True):
    """What clients need to know about a hosted volume.

    Args:
        volume: its number in the process.
        segments: those of the volume, with their descriptors in the process ``pid``.
        log: what the volume has logged, which explains a missing offer.
    """

    pid: int
    segments: list[Segment]
    topology: Topology
    offer: bytes | None
    log: list[str]
    volume: int = 0


class Ask(msgspec.Struct, frozen=True, array_like=True):
    """A call of ``handshake``, ``disconnect``, ``registered`` or ``close`` of a volume, or for
    another volume (``open``).
    """

    id: int
    method: str
    peer: bytes = b""
    data: bytes = b""
    volume: int = 0


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """The result of a call, or the code, message and details of its error."""

    id: int
    data: bytes = b""
    number: int = 0
    code: str = ""
    message: str = ""
    details: dict[str, Any] = {}


class _Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


class Hosting:
    """A volume with two segments, on the running event loop. Subclass it for a transport whose
    server half needs more than a volume around it (an engine's agent, for example).
    """

    def __init__(self, order: Order) -> None:
        self.order = order
        registry = order.plugin.registry()
        name, directory = order.store_name, order.directory
        self.volume = Volume(name, 0, order.nbytes, registry, directory)
        larger = order.nbytes + _LARGER
        self._second = open_memory(f"{name}-second", larger)
        self.volume.segments.append(Segment(1, self._second, larger))
        self.volumes = [self.volume]
        self._registry = registry
        self._listener = Listener(self._accept)
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self) -> Opened:
        """Start the server half, and listen for clients.

        Raises:
            PluginError: the transport's hook does not load.
        """
        self._registry.transport(self.order.plugin.name)
        opened = await self._start(self.volume)
        self._listener.open(os.path.join(self.order.directory, CONTROL))
        return opened

    async def open_another(self) -> Opened:
        """Start another volume in this process, of one segment."""
        order, number = self.order, len(self.volumes)
        made = Volume(order.store_name, number, order.nbytes, self._registry, order.directory)
        self.volumes.append(made)
        return await self._start(made)

    async def _start(self, volume: Volume) -> Opened:
        records = _Records()
        log = logging.getLogger(_VOLUME_LOG)
        before = log.level
        log.addHandler(records)
        log.setLevel(logging.DEBUG)
        try:
            info = await volume.start()
        finally:
            log.setLevel(before)
            log.removeHandler(records)
        offer = info.offers.get(self.order.plugin.name)
        segments, lines = volume.segments, records.lines
        return Opened(os.getpid(), segments, info.topology, offer, lines, volume.index)

    async def close(self) -> None:
        """Stop listening and close the volume."""
        self._listener.close()
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(list(self._tasks))
        for volume in self.volumes:
            await volume.close()
        os.close(self._second)

    def _accept(self, sock: socket.socket, _pid: int) -> None:
        begin(self._serve(sock), self._tasks)

    async def _serve(self, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        sock.setblocking(False)
        reader, sending = FrameReader(MAX_FRAME), asyncio.Lock()
        with sock, contextlib.suppress(OSError, ProtocolError):
            while data := await loop.sock_recv(sock, _RECEIVE):
                for body in reader.feed(data):
                    begin(self._answer(sock, sending, body), self._tasks)

    async def _answer(self, sock: socket.socket, sending: asyncio.Lock, body: bytes) -> None:
        ask = msgspec.msgpack.decode(body, type=Ask)
        try:
            answer = await self._call(ask)
        except TorchStoreError as error:
            message, details = portable(error)
            answer = Answer(ask.id, code=error.code, message=message, details=details)
        except Exception as error:  # noqa: BLE001 - the test that asked reports it
            answer = Answer(ask.id, code=TransportError.code, message=f"the host failed: {error!r}")
        async with sending:
            with contextlib.suppress(OSError, ValueError):  # the caller has gone
                await asyncio.get_running_loop().sock_sendall(sock, framed(answer))

    async def _call(self, ask: Ask) -> Answer:
        volume = self.volumes[ask.volume]
        match ask.method:
            case "open":
                return Answer(ask.id, msgspec.json.encode(await self.open_another()))
            case "handshake":
                name = self.order.plugin.name
                return Answer(ask.id, await volume.handshake(ask.peer, name, ask.data))
            case "disconnect":
                await volume.disconnect(ask.peer)
            case "registered":
                return Answer(ask.id, number=volume.memory.registered())
            case "trim":
                give_back()
            case "close":
                await volume.close()
        return Answer(ask.id)


class ThreadHost:
    """Hosts a volume on an event loop in a thread of this process, until :meth:`close`.

    Raises:
        TorchStoreError: :meth:`Hosting.open` has raised it.
    """

    def __init__(self, order: Order) -> None:
        self._order = order
        self._hosting: Hosting | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="kit-volume", daemon=True)
        self._thread.start()
        try:
            opening = asyncio.run_coroutine_threadsafe(self._open(), self._loop)
            self.opened: Opened = opening.result(_OPEN_S)
        except TimeoutError:
            hangs = hanging_call(self._loop, self._thread.ident)
            opening.cancel()
            asyncio.run_coroutine_threadsafe(self._abandon(), self._loop)
            self._thread.join(_ABANDON_S)  # if its loop is blocked, it ends when it no longer is
            raise PluginError(_too_slow(hangs)) from None
        except BaseException:
            self._end()
            raise

    def close(self) -> None:
        """Close the volume, and end the thread."""
        try:
            asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
        finally:
            self._end()

    async def _open(self) -> Opened:
        hosting: Hosting = load_class(self._order.hosting)(self._order)
        self._hosting = hosting
        return await hosting.open()

    async def _close(self) -> None:
        if self._hosting is not None:
            await self._hosting.close()

    async def _abandon(self) -> None:
        await self._close()
        self._loop.stop()

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.close()


def _too_slow(hangs: str) -> str:
    return f"the volume took more than {_OPEN_S:.0f} s to open: {hangs}"


def _give_up(hangs: str) -> None:
    """End this process, whatever its event loop is busy with."""
    sys.stdout.write(f"{_too_slow(hangs)}\n")
    sys.stdout.flush()
    os._exit(1)


async def _main(order: Order) -> None:
    hosting: Hosting = load_class(order.hosting)(order)
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(sys.stdin.fileno(), ended.set)
    try:
        with Alarm(_OPEN_S, _give_up):
            opened = await hosting.open()
    except TorchStoreError as error:
        sys.stdout.write(f"{error}\n")
        return
    sys.stdout.write(msgspec.json.encode(opened).decode() + "\n")
    sys.stdout.flush()
    await ended.wait()
    loop.remove_reader(sys.stdin.fileno())
    await hosting.close()


if __name__ == "__main__":
    asyncio.run(_main(msgspec.json.decode(sys.argv[1], type=Order)))
    sys.stdout.flush()
    os._exit(0)  # a library's threads may be blocked for ever
