"""Private directories for sockets: one per running server, inside one per user."""

from __future__ import annotations

import contextlib
import fnmatch
import os
import shutil
import socket
import stat
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from torchstore_core.errors import ConfigurationError
from torchstore_core.machine.sockets.unix import OUT_OF_DESCRIPTORS

#: Types of file systems that keep their files in memory.
MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs", "devtmpfs")

#: Name of the control socket in a private directory.
CONTROL = "control.sock"

_PRIVATE = 0o700
_STALE_AFTER_S = 10.0
# Whoever makes a directory binds a socket in it within seconds, even on a busy host.
_EMPTY_FOR_S = 600.0


class PrivateDirectory:
    """A directory (mode 0700) for the sockets of one server, relay or volume.

    Args:
        given: an existing directory to use, which :meth:`remove` leaves in place; None: create a
            new one.

    Raises:
        ConfigurationError: its path is no text; or see :func:`runtime_directory`.
    """

    def __init__(self, given: str | None = None) -> None:
        self._own = given is None
        if given is not None:
            self.path = Path(given).absolute()
            _check_text(self.path)
            return
        base = runtime_directory()
        _check_text(base)
        remove_stale(base)
        with explained():
            self.path = Path(tempfile.mkdtemp(dir=base))
            self.path.chmod(_PRIVATE)  # whatever the umask is

    @property
    def control(self) -> str:
        """The path of the control socket."""
        return str(self.path / CONTROL)

    def remove_dead(self) -> None:
        """Remove sockets at which nobody listens any more, because their process was killed. The
        control socket stays.
        """
        for path in self.path.glob("*.sock"):
            if path.name != CONTROL and path.is_socket() and is_abandoned(path):
                with contextlib.suppress(OSError):
                    path.unlink()

    def remove(self) -> None:
        """Remove the directory if it was created by this object. Idempotent."""
        if self._own:
            shutil.rmtree(self.path, ignore_errors=True)


def make_again(directory: str) -> None:
    """Make the directory of a server again if somebody has removed it, as programs do that clean up
    temporary files, and systems when a user's last session ends. One that was given to the server
    is not for it to make.

    Raises:
        OSError, ConfigurationError: that is not possible, now.
    """
    path = Path(directory)
    if not path.exists() and path.parent == runtime_directory():
        path.mkdir(mode=_PRIVATE)
        path.chmod(_PRIVATE)


def runtime_directory() -> Path:
    """Return the directory of this user (mode 0700) that holds one directory per running server.

    Raises:
        ConfigurationError: it belongs to another user, other users have access to it, this
            process has none, or it cannot be made.
    """
    with explained():
        path = _made_directory()
        info = path.lstat()
    if info.st_uid != os.getuid() or stat.S_IMODE(info.st_mode) & 0o077 or path.is_symlink():
        raise ConfigurationError(
            f"{path} must be a directory of yours with mode 0700; remove it or set XDG_RUNTIME_DIR"
        )
    if not os.access(path, os.R_OK | os.X_OK):  # in a user namespace, all strangers look like one
        raise ConfigurationError(
            f"this process may not look into {path}, where the sockets of stores are; set "
            "XDG_RUNTIME_DIR to another directory"
        )
    return path


def _check_text(path: Path) -> None:
    """Check that a path can be a part of an address, which is text."""
    try:
        str(path).encode()
    except UnicodeEncodeError as error:
        raise ConfigurationError(
            f"{str(path)!a} cannot hold the sockets of a store: in the encoding of this process "
            f"({sys.getfilesystemencoding()}) it is no text, which addresses are. Set "
            "XDG_RUNTIME_DIR to another directory, or PYTHONUTF8=1 if its name is UTF-8"
        ) from error


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Say what to do if the block cannot make the place for a socket, or the socket.

    Raises:
        ConfigurationError: there is no room, or no right to, for example.
        OSError: there is no file descriptor left.
    """
    try:
        yield
    except OSError as error:
        if error.errno in OUT_OF_DESCRIPTORS:
            raise
        raise ConfigurationError(
            f"there is no place for the sockets of stores: {error}. Set XDG_RUNTIME_DIR or TMPDIR "
            "to a directory where this process may make another one"
        ) from error


def _made_directory() -> Path:
    # Relative ones, which the standard says to ignore, would lead each process somewhere else.
    base = os.environ.get("XDG_RUNTIME_DIR", "")
    if os.path.isabs(base) and os.path.isdir(base) and os.access(base, os.W_OK):
        path = Path(base) / "torchstore"
    else:
        path = Path(tempfile.gettempdir()).absolute() / f"torchstore-{os.getuid()}"
    if len(os.fsencode(path)) > 70:  # a Unix socket's path has at most 107 bytes
        path = Path("/tmp") / f"torchstore-{os.getuid()}"  # noqa: S108 - checked just below
    try:
        path.mkdir(mode=_PRIVATE, parents=True)
    except FileExistsError:
        if not path.is_dir():
            raise
        return path
    path.chmod(_PRIVATE)  # the umask may have taken more away than the rights of others
    return path


def find_files(base: Path, pattern: str) -> list[Path]:
    """Return the files in the directories in ``base`` whose names match ``pattern`` (as in
    :mod:`fnmatch`), sorted. Skips directories that vanish meanwhile because their server ends.
    """
    found: list[Path] = []
    for folder in base.iterdir():
        with contextlib.suppress(OSError):
            found += [folder / name for name in fnmatch.filter(os.listdir(folder), pattern)]
    return sorted(found)


def remove_stale(base: Path) -> None:
    """Remove directories of servers that were killed: their sockets refuse connections, or they
    were killed before there was one, and their directories have been empty for ten minutes.
    """
    for path in base.iterdir():
        control = path / CONTROL
        try:
            age = _age(control)
        except OSError:  # there is none; what lies here may also be no directory at all
            _remove_empty(path)
            continue
        # A server that has just started may have bound it without listening yet.
        if age >= _STALE_AFTER_S and is_abandoned(control):
            shutil.rmtree(path, ignore_errors=True)


def _remove_empty(path: Path) -> None:
    with contextlib.suppress(OSError):  # it is not empty, or gone
        if _age(path) >= _EMPTY_FOR_S:
            path.rmdir()


def _age(path: Path) -> float:
    """For how many seconds a file has been as it is; if the clock was set back since, for how many
    it was, or it would count as new until the clock has come that far again.
    """
    return abs(time.time() - path.stat().st_mtime)


def is_abandoned(path: str | Path) -> bool:
    """Return whether a Unix socket is there at which nobody listens any more. A listener that is
    busy does, and a socket file that was removed is not there.
    """
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
    return False


def file_system(directory: str) -> str:
    """The type of the file system that a directory is in, such as ``ext4``; empty if it is not
    known.
    """
    device = os.stat(directory).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return ""
    for line in lines:
        mount, _, rest = line.partition(" - ")
        if mount.split()[2] == wanted:
            return rest.split()[0]
    return ""
