"""The threads that carry out orders for one spill file, in the process that has it."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
from collections.abc import Callable, Sequence

from torchstore_core.errors import TorchStoreError
from torchstore_core.server.spilling.mapped import MappedSegment
from torchstore_core.server.spilling.spill_file import DamagedError, SpillFile, write_all
from torchstore_core.server.spilling.workers import Workers
from torchstore_core.wire.volumes import spilling as orders
from torchstore_core.wire.volumes.spilling import SpillDone, SpillTrouble

#: How many threads read at the same time.
READERS = 4
_WRITERS = 2
_NICE = 10


class SpillThreads:
    """Moves values between segments of this process and one spill file.

    Args:
        file: where they are spilled to.
        memories: the descriptors of the segments.
        soon: calls something in the thread of the event loop; it may be called in any thread.
    """

    def __init__(
        self,
        file: SpillFile,
        memories: Sequence[int],
        soon: Callable[[Callable[[], None]], None],
    ) -> None:
        self.file = file
        self._memories = [MappedSegment(fd) for fd in memories]
        self._writers = Workers("torchstore-spill", _WRITERS, _NICE, soon)
        self._readers = Workers("torchstore-unspill", READERS, 0, soon)

    @property
    def directory(self) -> str:
        """Where the file is."""
        return self.file.directory

    @property
    def file_system(self) -> str:
        """The type of the file system; empty if it is not known."""
        return self.file.file_system

    @property
    def most(self) -> int:
        """See ``SpillFile.most``."""
        return self.file.most

    @property
    def size(self) -> int:
        """See ``SpillFile.size``."""
        return self.file.size

    @property
    def is_filled(self) -> bool:
        """Whether segments are in the page tables of this process."""
        return any(memory.is_filled for memory in self._memories)

    def submit(
        self,
        order: orders.SpillOrder,
        done: Callable[[SpillDone], None],
        wanted: Callable[[int], bool] = lambda at: True,
    ) -> None:
        """Carry out an order; then the event loop calls ``done``.

        Args:
            wanted: says, in any thread, whether the value at this position of the order is still
                wanted. If it is not, it need not be moved.
        """
        reads = isinstance(order, orders.ReadPieces | orders.ReadTogether)

        def job() -> Callable[[], None]:
            return functools.partial(done, self._do(order, wanted))

        def failed(error: Exception) -> None:
            done(SpillDone(order.id, failed=_trouble(error)))

        (self._readers if reads else self._writers).submit(job, failed)

    def hurry(self) -> None:
        """Somebody waits for what is being written."""
        self._writers.hurry()

    def stop(self) -> None:
        """Have what is under way, and what is submitted from now on, fail soon."""
        self.file.stop()

    def go_on(self) -> None:
        """Nothing is under way that was stopped: carry out orders again."""
        self.file.go_on()

    def close(self) -> None:
        """End the threads and close the file."""
        self.file.stop()
        self._writers.close()
        self._readers.close()
        for memory in self._memories:
            memory.close()
        self.file.close()

    # ---- in threads -----------------------------------------------------------------------

    def _do(self, order: orders.SpillOrder, wanted: Callable[[int], bool]) -> SpillDone:
        match order:
            case orders.WriteValues():
                return self._write(order, wanted)
            case orders.WriteTogether():
                contents = [
                    one if isinstance(one, bytes) else self._content(one) for one in order.values
                ]
                return SpillDone(order.id, self.file.write_together(contents, order.whole))
            case orders.ReadPieces():
                if wanted(0):
                    memory = self._memories[order.place.segment]
                    self.file.read(
                        memory, order.place.offset, order.extent, order.sums, order.first
                    )
                return SpillDone(order.id)
            case orders.ReadTogether():
                return self._read_together(order, wanted)
            case orders.CutSpill():
                for memory in self._memories:
                    if memory.is_filled:
                        memory.rest()
                if order.start >= 0:
                    with contextlib.suppress(OSError):  # it stays on disk, and is used again
                        self.file.cut(order.start)
                return SpillDone(order.id)

    def _content(self, place: orders.Place) -> bytes:
        return os.pread(self._memories[place.segment].fd, place.nbytes, place.offset)

    def _write(self, order: orders.WriteValues, wanted: Callable[[int], bool]) -> SpillDone:
        sums: list[list[int]] = []
        troubles: dict[int, SpillTrouble] = {}
        for at, (place, extent) in enumerate(zip(order.places, order.extents, strict=True)):
            sums.append([])
            if not wanted(at):
                continue
            try:
                sums[at] = self.file.write(self._memories[place.segment], place.offset, extent)
            except OSError as error:
                troubles[at] = _trouble(error)
        return SpillDone(order.id, sums, troubles=troubles)

    def _read_together(
        self, order: orders.ReadTogether, wanted: Callable[[int], bool]
    ) -> SpillDone:
        there = [at for at in range(len(order.places)) if wanted(at)]
        found = self.file.read_together([(order.extents[at], order.sums[at]) for at in there])
        contents = [b""] * len(order.places)
        troubles: dict[int, SpillTrouble] = {}
        for at, content in zip(there, found, strict=True):
            place = order.places[at]
            if not isinstance(content, bytes):
                troubles[at] = _trouble(content)
            elif place is None:
                contents[at] = content
            else:
                try:
                    fd = self._memories[place.segment].fd
                    write_all(fd, memoryview(content), place.offset)
                except OSError as error:
                    troubles[at] = _trouble(error)
        return SpillDone(order.id, contents=contents, troubles=troubles)


def _trouble(error: Exception) -> SpillTrouble:
    return SpillTrouble(_why(error), isinstance(error, DamagedError))


def _why(error: Exception) -> str:
    """Why something could not be read or written, for people.

    >>> _why(OSError(errno.ENOSPC, "said by the system")), _why(MemoryError())
    ('said by the system', 'MemoryError')
    """
    if isinstance(error, OSError):
        return error.strerror or str(error) or os.strerror(error.errno or errno.EIO)
    if isinstance(error, TorchStoreError):
        return error.message
    return f"{type(error).__name__}: {error}".removesuffix(": ")
