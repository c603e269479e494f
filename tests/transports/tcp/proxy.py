"""A proxy between a client and a volume that does what bad networks do."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from types import TracebackType

import msgspec

import torchstore_core as ts
from torchstore_transports.tcp.wire.protocol import Endpoint, Welcome

_CHUNK = 256 << 10


class Proxy:
    """Forwards connections. What it does may be changed while they are open.

    Attributes:
        delay_s: how long every byte takes to arrive.
        open: while it is not set, nothing is forwarded.
        flip_after: damage one byte after so many bytes from the client (``up``) or to it.
        forwarded: bytes so far that were handed on, from the client and to it.
        seen: these bytes, where somebody wants them.

    Args:
        source: the address from which the volume is reached; empty: the one that leads there.
    """

    def __init__(self, source: str = "") -> None:
        self._source = source
        self._counting = threading.Condition()
        self.delay_s = 0.0
        self.open = threading.Event()
        self.open.set()
        self._most: dict[str, int] = {}
        self.flip_after: dict[str, int] = {}
        self.forwarded = {"up": 0, "down": 0}
        self._received = {"up": 0, "down": 0}
        self.seen: dict[str, bytearray] | None = None
        self._target: Endpoint = ("", 0)
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._listener = socket.socket()
        self._listener.bind(("127.0.0.1", 0))
        self._listener.listen()

    def route(self, endpoints: tuple[Endpoint, ...]) -> tuple[Endpoint, ...]:
        self._target = endpoints[0]
        host, port = self._listener.getsockname()
        return ((host, port),)

    def __enter__(self) -> Proxy:
        self._start(self._accept)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.open.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self.cut()
        for thread in self._threads:
            thread.join()
        self._listener.close()
        for sock in self._sockets:
            sock.close()

    def cut(self) -> None:
        """End all connections."""
        for sock in list(self._sockets):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        self.go_on()

    def stop_after(self, way: str, nbytes: int) -> int:
        """Hand on so many bytes more, and then nothing, however late somebody looks. Returns what
        :attr:`forwarded` is then, at least.
        """
        with self._counting:
            self._most[way] = self.forwarded[way] + nbytes
            return self._most[way]

    def go_on(self) -> None:
        """Hand on everything again."""
        with self._counting:
            self._most.clear()
            self._counting.notify_all()

    def _start(self, call: object, *arguments: object) -> None:
        thread = threading.Thread(target=call, args=arguments, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                volume = socket.create_connection(self._target, source_address=(self._source, 0))
            except OSError:
                client.close()
                continue
            for one in (client, volume):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._sockets += [client, volume]
            for way, source, target in (("up", client, volume), ("down", volume, client)):
                pipe: queue.Queue[tuple[float, bytes]] = queue.Queue(512)
                self._start(self._receive, way, source, pipe)
                self._start(self._send, way, source, target, pipe)

    def _receive(
        self, way: str, source: socket.socket, pipe: queue.Queue[tuple[float, bytes]]
    ) -> None:
        data = b"-"
        while data:
            try:
                data = source.recv(_CHUNK)
            except OSError:
                data = b""
            self.open.wait()
            with self._counting:
                at = self.flip_after.get(way)
                if at is not None and self._received[way] <= at < self._received[way] + len(data):
                    damaged = bytearray(data)
                    damaged[at - self._received[way]] ^= 0x10
                    data = bytes(damaged)
                self._received[way] += len(data)
            if self.seen is not None:
                self.seen[way] += data
            pipe.put((time.monotonic() + self.delay_s, data))

    def _send(
        self,
        way: str,
        source: socket.socket,
        target: socket.socket,
        pipe: queue.Queue[tuple[float, bytes]],
    ) -> None:
        broken = False
        while True:
            due, data = pipe.get()
            time.sleep(max(0.0, due - time.monotonic()))
            self.open.wait()
            with self._counting:
                self._counting.wait_for(lambda: self.forwarded[way] < self._most.get(way, 1 << 60))
            if not data:
                break
            if not broken:
                try:
                    target.sendall(data)
                except OSError:
                    broken = True
                    with contextlib.suppress(OSError):
                        source.shutdown(socket.SHUT_RDWR)
                else:
                    with self._counting:
                        self.forwarded[way] += len(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)


async def lead_through(client: ts.Client, proxy: Proxy) -> None:
    """Have the links of ``tcp`` to the store's only volume connect to the proxy from now on."""
    (volume,) = (await client._joined.session(10)).volumes
    for links in volume._all_links():
        for link in list(links.values()):
            volume.close_when_unused(link)
    ask = volume._handshake

    async def handshake(transport: str, request: bytes) -> bytes:
        welcome = msgspec.msgpack.decode(await ask(transport, request), type=Welcome)
        there = proxy.route(welcome.endpoints)
        return msgspec.msgpack.encode(msgspec.structs.replace(welcome, endpoints=there))

    volume._handshake = handshake
