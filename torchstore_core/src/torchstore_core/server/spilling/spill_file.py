"""The file that spilled values lie in. It has no name, so nothing of it is left behind when the
process ends, however it ends; unless a keeper has its descriptor, for the next life of the server.

Reads and writes bypass the system's page cache where the file system can: cached pages would take
up the very memory that spilling is to free. For that, addresses, offsets in the file and lengths
must be multiples of a page. A value begins anywhere in a segment, so whole pages are written,
with what its neighbours have in them, and a value keeps its position within a page. Small values
are written one after the other, so that several share a page.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import mmap
import os
import tempfile
from collections.abc import Sequence

from torchstore_core.errors import ConfigurationError
from torchstore_core.machine.directories import MEMORY_FILE_SYSTEMS, file_system
from torchstore_core.server.spilling.checksums import checksum
from torchstore_core.server.spilling.mapped import MappedSegment
from torchstore_core.server.spilling.space import PIECE
from torchstore_core.wire.volumes import spilling as orders
from torchstore_core.wire.volumes.spilling import Extent

log = logging.getLogger(__name__)

_PREFIX = ".torchstore-spill-"


#: Why what was read is not taken.
NO_MATCH = "its bytes do not match their checksum"


class DamagedError(OSError):
    """What was read is not what was written."""


class SpillFile:
    """One unnamed file. Which parts of it are in use is for ``space.SpillSpace`` to know.

    :meth:`write`, :meth:`write_together`, :meth:`read`, :meth:`read_together` and :meth:`cut` may
    be called in any thread.

    Args:
        directory: where to make the file; it is created if it does not exist.
        capacity: the most bytes that it may have; None: as many as are free on the disk now.
        fd: of the file of an earlier life of this server; None: make one.

    Attributes:
        capacity: as above.
        file_system: the type of the file system; empty if it is not known.

    Raises:
        ConfigurationError: no file can be made there.
    """

    def __init__(self, directory: str, capacity: int | None, fd: int | None = None) -> None:
        self.directory = directory
        self._stopped = False
        try:
            os.makedirs(directory, mode=0o700, exist_ok=True)
            _clean(directory)
            if fd is None:
                self.fd = _open_unnamed(directory)
            else:
                os.set_inheritable(fd, False)
                self.fd = fd
            there = os.statvfs(directory)
        except OSError as error:
            raise ConfigurationError(
                f"cannot spill to {directory!r}: {error.strerror}. spill= names a directory on a "
                "disk that this process may write to",
                details={"spill": directory},
            ) from error
        free = there.f_bavail * there.f_frsize
        self.capacity = free if capacity is None else capacity
        self.file_system = file_system(directory)
        if fd is None and self.file_system in MEMORY_FILE_SYSTEMS:
            log.warning(
                "%s is in memory (%s), so that spilling to it frees none",
                directory,
                self.file_system,
            )

    @property
    def most(self) -> int:
        """The bytes that it may have in the end, as far as is known: others may fill the disk,
        too.
        """
        there, own = os.fstatvfs(self.fd), os.fstat(self.fd)
        return there.f_bavail * there.f_frsize + own.st_blocks * 512

    @property
    def size(self) -> int:
        """Where what was ever written ends, unless it was cut since."""
        return os.fstat(self.fd).st_size

    def cut(self, start: int) -> None:
        """Return the disk space from there on to the file system."""
        os.ftruncate(self.fd, start)

    def write(self, memory: MappedSegment, offset: int, extent: Extent) -> list[int]:
        """Write a value from a segment to its extent.

        Args:
            memory: the segment.
            offset: of the value in the segment.

        Returns:
            The checksum of each piece.

        Raises:
            OSError: the file system is full, or the disk fails.
        """
        sums: list[int] = []
        for at, nbytes in pieces(extent):
            self._check_stopped()
            with memory.piece(offset - extent.head + at, nbytes) as view:
                with own(view, extent, at, nbytes) as part:
                    sums.append(checksum(part))
                self._write(view, extent, at)
        return sums

    def read(
        self,
        memory: MappedSegment,
        offset: int,
        extent: Extent,
        sums: Sequence[int],
        first: int = 0,
    ) -> None:
        """Read a value, or some pieces of it, into a segment.

        Args:
            memory: the segment.
            offset: where in the segment the value is to begin.
            sums: what :meth:`write` returned; or a part of that, to read only these pieces. Several
                threads may read different pieces of a value.
            first: which piece the first of these is.

        Raises:
            DamagedError: these are not the bytes that were written.
            OSError: the disk fails.
        """
        if offset % orders.PAGE != extent.head:
            self._read_through_buffer(memory.fd, offset, extent, sums, first)
            return
        for (at, nbytes), expected in zip(pieces(extent, first, sums), sums, strict=True):
            self._check_stopped()
            with memory.piece(offset - extent.head + at, nbytes) as view:
                self._read_piece(view, extent, at, nbytes)
                with own(view, extent, at, nbytes) as part:
                    if checksum(part) != expected:
                        raise DamagedError(errno.EIO, NO_MATCH)

    def _read_piece(self, view: memoryview, extent: Extent, at: int, nbytes: int) -> None:
        """Read whole pages of a piece in place. The first and the last page of a value may also
        have bytes of its neighbours, which must not change, so these pages go through a buffer.
        """
        first = orders.PAGE if at == 0 and extent.head else 0
        tail = min(nbytes, extent.head + extent.nbytes - at)  # where the value ends in it
        last = tail & -orders.PAGE if tail < nbytes else nbytes
        last = max(last, first)
        if last > first:
            with view[first:last] as whole:
                self._read(whole, extent, at + first)
        if not first and last == nbytes:
            return
        with mmap.mmap(-1, orders.PAGE) as page, memoryview(page) as edge:
            if first:
                end = min(orders.PAGE, tail)
                self._read(edge, extent, at)
                view[extent.head : end] = edge[extent.head : end]
            if last < tail:
                self._read(edge, extent, at + last)
                view[last:tail] = edge[: tail - last]

    def _read_through_buffer(
        self, memory: int, offset: int, extent: Extent, sums: Sequence[int], first: int
    ) -> None:
        """Read a value to another position within a page than it had."""
        with mmap.mmap(-1, PIECE) as buffer, memoryview(buffer) as whole:
            for (at, nbytes), expected in zip(pieces(extent, first, sums), sums, strict=True):
                with whole[:nbytes] as view, own(view, extent, at, nbytes) as part:
                    self._read(view, extent, at)
                    if checksum(part) != expected:
                        raise DamagedError(errno.EIO, NO_MATCH)
                    write_all(memory, part, offset + max(0, at - extent.head))

    def write_together(self, contents: Sequence[bytes], whole: Extent) -> list[list[int]]:
        """Write small values one after the other; returns the checksums of each.

        Raises:
            OSError: as :meth:`write`.
        """
        self._check_stopped()
        with mmap.mmap(-1, whole.span) as buffer, memoryview(buffer) as view:
            for content in contents:
                buffer.write(content)
            self._write(view, whole, 0)
        return [[checksum(memoryview(content))] for content in contents]

    def read_together(
        self, wanted: Sequence[tuple[Extent, Sequence[int]]]
    ) -> list[bytes | OSError]:
        """Read small values; those that lie one after the other are read at once.

        Args:
            wanted: where each lies, and its checksums.

        Returns:
            The bytes of each, or why they cannot be read.
        """
        found: dict[int, bytes | OSError] = {}
        groups = _adjoining([extent for extent, _ in wanted])
        while groups:
            group = groups.pop()
            try:
                found |= self._read_group(wanted, group)
            except OSError as error:
                if len(group) > 1:  # others of them may be readable
                    groups += [[at] for at in group]
                else:
                    found[group[0]] = error
        return [found[at] for at in range(len(wanted))]

    def _read_group(
        self, wanted: Sequence[tuple[Extent, Sequence[int]]], group: Sequence[int]
    ) -> dict[int, bytes | OSError]:
        """Read values of which each begins at most where the one before it ends."""
        self._check_stopped()
        found: dict[int, bytes | OSError] = {}
        first, last = wanted[group[0]][0], wanted[group[-1]][0]
        start = first.runs[0][0]
        span = first.span if len(group) == 1 else sum(last.runs[0]) - start
        with mmap.mmap(-1, span) as buffer, memoryview(buffer) as view:
            whole = first if len(group) == 1 else Extent(((start, span),), 0, span)
            self._read(view, whole, 0)
            for at in group:
                extent, [expected] = wanted[at]
                begin = extent.head + (extent.runs[0][0] - start)
                content = bytes(view[begin : begin + extent.nbytes])
                damaged = checksum(memoryview(content)) != expected
                found[at] = DamagedError(errno.EIO, NO_MATCH) if damaged else content
        return found

    def _write(self, view: memoryview, extent: Extent, at: int) -> None:
        """Write whole pages of a value, from position ``at`` of its extent."""
        done = 0
        for offset, nbytes in extent.within(at, len(view)):
            write_all(self.fd, view[done : done + nbytes], offset)
            done += nbytes

    def _read(self, view: memoryview, extent: Extent, at: int) -> None:
        """Read whole pages of a value, from position ``at`` of its extent."""
        done = 0
        for offset, nbytes in extent.within(at, len(view)):
            _read_all(self.fd, view[done : done + nbytes], offset)
            done += nbytes

    def stop(self) -> None:
        """Have reads and writes that are under way fail soon, because the server ends."""
        self._stopped = True

    def go_on(self) -> None:
        """Nothing is under way that was stopped: read and write again."""
        self._stopped = False

    def _check_stopped(self) -> None:
        if self._stopped:
            raise OSError(errno.ECANCELED, os.strerror(errno.ECANCELED))

    def leave(self) -> None:
        """Another life of this server needs the file. Its keeper has it, too."""

    def close(self) -> None:
        """Close the file; the file system frees it."""
        os.close(self.fd)


def _adjoining(extents: Sequence[Extent]) -> list[list[int]]:
    """Positions of extents, in groups that lie without gaps, of at most a piece.

    >>> _adjoining([Extent(((8192, 4096),), 64, 9), Extent(((8192, 4096),), 0, 9)])
    [[1, 0]]
    """
    groups: list[list[int]] = []
    begin = end = -1
    for at in sorted(range(len(extents)), key=lambda at: (extents[at].runs[0], extents[at].head)):
        start, size = extents[at].runs[0]
        alone = len(extents[at].runs) > 1
        if alone or start > end or start + size - begin > PIECE:
            groups.append([])
            begin = start
        groups[-1].append(at)
        end = -1 if alone else max(end, start + size)
    return groups


def pieces(
    extent: Extent, first: int = 0, sums: Sequence[int] | None = None
) -> list[tuple[int, int]]:
    """Where in its extent the pieces of a value begin, and how long they are: whole pages. From
    the first of them on, as many as there are ``sums``; None: all.
    """
    end = extent.span if sums is None else min(extent.span, (first + len(sums)) * PIECE)
    return [(at, min(PIECE, extent.span - at)) for at in range(first * PIECE, end, PIECE)]


def own(view: memoryview, extent: Extent, at: int, nbytes: int) -> memoryview:
    """The part of a piece that belongs to the value."""
    return view[extent.head if at == 0 else 0 : min(nbytes, extent.head + extent.nbytes - at)]


def write_all(fd: int, view: memoryview, offset: int) -> None:
    """Write a buffer to a place in a file. Raises OSError."""
    done = 0
    while done < len(view):
        with view[done:] as rest:
            written = os.pwrite(fd, rest, offset + done)
        if not written:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        done += written


def _read_all(fd: int, view: memoryview, offset: int) -> None:
    done = 0
    while done < len(view):
        with view[done:] as rest:
            count = os.preadv(fd, [rest], offset + done)
        if not count:
            raise DamagedError(errno.EIO, "the file has become shorter")
        done += count


def _open_unnamed(directory: str) -> int:
    """A new file without a name, which bypasses the page cache if the file system can do that."""
    flags = os.O_RDWR | os.O_CLOEXEC
    try:
        fd = os.open(directory, flags | os.O_TMPFILE, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT):
            raise
        fd = _open_removed(directory)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)
        with mmap.mmap(-1, orders.PAGE) as page:
            os.pwrite(fd, page, 0)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            log.info("spilling to %s goes through the page cache: %s", directory, error)
            flags_now = fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT
            fcntl.fcntl(fd, fcntl.F_SETFL, flags_now)
    return fd


def _open_removed(directory: str) -> int:
    """A file that is removed while it is open. Until then it is locked, so that a server that
    starts meanwhile can tell whether it was left behind (see `_clean`).
    """
    while True:
        fd, path = tempfile.mkstemp(prefix=_PREFIX, dir=directory)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(path)
        except (BlockingIOError, FileNotFoundError):  # that server was faster, and removes it
            os.close(fd)
        except BaseException:
            os.close(fd)
            raise
        else:
            return fd


def _clean(directory: str) -> None:
    """Remove the files of servers that were killed between making one and removing its name."""
    for name in os.listdir(directory):
        if not name.startswith(_PREFIX):
            continue
        path = os.path.join(directory, name)
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:  # it is gone, or another user's
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(fd).st_uid == os.getuid():
                os.unlink(path)
        except OSError as error:
            log.debug("%s is in use: %s", path, error)
        finally:
            os.close(fd)
