"""A disk to spill to, and the threads that read and write it, in turn with everything else.

The mover and the spill file are the real ones, or the objects at a URL. Only their units are small,
so that a few values fill pages of the file, some of a page and some of several, and are moved in
several jobs.
"""

from __future__ import annotations

import errno
import functools
import mmap
import os
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fsspec  # type: ignore[import-untyped]
import pytest
from fsspec.implementations.memory import MemoryFileSystem  # type: ignore[import-untyped]
from tests.simulation.machine.memory import LINE, Memory
from tests.simulation.promises.violations import Violation

from torchstore_core.machine.directories import file_system
from torchstore_core.server.spilling import moves, space, spill_file, spilling, threads
from torchstore_core.server.spilling.objects import bucket
from torchstore_core.server.spilling.spill_file import SpillFile
from torchstore_core.wire.volumes import spilling as orders
from torchstore_core.wire.volumes.spilling import Extent

if TYPE_CHECKING:
    from tests.simulation.world import World

    from torchstore_core.server.server import Server

__all__ = ["DIRECTORY", "PAGE", "Disk", "MappedMemory"]

PAGE = 4 * LINE
#: The file is said to be here; it has no name.
DIRECTORY = str(Path(__file__).parent)

# Which one it is stays the same.
_file_system = functools.cache(file_system)

_Job = Callable[[], Callable[[], None]]
_Failed = Callable[[Exception], None]


class MappedMemory(Memory):
    """A segment that has a descriptor."""

    def __init__(self, capacity: int) -> None:
        self.fd = os.memfd_create("memory")
        os.ftruncate(self.fd, capacity + -capacity % mmap.PAGESIZE)
        self.bytes = mmap.mmap(self.fd, capacity)  # type: ignore[assignment]
        self.warm = capacity

    def close(self) -> None:
        """Nothing is left of it."""
        self.bytes.close()  # type: ignore[attr-defined]
        os.close(self.fd)


class Disk:
    """The disk of one run.

    Attributes:
        files: those that are open.
        refusals: how many more writes fail, because others have filled it.
        failures: how many more reads and writes fail, because of the disk or for lack of memory.
    """

    def __init__(self, world: World, *, at_a_url: bool) -> None:
        self._world = world
        self._at_a_url = at_a_url
        self._objects: dict[str, Any] = {}
        self._numbers: dict[str, int] = {}
        self.files: list[SpillFile] = []
        self.refusals = self.failures = 0

    @property
    def place(self) -> str:
        """What servers are told to spill to."""
        return "simulated://disk" if self._at_a_url else DIRECTORY

    def leave(self, server: Server) -> None:
        """A server dies: what it has at a URL stays there."""
        if server._spill_file is not None:
            server._spill_file.leave()

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Servers use this disk, and threads that take turns."""
        patch.setattr(spill_file, "SpillFile", functools.partial(_File, self))
        patch.setattr(spill_file, "file_system", _file_system)
        if self._at_a_url:
            fields = {"store": self._objects, "pseudo_dirs": [""], "disk": self}
            kind = type("_ObjectsOfOneRun", (_Objects,), fields)
            fsspec.register_implementation("simulated", kind, clobber=True)
            patch.setattr(bucket, "_PAUSES_S", ())
        patch.setattr(threads, "Workers", functools.partial(_Threads, self))
        patch.setattr(orders, "PAGE", PAGE)
        for module in (space, spill_file):
            patch.setattr(module, "PIECE", 2 * PAGE)
        patch.setattr(moves, "_SMALL", LINE)
        patch.setattr(moves, "_LEAST_PIECES", 1)
        patch.setattr(moves, "_BATCH", 2 * PAGE)
        patch.setattr(moves, "_MOST_TOGETHER", 3)
        patch.setattr(moves, "_MOST_AT_ONCE", 4)
        patch.setattr(spilling, "_MOST_AT_ONCE", 2)

    def close(self) -> None:
        """Nothing is left of it, also if a server has not got far.

        Raises:
            Violation: something is, although all servers have ended.
        """
        if self._objects:
            raise Violation("accounts", f"objects are left: {list(self._objects)}")
        for file in list(self.files):
            file.close()

    def turn(self, name: str, run: Callable[[], None]) -> None:
        """Let a thread go on, some time."""
        number = self._numbers[name] = self._numbers.get(name, 0) + 1
        self._world.once((name, number), run)

    def fail(self) -> None:
        """Fail, if it is time to.

        Raises:
            OSError, MemoryError: in turn.
        """
        if self.failures:
            self.failures -= 1
            if self.failures % 2:
                raise MemoryError
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def not_read(self) -> None:
        """From now on, readers may be told that something cannot be read."""
        self._world.history.unread = self._world.history.unread or self._world.point


class _File(SpillFile):
    """A file on a disk that may refuse writes, and fail."""

    def __init__(
        self, disk: Disk, directory: str, capacity: int | None, fd: int | None = None
    ) -> None:
        self._disk = disk
        super().__init__(directory, capacity, os.memfd_create("disk") if fd is None else fd)
        disk.files.append(self)

    def close(self) -> None:
        self._disk.files.remove(self)
        super().close()

    @property
    def most(self) -> int:
        return 0 if self._disk.refusals else self.capacity

    def _write(self, view: memoryview, extent: Extent, at: int) -> None:
        if self._disk.refusals:
            self._disk.refusals -= 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._disk.fail()
        super()._write(view, extent, at)

    def _read(self, view: memoryview, extent: Extent, at: int) -> None:
        try:
            self._disk.fail()
        except (OSError, MemoryError):
            self._disk.not_read()
            raise
        super()._read(view, extent, at)


class _Objects(MemoryFileSystem):  # type: ignore[misc]
    """Object storage that may refuse writes, and fail."""

    protocol = "simulated"
    disk: Disk

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return "/" + path.removeprefix("simulated://").strip("/")

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        if self.disk.refusals:
            self.disk.refusals -= 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.disk.fail()
        super().pipe_file(path, value, mode=mode, **kwargs)

    def cat_file(self, path: str, start: Any = None, end: Any = None, **kwargs: Any) -> bytes:
        try:
            self.disk.fail()
        except (OSError, MemoryError):
            self.disk.not_read()
            raise
        return bytes(super().cat_file(path, start=start, end=end, **kwargs))


class _Threads:
    """As ``Workers``: jobs begin in their order, and end in any."""

    def __init__(
        self,
        disk: Disk,
        name: str,
        count: int,
        nice: int,
        soon: Callable[[Callable[[], None]], None],
    ) -> None:
        self._disk = disk
        self._name = name
        self._idle = count
        self._soon = soon
        self._jobs: deque[tuple[_Job, _Failed]] = deque()
        self._closed = False

    def submit(self, job: _Job, failed: _Failed) -> None:
        self._jobs.append((job, failed))
        self._begin()

    def hurry(self) -> None:
        """They have no priorities."""

    def close(self) -> None:
        self._closed = True

    def _begin(self) -> None:
        if self._idle and self._jobs:
            self._idle -= 1
            self._disk.turn(self._name, functools.partial(self._do, *self._jobs.popleft()))

    def _do(self, job: _Job, failed: _Failed) -> None:
        if not self._closed:
            try:
                done = job()
            except (OSError, MemoryError) as error:
                done = functools.partial(failed, error)
            self._soon(done)
            self._idle += 1
            self._begin()
