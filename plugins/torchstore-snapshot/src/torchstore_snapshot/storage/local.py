"""Snapshots in a folder of the local file system, or of one that is mounted."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchstore_snapshot.format.paths import temporary
from torchstore_snapshot.storage.base import FileInfo

__all__ = ["LocalReader", "LocalStorage", "LocalWriter"]

# Fills the page tables of a mapping, without making private copies, and reports what cannot be read
# as an error, where an access would end the process by SIGBUS. Since Linux 5.14; EINVAL before.
_MADV_POPULATE_READ = 22


class LocalWriter:
    """A new file. Any number of threads write to it."""

    random_access = True

    def __init__(self, path: str, nbytes: int) -> None:
        self._path = path
        self._file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o666)
        try:
            os.ftruncate(self._file, nbytes)
        except OSError:
            self.abort()
            raise

    def write(self, offset: int, data: Any) -> None:
        rest = memoryview(data)
        while rest.nbytes:
            written = os.pwrite(self._file, rest, offset)
            offset += written
            rest = rest[written:]

    def close(self, *, durable: bool) -> None:
        try:
            if durable:
                os.fsync(self._file)
        finally:
            self._release()

    def abort(self) -> None:
        if self._file >= 0:
            self._release()
            with contextlib.suppress(OSError):
                os.unlink(self._path)

    def _release(self) -> None:
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)


class LocalReader:
    """An open file."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._nbytes = os.fstat(self._file).st_size

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def read_into(self, offset: int, buffer: Any) -> None:
        rest = memoryview(buffer)
        while rest.nbytes:
            count = os.preadv(self._file, [rest], offset)
            if count == 0:
                raise EOFError(f"the file ends {rest.nbytes} bytes too early")
            offset += count
            rest = rest[count:]

    def map(self, offset: int, nbytes: int, *, populate: bool) -> Any:
        start = offset - offset % mmap.ALLOCATIONGRANULARITY
        mapped = mmap.mmap(
            self._file,
            offset + nbytes - start,
            flags=mmap.MAP_PRIVATE,
            prot=mmap.PROT_READ | mmap.PROT_WRITE,
            offset=start,
        )
        if populate:
            mapped.madvise(_MADV_POPULATE_READ)
        return memoryview(mapped)[offset - start :]

    def close(self) -> None:
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)


class LocalStorage:
    """A folder.

    Args:
        path: its path. :meth:`prepare` makes it, and the folders above it.
    """

    request_size = 1

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = os.path.abspath(path)

    @property
    def url(self) -> str:
        return self._path

    def prepare(self) -> None:
        os.makedirs(self._path, exist_ok=True)

    def create(self, name: str, nbytes: int) -> LocalWriter:
        return LocalWriter(self._in(name), nbytes)

    def open(self, name: str) -> LocalReader:
        return LocalReader(self._in(name))

    def read(self, name: str) -> bytes:
        return Path(self._in(name)).read_bytes()

    def list(self) -> Sequence[FileInfo]:
        found: list[FileInfo] = []
        try:
            with os.scandir(self._path) as entries:
                for entry in entries:
                    with contextlib.suppress(FileNotFoundError):  # removed in the meantime
                        if entry.is_file(follow_symlinks=False):
                            stat = entry.stat(follow_symlinks=False)
                            found.append(FileInfo(entry.name, stat.st_size, stat.st_mtime))
        except FileNotFoundError:
            return []
        return found

    def publish(self, name: str, data: bytes, *, take: str, overwrite: bool, durable: bool) -> None:
        whole = self._in(temporary(name, take))
        writer = LocalWriter(whole, len(data))
        try:
            writer.write(0, data)
            writer.close(durable=durable)
            if durable:
                self._flush()  # the entries of the data files, which must not appear later
            if overwrite:
                os.rename(whole, self._in(name))
            else:
                os.link(whole, self._in(name))  # unlike a rename, it never replaces a file
                os.unlink(whole)
            if durable:
                self._flush()
        except BaseException:
            writer.abort()
            with contextlib.suppress(OSError):
                os.unlink(whole)
            raise

    def delete(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._in(name))

    def sibling(self, name: str) -> LocalStorage:
        return LocalStorage(os.path.join(os.path.dirname(self._path), name))

    def siblings(self) -> Sequence[str]:
        with (
            contextlib.suppress(FileNotFoundError),
            os.scandir(os.path.dirname(self._path)) as all_,
        ):
            # A link, such as `latest`, is another name of a folder, not another snapshot.
            return [entry.name for entry in all_ if entry.is_dir(follow_symlinks=False)]
        return []

    def remove_if_empty(self) -> None:
        with contextlib.suppress(OSError):
            os.rmdir(self._path)

    def _in(self, name: str) -> str:
        return os.path.join(self._path, name)

    def _flush(self) -> None:
        folder = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
