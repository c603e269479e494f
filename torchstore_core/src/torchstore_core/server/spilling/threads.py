"""The threads that carry out orders for what values are spilled to, in the process that has it."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from torchstore_core.errors import TorchStoreError
from torchstore_core.server.spilling.mapped import MappedSegment
from torchstore_core.server.spilling.spill_file import DamagedError, write_all
from torchstore_core.server.spilling.workers import Workers
from torchstore_core.wire.volumes import spilling as orders
from torchstore_core.wire.volumes.spilling import Extent, SpillDone, SpillTrouble

#: How many threads read at the same time.
READERS = 4
_WRITERS = 2
_NICE = 10


class SpillDevice(Protocol):
    """What values are spilled to: a space of bytes, in which whole pages are written and read where
    :class:`~torchstore_core.server.spilling.space.SpillSpace` says. What is written to a place
    counts until something else is written there.

    Several threads use it. Everything that reads or writes raises OSError if that fails, whose
    ``strerror`` is for people; DamagedError if it never can be read.

    Attributes:
        directory: where it is, for people.
        file_system: what keeps it there: a type of file system, or a protocol; empty if it is not
            known.
        capacity: the most bytes that it may have.
    """

    @property
    def directory(self) -> str: ...
    @property
    def file_system(self) -> str: ...
    @property
    def capacity(self) -> int: ...

    @property
    def most(self) -> int:
        """The bytes that it may have in the end, as far as is known: others may use it, too."""

    @property
    def size(self) -> int:
        """Where what was ever written ends, at most."""

    def write(self, memory: MappedSegment, offset: int, extent: Extent) -> list[int]:
        """Write a value, which begins at ``offset`` of a segment, to its extent. Returns the
        checksum of each piece.
        """

    def read(
        self,
        memory: MappedSegment,
        offset: int,
        extent: Extent,
        sums: Sequence[int],
        first: int = 0,
    ) -> None:
        """Read a value into a segment: the pieces from ``first`` on of which these are the sums."""

    def write_together(self, contents: Sequence[bytes], whole: Extent) -> list[list[int]]:
        """Write small values one after the other; returns the checksums of each."""

    def read_together(
        self, wanted: Sequence[tuple[Extent, Sequence[int]]]
    ) -> list[bytes | OSError]:
        """Read small values, given their places and checksums; the bytes of each, or why not."""

    def cut(self, start: int) -> None:
        """Nothing from there on is in use. Nobody is in a hurry."""

    def stop(self) -> None:
        """Have reads and writes that are under way, or are to come, fail soon."""

    def go_on(self) -> None:
        """Nothing is under way that was stopped: read and write again."""

    def close(self) -> None:
        """The store ends; nothing is under way. Leave nothing behind."""


@runtime_checkable
class FreeingDevice(SpillDevice, Protocol):
    """A device that is told what is not in use any more."""

    def free(self, runs: Sequence[tuple[int, int]]) -> None:
        """These parts, as (offset, bytes), are not in use any more. The event loop calls this
        before anything is written there again, so it only notes it.
        """

    def keep_only(self, runs: Sequence[tuple[int, int]]) -> None:
        """The same of everything else than these parts, for a new life of the server."""

    def tidy(self) -> None:
        """Give back what is not in use. It may block."""


class SpillThreads:
    """Moves values between segments of this process and what they are spilled to.

    Args:
        file: where they are spilled to.
        memories: the descriptors of the segments.
        soon: calls something in the thread of the event loop; it may be called in any thread.
    """

    def __init__(
        self,
        file: SpillDevice,
        memories: Sequence[int],
        soon: Callable[[Callable[[], None]], object],
    ) -> None:
        self.file = file
        self._memories = [MappedSegment(fd) for fd in memories]
        self._writers = Workers("torchstore-spill", _WRITERS, _NICE, soon)
        self._readers = Workers("torchstore-unspill", READERS, 0, soon)
        self._freeing = file if isinstance(file, FreeingDevice) else None
        if self._freeing is not None:  # earlier stores may have left something
            self.submit(orders.FreeSpill(0, []), lambda done: None)

    @property
    def file_system(self) -> str:
        """The type of the file system; empty if it is not known."""
        return self.file.file_system

    @property
    def most(self) -> int:
        """See :class:`SpillDevice`."""
        return self.file.most

    @property
    def size(self) -> int:
        """See :class:`SpillDevice`."""
        return self.file.size

    @property
    def frees(self) -> bool:
        """Whether it is to be told what is not in use any more."""
        return self._freeing is not None

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
        if self._freeing is not None:
            # Noted in the order of the orders, which are not carried out in that.
            if isinstance(order, orders.FreeSpill):
                self._freeing.free(order.runs)
            elif isinstance(order, orders.KeepSpill):
                self._freeing.keep_only(order.runs)

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
                if self._freeing is not None:
                    with contextlib.suppress(OSError):  # tried again the next time
                        self._freeing.tidy()
                return SpillDone(order.id)
            case orders.FreeSpill() | orders.KeepSpill():
                if self._freeing is not None:
                    self._freeing.tidy()
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
