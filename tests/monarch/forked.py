"""Workers of jobs, forked from a process that has imported torch: a new interpreter takes 3 s of a
processor for that, and jobs are started by the dozen.

What the engine starts is a small interpreter without libraries (:mod:`tests.monarch.stand_in`).
Signals, deaths and the exit status go from the one to the other.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import runpy
import select
import signal
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.interpreters.twins import run_to_the_end, show
from tests.processes import fork

__all__ = ["STAND_IN", "forking"]

STAND_IN = str(Path(__file__).with_name("stand_in.py"))

_MODULE = "monarch._src.actor.bootstrap_main"
_LARGEST = 1 << 17
_PR_SET_PDEATHSIG = 1  # of the kernel's include/uapi/linux/prctl.h


@contextmanager
def forking(folder: Path, environment: Mapping[str, str]) -> Iterator[list[str]]:
    """Fork workers meanwhile. What comes is what the engine has to start in place of one.

    Args:
        folder: where the process listens that forks them; of a short path.
        environment: that process's.
    """
    address = str(folder / "workers")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(address)
        listener.listen()
        process = fork(_serve, files={0: listener.fileno()}, environment=environment)
    try:
        yield [sys.executable, "-I", "-S", STAND_IN, address]
    finally:
        process.kill()
        process.join()


def _serve() -> None:
    """Fork a worker for each stand-in that connects to this process's input, which is a listener,
    until the process ends that this one was forked from.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for what it forks
    listener = socket.socket(fileno=os.dup(0))  # 0 becomes the input of the workers
    while True:
        connection, _ = listener.accept()
        if not os.fork():
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _watch(connection)
        connection.close()


def _watch(connection: socket.socket) -> None:
    """Fork the worker, and end it with its stand-in or with the engine's process that has started
    that, as the engine wants it. Never returns.
    """
    order, streams, _, _ = socket.recv_fds(connection, _LARGEST, 3)
    engine, _, order = order.partition(b"\0")
    worker = os.fork()
    if not worker:
        connection.close()
        _become(os.fsdecode(order), streams)
    for fd in streams:
        os.close(fd)
    connection.send(str(worker).encode())
    ended = os.pidfd_open(worker)
    readable, _, _ = select.select([connection, os.pidfd_open(int(engine)), ended], [], [])
    if readable != [ended]:
        os.kill(worker, signal.SIGKILL)
    _, status = os.waitpid(worker, 0)
    with contextlib.suppress(OSError):  # it has ended
        connection.send(str(status).encode())
    os._exit(0)


def _become(order: str, streams: list[int]) -> None:
    """Be the worker that the engine has started. Never returns."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for number, fd in enumerate(streams):
        os.dup2(fd, number)
        os.close(fd)
    directory, *variables = order.split("\0")
    os.chdir(directory)
    environment = dict(variable.split("=", 1) for variable in variables)
    show(environment)
    os.environ.update(environment)
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [path for path in ("", *paths) if path not in sys.path]
    sys.argv[:] = [_MODULE]
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    run_to_the_end(lambda: runpy.run_module(_MODULE, run_name="__main__", alter_sys=True))
