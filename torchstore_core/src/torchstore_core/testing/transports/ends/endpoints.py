"""A hosted volume, and how clients reach it."""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Mapping, Sequence

import msgspec

from torchstore_core.errors import PluginError
from torchstore_core.testing import leftovers
from torchstore_core.testing.transports.ends.host import (
    CONTROL,
    Opened,
    Order,
    Plugin,
    ThreadHost,
)
from torchstore_core.testing.transports.ends.session import Reach, Session

__all__ = ["SEGMENT", "Endpoints", "tool_environment"]

#: Size of a segment in bytes. Only pages that are touched take memory.
SEGMENT = 256 << 20
# The unit in which the system counts the memory of files.
_BLOCK = 512
_PAGE = mmap.PAGESIZE
_numbers = itertools.count()


def tool_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the kit's processes, which can import what this process can."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **extra}


class Endpoints:
    """A hosted volume, and how to reach it. Close it, or its processes stay behind.

    Args:
        here: whether to host it in this process, in a thread; otherwise in a process of its own.
        wrapper: a command that runs the process, whose command line is appended to it.
        environment: further environment variables of the process.
        same_host: whether clients are told that they are on the volume's host.

    Attributes:
        segments: those of the volume, as shared memory of this process.
        nbytes: the size of the first one.
        root: the pid of the volume's process; None: the volume is in this process.
        refusal: why the server half does not serve; empty if it does.

    Raises:
        PluginError: the transport does not load there.
    """

    def __init__(
        self,
        plugin: Plugin,
        *,
        here: bool = False,
        hosting: str | None = None,
        wrapper: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        same_host: bool = True,
        nbytes: int = SEGMENT,
    ) -> None:
        self._directory = tempfile.mkdtemp(prefix="ts-kit-", dir="/tmp")
        name = f"kit-{os.getpid()}-{next(_numbers)}"
        order = Order(plugin, name, self._directory, nbytes)
        if hosting is not None:
            order = msgspec.structs.replace(order, hosting=hosting)
        self.nbytes = nbytes
        self._taken = 0
        self._lock = threading.Lock()
        self._host: ThreadHost | None = None
        self._process: subprocess.Popen[bytes] | None = None
        try:
            if here:
                self._host = ThreadHost(order)
                opened = self._host.opened
            else:
                opened = self._start(order, wrapper, environment or {})
            self.segments = [_mapped(opened.pid, one.fd, one.nbytes) for one in opened.segments]
            self._places = [f"/proc/{opened.pid}/fd/{one.fd}" for one in opened.segments]
            self._files = {(found.st_dev, found.st_ino) for found in map(os.stat, self._places)}
        except BaseException:
            self._end()
            raise
        self.root = None if here else opened.pid
        self.refusal = "" if opened.offer is not None else "; ".join(opened.log) or "no offer"
        control = os.path.join(self._directory, CONTROL)
        self.reach = Reach(plugin, control, opened.topology, same_host, opened.offer or b"")

    def session(self) -> Session:
        """Return a new client."""
        return Session(self.reach)

    @contextlib.asynccontextmanager
    async def another(self) -> AsyncIterator[tuple[Session, mmap.mmap]]:
        """Yield a client of another volume in the same process, and that volume's segment. The
        volume is closed at the end.
        """
        async with self.session() as asking:
            opened = await asking.open_another()
            offer, (segment,) = opened.offer or b"", opened.segments
            reach = msgspec.structs.replace(self.reach, offer=offer, number=opened.volume)
            memory = _mapped(opened.pid, segment.fd, segment.nbytes)
            try:
                async with Session(reach) as session:
                    yield session, memory
                    await session.close_volume()
            finally:
                memory.close()

    def take(self, nbytes: int) -> int:
        """Return the offset of ``nbytes`` unused bytes of each segment, not page-aligned; reused
        after a while.
        """
        with self._lock:
            if self._taken + nbytes + 2 * _PAGE > self.nbytes:
                self._taken = 0
            offset = self._taken + 13
            self._taken += (nbytes // _PAGE + 2) * _PAGE
            return offset

    def look(self, offset: int, nbytes: int, segment: int = 0) -> bytes:
        """Return bytes of a segment."""
        return self.segments[segment][offset : offset + nbytes]

    def put(self, offset: int, data: bytes, segment: int = 0) -> None:
        """Write to a segment, bypassing the transport."""
        self.segments[segment][offset : offset + len(data)] = data

    def backed_bytes(self) -> int:
        """Return how much memory the segments have: that of the pages that somebody has made."""
        return sum(os.stat(place).st_blocks * _BLOCK for place in self._places)

    def held_here(self) -> int:
        """Count the descriptors and mappings that this process has of the segments."""
        count = 0
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # it has been closed in the meantime
                found = os.stat(f"/proc/self/fd/{name}")
                count += (found.st_dev, found.st_ino) in self._files
        with open("/proc/self/maps") as maps:
            numbers = [line.split()[4] for line in maps if "/memfd:" in line]
        return count + sum(numbers.count(str(number)) for _, number in self._files)

    def processes(self) -> list[int]:
        """Return the pids of the server half's processes; empty if it is in this process."""
        if self.root is None:
            return []
        return [self.root, *(pid for pid, _ in leftovers.descendants(self.root))]

    def signal(self, number: int) -> None:
        """Send a signal to all of :meth:`processes`."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def close(self) -> None:
        """End the volume and its processes. Idempotent."""
        for segment in self.segments:
            segment.close()
        self._end()

    def _start(self, order: Order, wrapper: Sequence[str], extra: Mapping[str, str]) -> Opened:
        encoded = msgspec.json.encode(order).decode()
        module = "torchstore_core.testing.transports.ends.host"
        self._process = subprocess.Popen(
            [*wrapper, sys.executable, "-m", module, encoded],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=tool_environment(extra),
        )
        line = self._process.stdout.readline() if self._process.stdout is not None else b""
        try:
            return msgspec.json.decode(line, type=Opened)
        except msgspec.DecodeError as error:
            why = line.decode().strip() or "its standard error says why"
            raise PluginError(f"a process cannot host the server half: {why}") from error

    def _end(self) -> None:
        host, self._host = self._host, None
        if host is not None:
            host.close()
        process, self._process = self._process, None
        if process is not None:
            below = [pid for pid, _ in leftovers.descendants(process.pid)]
            for pid in [process.pid, *below]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
            if process.stdin is not None and process.stdout is not None:
                process.stdin.close()
                process.stdout.close()
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            for pid in below:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self._directory, ignore_errors=True)


def _mapped(pid: int, fd: int, nbytes: int) -> mmap.mmap:
    """Return memory that another process has a descriptor of."""
    own = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR)
    try:
        return mmap.mmap(own, nbytes)
    finally:
        os.close(own)
