"""A TCP connection for one thread at a time, which any thread can end.

The sockets are blocking, so that a transfer of megabytes takes one or two system calls, and the
kernel does all waiting, without the interpreter lock. The kernel's own time-outs for receiving and
sending detect stalls.
"""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import struct
import threading
from collections.abc import Iterable, Sequence
from itertools import islice

from torchstore_transports.tcp.wire import rows as socket_rows
from torchstore_transports.tcp.wire.memory import Piece, incoming, outgoing

__all__ = ["STALL_S", "Connection", "tune"]

#: A connection is given up when its peer has sent or accepted no byte for this many seconds.
STALL_S = 20.0
_KEEP_IDLE_S, _KEEP_INTERVAL_S, _KEEP_PROBES = 10, 5, 3
_IOV_MAX = 1024
# ``tcpi_bytes_acked`` and ``tcpi_bytes_received`` in the ``tcp_info`` of linux/tcp.h.
_TCP_INFO = struct.Struct("=120xQQ")
# With TLS every call copies anyway, so small rows are joined, up to this many bytes.
_JOINED_BYTES = 64 << 10


def tune(sock: socket.socket) -> None:
    """Set a socket's options: no delay of small messages, and detection of dead peers."""
    tcp = socket.IPPROTO_TCP
    sock.setsockopt(tcp, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(tcp, socket.TCP_KEEPIDLE, _KEEP_IDLE_S)
    sock.setsockopt(tcp, socket.TCP_KEEPINTVL, _KEEP_INTERVAL_S)
    sock.setsockopt(tcp, socket.TCP_KEEPCNT, _KEEP_PROBES)
    sock.setsockopt(tcp, socket.TCP_USER_TIMEOUT, int(STALL_S * 1000))


class Connection:
    """An authenticated connection.

    All methods but :meth:`shut` and :meth:`close` are for the thread that uses it. They raise
    OSError when the connection has broken, was shut, or has stalled for :data:`STALL_S` seconds;
    after that, it cannot be used any more.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self.encrypted = isinstance(sock, ssl.SSLSocket)
        #: Whether sending copies anyway: TLS does, and over the loopback a copy from memory is
        #: faster than handing over pages one by one.
        self.copies = self.encrypted or sock.getsockname()[0] == sock.getpeername()[0]
        # Whether compiled code moves rows of memory, otherwise buffers are made of them here.
        self._rows = socket_rows.has_native() and not self.encrypted
        self._shut = False
        # Reentrant, because the collector may drop a link, and shut its connections, at any moment.
        self._lock = threading.RLock()
        if self.encrypted:
            sock.settimeout(STALL_S)
            return
        sock.settimeout(None)
        interval = struct.pack("ll", int(STALL_S), int(STALL_S % 1 * 1e6))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, interval)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, interval)

    # ---- receiving ------------------------------------------------------------------------

    def receive_first(self, view: memoryview) -> bool:
        """Fill ``view``, waiting without limit for its first byte. Return False if the peer has
        closed the connection instead.
        """
        while True:
            try:
                got = self._socket.recv_into(view)
            except (BlockingIOError, TimeoutError):
                if self._shut:
                    return False
                continue
            if not got:
                return False
            self.receive([view[got:]])
            return True

    def receive(self, views: Iterable[memoryview]) -> None:
        """Fill the views, one after the other."""
        if self.encrypted:
            for view in views:
                self._receive_one(view)
            return
        rest = iter(views)
        while batch := list(islice(rest, _IOV_MAX)):
            if len(batch) == 1:
                self._receive_one(batch[0])
            else:
                self._receive_batch(batch)

    def receive_pieces(self, pieces: Sequence[Piece]) -> None:
        """Fill the pieces of memory, one after the other."""
        if not self._rows:
            for views in incoming(pieces):
                self.receive(views)
            return
        try:
            got = socket_rows.receive_rows(self._socket.fileno(), pieces)
        except BlockingIOError as error:
            raise _stalled() from error
        if got < sum([nbytes * rows for _, nbytes, rows, _ in pieces]):
            self._check(0)

    def drain(self, most: int) -> None:
        """Discard what arrives, until the peer closes the connection or ``most`` bytes came."""
        scratch = memoryview(bytearray(64 << 10))
        while most > 0:
            try:
                got = self._socket.recv_into(scratch)
            except BlockingIOError:
                return
            if not got:
                return
            most -= got

    def _receive_one(self, view: memoryview) -> None:
        while view:
            try:
                got = self._socket.recv_into(view, 0, 0 if self.encrypted else socket.MSG_WAITALL)
            except BlockingIOError as error:
                raise _stalled() from error
            self._check(got)
            view = view[got:]

    def _receive_batch(self, batch: list[memoryview]) -> None:
        while batch:
            try:
                got = self._socket.recvmsg_into(batch, 0, socket.MSG_WAITALL)[0]
            except BlockingIOError as error:
                raise _stalled() from error
            batch = _after(batch, got)
            if batch:
                self._check(got)

    def _check(self, got: int) -> None:
        if self._shut:
            raise ConnectionAbortedError("the connection was shut")
        if not got:
            raise ConnectionResetError("the peer has closed the connection")

    # ---- sending --------------------------------------------------------------------------

    def send(self, views: Iterable[memoryview], *, more: bool = False) -> None:
        """Send all views, one after the other.

        Args:
            more: whether more data follows at once, so that a small remainder may be held back.
        """
        if self.encrypted:
            self._send_encrypted(views)
            return
        rest = iter(views)
        batch = list(islice(rest, _IOV_MAX))
        while batch:
            following = list(islice(rest, _IOV_MAX))
            flags = socket.MSG_NOSIGNAL | (socket.MSG_MORE if more or following else 0)
            while batch:
                try:
                    sent = self._socket.sendmsg(batch, (), flags)
                except BlockingIOError as error:
                    raise _stalled() from error
                batch = _after(batch, sent)
            batch = following

    def send_pieces(self, pieces: Sequence[Piece]) -> None:
        """Send the bytes of pieces of memory, one after the other."""
        if not self._rows:
            for views in outgoing(pieces):
                self.send(views)
            return
        try:
            socket_rows.send_rows(self._socket.fileno(), pieces)
        except BlockingIOError as error:
            raise _stalled() from error

    def _send_encrypted(self, views: Iterable[memoryview]) -> None:
        joined = bytearray()
        for view in views:
            if len(joined) + len(view) <= _JOINED_BYTES:
                joined += view
                continue
            if joined:
                self._socket.sendall(joined)
                joined.clear()
            self._socket.sendall(view)
        if joined:
            self._socket.sendall(joined)

    def send_file(self, fd: int, offset: int, nbytes: int) -> None:
        """Send a range of a file without copying it into this process. Not with TLS."""
        while nbytes:
            try:
                sent = os.sendfile(self._socket.fileno(), fd, offset, nbytes)
            except BlockingIOError as error:
                raise _stalled() from error
            if not sent:
                raise ConnectionAbortedError("the segment has ended")
            offset += sent
            nbytes -= sent

    def moved(self) -> int:
        """Return how many bytes the peer has acknowledged and sent. From any thread; 0 once the
        connection is closed.
        """
        try:
            info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
        except OSError:
            return 0
        return sum(_TCP_INFO.unpack(info)) if len(info) == _TCP_INFO.size else 0

    # ---- ending ---------------------------------------------------------------------------

    def quiet(self) -> bool:
        """Return whether the connection can be reused: it is open, with nothing to receive."""
        if self.encrypted:
            return not self._shut
        try:
            self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return not self._shut
        except OSError:
            return False
        return False  # closed by the peer, or an unexpected byte

    def has_received(self, nbytes: int) -> bool:
        """Return whether so many bytes have arrived, also if the connection has ended since. An
        encrypted connection does not tell: it says no.
        """
        if self.encrypted:
            return False
        try:
            return len(self._socket.recv(nbytes, socket.MSG_PEEK | socket.MSG_DONTWAIT)) == nbytes
        except OSError:
            return False

    def shut(self) -> None:
        """End the connection, from any thread; a thread that waits for it gets an error at once."""
        with self._lock:
            self._shut = True
            # Not SSLSocket.shutdown, which would take the session from the thread that uses it.
            with contextlib.suppress(OSError):
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        """Release the descriptor. No thread may use the connection any more."""
        with self._lock:
            self._shut = True
            self._socket.close()

    def forget(self) -> None:
        """Release the descriptor in a forked child; the parent's connection stays as it is."""
        self._socket.close()


def _after(batch: list[memoryview], done: int) -> list[memoryview]:
    """Return what is left of the views after the first ``done`` bytes have been transferred."""
    for at, view in enumerate(batch):
        if done < len(view):
            return [view[done:], *batch[at + 1 :]]
        done -= len(view)
    return []


def _stalled() -> TimeoutError:
    return TimeoutError(f"nothing has moved for {STALL_S:g} s")
