"""The client's streams: connections, each driven by a thread while it has something to move."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from torchstore_core.contracts.transport import Copy
from torchstore_core.errors import TransportError
from torchstore_transports.tcp.moving.transfers import Transfer
from torchstore_transports.tcp.moving.units import Unit
from torchstore_transports.tcp.wire.connection import Connection
from torchstore_transports.tcp.wire.memory import incoming, outgoing
from torchstore_transports.tcp.wire.protocol import (
    ANSWER,
    EXTENT,
    OK,
    READ,
    REQUEST,
    TEXT_MAX,
    WRITE,
    checksum,
)

__all__ = ["STREAMS_MAX", "Streams"]

log = logging.getLogger(__name__)

#: Largest number of streams of a link.
STREAMS_MAX = 8
# Requests that a stream sends ahead of their answers: many, for networks with a long delay, but few
# towards the end, so that no stream has a queue left when the others have nothing to do.
_DEPTH = 8
_DEPTH_AT_END = 2
_AHEAD_BYTES = 64 << 20
# Limit for the total size of these requests' extents: while the server sends an answer it does not
# read, so the requests must fit into the buffers of its socket.
_DEPTH_BYTES = 48 << 10
# Bytes that a stream moves before it checks whether another transfer is waiting.
_QUANTUM = 64 << 20
_IDLE_S = 10.0


class Streams:
    """Moves transfers over at most :data:`STREAMS_MAX` connections, which are made when needed and
    kept for later transfers. Can be used by every event loop of the process.

    Args:
        dial: makes an authenticated connection; raises OSError or TransportError.
        checked: whether all units carry checksums.
    """

    def __init__(self, dial: Callable[[], Connection], *, checked: bool) -> None:
        self._dial = dial
        self._checked = checked
        self._lock = threading.Condition(threading.RLock())
        self._transfers: list[Transfer] = []
        self._connections: set[Connection] = set()
        self._idle: list[Connection] = []
        self._threads = 0
        self._free = 0  # threads that wait for a transfer
        self._closed = False

    def keep(self, connection: Connection) -> None:
        """Take over a connection, for the first transfer that needs one."""
        with self._lock:
            self._connections.add(connection)
            self._idle.append(connection)

    def start(
        self, copies: Sequence[Copy], *, write: bool, nbytes: int, width: int, volume: int
    ) -> Transfer:
        """Begin to move a batch. Call this on the event loop that will wait for the transfer.

        Raises:
            TransportError: the streams are closed, or a copy is invalid.
        """
        with self._lock:
            if self._closed:
                raise TransportError("the link is closed")
            transfer = Transfer(
                copies, write=write, nbytes=nbytes, width=width, volume=volume, lock=self._lock
            )
            if not transfer.wanting:
                return transfer
            self._transfers.append(transfer)
            for _ in range(min(width - self._free, STREAMS_MAX - self._threads)):
                self._start_thread()
            self._lock.notify(width)
            if not self._threads:
                transfer.fail(TransportError("this process can start no thread"))
            return transfer

    def forget(self, transfer: Transfer) -> None:
        """Remove a transfer that has ended."""
        with self._lock:
            if transfer in self._transfers:
                self._transfers.remove(transfer)

    @property
    def connected(self) -> bool:
        """Whether there is a connection."""
        return bool(self._connections)

    @property
    def alone(self) -> bool:
        """Whether at most one transfer is being moved."""
        return len(self._transfers) <= 1

    def moved(self) -> int:
        """Return how many bytes the connections that are open now have sent and received."""
        with self._lock:
            return sum([connection.moved() for connection in self._connections])

    def close(self) -> None:
        """Fail all transfers, and end all connections and threads, without waiting."""
        with self._lock:
            self._closed = True
            for transfer in list(self._transfers):
                transfer.fail(TransportError("the link was closed"))
            for connection in self._connections:
                connection.shut()
            while self._idle:
                self._drop(self._idle.pop())
            self._lock.notify_all()

    def close_in_child(self) -> None:
        """Release the descriptors in a forked child, where the threads do not exist, and one of
        them may have held the lock.
        """
        self._closed = True
        for connection in list(self._connections):
            connection.forget()

    def _start_thread(self) -> None:
        try:
            threading.Thread(target=self._run, name="torchstore-tcp", daemon=True).start()
        except RuntimeError as error:  # the limit of threads: the existing ones do the work
            log.warning("a stream less: %s", error)
        else:
            self._threads += 1

    # ---- a thread -------------------------------------------------------------------------

    def _run(self) -> None:
        connection: Connection | None = None
        try:
            while (transfer := self._assigned()) is not None:
                connection = self._serve(transfer, connection)
        finally:
            with self._lock:
                self._threads -= 1
                if connection is not None:
                    if self._closed:
                        self._drop(connection)
                    else:
                        self._idle.append(connection)

    def _assigned(self) -> Transfer | None:
        """Return the transfer that needs another stream most; None if there is none for a while."""
        with self._lock:
            end = time.monotonic() + _IDLE_S
            while True:
                if self._closed:
                    return None
                wanting = [one for one in self._transfers if one.wanting]
                if wanting:
                    transfer = min(wanting, key=lambda one: one.streams)
                    transfer.streams += 1
                    return transfer
                left = end - time.monotonic()
                if left <= 0:
                    return None
                self._free += 1
                try:
                    self._lock.wait(left)
                finally:
                    self._free -= 1

    def _serve(self, transfer: Transfer, connection: Connection | None) -> Connection | None:
        """Move units of a transfer until none is left, or until another transfer has waited too
        long. Return the connection if it can still be used.
        """
        try:
            connection = self._connected(connection)
        except Exception as error:  # noqa: BLE001 - handed to the awaiting caller
            with self._lock:
                transfer.streams -= 1
                if transfer.streams:  # those that have a connection continue without this one
                    transfer.width = min(transfer.width, transfer.streams)
                    log.debug("a stream less: %s", error)
                else:
                    transfer.fail(error)
            return None
        broken = False
        try:
            self._move(transfer, connection)
        except Exception as error:  # noqa: BLE001 - handed to the awaiting caller
            broken = True
            transfer.fail(error)
        with self._lock:
            if broken:
                self._drop(connection)
            transfer.streams -= 1
            transfer.leave(connection)
        return None if broken else connection

    def _connected(self, connection: Connection | None) -> Connection:
        while True:
            if connection is None:
                with self._lock:
                    connection = self._idle.pop() if self._idle else None
                if connection is None:
                    break
            if connection.quiet():
                return connection
            self._drop(connection)
            connection = None
        made = self._dial()
        with self._lock:
            if self._closed:
                made.close()
                raise TransportError("the link was closed")
            self._connections.add(made)
        return made

    def _move(self, transfer: Transfer, connection: Connection) -> None:
        in_flight: deque[Unit] = deque()
        waiting = ahead = turn = 0
        while True:
            depth = min(_DEPTH, max(_DEPTH_AT_END, transfer.share))
            while len(in_flight) < depth and (transfer.write or waiting < _DEPTH_BYTES):
                if ahead >= _AHEAD_BYTES and len(in_flight) >= _DEPTH_AT_END:
                    break
                if turn >= _QUANTUM and self._others_wait():
                    break
                unit = transfer.take(connection)
                if unit is None:
                    break
                turn += unit.nbytes
                ahead += unit.nbytes
                in_flight.append(unit)
                waiting += len(unit.extents)
                try:
                    self._ask(connection, unit, transfer.volume, write=transfer.write)
                except Exception:
                    self._note_answers(transfer, connection, in_flight)
                    raise
            if not in_flight:
                return
            unit = in_flight[0]
            self._settle(connection, unit, write=transfer.write)
            transfer.moved(unit)
            in_flight.popleft()
            waiting -= len(unit.extents)
            ahead -= unit.nbytes

    def _note_answers(
        self, transfer: Transfer, connection: Connection, in_flight: deque[Unit]
    ) -> None:
        """The connection has broken while something was being sent: note which writes have been
        answered by then, so that they are not done again over another transport.
        """
        with contextlib.suppress(OSError, TransportError):
            while transfer.write and in_flight and connection.has_received(ANSWER.size):
                self._settle(connection, in_flight[0], write=True)
                transfer.moved(in_flight.popleft())

    def _others_wait(self) -> bool:
        with self._lock:
            return any(one.wanting and not one.streams for one in self._transfers)

    def _ask(self, connection: Connection, unit: Unit, volume: int, *, write: bool) -> None:
        crc = 0
        if write and self._checked:
            for views in outgoing(unit.pieces):
                crc = checksum(views, crc)
        operation = WRITE if write else READ
        count = len(unit.extents) // EXTENT.size
        header = REQUEST.pack(operation, self._checked, volume, count, unit.nbytes, crc)
        connection.send([memoryview(header + unit.extents)], more=write)
        if write:
            connection.send_pieces(unit.pieces)

    def _settle(self, connection: Connection, unit: Unit, *, write: bool) -> None:
        head = bytearray(ANSWER.size)
        connection.receive([memoryview(head)])
        outcome, checked, _, crc, nbytes = ANSWER.unpack(head)
        if outcome != OK:
            text = bytearray(min(nbytes, TEXT_MAX))
            connection.receive([memoryview(text)])
            raise TransportError(f"the volume refuses: {text.decode(errors='replace')}")
        if nbytes != (0 if write else unit.nbytes):
            raise TransportError(f"the volume answers {unit.nbytes} bytes with {nbytes}")
        if write:
            return
        if not checked:
            connection.receive_pieces(unit.pieces)
            return
        made = 0
        for views in incoming(unit.pieces):
            connection.receive(views)
            made = checksum(views, made)
        if made != crc:
            raise TransportError("bytes were damaged on their way: their checksum is wrong")

    # ---- the lock is held -----------------------------------------------------------------

    def _drop(self, connection: Connection) -> None:
        with self._lock:
            self._connections.discard(connection)
        connection.close()
