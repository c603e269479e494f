"""``torchstore serve``: runs a server in the foreground. Torch-free."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from torchstore_cli.reports import Serving
from torchstore_core.errors import ConfigurationError, StoreClosedError, from_wire
from torchstore_core.machine.directories import PrivateDirectory
from torchstore_core.server.__main__ import run
from torchstore_core.server.keeping.link import KEEPER
from torchstore_core.server.memory.volume import default_capacity
from torchstore_core.server.server import Ready, ServerOptions
from torchstore_core.server.serving.journal import LOG_LEVEL

__all__ = ["serve"]

# A Unix socket's path has at most 107 bytes, and a transport's socket in the directory may need 26.
_LONGEST_DIRECTORY = 80

_Outcome = Ready | dict[str, str]


def serve(
    options: ServerOptions, ready: Callable[[Serving], None], *, keeper: bool = False
) -> None:
    """Run a server until SIGTERM or SIGINT.

    Args:
        options: the options of the server.
        ready: called when clients can connect.
        keeper: run it in a process of its own, below a keeper that starts it again if it dies.

    Raises:
        TorchStoreError: the server could not start, or its keeper has given up.
    """
    capacity = default_capacity() if options.capacity is None else options.capacity
    failure: dict[str, str] = {}

    def started(outcome: _Outcome) -> None:
        if not isinstance(outcome, Ready):
            failure.update(outcome)
            return
        report = Serving(
            address=outcome.address,
            pid=outcome.pid,
            store_name=options.store_name,
            num_storage_volumes=options.num_storage_volumes,
            capacity_bytes=capacity,
            strategy=options.strategy,
        )
        with suppress(OSError):  # nobody reads the output, but the store is up all the same
            ready(report)

    with _directory(options.directory):
        if keeper:
            _keep(options, started)
        else:
            run(options, started)
    if failure:
        raise from_wire(failure["error"], failure["message"], None, {})


def _keep(options: ServerOptions, started: Callable[[_Outcome], None]) -> None:
    """Run a keeper, and with it a server, which both end with this process."""
    text = msgspec.json.encode(options).decode()
    # -P: the server must not import modules that happen to be in the current directory.
    server = [sys.executable, "-P", "-m", "torchstore_core.server", text]
    order = msgspec.json.encode({"command": server, "owner": os.getpid()}).decode()
    process: subprocess.Popen[bytes] | None = None
    is_stopping = False

    def stop(*_: object) -> None:
        nonlocal is_stopping
        is_stopping = True
        if process is not None:
            process.terminate()

    # In place before there is anything that a signal could leave behind.
    signals = signal.SIGTERM, signal.SIGINT
    before = [signal.signal(signum, stop) for signum in signals]
    try:
        # In a process session of its own, so that Ctrl-C comes here alone.
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", KEEPER, order],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            start_new_session=True,
            env={LOG_LEVEL: "INFO", **os.environ},
        )
        if is_stopping:
            process.terminate()
        if process.stdout is not None:
            with process.stdout as stream:
                line = stream.readline()
            if line:
                started(_outcome(line))
        status = process.wait()
    finally:
        for signum, handler in zip(signals, before, strict=True):
            signal.signal(signum, handler)
    if status and line and not is_stopping and "error" not in msgspec.json.decode(line):
        raise StoreClosedError("the server died too often, and was given up; its log says why")
    if not line and not is_stopping:
        raise StoreClosedError("the server ended while starting; its log says why")


def _outcome(line: bytes) -> _Outcome:
    """What a server says when it has started, or cannot."""
    said = msgspec.json.decode(line, type=dict[str, str | int])
    if "address" in said:
        return msgspec.convert(said, Ready)
    return {name: str(value) for name, value in said.items()}


@contextmanager
def _directory(name: str | None) -> Iterator[None]:
    """Create the user's directory for the sockets if it is missing; leave it as it was found."""
    if name is None:
        yield
        return
    path = Path(name)
    if len(os.fsencode(name)) > _LONGEST_DIRECTORY:
        raise ConfigurationError(
            f"{name} is too long for the path of a socket (at most {_LONGEST_DIRECTORY} bytes)"
        )
    made = not path.exists()
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        info = path.stat()
    except OSError as error:
        raise ConfigurationError(f"cannot use {name} for the sockets: {error}") from error
    if info.st_uid != os.getuid() or info.st_mode & 0o022:
        raise ConfigurationError(f"{name} must be yours, and nobody else may write to it")
    control = path / "control.sock"
    if _listening(control):
        raise ConfigurationError(f"a store is running in {name} already")
    try:
        yield
    finally:
        control.unlink(missing_ok=True)
        PrivateDirectory(name).remove_dead()  # of a server that was killed
        if made and not any(path.iterdir()):
            path.rmdir()


def _listening(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except BlockingIOError:  # its backlog is full, so somebody listens
            return True
        except OSError:
            return False
    return True
