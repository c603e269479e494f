"""What a program of the fork server starts with ``multiprocessing``, spawned processes and fork
servers, is forked from its twin: the process as it was before the program, with torch imported. A
new interpreter takes some 3 s of a processor for that.

What is forked is a child of the program, which adopts it (see :mod:`tests.interpreters.prepared`)
and has the environment, directory, descriptors and signal mask that the program gives it.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import json
import multiprocessing.util
import os
import signal
import socket
import sys
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.interpreters.prepared import wait_for_order

__all__ = ["have_twin", "run_to_the_end", "show"]

# Not the resource tracker's, which has no use for torch.
_FORKED = ("from multiprocessing.spawn import", "from multiprocessing.forkserver import")
_PR_SET_CHILD_SUBREAPER = 36  # of the kernel's include/uapi/linux/prctl.h
_ENVIRONMENT_BEGIN, _ENVIRONMENT_END = 47, 48  # of /proc/self/stat, behind the name


def have_twin() -> None:
    """From now on this process's children of ``multiprocessing`` are forked from what it is now."""
    ours, twins = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    program = os.getpid()
    if not os.fork():
        ours.close()
        _serve(twins)
    twins.close()
    lock = threading.Lock()
    start: Callable[..., int] = multiprocessing.util.spawnv_passfds

    def fork_or_start(path: str, words: Sequence[str], passed: Sequence[int]) -> int:
        words = [os.fsdecode(word) for word in words]
        code = words[words.index("-c") + 1] if "-c" in words else ""
        if os.getpid() != program or not code.startswith(_FORKED):
            return start(path, words, passed)
        order = {
            "code": code,
            "arguments": words[words.index(code) + 1 :],
            "environment": {**os.environ},
            "directory": os.getcwd(),
            "mask": [*signal.pthread_sigmask(signal.SIG_BLOCK, [])],
            "descriptors": [*passed],
        }
        prctl = ctypes.CDLL(None).prctl
        with lock:
            prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            try:
                socket.send_fds(ours, [json.dumps(order).encode()], [*passed])
                pid = int(ours.recv(64))
                ours.recv(64)  # it is adopted
            finally:
                prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        return pid

    multiprocessing.util.spawnv_passfds = fork_or_start


def _serve(asked: socket.socket) -> None:
    """Fork for each order. Never returns."""
    order, fds = wait_for_order(asked)
    asked.close()
    run_to_the_end(functools.partial(_become, order, fds))


def _become(order: dict[str, Any], fds: Sequence[int]) -> None:
    """Do what a new interpreter would that was started so."""
    wanted = order["descriptors"]
    above = [os.dup2(fd, max([*wanted, *fds]) + 1 + i) for i, fd in enumerate(fds)]
    os.closerange(3, min(above))
    for fd, number in zip(above, wanted, strict=True):
        os.dup2(fd, number)
    os.closerange(max(wanted) + 1, max(above) + 1)
    signal.pthread_sigmask(signal.SIG_SETMASK, order["mask"])
    show(order["environment"])
    os.environ.clear()
    os.environ.update(order["environment"])
    os.chdir(order["directory"])
    sys.argv[:] = ["-c", *order["arguments"]]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    exec(order["code"], main.__dict__)


def run_to_the_end(function: Callable[[], object]) -> None:
    """Call it, and end this process as an interpreter would whose main module has done that."""
    status = 1
    try:
        function()
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(status)


def show(environment: Mapping[str, str]) -> None:
    """Let the system show these variables as those of this process, as many as have room, by which
    tests find it. Those of ``os.environ`` are to be set afterwards.
    """
    with open("/proc/self/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    begin, end = int(fields[_ENVIRONMENT_BEGIN]), int(fields[_ENVIRONMENT_END])
    variables = [f"{name}={value}".encode() for name, value in environment.items()]
    were = Path("/proc/self/environ").read_bytes().split(b"\0")
    variables.sort(key=lambda variable: (variable in were, len(variable)))
    shown = b"\0".join(variables)[: end - begin - 1]
    os.environ.clear()  # nothing reads that memory any more
    ctypes.memmove(begin, shown.ljust(end - begin, b"\0"), end - begin)
