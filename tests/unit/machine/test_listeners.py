"""Sockets that take nobody any more."""

from __future__ import annotations

import os
import socket

import pytest

from torchstore_transports.listeners import listeners, refuse_all


def _connects(address: tuple[str, int]) -> bool:
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    with socket.socket(family) as sock:
        sock.setblocking(False)
        sock.connect_ex(address)
        try:
            sock.getpeername()
        except OSError:
            return False
    return True


@pytest.mark.parametrize(
    ("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")]
)
def test_one_refuses_and_nothing_else_changes(family: socket.AddressFamily, host: str) -> None:
    with socket.socket(family) as one, socket.socket(family) as other:
        for sock in (one, other):
            try:
                sock.bind((host, 0))
            except OSError:
                pytest.skip(f"this host has no address {host}")
            sock.listen()
        (found,) = (at for at in listeners() if at.inode == os.fstat(one.fileno()).st_ino)
        assert (found.address, found.port) == one.getsockname()[:2]
        before = one.getsockname()[:2]
        with socket.create_connection(before) as connected, one.accept()[0] as accepted:
            assert refuse_all([found.inode]) == 1
            assert not _connects(before)
            assert _connects(other.getsockname()[:2])
            connected.sendall(b"goes on")
            assert accepted.recv(16) == b"goes on"
            accepted.sendall(b"both ways")
            assert connected.recv(16) == b"both ways"
