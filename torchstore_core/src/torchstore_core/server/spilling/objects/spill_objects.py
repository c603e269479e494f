"""What values are spilled to at a URL: an object for each piece of a large value, and for each
group of small ones.

All objects of a store are in a folder of its own, whose name says whose it is: what is left of
stores whose processes are gone is deleted by the next one that spills to the same URL. It judges
only those of its own host, since it was started, because it cannot see whether others live.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import re
import secrets
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from torchstore_core import moments
from torchstore_core.contracts.when_full import URL_END_S, shown_place
from torchstore_core.errors import ConfigurationError
from torchstore_core.machine.processes import pid_namespace, started
from torchstore_core.machine.topology import start_time
from torchstore_core.server.spilling.checksums import checksum
from torchstore_core.server.spilling.mapped import MappedSegment
from torchstore_core.server.spilling.objects.bucket import Bucket, OutOfRangeError, protocol_of
from torchstore_core.server.spilling.objects.layout import Layout, ObjectName, Part, joined
from torchstore_core.server.spilling.spill_file import (
    NO_MATCH,
    DamagedError,
    own,
    pieces,
    write_all,
)
from torchstore_core.wire.volumes.spilling import Extent

log = logging.getLogger(__name__)

#: The most bytes of a store whose user does not say how many.
DEFAULT_CAPACITY = 1 << 40
_FOLDER = re.compile(r"torchstore-spill-([0-9a-f]+)\.(\d+)\.(\d+)\.(\d+)\.[0-9a-f]+")
_PROBE = "probe"
# So many pieces of a value are under way at the same time, for each thread; they take memory.
_AT_ONCE = 2
# Small values are read together if so many bytes at most lie between them, and so many requests for
# them are under way.
_GAP, _READ_AT_ONCE = 64 << 10, 8
# When nothing could be stored, nothing is tried for so many seconds: each attempt may take long.
_PAUSE_S = 1.0
# So many objects are deleted in one go; then others have a turn.
_BATCH = 1000


class SpillObjects:
    """The objects of one store at a URL. See ``threads.SpillDevice`` for what is not said here.

    Args:
        url: the place below which they are.
        capacity: the most bytes of the space that they have; None: 1 TiB.
        owner: pid of the process with which the store ends at the latest.
        life: which life of the server this is.
        folder: of an earlier life of this server, whose objects are still there; None: there is
            none.

    Raises:
        ConfigurationError: nothing can be stored there, or no package for such URLs is installed.
    """

    def __init__(
        self,
        url: str,
        capacity: int | None,
        owner: int,
        life: int = 1,
        folder: str | None = None,
    ) -> None:
        self._url = url
        self.directory, self.file_system = shown_place(url), protocol_of(url)
        self.capacity = DEFAULT_CAPACITY if capacity is None else capacity
        self.folder = folder or _new_folder(owner)
        self._life = life
        self._numbers = itertools.count()
        # To open it takes long, and a server that comes back does not wait for that.
        self._opened: Bucket | None = None
        self._opening = threading.Lock()
        self._is_stopped = False
        self._lock = threading.Lock()
        self._looking = threading.Lock()
        self._layout: Layout | None = None  # until it was looked what an earlier life has left
        self._kept: list[tuple[int, int]] | None = None
        self._freed: list[tuple[int, int]] = []  # before that
        self._unused: deque[str] = deque()
        self._is_swept = False
        self._failed: tuple[float, OSError] | None = None  # when, and why something was not stored
        self._ends = True
        if folder is None:
            self._layout = Layout()
            self._probe()
        if self.file_system == "memory":
            log.warning("%s is in memory, so that spilling to it frees none", self.directory)

    @property
    def _bucket(self) -> Bucket:
        if self._opened is None:
            with self._opening:
                if self._opened is None:
                    bucket = Bucket(self._url)
                    if self._is_stopped:
                        bucket.stop()
                    self._opened = bucket
        return self._opened

    def _probe(self) -> None:
        name = f"{self.folder}/{_PROBE}"
        content = secrets.token_bytes(16)
        try:
            self._bucket.folder(self.folder)
            self._bucket.wait(self._bucket.put(name, content))
            found = self._bucket.wait(self._bucket.get(name, 0, len(content)))
            self._bucket.delete_one(name)
        except OSError as error:
            there_is_none = isinstance(error, FileNotFoundError)
            why = "there is no such bucket or folder" if there_is_none else error.strerror
            raise ConfigurationError(
                f"cannot spill to {self.directory!r}: {why}. spill= names a directory, "
                "or a URL at which this process may store, read and delete objects",
                details={"spill": self.directory},
            ) from error
        if found != content:
            raise ConfigurationError(
                f"cannot spill to {self.directory!r}: what was stored there is not what is read",
                details={"spill": self.directory},
            )

    @property
    def most(self) -> int:
        """The bytes that it may have in the end."""
        return self.capacity

    @property
    def size(self) -> int:
        """Where what was ever written ends: that may be anywhere."""
        return self.capacity

    # ---- values ---------------------------------------------------------------------------

    def write(self, memory: MappedSegment, offset: int, extent: Extent) -> list[int]:
        """Write a value from a segment; its pieces are under way at the same time."""
        sums: list[int] = []
        with _Requests(self) as requests:
            for at, nbytes in pieces(extent):
                with memory.piece(offset - extent.head + at, nbytes) as view:
                    content = bytes(view)  # neighbours may change meanwhile
                with memoryview(content) as whole, own(whole, extent, at, nbytes) as part:
                    sums.append(checksum(part))
                requests.put(extent, at, content)
        return sums

    def write_together(self, contents: Sequence[bytes], whole: Extent) -> list[list[int]]:
        """Write small values, as one object."""
        content = b"".join(contents)
        with _Requests(self) as requests:
            requests.put(whole, 0, content.ljust(whole.span, b"\0"))
        return [[checksum(memoryview(content))] for content in contents]

    def read(
        self,
        memory: MappedSegment,
        offset: int,
        extent: Extent,
        sums: Sequence[int],
        first: int = 0,
    ) -> None:
        """Read a value, or some pieces of it, into a segment."""
        layout = self._known()
        ahead: deque[tuple[int, int, int, list[tuple[Part, Future[bytes]]]]] = deque()
        try:
            for (at, nbytes), expected in zip(pieces(extent, first, sums), sums, strict=True):
                with self._lock:
                    parts = layout.find(extent.within(at, nbytes))
                ahead.append((at, nbytes, expected, [(one, self._get(one)) for one in parts]))
                if len(ahead) == _AT_ONCE:
                    self._take_piece(memory.fd, offset, extent, *ahead.popleft())
            while ahead:
                self._take_piece(memory.fd, offset, extent, *ahead.popleft())
        finally:
            for *_, requests in ahead:
                for _, request in requests:
                    request.cancel()

    def _take_piece(
        self,
        fd: int,
        offset: int,
        extent: Extent,
        at: int,
        nbytes: int,
        expected: int,
        parts: list[tuple[Part, Future[bytes]]],
    ) -> None:
        content = self._content(nbytes, [(part, self._got(part, one)) for part, one in parts])
        with memoryview(content) as view, own(view, extent, at, nbytes) as part:
            if checksum(part) != expected:
                raise DamagedError(errno.EIO, NO_MATCH)
            write_all(fd, part, offset + max(0, at - extent.head))

    def read_together(
        self, wanted: Sequence[tuple[Extent, Sequence[int]]]
    ) -> list[bytes | OSError]:
        """Read small values; what lies close together in an object, by one request."""
        layout = self._known()
        with self._lock:
            found = [layout.find(extent.runs) for extent, _ in wanted]
        spans = joined(itertools.chain.from_iterable(found), _GAP)
        contents: dict[Part, bytes | OSError] = {}
        under_way: deque[tuple[Part, Future[bytes]]] = deque()
        left = iter(dict.fromkeys(spans.values()))
        while True:
            for span in itertools.islice(left, _READ_AT_ONCE - len(under_way)):
                under_way.append((span, self._get(span)))
            if not under_way:
                break
            span, request = under_way.popleft()
            try:
                contents[span] = self._got(span, request)
            except OSError as error:
                contents[span] = error
        results: list[bytes | OSError] = []
        for (extent, [expected]), parts in zip(wanted, found, strict=True):
            try:
                read = [(part, _cut_out(part, spans[part], contents)) for part in parts]
                results.append(self._value(extent, expected, read))
            except OSError as error:
                results.append(error)
        return results

    def _value(self, extent: Extent, expected: int, read: Sequence[tuple[Part, bytes]]) -> bytes:
        content = self._content(extent.span, read)[extent.head : extent.head + extent.nbytes]
        if checksum(memoryview(content)) != expected:
            raise DamagedError(errno.EIO, NO_MATCH)
        return content

    @staticmethod
    def _content(nbytes: int, parts: Sequence[tuple[Part, bytes]]) -> bytes:
        if len(parts) == 1 and parts[0][0].nbytes == nbytes:
            return parts[0][1]
        content = bytearray(nbytes)
        for part, data in parts:
            content[part.to : part.to + part.nbytes] = data
        return bytes(content)

    def _get(self, part: Part) -> Future[bytes]:
        return self._bucket.get(f"{self.folder}/{part.name}", part.at, part.nbytes)

    def _got(self, part: Part, request: Future[bytes]) -> bytes:
        try:
            content = bytes(self._bucket.wait(request))
        except FileNotFoundError as error:
            raise DamagedError(errno.EIO, f"object {part.name} is gone") from error
        except OutOfRangeError as error:
            raise DamagedError(errno.EIO, f"object {part.name} has become shorter") from error
        if len(content) != part.nbytes:
            raise DamagedError(errno.EIO, f"object {part.name} has become shorter")
        return content

    # ---- what is in use -------------------------------------------------------------------

    def _known(self) -> Layout:
        """Which objects have what. Looks for those of an earlier life; raises OSError."""
        if self._layout is not None:
            return self._layout
        with self._looking:
            if self._layout is None:
                listed = map(ObjectName.parse, self._bucket.names(self.folder))
                layout = Layout()
                with self._lock:
                    for name in sorted(one for one in listed if one is not None):
                        self._forget(layout.write(name))
                    if self._kept is not None:
                        self._forget(layout.keep_only(self._kept))
                    self._forget(layout.free(self._freed))
                    self._layout = layout
        return self._layout

    def free(self, runs: Iterable[tuple[int, int]]) -> None:
        """See ``threads.FreeingDevice.free``."""
        with self._lock:
            if self._layout is None:
                self._freed += runs
            else:
                self._forget(self._layout.free(runs))

    def keep_only(self, runs: Iterable[tuple[int, int]]) -> None:
        """See ``threads.FreeingDevice.keep_only``."""
        with self._lock:
            if self._layout is None:
                self._kept = list(runs)
            else:
                self._forget(self._layout.keep_only(runs))

    def _forget(self, names: Iterable[ObjectName]) -> None:
        self._unused.extend(map(str, names))

    def cut(self, start: int) -> None:
        """Nothing: what is not in use is deleted when that is said."""

    def tidy(self) -> None:
        """Delete objects that are not in use, and what dead stores have left. Raises OSError."""
        if not self._is_swept:
            self._is_swept = True
            self._sweep()
        self._known()
        while self._unused:
            batch: list[str] = []
            with contextlib.suppress(IndexError):  # another thread does the same
                while len(batch) < _BATCH:
                    batch.append(self._unused.popleft())
            try:
                self._bucket.delete(self.folder, batch)
            except OSError:
                self._unused.extend(batch)
                raise

    def _sweep(self) -> None:
        """Delete what stores have left that were killed together with their keepers."""
        try:
            for name in self._bucket.names():
                if _is_abandoned(name):
                    log.info("deleting what a store has left: %s/%s", self.directory, name)
                    self._delete_folder(name, self._bucket.names(name))
        except OSError as error:
            log.info("cannot look for what stores have left: %s", error.strerror)

    def _delete_folder(self, folder: str, names: Sequence[str]) -> None:
        self._bucket.delete(folder, names)
        self._bucket.remove_folder(folder)

    def _left_names(self) -> list[str]:
        """Of objects of this store that it does not know, because a request came late."""
        try:
            return self._bucket.names(self.folder)
        except OSError as error:  # not everybody who may store objects may list them
            if self._layout is None:
                raise
            log.info("cannot list what is in %s: %s", self.directory, error.strerror)
            return []

    # ---- ends -----------------------------------------------------------------------------

    def stop(self) -> None:
        """Have reads and writes that are under way, or are to come, fail soon."""
        self._is_stopped = True
        if self._opened is not None:
            self._opened.stop()

    def go_on(self) -> None:
        """Nothing is under way that was stopped: read and write again."""
        self._is_stopped = False
        if self._opened is not None:
            self._opened.go_on()

    def leave(self) -> None:
        """Another life of this server needs the objects: :meth:`close` is to leave them."""
        self._ends = False

    def close(self) -> None:
        """Delete all objects, as far as that is possible in some seconds."""
        if not self._ends:
            return
        self.go_on()
        timer = threading.Timer(URL_END_S, self.stop)
        timer.daemon = True
        timer.start()
        try:
            self._bucket.settle()
            if self._layout is not None:  # to list them all may take long
                known = [*map(str, self._layout.names), *self._unused]
                self._bucket.delete(self.folder, known)
            self._delete_folder(self.folder, self._left_names())
        except OSError as error:
            log.warning(
                "objects are left at %s/%s, for the next store of this host that spills there to "
                "delete: %s",
                self.directory,
                self.folder,
                f"not within {URL_END_S:.0f} s" if self._is_stopped else error.strerror,
            )
        finally:
            timer.cancel()
            self.stop()


class _Requests:
    """Objects that are being stored, a few at a time, for one order.

    Args:
        objects: whose they are.
    """

    def __init__(self, objects: SpillObjects) -> None:
        self._objects = objects
        self._layout = objects._known()
        self._under_way: deque[tuple[ObjectName, Future[Any]]] = deque()

    def __enter__(self) -> _Requests:
        failed = self._objects._failed
        if failed is not None and moments.monotonic() < failed[0] + _PAUSE_S:
            raise OSError(failed[1].errno, failed[1].strerror)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            while self._under_way and kind is None:
                self._end()
        finally:
            while self._under_way:
                name, request = self._under_way.popleft()
                if not self._objects._is_stopped:  # then what ends the store waits for it
                    request.cancel()
                self._objects._forget([name])  # it may be stored all the same

    def put(self, extent: Extent, at: int, content: bytes) -> None:
        """Begin to store whole pages of a value, from position ``at`` of its extent."""
        done = 0
        for start, nbytes in extent.within(at, len(content)):
            if len(self._under_way) == _AT_ONCE:
                self._end()
            objects = self._objects
            name = ObjectName(objects._life, next(objects._numbers), start, nbytes)
            part = content[done : done + nbytes]
            self._under_way.append((name, objects._bucket.put(f"{objects.folder}/{name}", part)))
            done += nbytes

    def _end(self) -> None:
        """Wait for the first of them."""
        objects = self._objects
        name, request = self._under_way.popleft()
        try:
            objects._bucket.wait(request)
        except OSError as error:
            objects._forget([name])  # as above
            if error.errno != errno.ECANCELED:
                objects._failed = moments.monotonic(), error
            raise
        with objects._lock:
            objects._forget(self._layout.write(name))


def _cut_out(part: Part, span: Part, contents: dict[Part, bytes | OSError]) -> bytes:
    """What was read of a part; raises why it was not."""
    there = contents[span]
    if isinstance(there, OSError):
        raise there
    return there[part.at - span.at : part.at - span.at + part.nbytes]


def _host() -> str:
    """What tells this host, since it was started, and its processes' pids from others."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        boot = ""
    return f"{boot.replace('-', '') or '0'}.{pid_namespace()}"


def _new_folder(owner: int) -> str:
    """The name of a folder for a store that ends with this process."""
    return f"torchstore-spill-{_host()}.{owner}.{started(owner)}.{secrets.token_hex(8)}"


def _is_abandoned(folder: str) -> bool:
    """Whether a name is that of a folder whose store's process was here, and is gone."""
    found = _FOLDER.fullmatch(folder)
    if found is None:
        return False
    boot, namespace, owner, then = found.groups()
    is_here = f"{boot}.{namespace}" == _host() and boot != "0" and namespace != "0"
    return is_here and start_time(int(owner)) != int(then)
