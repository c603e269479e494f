"""Workers of jobs, forked from a process that has imported torch: a new interpreter takes 3 to 4 s
of a processor for that, and jobs are started by the dozen.

The engine starts a small interpreter without libraries (:mod:`tests.monarch.stand_in`), as whose
child it sees the worker: signals, a death and an exit status go from one to the other.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import runpy
import select
import signal
import socket
import sys
import threading
from pathlib import Path

__all__ = ["STAND_IN", "command", "serve"]

STAND_IN = str(Path(__file__).with_name("stand_in.py"))

_MODULE = "monarch._src.actor.bootstrap_main"
_LARGEST = 1 << 17
_PR_SET_PDEATHSIG = 1
_ENVIRONMENT_BEGIN, _ENVIRONMENT_END = 47, 48  # of /proc/self/stat, behind the name


def command(address: str) -> list[str]:
    """What a program is started with in place of a worker."""
    return ["-I", "-S", STAND_IN, address]


def serve(mark: str) -> None:
    """Fork a worker for each stand-in that connects to this process's input, a listener; until the
    process that this one was forked from ends. What the system shows of its environment is ``mark``, by which the job's are found.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for what it forks
    listener = socket.socket(fileno=os.dup(0))  # 0 becomes the input of the workers
    while True:
        connection, _ = listener.accept()
        if not os.fork():
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _watch(connection, mark)
        connection.close()


def _watch(connection: socket.socket, mark: str) -> None:
    """Fork the worker, and end it with its stand-in. Never returns."""
    order, streams, _, _ = socket.recv_fds(connection, _LARGEST, 3)
    worker = os.fork()
    if not worker:
        connection.close()
        _become(order, streams, mark)
    for fd in streams:
        os.close(fd)
    connection.send(str(worker).encode())
    ended = os.pidfd_open(worker)
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    poll.register(ended, select.POLLIN)
    if any(fd != ended for fd, _ in poll.poll()):
        os.kill(worker, signal.SIGKILL)
    _, status = os.waitpid(worker, 0)
    try:
        connection.send(str(status).encode())
    except OSError:  # it has ended
        pass
    os._exit(0)


def _become(order: bytes, streams: list[int], mark: str) -> None:
    """Be the worker that the engine has started. Never returns."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for number, fd in enumerate(streams):
        os.dup2(fd, number)
        os.close(fd)
    directory, *variables = order.split(b"\0")
    os.chdir(directory)
    os.environb.clear()
    os.environb.update(variable.split(b"=", 1) for variable in variables)
    _show(mark)
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [path for path in ("", *paths) if path not in sys.path]
    sys.argv[:] = [_MODULE]
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    status = 1
    try:
        runpy.run_module(_MODULE, run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)


def _show(mark: str) -> None:
    """Let the system show this environment; nothing reads the memory any more."""
    with open("/proc/self/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    begin, end = int(fields[_ENVIRONMENT_BEGIN]), int(fields[_ENVIRONMENT_END])
    shown = mark.encode()[: end - begin - 1]
    ctypes.memmove(begin, shown.ljust(end - begin, b"\0"), end - begin)
