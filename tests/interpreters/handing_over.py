"""Workers of Monarch jobs, of programs and of the tests themselves that have imported torch: that
takes a processor seconds for each of them.

Who starts them is a library, which says what it wants in a command line. So a new interpreter
begins, and before it has imported anything, sends its order to a process that has imported torch,
which forks one that does what was ordered. The interpreter ends as that does, and the other way
round.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import importlib
import json
import multiprocessing
import os
import runpy
import select
import signal
import socket
import sys
import types
from typing import Any

# A variable: where to have a process forked (the path of a Unix socket).
VARIABLE = "TESTS_HAND_OVER"
# How the command lines of workers begin: of Monarch's, of multiprocessing's, and of xdist's.
_WORKERS = (
    ("-m", "monarch._src.actor.bootstrap_main"),
    ("-c", "from multiprocessing.spawn import spawn_main"),
    ("-c", "from multiprocessing.forkserver import main"),
    ("-c", "import sys;exec(eval(sys.stdin.readline()))"),
)
_LARGEST = 1 << 17
_MOST_DESCRIPTORS = 64
_PR_SET_PDEATHSIG = 1  # of the kernel's include/uapi/linux/prctl.h
_ENVIRONMENT = slice(47, 49)  # its begin and its end in /proc/self/stat, behind the name


def hand_over() -> None:
    """Have another process forked, and end as it does, if this one is to be a worker."""
    words = [word for word in sys.orig_argv[1:] if word not in ("-B", "-u")]
    if not any(words[:1] == [how] and words[1].startswith(what) for how, what in _WORKERS):
        return
    if words[0] == "-m":  # such a worker does not outlive who has started it
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    address = os.environ.pop(VARIABLE)
    descriptors = []
    for fd in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # that of the folder, which is closed
            if os.get_inheritable(fd):
                descriptors.append(fd)
    order = {
        "command": words,
        "descriptors": descriptors,
        "directory": os.getcwd(),
        "environment": {**os.environ},
    }
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(address)
    socket.send_fds(connection, [json.dumps(order).encode()], descriptors)
    for fd in descriptors:
        os.close(fd)
    _show(b"")  # who looks for processes by a variable is to find the other one
    pid = int(connection.recv(64))
    signal.signal(signal.SIGTERM, lambda number, _: os.kill(pid, number))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal interrupts both
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
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    importlib.import_module("tests.monarch.acts")  # what workers import, and what imports no engine
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
        data, fds, _, _ = socket.recv_fds(connection, _LARGEST, _MOST_DESCRIPTORS)
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
        _run(json.loads(data), fds, connection)
        return


def _show(environment: bytes) -> None:
    """Let the system show this environment, as much of it as there is room for."""
    with open("/proc/self/stat") as file:
        begin, end = map(int, file.read().rpartition(")")[2].split()[_ENVIRONMENT])
    ctypes.memmove(begin, environment[: end - begin].ljust(end - begin, b"\0"), end - begin)


def _tell(connection: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):  # it was killed
        connection.send(str(number).encode())


def _run(order: dict[str, Any], fds: list[int], connection: socket.socket) -> None:
    """Be as the interpreter that has sent the order would have been."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    wanted = order["descriptors"]
    above = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, max(wanted) + 1) for fd in fds]
    own = fcntl.fcntl(connection.detach(), fcntl.F_DUPFD_CLOEXEC, max(wanted) + 1)
    for fd, number in zip(above, wanted, strict=True):
        os.dup2(fd, number)
        os.close(fd)
    # Who has ordered it takes it along: what the end of the connection signals is a kill.
    fcntl.fcntl(own, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(own, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(own, fcntl.F_SETFL, fcntl.fcntl(own, fcntl.F_GETFL) | os.O_ASYNC)
    os.chdir(order["directory"])
    os.environ.clear()
    os.environ.update(order["environment"])
    # Not all of it, if there is less room: not what is long.
    _show(b"".join(sorted((b"%s=%s\0" % item for item in os.environb.items()), key=len)))
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    # That of the fork server's own processes is no choice of the program.
    multiprocessing.set_start_method(None, force=True)
    how, what, *arguments = order["command"]
    try:
        if how == "-m":
            runpy.run_module(what, run_name="__main__", alter_sys=True)
        else:
            sys.argv[:] = ["-c", *arguments]
            main = sys.modules["__main__"] = types.ModuleType("__main__")
            exec(what, main.__dict__)
    finally:
        atexit._run_exitfuncs()
