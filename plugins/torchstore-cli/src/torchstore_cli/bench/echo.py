"""The echo floor: a 185-byte msgspec frame to another process and back, in three ways.

``python -m torchstore_cli.bench.echo KIND FD`` is the far end: it echoes what arrives over a Unix
socket, until that is closed. Torch-free.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

__all__ = ["ASYNCIO", "FRAME", "RAW", "UVLOOP", "Echo", "kinds", "new_loop", "two_cpus"]

FRAME = 185
RAW, ASYNCIO, UVLOOP = "raw", "asyncio", "uvloop"


class Frame(msgspec.Struct, array_like=True):
    """A message about as large as a small request."""

    id: int
    key: str
    data: bytes


def frame() -> bytes:
    """Return a frame of exactly 185 bytes."""
    empty = len(msgspec.msgpack.encode(Frame(1, "a/small/key", b"")))
    return msgspec.msgpack.encode(Frame(1, "a/small/key", bytes(FRAME - empty)))


def kinds() -> list[str]:
    """Return the kinds of echo that this platform supports."""
    return [RAW, ASYNCIO, *([UVLOOP] if importlib.util.find_spec("uvloop") else [])]


def new_loop(kind: str) -> asyncio.AbstractEventLoop:
    """Return a fresh event loop of the kind ``asyncio`` or ``uvloop``."""
    if kind != UVLOOP:
        return asyncio.SelectorEventLoop()
    import uvloop

    return uvloop.new_event_loop()


def two_cpus() -> tuple[int, int] | None:
    """Return two CPUs of this process, on different cores if possible; None if it cannot choose."""
    if not hasattr(os, "sched_setaffinity"):
        return None
    first, *others = sorted(os.sched_getaffinity(0))
    try:
        path = Path(f"/sys/devices/system/cpu/cpu{first}/topology/thread_siblings_list")
        siblings = {int(n) for n in path.read_text().replace("-", ",").split(",")}
    except (OSError, ValueError):
        siblings = set()
    others.sort(key=lambda cpu: cpu in siblings)
    return (first, others[0]) if others else None


class _Far(asyncio.Protocol):
    def __init__(self) -> None:
        self.closed = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        self._transport.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed.set_result(None)


class _Near(asyncio.Protocol):
    def __init__(self) -> None:
        self._got = bytearray()
        self._want: asyncio.Future[bytes] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: asyncio.Transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        self._got += data
        if len(self._got) >= FRAME and self._want is not None:
            self._want.set_result(bytes(self._got))
            self._got.clear()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._want is not None and not self._want.done():
            self._want.set_exception(exc or EOFError("the far end is gone"))

    async def call(self, data: bytes) -> bytes:
        self._want = asyncio.get_running_loop().create_future()
        self.transport.write(data)
        return await self._want


class Echo:
    """One kind of echo with its far end; :meth:`measure` returns round-trip times."""

    def __init__(self, kind: str) -> None:
        self._socket, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with far:
            self._far = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "torchstore_cli.bench.echo",
                    kind,
                    str(far.fileno()),
                ],
                pass_fds=[far.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
        self.pid = self._far.pid
        self._socket.settimeout(30)
        self._loop: asyncio.AbstractEventLoop | None = None
        self.measure: Callable[[int], list[float]] = self._raw
        if kind != RAW:
            self._socket.setblocking(False)
            self._loop = new_loop(kind)
            self._near = self._loop.run_until_complete(self._connect(self._loop))
            self.measure = self._on_loop

    async def _connect(self, loop: asyncio.AbstractEventLoop) -> _Near:
        _, near = await loop.create_unix_connection(_Near, sock=self._socket)
        return near

    def _raw(self, count: int) -> list[float]:
        data = frame()
        times: list[float] = []
        for _ in range(count):
            start = time.perf_counter()
            self._socket.sendall(data)
            back = self._socket.recv(FRAME, socket.MSG_WAITALL)
            msgspec.msgpack.decode(back, type=Frame)
            times.append(time.perf_counter() - start)
        return times

    def _on_loop(self, count: int) -> list[float]:
        if self._loop is None:
            raise RuntimeError("this echo has no event loop")
        return self._loop.run_until_complete(asyncio.wait_for(self._calls(count), 60))

    async def _calls(self, count: int) -> list[float]:
        data = frame()
        times: list[float] = []
        for _ in range(count):
            start = time.perf_counter()
            back = await self._near.call(data)
            msgspec.msgpack.decode(back, type=Frame)
            times.append(time.perf_counter() - start)
        return times

    def close(self) -> None:
        """Close the socket, and wait until the far end has ended because of that."""
        if self._loop is not None:
            self._near.transport.abort()
            self._loop.run_until_complete(asyncio.sleep(0))
            self._loop.close()
        self._socket.close()
        try:
            self._far.wait(5)
        except subprocess.TimeoutExpired:
            self._far.kill()
            self._far.wait()


async def _serve(sock: socket.socket) -> None:
    sock.setblocking(False)
    loop = asyncio.get_running_loop()
    _, far = await loop.create_unix_connection(_Far, sock=sock)
    await far.closed


def main(kind: str, fd: int) -> None:
    """Run the far end."""
    with socket.socket(fileno=fd) as sock:
        if kind == RAW:
            while data := sock.recv(1 << 16):
                sock.sendall(data)
            return
        with asyncio.Runner(loop_factory=lambda: new_loop(kind)) as runner:
            runner.run(_serve(sock))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
