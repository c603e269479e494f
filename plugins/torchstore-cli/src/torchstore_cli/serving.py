"""``torchstore serve``: runs a server in the foreground. Torch-free."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from torchstore_cli.reports import Serving
from torchstore_core.errors import ConfigurationError, StoreClosedError, from_wire
from torchstore_core.machine.directories import PrivateDirectory, is_abandoned
from torchstore_core.server.__main__ import keep, run
from torchstore_core.server.memory.volume import default_capacity
from torchstore_core.server.server import Ready, ServerOptions

__all__ = ["serve"]

# A Unix socket's path has at most 107 bytes, and a transport's socket in the directory may need 26.
_LONGEST_DIRECTORY = 80
# How long the server of a command that was killed may take to notice that, and to end.
_END_S = 1.0
_POLL_S = 0.02


def serve(
    options: ServerOptions, ready: Callable[[Serving], None], *, keeper: bool = False
) -> None:
    """Run a server until SIGTERM or SIGINT.

    Args:
        options: the options of the server.
        ready: called when clients can connect.
        keeper: run it in a process of its own, which this one starts again if it dies.

    Raises:
        TorchStoreError: the server could not start, or its keeper has given up.
    """
    capacity = default_capacity() if options.capacity is None else options.capacity
    outcome: dict[str, str | int] = {}

    def started(said: Ready | dict[str, str] | dict[str, str | int]) -> None:
        outcome.update(msgspec.to_builtins(said))
        if "error" in outcome:
            return
        report = Serving(
            address=str(outcome["address"]),
            pid=int(outcome["pid"]),
            store_name=options.store_name,
            num_storage_volumes=options.num_storage_volumes,
            capacity_bytes=capacity,
            strategy=options.strategy,
        )
        with suppress(OSError):  # nobody reads the output, but the store is up all the same
            ready(report)

    with _directory(options.directory):
        status = keep(options, started) if keeper else run(options, started)
    if "error" in outcome:
        raise from_wire(str(outcome["error"]), str(outcome["message"]), None, {})
    if status:
        failed = "died too often, and was given up" if outcome else "ended while starting"
        raise StoreClosedError(f"the server {failed}; its log says why")


@contextmanager
def _directory(name: str | None) -> Iterator[None]:
    """Create the user's directory for the sockets if it is missing; leave it as it was found."""
    if name is None:
        yield
        return
    path = Path(name).absolute()
    if len(os.fsencode(path)) > _LONGEST_DIRECTORY:
        raise ConfigurationError(
            f"{path} is too long for the path of a socket (at most {_LONGEST_DIRECTORY} bytes)"
        )
    made = not path.exists()
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        info = path.stat()
    except OSError as error:
        raise _unusable(name, error) from error
    if info.st_uid != os.getuid() or info.st_mode & 0o022:
        raise ConfigurationError(f"{name} must be yours, and nobody else may write to it")
    control = path / "control.sock"
    until = time.monotonic() + _END_S
    while (listening := _is_listening(control)) and time.monotonic() < until:
        time.sleep(_POLL_S)
    if listening:
        raise ConfigurationError(f"a store is running in {name} already")
    try:
        _check_sockets(path)
        yield
    finally:
        control.unlink(missing_ok=True)
        PrivateDirectory(name).remove_dead()  # of a server that was killed
        if made and not any(path.iterdir()):
            path.rmdir()


def _check_sockets(path: Path) -> None:
    """Make a socket in a directory, and remove it. Not every file system has sockets: ``/proc`` has
    none, some network and FUSE mounts have none, and others are mounted read-only.

    Raises:
        ConfigurationError: that is not possible.
    """
    trial = path / f"try-{os.getpid()}.sock"
    try:
        with socket.socket(socket.AF_UNIX) as unbound:
            unbound.bind(str(trial))
        trial.unlink()
    except OSError as error:
        raise _unusable(str(path), error) from error


def _unusable(name: str, error: OSError) -> ConfigurationError:
    why = os.strerror(error.errno or 0)
    return ConfigurationError(
        f"cannot make sockets in {name}: {why}. Give --directory one where this user may make "
        "files and sockets, such as a directory in $XDG_RUNTIME_DIR or /tmp, or leave it out"
    )


def _is_listening(path: Path) -> bool:
    return path.exists() and not is_abandoned(path)
