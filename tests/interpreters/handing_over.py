"""Workers of Monarch jobs, and their like, that have imported torch: to import it takes a processor
seconds, and a job has a process for each of them.

Who starts them is an engine, which says what it wants in a command line. So a new interpreter
begins, and before it has imported anything, sends its order to a process that has imported torch,
which forks one that does what was ordered. The interpreter ends as that does, and the other way
round, and passes signals on.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import signal
import socket
import sys
from typing import Any

# A variable: where to have a process forked (the path of a Unix socket).
VARIABLE = "TESTS_HAND_OVER"
_MODULE = "monarch._src.actor.bootstrap_main"
_LARGEST = 1 << 17
_PR_SET_PDEATHSIG = 1  # of the kernel's include/uapi/linux/prctl.h
_ENVIRONMENT = slice(47, 49)  # its begin and its end in /proc/self/stat, behind the name


def hand_over() -> None:
    """Have another process forked, and end as it does, if this one is to be a worker."""
    if sys.orig_argv[1:3] != ["-m", _MODULE]:
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    address = os.environ.pop(VARIABLE)
    order = {"environment": {**os.environ}, "directory": os.getcwd()}
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(address)
    socket.send_fds(connection, [json.dumps(order).encode()], [0, 1, 2])
    pid = int(connection.recv(64))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: os.kill(pid, number))
    status = int(connection.recv(64) or -signal.SIGKILL)
    if status < 0:
        if status != -signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def serve(listener: socket.socket, alive: Any) -> None:
    """Fork what is ordered, until the other end of ``alive`` is closed; runs in the fork server's
    child, and returns in none of its own.
    """
    import runpy
    import select
    from importlib import import_module

    import_module("tests.monarch.acts")  # what workers import, and what imports no engine
    running: dict[int, tuple[int, socket.socket]] = {}  # by pidfd
    while True:
        ready, _, _ = select.select([listener, alive, *running], [], [])
        if alive in ready:
            os._exit(0)
        for pidfd in running.keys() & {one for one in ready if isinstance(one, int)}:
            pid, connection = running.pop(pidfd)
            _, status = os.waitpid(pid, 0)
            with connection:
                _tell(connection, os.waitstatus_to_exitcode(status))
            os.close(pidfd)
        if listener not in ready:
            continue
        connection, _ = listener.accept()
        data, fds, _, _ = socket.recv_fds(connection, _LARGEST, 3)
        if pid := os.fork():
            for fd in fds:
                os.close(fd)
            running[os.pidfd_open(pid)] = pid, connection
            _tell(connection, pid)
            continue
        for pidfd, (_, other) in running.items():
            os.close(pidfd)
            other.close()
        listener.close()
        alive.close()
        _become(json.loads(data), fds, connection)
        runpy.run_module(_MODULE, run_name="__main__", alter_sys=True)
        return


def _tell(connection: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):  # it was killed
        connection.send(str(number).encode())


def _become(order: dict[str, Any], fds: list[int], connection: socket.socket) -> None:
    # Who has ordered it takes it along: what the end of the connection would signal is a kill.
    fd = connection.detach()
    fcntl.fcntl(fd, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_ASYNC)
    for number, stream in enumerate(fds):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(order["directory"])
    os.environ.clear()
    os.environ.update(order["environment"])
    # What the system shows of it, as much as there is room for: not what is long.
    with open("/proc/self/stat") as file:
        begin, end = map(int, file.read().rpartition(")")[2].split()[_ENVIRONMENT])
    lines = sorted((b"%s=%s\0" % item for item in os.environb.items()), key=len)
    ctypes.memmove(begin, b"".join(lines)[: end - begin].ljust(end - begin, b"\0"), end - begin)
