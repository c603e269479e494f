"""The data files of a snapshot while it is read, and the errors for those that are damaged."""

from __future__ import annotations

import errno
import mmap
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import NamedTuple, Protocol, TypeVar

from torchstore_core.errors import TorchStoreError
from torchstore_snapshot.errors import (
    SnapshotCorruptError,
    SnapshotNotFoundError,
    SnapshotReplacedError,
)
from torchstore_snapshot.format.manifest import Manifest, Piece
from torchstore_snapshot.restoring.mappings import MappedFile
from torchstore_snapshot.storage.base import Maps, Reader, Storage
from torchstore_snapshot.storage.opening import read_manifest

__all__ = ["Files", "Rows", "adjacent"]

P = TypeVar("P", bound="_Part")

# From this share of a file on, all of it may be read ahead.
_MOST = 0.9


class Rows(NamedTuple):
    """Which parts of a range of bytes are needed: the first ``nbytes`` of each ``stride``."""

    nbytes: int
    stride: int

    @property
    def apart(self) -> bool:
        """Whether each part is read on its own: more than a page lies between two."""
        return self.stride - self.nbytes > mmap.PAGESIZE


class Files:
    """The data files of a snapshot, opened when they are first needed. A context manager."""

    def __init__(self, storage: Storage, manifest: Manifest) -> None:
        self._storage = storage
        self._manifest = manifest
        self._open: dict[int, Reader] = {}
        self._mapped: dict[int, MappedFile | None] = {}

    def __enter__(self) -> Files:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._mapped.clear()
        for reader in self._open.values():
            reader.close()

    @property
    def url(self) -> str:
        """Where the snapshot is."""
        return self._storage.url

    @property
    def gap(self) -> int:
        """Bytes between two ranges up to which one request for both costs less than two: a request
        costs as much as to read :attr:`.Storage.request_size` bytes.
        """
        return self._storage.request_size - 1

    @property
    def remote(self) -> bool:
        """Whether requests are so expensive that there should be few."""
        return self._storage.request_size > 1

    def reader(self, index: int) -> Reader:
        """Return a file.

        Raises:
            SnapshotCorruptError: it is missing, or its size is not the one in the manifest.
        """
        found = self._open.get(index)
        if found is not None:
            return found
        file = self._manifest.files[index]
        try:
            reader = self._storage_of(index).open(file.name)
        except FileNotFoundError as error:
            gone = error.errno in (None, errno.ENOENT)
            what = "is missing" if gone else f"is no file ({error.strerror})"
            raise self.corrupt(index, what) from error
        if reader.nbytes != file.nbytes:
            reader.close()
            raise self.corrupt(index, f"has {reader.nbytes} bytes instead of {file.nbytes}")
        self._open[index] = reader
        return reader

    def request_size(self, index: int) -> int:
        """Return how many bytes one request for a part of a file should have at least."""
        return self._storage_of(index).request_size

    def block(self, index: int) -> int:
        """Return the bytes of a block of the hashes of a file's pieces."""
        return self._manifest.files[index].block

    def _storage_of(self, index: int) -> Storage:
        folder = self._manifest.files[index].snapshot
        return self._storage.sibling(folder) if folder else self._storage

    def map(self, index: int, ranges: Sequence[tuple[int, int]] | None = None) -> None:
        """Map a file that :meth:`reader` has opened, if its storage can; nothing is read by that.
        Called by one thread at a time.

        Args:
            ranges: the first byte and the end of each range of which everything will be read, in
                order and without overlaps; None: all of the file.
        """
        if index in self._mapped:
            return
        reader = self.reader(index)
        self._mapped[index] = None
        if isinstance(reader, Maps) and reader.nbytes:
            try:
                whole = reader.map()
            except OSError:  # no address space, or a file system that cannot: it is read instead
                return
            if sum(end - begin for begin, end in ranges or ()) >= _MOST * reader.nbytes:
                ranges = None
            self._mapped[index] = MappedFile(whole, ranges)

    def window(
        self, index: int, start: int, nbytes: int, rows: Rows | None = None
    ) -> memoryview | None:
        """Return a range of a mapped file; None if the file is not mapped, or not all of the range
        can be read (then reading it says why).

        Args:
            rows: which parts of it are needed; None: all of it. These are in memory when this
                returns; whether they still were when they were used says :meth:`check_kept`.
        """
        mapped = self._mapped.get(index)
        if mapped is None or not nbytes:
            return None
        if not all(mapped.populate(*each) for each in _needed(start, nbytes, rows)):
            return None
        return mapped.memory[start : start + nbytes]

    def check_kept(self, index: int, path: str | None = None) -> None:
        """Find out whether what was used of a file's windows were its bytes. Called after that, and
        before anybody relies on it.

        Raises:
            SnapshotCorruptError: the file was truncated meanwhile, or its disk has failed.
        """
        mapped = self._mapped.get(index)
        if mapped is not None and mapped.lost:
            raise self.corrupt(index, "became shorter while it was read, or its disk failed", path)

    def corrupt(self, index: int, what: str, path: str | None = None) -> SnapshotCorruptError:
        """Return the error for a damaged file, unless it is one of a snapshot that is there no
        longer; ``path`` is the tensor concerned.
        """
        name = self._manifest.files[index].name
        replaced = self.replaced(name, what, path)
        if replaced is not None:
            return replaced
        return SnapshotCorruptError(
            f"the snapshot {self._storage.url!r} is damaged: {name!r} {what}; restore another "
            "snapshot",
            key=path,
            details={"path": self._storage.url, "file": name},
        )

    def replaced(
        self, name: str, what: str, path: str | None = None
    ) -> SnapshotReplacedError | None:
        """Return the error for a file that is not as it was written because the snapshot is there
        no longer; None if it is.
        """
        if not self._replaced():
            return None
        return SnapshotReplacedError(
            f"the snapshot {self._storage.url!r} was replaced or removed since its manifest "
            f"was read: {name!r} {what}; open it again",
            key=path,
            details={"path": self._storage.url, "file": name},
        )

    def _replaced(self) -> bool:
        """Whether what is at the path is another snapshot, or none."""
        try:
            return read_manifest(self._storage).take != self._manifest.take
        except SnapshotNotFoundError:
            return True
        except (TorchStoreError, OSError):
            return False

    def damaged(self, piece: Piece, path: str) -> SnapshotCorruptError:
        """Return the error for a piece whose hash is wrong."""
        return self.corrupt(piece.file, f"has other bytes of {path!r} than were written", path)


class _Part(Protocol):
    @property
    def file(self) -> int: ...

    @property
    def start(self) -> int: ...

    @property
    def end(self) -> int: ...


def adjacent(parts: Sequence[P]) -> Iterator[Sequence[P]]:
    """Divide parts of files into groups that touch each other: there is one window for each group,
    since every window is a call of the kernel.
    """
    first = 0
    for at in range(1, len(parts)):
        last, part = parts[at - 1], parts[at]
        if part.start != last.end or part.file != last.file:
            yield parts[first:at]
            first = at
    if parts:
        yield parts[first:]


def _needed(start: int, nbytes: int, rows: Rows | None) -> Iterator[tuple[int, int]]:
    """The first byte and the end of what has to be read of a range."""
    if rows is None or not rows.apart:
        yield start, start + nbytes
        return
    for begin in range(start, start + nbytes, rows.stride):
        yield begin, min(begin + rows.nbytes, start + nbytes)
