"""Spill files of volumes in other processes: both ends of the line.

Each volume has a file of its own, on its host, and the threads that move values between this file
and its segment. The server orders what they do, over the volume's connection. The file outlives the
server with the volume; what is under way then ends before the volume attaches again, so that
nothing is written where the next life of the server has put something else.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from torchstore_core.contracts.when_full import is_url
from torchstore_core.machine.tasks import call_from_thread
from torchstore_core.server.remote.volume_line import VolumeLine
from torchstore_core.server.spilling.spill_file import SpillFile
from torchstore_core.server.spilling.threads import SpillThreads
from torchstore_core.wire import messages as m

if TYPE_CHECKING:
    from torchstore_core.server.spilling.objects.spill_objects import SpillObjects


class AttachedFile:
    """The server's view of the file of a volume in another process, see ``moves.HasFile``.

    Args:
        place: what the volume has told of it.
        line: to the volume.

    Attributes:
        capacity: the most bytes that it may have.
        file_system: its type; empty if it is not known.
        frees: whether it is to be told what is not in use any more.
        most: how large it may become, as the volume has said the last time.
        is_filled: whether anything was moved since the segment has left the page tables.
    """

    def __init__(self, place: m.SpillPlace, line: VolumeLine) -> None:
        self._line = line
        self.file_system = place.file_system
        self.frees = place.frees
        self.most = place.most
        self.is_filled = False
        self.capacity = place.capacity
        self._ids = itertools.count(1)
        self._pending: dict[int, Callable[[m.SpillDone], None]] = {}
        self._lost = ""
        self._is_closed = False

    @property
    def size(self) -> int:
        """Where what was ever written ends: that may be anywhere."""
        return self.capacity

    def submit(
        self,
        order: m.SpillOrder,
        done: Callable[[m.SpillDone], None],
        wanted: Callable[[int], bool],
    ) -> None:
        """Have the volume carry out an order, see ``SpillThreads.submit``."""
        if self._lost:
            asyncio.get_running_loop().call_soon(done, self._failure())
            return
        number = next(self._ids)
        self._pending[number] = done
        order = msgspec.structs.replace(order, id=number)
        if not isinstance(order, m.FreeSpill | m.KeepSpill):
            self.is_filled = not isinstance(order, m.CutSpill)
        if not self._is_closed:
            self._line.send(order)

    def hurry(self) -> None:
        """Somebody waits for what is being written."""
        if self._line.is_open and self._pending:
            self._line.send(m.HurrySpill())

    def done(self, message: m.SpillDone) -> None:
        """The volume has carried out an order."""
        self.most = message.most
        done = self._pending.pop(message.id, None)
        if done is not None:
            done(message)

    def lost(self, why: str) -> None:
        """Fail all orders, present and future, because the volume is gone."""
        self._lost = why or "it is gone"
        pending, self._pending = self._pending, {}
        for done in pending.values():
            done(self._failure())

    def close(self) -> None:
        """Give no more orders. The file ends with the volume."""
        self._pending.clear()
        self._is_closed = True

    def _failure(self) -> m.SpillDone:
        return m.SpillDone(0, failed=m.SpillTrouble(f"its volume is gone: {self._lost}"))


class VolumeFile:
    """The file of a volume, in the volume's process; belongs to its event loop.

    Args:
        directory: where to make it, or a URL for objects.
        capacity: the most bytes that it may have; None: an equal part of what is free on the disk.
        sharing: how many volumes share that.
        memory: the descriptor of the volume's segment.

    Raises:
        ConfigurationError: no file can be made there.
    """

    def __init__(self, directory: str, capacity: int | None, sharing: int, memory: int) -> None:
        self._file: SpillFile | SpillObjects
        if is_url(directory):
            from torchstore_core.server.spilling.objects.spill_objects import SpillObjects

            self._file = SpillObjects(directory, capacity, os.getpid())
        else:
            self._file = SpillFile(directory, capacity)
        if capacity is None:
            self._file.capacity //= sharing
        soon = functools.partial(call_from_thread, asyncio.get_running_loop())
        self._threads = SpillThreads(self._file, [memory], soon)
        self._open = 0  # orders that have not ended
        self._quiet = asyncio.Event()
        self._closed = False

    @property
    def place(self) -> m.SpillPlace:
        """What the server has to know of it."""
        file = self._file
        return m.SpillPlace(file.capacity, file.most, file.file_system, self._threads.frees)

    def order(self, order: m.SpillOrder, answer: Callable[[m.SpillDone], None]) -> None:
        """Carry out an order, and answer it."""

        def done(message: m.SpillDone) -> None:
            self._open -= 1
            if not self._open:
                self._quiet.set()
            if not self._closed:
                answer(msgspec.structs.replace(message, most=self._file.most))

        self._open += 1
        self._threads.submit(order, done)

    def hurry(self) -> None:
        """Somebody waits for what is being written."""
        self._threads.hurry()

    async def drop(self) -> None:
        """Carry out nothing more of what was ordered, and return when nothing is under way."""
        self._threads.stop()
        while self._open:
            self._quiet.clear()
            await self._quiet.wait()
        self._threads.go_on()

    def close(self) -> None:
        """End the threads, and give the disk space back. Idempotent."""
        if not self._closed:
            self._closed = True
            self._threads.close()
