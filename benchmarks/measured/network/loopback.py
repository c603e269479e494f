"""Commands of a measured process: a set of weights over ``tcp``, beside plain sockets.

``python sockets.py NBYTES STREAMS`` is the other end of the plain sockets: a process with warm
memory of as many bytes, as the server of a store is.
"""

from __future__ import annotations

import mmap
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

CHUNK = 8 << 20
#: Numbers of connections of the plain sockets.
STREAMS = (1, 2, 4, 8)
_PUT, _GET, _DONE = b"P", b"G", b"D"


def share(nbytes: int, streams: int, number: int) -> tuple[int, int]:
    """Start and end of what one of the connections moves."""
    each = -(-nbytes // streams)
    return min(number * each, nbytes), min((number + 1) * each, nbytes)


def chunks(view: memoryview) -> Iterator[memoryview]:
    """Parts of at most ``CHUNK`` bytes."""
    for at in range(0, len(view), CHUNK):
        yield view[at : at + CHUNK]


def fill(sock: socket.socket, view: memoryview) -> None:
    """Receive exactly as many bytes."""
    while view:
        got = sock.recv_into(view, 0, socket.MSG_WAITALL)
        if not got:
            raise ConnectionResetError("the other end is gone")
        view = view[got:]


def together(calls: Iterable[Callable[[], object]]) -> None:
    """Each call in a thread of its own."""
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def serve(nbytes: int, streams: int) -> None:
    """The other end."""
    fd = os.memfd_create("torchstore-bench")
    os.ftruncate(fd, nbytes)
    memory = memoryview(mmap.mmap(fd, nbytes))
    for at in range(0, nbytes, mmap.PAGESIZE):
        memory[at] = 1
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        socks = [listener.accept()[0] for _ in range(streams)]

    def work(number: int) -> None:
        sock = socks[number]
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        start, end = share(nbytes, streams, number)
        while what := sock.recv(1):
            for part in chunks(memory[start:end]):
                if what == _PUT:
                    fill(sock, part)
                else:
                    sock.sendall(part)
            if what == _PUT:
                sock.sendall(_DONE)

    together(partial(work, number) for number in range(streams))


class PlainSockets:
    """Connections to such a process; they move the bytes of tensors, one after the other."""

    def __init__(self, tensors: Sequence[torch.Tensor], streams: int) -> None:
        import ctypes

        sizes = [tensor.nbytes for tensor in tensors]
        command = [sys.executable, __file__, str(sum(sizes)), str(streams)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        if self._process.stdout is None:
            raise RuntimeError("no pipe")
        port = int(self._process.stdout.readline())
        self._socks = [socket.create_connection(("127.0.0.1", port)) for _ in range(streams)]
        views = [
            memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")
            for tensor in tensors
        ]
        self._parts: list[list[memoryview]] = []
        for number, sock in enumerate(self._socks):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            low, high = share(sum(sizes), streams, number)
            parts, at = [], 0
            for view in views:
                inside = view[max(0, low - at) : max(0, high - at)]
                parts += [part for part in chunks(inside) if part]
                at += len(view)
            self._parts.append(parts)

    def put(self) -> None:
        """Send all tensors; the other end has them when this returns."""
        together(partial(self._put, *each) for each in zip(self._socks, self._parts, strict=True))

    def get(self) -> None:
        """Receive all tensors."""
        together(partial(self._get, *each) for each in zip(self._socks, self._parts, strict=True))

    def _put(self, sock: socket.socket, parts: Sequence[memoryview]) -> None:
        sock.sendall(_PUT)
        for part in parts:
            sock.sendall(part)
        fill(sock, memoryview(bytearray(len(_DONE))))

    def _get(self, sock: socket.socket, parts: Sequence[memoryview]) -> None:
        sock.sendall(_GET)
        for part in parts:
            fill(sock, part)

    def close(self) -> None:
        """End the connections and the process."""
        for sock in self._socks:
            sock.close()
        self._process.communicate()


class OverNetwork:
    """Commands on a store whose bytes all go through ``tcp``.

    Args:
        run: runs a coroutine on the process's event loop.
    """

    def __init__(self, run: Callable[[Any], Any]) -> None:
        self._run = run
        self._source: dict[str, torch.Tensor] = {}
        self._target: dict[str, torch.Tensor] = {}
        self._plain: dict[int, PlainSockets] = {}

    def open(self, shapes: dict[str, list[int]], seed: int, capacity: int) -> dict[str, Any]:
        """Start a store, make the set and a destination for it, and the plain sockets."""
        import torchstore_core as ts
        from torchstore_cli.bench import workload

        of = workload.received(shapes)
        self._source, self._target = workload.make(of, seed), workload.make_empty(of)
        targets = list(self._target.values())
        self._plain = {streams: PlainSockets(targets, streams) for streams in STREAMS}

        async def start() -> tuple[ts.Client, int]:
            client = await ts.initialize(capacity=capacity, prefer=["tcp"])
            return client, (await client.status()).controller_pid

        client, server_pid = self._run(start())
        return {"address": client.address, "server_pid": server_pid}

    def round(self, stamp: int, turn: int) -> dict[str, Any]:
        """A put and a get of the set, and each of them by plain sockets; what came is compared."""
        import torch

        import torchstore_core as ts
        from torchstore_cli.bench import floors, workload
        from torchstore_cli.bench.measuring import timed, timed_call

        workload.stamp(self._source, stamp)

        def put() -> float:
            return float(self._run(timed(ts.put_batch(self._source, timeout=120)))[0])

        def get() -> float:
            for tensor in self._target.values():
                tensor.view(torch.int16).zero_()
            return float(self._run(timed(ts.get_batch(self._target, timeout=120)))[0])

        def plain(way: str) -> dict[str, Callable[[], float]]:
            return {
                f"plain {way}, {streams}": partial(timed_call, getattr(sockets, way))
                for streams, sockets in self._plain.items()
            }

        times = floors.interleave({**plain("put"), "put": put}, turn)
        times |= floors.interleave({**plain("get"), "get": get}, turn)
        get()
        wrong = [
            name
            for name, tensor in self._target.items()
            if not torch.equal(tensor.view(torch.uint8), self._source[name].view(torch.uint8))
        ]
        return {"times": times, "wrong": wrong, "streams": self._run(_streams())}

    def close(self) -> None:
        """End the store and the plain sockets."""
        import torchstore_core as ts

        self._run(ts.shutdown())
        while self._plain:
            self._plain.popitem()[1].close()
        self._source, self._target = {}, {}


async def _streams() -> dict[str, int]:
    """How many streams the link of ``tcp`` has settled on, for puts and gets."""
    import torchstore_core as ts
    from torchstore_transports.tcp.link import TcpLink

    session = await (await ts.client())._joined.session(10)
    (volume,) = session.volumes
    candidate = next(one for one in volume.candidates(1 << 30) if one.spec.name == "tcp")
    link = await volume.connect(candidate)
    if not isinstance(link, TcpLink):
        raise TypeError(type(link))
    return {"put": link._writes.best(), "get": link._reads.best()}


if __name__ == "__main__":
    serve(int(sys.argv[1]), int(sys.argv[2]))
