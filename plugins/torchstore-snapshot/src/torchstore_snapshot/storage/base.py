"""The contract between snapshots and what stores them. No logic.

A :class:`Storage` is one folder of files, without folders in it. All calls block, and may be made
by any thread. Errors of the storage itself (a full disk, no permission, no network) are OSError.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol, runtime_checkable

from torchstore_core.machine.bus_errors import Guard

__all__ = [
    "FileInfo",
    "First",
    "Gathers",
    "KeepsUnfinished",
    "Mapping",
    "Maps",
    "Reader",
    "Storage",
]
__all__ += ["Writer"]


class FileInfo(NamedTuple):
    """A file: its name, its size in bytes, and when it was last changed (seconds since the
    epoch).
    """

    name: str
    nbytes: int
    modified: float


class Writer(Protocol):
    """A new file that is being written. Invisible to readers of the snapshot, because no manifest
    names it yet.
    """

    @property
    def random_access(self) -> bool:
        """Whether several threads may write different ranges, in any order. Otherwise, one thread
        writes everything from the beginning to the end.
        """

    def write(self, offset: int, data: Any) -> None:
        """Write all of ``data``, a contiguous buffer of bytes, at ``offset``."""

    def close(self, *, durable: bool) -> None:
        """Finish the file; with ``durable``, return only when it would survive a power failure.
        Must be called by one thread, once.
        """

    def abort(self) -> None:
        """Give the file up, and remove it if possible. Never raises; does nothing after
        :meth:`close`.
        """


class Reader(Protocol):
    """An open file."""

    @property
    def nbytes(self) -> int:
        """The size of the file."""

    def read_into(self, offset: int, buffer: Any) -> None:
        """Fill ``buffer``, a contiguous writable buffer, from ``offset`` on.

        Raises:
            EOFError: the file ends before that.
        """

    def close(self) -> None:
        """Release the file. Idempotent."""


@runtime_checkable
class Gathers(Protocol):
    """An optional ability of a :class:`Writer`."""

    def write_parts(self, offset: int, parts: Sequence[Any]) -> None:
        """Write contiguous buffers of bytes, one after the other, at ``offset``, in one request if
        possible.
        """


class Mapping(NamedTuple):
    """A mapped file.

    Args:
        memory: a writable buffer with private memory that shows the file, also after it was closed.
            It is unmapped when nothing refers to it any more.
        guard: says whether zeros were read in the place of what could not be read.
    """

    memory: memoryview
    guard: Guard


@runtime_checkable
class Maps(Protocol):
    """An optional ability of a :class:`Reader`."""

    def map(self) -> Mapping:
        """Return the file, which is not empty, in memory. Only what is accessed is read.

        Raises:
            OSError: it cannot be mapped; it can be read.
        """


@runtime_checkable
class KeepsUnfinished(Protocol):
    """An optional ability of a :class:`Storage`: files that were never finished occupy space,
    though :meth:`Storage.list` does not show them.
    """

    def unfinished(self) -> Sequence[FileInfo]:
        """Return the unfinished files of the folder. Sizes are 0 where they are unknown."""

    def discard_unfinished(self, name: str) -> None:
        """Give up all unfinished files of a name. Does nothing if there is none."""


#: Publishes a file in a folder, given how many folders had to be made. It may be called again.
First = Callable[["Storage", int], None]


class Storage(Protocol):
    """A folder of files."""

    @property
    def url(self) -> str:
        """The address by which :func:`~torchstore_snapshot.storage.opening.open_storage` opens it
        again.
        """

    @property
    def request_size(self) -> int:
        """Bytes that take as long to read as it takes to ask for them, so that one request should
        have at least as many: ranges that are closer to each other are read together, with what is
        between them, and others are not. 1 for local files, whose requests cost next to nothing.
        """

    @property
    def replaces(self) -> bool:
        """Whether :meth:`publish` can replace a file in one step, so that readers, also after a
        crash, see either the one before or the new one.
        """

    def prepare(self, *, durable: bool, first: First | None = None) -> int:
        """Make the folder if there is none; return how many had to be made, with those above it.

        Args:
            durable: the folders above it that had to be made would survive a power failure when
                this returns. The folder itself does when something in it was published, or flushed.
            first: puts the first file into it. Where folders can be renamed, one that had to be
                made is seen only with that file in it.

        Raises:
            NotAtomicError: :meth:`publish` could not work here. No folder was made.
        """

    def create(self, name: str, nbytes: int) -> Writer:
        """Begin a new file of ``nbytes`` bytes. The name is not in use."""

    def open(self, name: str) -> Reader:
        """Open a file.

        Raises:
            FileNotFoundError: there is none.
        """

    def read(self, name: str) -> bytes:
        """Return everything in a file.

        Raises:
            FileNotFoundError: there is none.
        """

    def read_start(self, name: str, nbytes: int) -> bytes:
        """Return the first ``nbytes`` bytes of a file, or all of it if it has fewer.

        Raises:
            FileNotFoundError: there is none.
        """

    def flush(self, names: Sequence[str]) -> None:
        """Return when finished files, which another take may have written without waiting for it,
        would survive a power failure.
        """

    def list(self) -> Sequence[FileInfo]:
        """Return all files; none if there is no folder."""

    def is_folder(self, name: str) -> bool:
        """Whether there is a folder of a name, so that no file can be published under it."""

    def publish(self, name: str, data: bytes, *, take: str, overwrite: bool, durable: bool) -> None:
        """Store a small file in one step: readers see either nothing (or the file before), or all
        of it. ``take`` is the id of the take, for the name of a temporary file. (A file that is
        replaced where :attr:`replaces` is False may be seen half.)

        Raises:
            FileExistsError: there is a file already, and ``overwrite`` is False. Of several callers
                at once, one succeeds.
            NotAtomicError: the storage cannot do this in one step.
        """

    def delete(self, name: str) -> None:
        """Remove a file. Does nothing if there is none."""

    def sibling(self, name: str) -> Storage:
        """Return the folder ``name`` beside this one."""

    def siblings(self) -> Sequence[str]:
        """Return the names of the folders beside this one, and its own if it exists."""

    def emptying(self) -> AbstractContextManager[None]:
        """While it lasts, everything in the folder may be removed; then the folder is removed, too,
        if there is nothing in it. If the process is killed meanwhile, a temporary folder beside it,
        with its name, tells ``gc`` that it may be empty. (Only on the local file system.)
        """

    def remove_if_empty(self, folders: int = 1) -> None:
        """Remove the folder if there is nothing in it, and if the storage has empty folders.

        Args:
            folders: how many are removed, the folder and those above it, up to the first one in
                which there is something.
        """
