"""Connections to processes from somebody whom they do not expect."""

from __future__ import annotations

import socket
from collections.abc import Collection, Sequence

import psutil

__all__ = ["Strangers", "closed", "listening"]

Address = tuple[str, int]


def listening(pid: int) -> set[Address]:
    """Return the TCP addresses at which a process listens."""
    return {
        (one.laddr.ip, one.laddr.port)
        for one in psutil.Process(pid).net_connections("tcp")
        if one.status == psutil.CONN_LISTEN
    }


def closed(sock: socket.socket) -> bool:
    """Whether the other end closes the connection, without a word."""
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


class Strangers:
    """Attributes: ``ports``, where the processes listened at first, without ``besides``."""

    def __init__(self, *pids: int, besides: Collection[Address] = ()) -> None:
        self._processes = [psutil.Process(pid) for pid in pids]
        self._before = self._descriptors()
        self.ports = set[Address]().union(*(listening(pid) for pid in pids)) - set(besides)

    def let_in(self, payloads: Sequence[bytes], rounds: int = 10) -> int:
        """Connect to each port for each payload, send it, and leave; how many connected. On the
        loopback, a connection that is not made at once is not made.
        """
        connected = 0
        for payload in [*payloads] * rounds:
            for address in self.ports:
                with socket.socket() as sock:
                    sock.setblocking(False)
                    sock.connect_ex(address)
                    try:
                        sock.getpeername()
                    except OSError:
                        continue
                    sock.send(payload)
                    connected += 1
        return connected

    def left_nothing(self) -> bool:
        """Whether no process has more descriptors than at the beginning."""
        pairs = zip(self._descriptors(), self._before, strict=True)
        return all(now <= before for now, before in pairs)

    def _descriptors(self) -> list[int]:
        return [process.num_fds() for process in self._processes]
