"""Servers, and the processes of the transports' kit, that this process starts are forked from one
that has imported what they need (:mod:`tests.interpreters.prepared`): tests start hundreds, and a
new interpreter takes a tenth of a second of a processor to import it.

Only those are that would be the same as a new interpreter: not with another environment, another
limit, or in another namespace than the first had.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from ctypes import CDLL
from pathlib import Path
from typing import Any

__all__ = ["Starter", "starter"]

_MODULES = {
    "torchstore_core.server",
    "torchstore_core.testing.transports.ends.client",
    "torchstore_core.testing.transports.ends.host",
}
_PREPARED = Path(__file__).with_name("prepared.py")
# The longest command line that tests look for something in.
_PADDING = 4096
_LARGEST = 1 << 17
_PR_SET_CHILD_SUBREAPER = 36  # of the kernel's include/uapi/linux/prctl.h
# A test's own name, where its stores are, and where processes of a kit find what this one imports.
_FREE = {"PYTEST_CURRENT_TEST", "PYTHONPATH", "TORCHSTORE_ADDRESS", "TORCHSTORE_ADDRESSES"}
_LIMITS = 16  # RLIM_NLIMITS of the kernel
_STATUS = ("Umask:", "SigBlk:", "SigIgn:")


class Starter:
    """Has a process that has imported what is needed, and lets ``subprocess`` use it.

    Attributes:
        on: whether it is used.
        started: how many processes it has started.
    """

    def __init__(self) -> None:
        self.on = True
        self.started = 0
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._prctl = CDLL(None).prctl
        self._as_now = _surroundings(os.environ)
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            number = theirs.fileno()
            command = [sys.executable, "-P", str(_PREPARED), str(number), " " * _PADDING]
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=[number]
            )

    def close(self) -> None:
        """End the process, also if what tests have forked still has the connection."""
        self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()
        self._process.wait()

    def start(
        self,
        command: Sequence[str],
        environment: dict[str, str],
        descriptors: dict[int, int],
        *,
        session: bool,
    ) -> int | None:
        """Start a process as ``subprocess`` would; returns its pid, or None if that has to.

        Args:
            command: all of it.
            environment: all of its variables.
            descriptors: those of this process, by the numbers that they get there.
            session: whether it is the first of a session of its own.
        """
        safe_path = list(command[1:2]) == ["-P"]
        flags = ["-P", "-m"] if safe_path else ["-m"]
        first, after = [sys.executable, *flags], len(flags) + 2
        if list(command[: after - 1]) != first or command[after - 1] not in _MODULES:
            return None
        if not self.on or os.getpid() != self._pid or _surroundings(environment) != self._as_now:
            return None
        order = {
            "module": command[after - 1],
            "arguments": command[after:],
            "command": command,
            "safe_path": safe_path,
            "environment": environment,
            "directory": os.getcwd(),
            "descriptors": [*descriptors],
            "session": session,
        }
        message = json.dumps(order).encode()
        if len(message) > _LARGEST:
            return None
        with self._lock, self._adopting():
            socket.send_fds(self._connection, [message], [*descriptors.values()])
            pid = int(self._connection.recv(64))
            self._connection.recv(64)  # it is adopted
            self.started += 1
        return pid

    @contextlib.contextmanager
    def _adopting(self) -> Iterator[None]:
        """This process becomes the parent of what those below it leave."""
        self._prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        try:
            yield
        finally:
            self._prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


@contextlib.contextmanager
def starter() -> Iterator[Starter]:
    """A starter that ``subprocess.Popen`` uses."""
    made = Starter()
    execute: Callable[..., None] = subprocess.Popen._execute_child  # type: ignore[attr-defined]

    def start_or_execute(popen: Any, *arguments: Any) -> None:
        if not _start(made, popen, arguments):
            execute(popen, *arguments)

    subprocess.Popen._execute_child = start_or_execute  # type: ignore[attr-defined]
    try:
        yield made
    finally:
        subprocess.Popen._execute_child = execute  # type: ignore[attr-defined]
        made.close()


def _start(starter: Starter, popen: Any, arguments: tuple[Any, ...]) -> bool:
    """Whether the process was started; with the arguments of ``Popen._execute_child``."""
    command, executable, preexec, close_fds, pass_fds, cwd, env, _, _, shell, *rest = arguments
    pipes, (restore_signals, gid, gids, uid, umask, session, group) = rest[:6], rest[6:]
    usual = close_fds and restore_signals and umask < 0 and group < 0
    others = (executable, preexec, cwd, gid, gids, uid)
    if not usual or shell or any(one is not None for one in others) or isinstance(command, str):
        return False
    streams = [own if own >= 0 else i for i, own in enumerate((pipes[0], pipes[3], pipes[5]))]
    descriptors = dict(enumerate(streams)) | {fd: fd for fd in pass_fds}
    environment = dict(os.environ if env is None else env)
    pid = starter.start(list(command), environment, descriptors, session=session)
    if pid is None:
        return False
    popen.pid = pid
    popen._child_created = True
    popen._close_pipe_fds(*pipes)
    return True


def _surroundings(environment: Any) -> tuple[object, ...]:
    """What a process gets from the one that starts it, and the other one cannot be told."""
    own = Path("/proc/thread-self")
    status = own.joinpath("status").read_text().splitlines()
    return (
        {name: value for name, value in environment.items() if name not in _FREE},
        [line for line in status if line.startswith(_STATUS)],
        [os.readlink(own / "ns" / kind) for kind in ("mnt", "net", "pid", "user")],
        own.joinpath("cgroup").read_text(),
        own.joinpath("oom_score_adj").read_text(),
        [resource.getrlimit(number) for number in range(_LIMITS)],
        os.sched_getaffinity(0),
    )
