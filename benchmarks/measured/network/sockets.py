"""Plain sockets: what the way between two processes gives without a store.

``python sockets.py NBYTES STREAMS ADDRESS`` is the other end: a process with warm memory of as many
bytes, as the server of a store is.
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
from typing import TYPE_CHECKING

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


def serve(nbytes: int, streams: int, address: str) -> None:
    """The other end."""
    fd = os.memfd_create("torchstore-bench")
    os.ftruncate(fd, nbytes)
    memory = memoryview(mmap.mmap(fd, nbytes))
    for at in range(0, nbytes, mmap.PAGESIZE):
        memory[at] = 1
    with socket.create_server((address, 0)) as listener:
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
    """Connections to such a process; they move the bytes of tensors, one after the other.

    Args:
        tensors: contiguous.
        address: at which the process listens.
        wrapper: the command that runs it, given as the last arguments.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        streams: int,
        address: str = "127.0.0.1",
        wrapper: Sequence[str] = (),
    ) -> None:
        import ctypes

        sizes = [tensor.nbytes for tensor in tensors]
        command = [*wrapper, sys.executable, __file__, str(sum(sizes)), str(streams), address]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        if self._process.stdout is None:
            raise RuntimeError("no pipe")
        port = int(self._process.stdout.readline())
        self._socks = [socket.create_connection((address, port)) for _ in range(streams)]
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


if __name__ == "__main__":
    serve(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
