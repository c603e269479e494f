"""Snapshots in a folder of the local file system, or of one that is mounted."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

from torchstore_snapshot.errors import ForeignFileError, NotAtomicError
from torchstore_snapshot.format.paths import new_take_id, temporary
from torchstore_snapshot.storage.base import FileInfo, First, Mapping
from torchstore_snapshot.storage.descriptors import NO_FILE, OpenForReading
from torchstore_snapshot.storage.mapping import map_file
from torchstore_snapshot.storage.naming import naming_local, naming_written

__all__ = ["LocalReader", "LocalStorage", "LocalWriter", "make_folders"]

P = ParamSpec("P")
T = TypeVar("T")

# What file systems and kernels answer that do not know a call, or a flag of it.
_UNSUPPORTED = {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTTY}
# The kernel's limit for one request.
_PARTS_MAX = 1024
_AT_FDCWD = -100
_RENAME_NOREPLACE = 1
# Where fsck puts what it finds; nobody but root may look into it.
_NO_SNAPSHOTS = {"lost+found"}


class LocalWriter:
    """A new file. Any number of threads write to it.

    Args:
        path: where it is while it is written.
        nbytes: its size.
        final: where it will be, for errors; None: where it is.
    """

    random_access = True

    def __init__(self, path: str, nbytes: int, final: str | None = None) -> None:
        self._path = path
        self._naming = functools.partial(naming_written, final or path, nbytes)
        with self._naming():
            self._file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o666)
            try:
                os.ftruncate(self._file, nbytes)
            except OSError:
                self.abort()
                raise

    def write(self, offset: int, data: Any) -> None:
        rest = memoryview(data)
        with self._naming():
            while rest.nbytes:
                written = os.pwrite(self._file, rest, offset)
                offset += written
                rest = rest[written:]

    def write_parts(self, offset: int, parts: Sequence[Any]) -> None:
        for start in range(0, len(parts), _PARTS_MAX):
            some = parts[start : start + _PARTS_MAX]
            with self._naming():
                written = os.pwritev(self._file, some, offset)
            for part in some:
                nbytes = memoryview(part).nbytes
                if written < nbytes:  # of a full disk, or a huge request, not everything is written
                    self.write(offset + written, memoryview(part)[written:])
                offset += nbytes
                written = max(written - nbytes, 0)

    def close(self, *, durable: bool) -> None:
        with self._naming():
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
    """A file that is read; see :class:`.OpenForReading`. Mappings of it need no open file."""

    def __init__(self, path: str) -> None:
        self._file = OpenForReading(path)

    @property
    def nbytes(self) -> int:
        return self._file.nbytes

    def read_into(self, offset: int, buffer: Any) -> None:
        rest = memoryview(buffer)
        with self._file.opened() as file:
            while rest.nbytes:
                count = os.preadv(file, [rest], offset)
                if count == 0:
                    raise EOFError(f"the file ends {rest.nbytes} bytes too early")
                offset += count
                rest = rest[count:]

    def map(self) -> Mapping:
        with self._file.opened() as file:
            return map_file(file, self.nbytes)

    def close(self) -> None:
        self._file.close()


def _named(
    call: Callable[Concatenate[LocalStorage, P], T],
) -> Callable[Concatenate[LocalStorage, P], T]:
    """Let a method raise the errors of this package; see :func:`.naming_local`."""

    @functools.wraps(call)
    def named(self: LocalStorage, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with naming_local(self._path):
            return call(self, *args, **kwargs)

    return named


class LocalStorage:
    """A folder.

    Args:
        path: its path. :meth:`prepare` makes it, and the folders above it.
    """

    request_size = 1

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = os.path.abspath(path)
        self._link: str | None = None

    @classmethod
    def named(cls, path: str | os.PathLike[str]) -> LocalStorage:
        """Return the folder that a path names. A link, such as ``latest``, is another name of a
        folder; what is beside the snapshot there is beside that folder.
        """
        storage = cls(path)
        if os.path.islink(storage._path) and os.path.isdir(storage._path):
            storage._link, storage._path = storage._path, os.path.realpath(storage._path)
        return storage

    @property
    def url(self) -> str:
        return self._path

    @property
    def replaces(self) -> bool:
        return True

    @_named
    def prepare(self, *, durable: bool, first: First | None = None) -> int:
        new = not os.path.isdir(self._path)
        above = make_folders(os.path.dirname(self._path))
        made = len(above) + new
        try:
            if durable:  # publish() flushes the entry of the folder itself
                for folder in above:
                    _flush(os.path.dirname(folder))
            if new and first is not None and self._appear(first, made):
                return made
            make_folders(self._path)
            self._try_publishing()
            if first is not None:
                first(self, made)
        except BaseException:
            self.remove_if_empty(made)
            raise
        return made

    def _appear(self, first: First, made: int) -> bool:
        """Make the folder with its first file in it, in one step; return whether that was possible.
        It is not if others have just made it, or on file systems that cannot rename folders.
        """
        parent, name = os.path.split(self._path)
        whole = LocalStorage(os.path.join(parent, temporary(name, new_take_id())))
        try:
            os.mkdir(whole._path)
            whole._try_publishing()
            first(whole, made)
            os.rename(whole._path, self._path)  # which replaces an empty folder, and no other
        except BaseException as error:
            with contextlib.suppress(OSError):
                for info in whole.list():
                    whole.delete(info.name)
                whole.remove_if_empty()
            if not isinstance(error, OSError):
                raise
            return False
        return True

    def _try_publishing(self) -> None:
        """Find out before anything is written whether a file can be renamed unless its new name is
        in use: some file systems know neither that nor hard links.
        """
        take = new_take_id()
        one, other = (self._in(temporary("try", take)) for _ in "ab")
        os.close(os.open(one, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o666))
        try:
            _rename_new(one, other)
        finally:
            for name in (one, other):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name)

    @_named
    def create(self, name: str, nbytes: int) -> LocalWriter:
        return LocalWriter(self._in(name), nbytes)

    @_named
    def open(self, name: str) -> LocalReader:
        return LocalReader(self._in(name))

    @_named
    def read(self, name: str) -> bytes:
        return _contents(self._in(name))

    @_named
    def read_start(self, name: str, nbytes: int) -> bytes:
        return _contents(self._in(name), nbytes)

    def flush(self, names: Sequence[str]) -> None:
        for name in names:
            _flush(self._in(name))
        _flush(self._path)
        _flush(os.path.dirname(self._path))

    @_named
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
        except NotADirectoryError as error:
            raise _no_folder(self._path) from error
        return found

    def is_folder(self, name: str) -> bool:
        path = self._in(name)
        return os.path.isdir(path) and not os.path.islink(path)

    @_named
    def publish(self, name: str, data: bytes, *, take: str, overwrite: bool, durable: bool) -> None:
        whole = self._in(temporary(name, take))
        writer: LocalWriter | None = None
        try:
            writer = LocalWriter(whole, len(data), self._in(name))
            writer.write(0, data)
            writer.close(durable=durable)
            if durable:
                # The entries of the data files, and that of the folder, must not appear later.
                _flush(self._path)
                _flush(os.path.dirname(self._path))
            if overwrite:
                os.rename(whole, self._in(name))
            else:
                _rename_new(whole, self._in(name))
            if durable:
                _flush(self._path)
        except BaseException:
            if writer is not None:
                writer.abort()
            with contextlib.suppress(OSError):
                os.unlink(whole)
            raise

    @_named
    def delete(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._in(name))

    def sibling(self, name: str) -> LocalStorage:
        path = os.path.join(os.path.dirname(self._path), name)
        if self._link is not None and not os.path.isdir(path):
            # Somebody has moved the folder, and left a link where it was, beside the others.
            left = os.path.join(os.path.dirname(self._link), name)
            path = left if os.path.isdir(left) else path
        return LocalStorage(path)

    @_named
    def siblings(self) -> Sequence[str]:
        parent = os.path.dirname(self._path)
        try:
            with os.scandir(parent) as all_:
                # A link, such as `latest`, is another name of a folder, not another snapshot.
                folders = [entry.name for entry in all_ if entry.is_dir(follow_symlinks=False)]
        except FileNotFoundError:
            return []
        except NotADirectoryError as error:
            raise _no_folder(parent) from error
        return [name for name in folders if name not in _NO_SNAPSHOTS]

    @contextlib.contextmanager
    def emptying(self) -> Iterator[None]:
        parent, name = os.path.split(self._path)
        mark = os.path.join(parent, temporary(name, new_take_id()))
        with contextlib.suppress(OSError):  # there may be no room for it
            os.mkdir(mark)
        try:
            yield
            self.remove_if_empty()
        finally:
            with contextlib.suppress(OSError):
                os.rmdir(mark)

    def remove_if_empty(self, folders: int = 1) -> None:
        path = self._path
        with contextlib.suppress(OSError):
            for _ in range(folders):
                with contextlib.suppress(FileNotFoundError):
                    os.rmdir(path)
                path = os.path.dirname(path)

    def _in(self, name: str) -> str:
        return os.path.join(self._path, name)


def _contents(path: str, nbytes: int = -1) -> bytes:
    """Read a file, or its start. What is there instead of a file, such as a folder, a pipe, a
    socket or a link to itself, has nothing in it, and nobody waits for it.
    """
    try:
        with open(path, "rb", opener=lambda p, flags: os.open(p, flags | os.O_NONBLOCK)) as file:
            return file.read(nbytes) or b""
    except OSError as error:
        if error.errno not in {errno.EISDIR, *NO_FILE}:
            raise
        return b""


def make_folders(path: str) -> list[str]:
    """Make a folder, and those above it; return the paths of those that had to be made, its own
    first.
    """
    while True:
        made: list[str] = []
        above = path
        while not os.path.isdir(above):
            made.append(above)
            above = os.path.dirname(above)
        try:
            os.makedirs(path, exist_ok=True)
        except BaseException as error:
            LocalStorage(path).remove_if_empty(len(made))
            if not isinstance(error, FileExistsError | NotADirectoryError):
                raise
            if any(os.path.lexists(each) and not os.path.isdir(each) for each in (path, above)):
                raise _no_folder(path) from error
            continue  # it was there, and a take that failed has just removed it
        return made


def _no_folder(path: str) -> ForeignFileError:
    while not os.path.lexists(path):
        path = os.path.dirname(path)
    return ForeignFileError(
        f"there is a file at {path!r}, where a folder of snapshots would be; move it away, or give "
        "another path",
        details={"path": path, "file": os.path.basename(path)},
    )


def _flush(path: str) -> None:
    """Return when a file, or what a folder lists, would survive a power failure."""
    with naming_written(path):
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(file)
        except OSError as error:
            # Some file systems cannot flush folders: they cannot lose what is in them otherwise.
            if error.errno not in _UNSUPPORTED or not os.path.isdir(path):
                raise
        finally:
            os.close(file)


def _rename_new(old: str, new: str) -> None:
    """Rename a file in one step, unless there is a file of the new name.

    Raises:
        FileExistsError: there is.
        NotAtomicError: the file system can neither do this nor make hard links.
    """
    if _renameat2 is not None:
        ends = os.fsencode(old), os.fsencode(new)
        if _renameat2(_AT_FDCWD, ends[0], _AT_FDCWD, ends[1], _RENAME_NOREPLACE) == 0:
            return
        code = ctypes.get_errno()
        if code not in _UNSUPPORTED:
            raise OSError(code, os.strerror(code), old, None, new)
    try:
        os.link(old, new)  # unlike a plain rename, it never replaces a file
    except OSError as error:
        if error.errno not in _UNSUPPORTED | {errno.EPERM, errno.EMLINK}:
            raise
        folder = os.path.dirname(new)
        raise NotAtomicError(
            f"the file system of {folder!r} has neither hard links nor renames that replace "
            "nothing, so a snapshot cannot become visible in one step there; take it elsewhere",
            details={"path": folder},
        ) from error
    os.unlink(old)


_renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
