"""Clients that do not read, or say nothing, do not hurt the others; nor does a full store."""

from __future__ import annotations

import socket

from torchstore_core import topology
from torchstore_core.client_side.lane import client_facts, handshake


async def connection(address: str) -> socket.socket:
    """A connection that has said hello, with nobody behind it."""
    here = topology.probe()
    sock, _ = await handshake(address, b"", client_facts({}, here), here, 5)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 12)
    return sock


def send_all_it_takes(sock: socket.socket, frame: bytes) -> int:
    """Send a frame again and again until the other side takes no more; how many went out whole."""
    sent = 0
    try:
        while sent < 100_000 * len(frame):
            sent += sock.send(frame)
    except BlockingIOError:
        pass
    return sent // len(frame)
