"""A batch that is being moved: the units that are left, and how it ends."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Sequence

from torchstore_core.contracts.transport import Copy
from torchstore_core.errors import TransportError
from torchstore_transports.tcp.moving.units import Unit, cut
from torchstore_transports.tcp.wire.connection import Connection
from torchstore_transports.tcp.wire.protocol import READ_BYTES, WRITE_BYTES

__all__ = ["Transfer"]

# Smallest unit: below this size, another unit costs more than a second stream gains.
_UNIT_LEAST = 1 << 20
# How many units each stream of a small batch moves.
_UNITS = 8


class Transfer:
    """A batch that streams move together.

    Streams take units and report each of them; an event loop waits for the end. Once the transfer
    has ended, no thread touches the batch's memory. The methods may be called by any thread.

    Args:
        nbytes: the total size of the copies.
        width: the number of streams that may work on the transfer.
        volume: the number by which requests name the volume.
        lock: protects everything that changes; all transfers of a link share it.
    """

    def __init__(
        self,
        copies: Sequence[Copy],
        *,
        write: bool,
        nbytes: int,
        width: int,
        volume: int,
        lock: threading.Condition,
    ) -> None:
        self.write = write
        self.width = width
        self.volume = volume
        #: Streams that are working on the transfer, or about to.
        self.streams = 0
        #: Why the transfer is incomplete; None if it is not.
        self.error: BaseException | None = None
        #: Whether a unit has been taken at all.
        self.began = False
        most = WRITE_BYTES if write else READ_BYTES
        self._unit_bytes = max(_UNIT_LEAST, min(most, nbytes // (_UNITS * width)))
        self._left = nbytes
        self._units = cut(copies, self._next_bytes)
        self._next: Unit | None = next(self._units, None)
        self._taken = 0  # copies that are complete once all taken units have arrived
        self._in_flight: Counter[int] = Counter()  # units, by their first copy
        self._connections: set[Connection] = set()
        self._ended = threading.Event()
        self._lock = lock
        self._loop = asyncio.get_running_loop()
        self._end: asyncio.Future[None] = self._loop.create_future()
        self._check()

    # ---- for streams ----------------------------------------------------------------------

    @property
    def more(self) -> bool:
        """Whether there are units that no stream has taken yet."""
        return self._next is not None

    @property
    def wanting(self) -> bool:
        """Whether another stream would help."""
        return self.more and self.streams < self.width

    @property
    def share(self) -> int:
        """About how many of the remaining units each stream will move."""
        return self._left // self._unit_bytes // self.width

    def _next_bytes(self) -> int:
        """Return the size of the next unit: smaller towards the end, so that all streams end at
        about the same time, but not too small, because each unit may cost a round trip.
        """
        if self.width == 1:
            return self._unit_bytes
        least = max(_UNIT_LEAST, self._unit_bytes // 4)
        return max(least, min(self._unit_bytes, self._left // (2 * self.width)))

    def take(self, connection: Connection) -> Unit | None:
        """Return the next unit, to be moved over ``connection``; None if none is left."""
        with self._lock:
            unit = self._next
            if unit is None:
                return None
            self.began = True
            self._taken = unit.following
            self._left -= unit.nbytes
            self._in_flight[unit.first] += 1
            self._connections.add(connection)
            try:
                self._next = next(self._units, None)
            except TransportError as error:
                self._fail(error)
            return unit

    def moved(self, unit: Unit) -> None:
        """Record that a unit has arrived."""
        with self._lock:
            self._in_flight[unit.first] -= 1

    def leave(self, connection: Connection) -> None:
        """Record that a stream has no unit in flight, or that its connection has broken."""
        with self._lock:
            self._connections.discard(connection)
            self._check()

    def fail(self, error: BaseException) -> None:
        """Give up. The first ``error`` is the one that is reported."""
        with self._lock:
            self._fail(error)

    # ---- for the event loop ---------------------------------------------------------------

    async def ended(self) -> None:
        """Wait until all units have arrived, or until nothing moves any more after an error. May be
        called again after it was cancelled.
        """
        if self._end.cancelled():
            with self._lock:
                self._end = self._loop.create_future()
                if self._ended.is_set():
                    return
        await self._end

    def stop(self) -> None:
        """Let streams take no further units; those in flight may still arrive."""
        with self._lock:
            self._stop()
            self._check()

    def abort(self) -> None:
        """End the transfer: when this returns, no thread touches the batch's memory. Blocks only
        until the threads notice that their connections have been shut.
        """
        with self._lock:
            self._stop()
            self._shut()
            self._check()
        self._ended.wait()

    @property
    def done(self) -> int:
        """How many copies, counted from the first, have certainly arrived."""
        open_copies = [first for first, count in self._in_flight.items() if count]
        return min([*open_copies, self._taken])

    # ---- inside; the lock is held ---------------------------------------------------------

    def _fail(self, error: BaseException) -> None:
        self.error = self.error or error
        self._stop()
        self._shut()
        self._check()

    def _stop(self) -> None:
        self._next = None

    def _shut(self) -> None:
        for connection in self._connections:
            connection.shut()

    def _check(self) -> None:
        if self._next is not None or self._connections or self._ended.is_set():
            return
        self._ended.set()
        try:
            self._loop.call_soon_threadsafe(self._finish)
        except RuntimeError:  # the loop is closed, nobody waits any more
            return

    def _finish(self) -> None:
        if not self._end.done():
            self._end.set_result(None)
