"""The TCP sockets at which this process listens, and how to have them take nobody. Torch-free.

Libraries listen for a peer, and go on listening when it has connected. Some cannot bear strangers:
they keep a descriptor for each of them, or fail. Closing their socket behind their back is no way,
but the kernel drops what a filter of the socket refuses, before the library sees it.
"""

from __future__ import annotations

import ctypes
import logging
import os
import socket
import struct
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import NamedTuple

__all__ = ["Listener", "listeners", "refuse_all"]

log = logging.getLogger(__name__)

_PREFIX = "socket:["
_ATTACH_FILTER = 26  # SO_ATTACH_FILTER of Linux, which Python does not name
_RETURN_NOTHING = struct.pack("=HBBI", 0x06, 0, 0, 0)  # BPF_RET | BPF_K: pass on 0 bytes


class Listener(NamedTuple):
    """A TCP socket that listens; ``inode`` identifies it as long as it is open."""

    inode: int
    family: int
    address: str
    port: int

    def packed(self) -> bytes:
        """Return the beginning of its address as C has it: ``sockaddr_in`` or ``sockaddr_in6``.

        >>> Listener(1, socket.AF_INET, "127.0.0.1", 258).packed()[2:]
        b'\\x01\\x02\\x7f\\x00\\x00\\x01'
        """
        flow = bytes(4 if self.family == socket.AF_INET6 else 0)
        where = socket.inet_pton(self.family, self.address.partition("%")[0])
        return struct.pack("=H", self.family) + struct.pack("!H", self.port) + flow + where


def listeners() -> list[Listener]:
    """Return those of this process; none where the system does not tell."""
    return [listener for _, listener in _open()]


def refuse_all(inodes: Collection[int]) -> int:
    """Have the kernel drop whatever arrives at these sockets: who connects gets no answer. The
    connections that they have accepted go on.

    Returns:
        The number of sockets that refuse now: fewer than were named where the system cannot do it.
    """
    if not inodes or sys.platform != "linux":
        return 0
    instruction = ctypes.create_string_buffer(_RETURN_NOTHING, len(_RETURN_NOTHING))
    program = struct.pack("@HP", 1, ctypes.addressof(instruction))
    refused: set[int] = set()
    for sock, listener in _open():
        if listener.inode not in inodes:
            continue
        try:
            sock.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, program)
        except OSError as error:
            log.debug("port %s stays open to strangers: %s", listener.port, error)
        else:
            refused.add(listener.inode)
    return len(refused)


def _open() -> Iterator[tuple[socket.socket, Listener]]:
    try:
        descriptors = [int(name) for name in os.listdir("/proc/self/fd")]
    except OSError:
        return
    for descriptor in descriptors:
        with _duplicate(descriptor) as sock:
            if sock is not None and (listener := _listener(sock)) is not None:
                yield sock, listener


@contextmanager
def _duplicate(descriptor: int) -> Iterator[socket.socket | None]:
    """Yield the socket of a descriptor, which other threads may close meanwhile; None if it is not
    one.
    """
    sock: socket.socket | None = None
    try:
        if os.readlink(f"/proc/self/fd/{descriptor}").startswith(_PREFIX):
            sock = socket.socket(fileno=os.dup(descriptor))
    except OSError:
        sock = None
    try:
        yield sock
    finally:
        if sock is not None:
            sock.close()


def _listener(sock: socket.socket) -> Listener | None:
    if sock.family not in (socket.AF_INET, socket.AF_INET6) or sock.type != socket.SOCK_STREAM:
        return None
    try:
        if not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return None
        address, port = sock.getsockname()[:2]
    except OSError:
        return None
    return Listener(os.fstat(sock.fileno()).st_ino, sock.family, address, port)
