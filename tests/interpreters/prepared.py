"""A process that has imported what servers, and the processes of the transports' kit, need, and
forks one when :mod:`tests.interpreters.starting` asks for it: ``prepared.py SOCKET PADDING``.

What it forks is a child of the tests' own process, not of this one: a process in between forks it
and ends at once, and the tests' process adopts what is left.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import importlib
import importlib.util
import json
import os
import socket
import sys
import time
import types
from typing import Any

_CORE = "torchstore_core"
# What they import, but for the module that is run, which each runs for itself.
_PREPARED = (
    f"{_CORE}.server.keeping.compaction",
    f"{_CORE}.server.keeping.keeper",
    f"{_CORE}.server.keeping.recorded",
    f"{_CORE}.server.keeping.returning",
    f"{_CORE}.server.server",
    f"{_CORE}.server.serving.members",
    f"{_CORE}.server.stalled_loop",
    f"{_CORE}.testing.transports.ends.client",
    f"{_CORE}.testing.transports.ends.host",
    "uvloop",
)
_LARGEST = 1 << 18
_MOST_DESCRIPTORS = 64
_POLL_S = 0.0005
_ARGUMENTS_BEGIN, _ARGUMENTS_END = 45, 46  # of /proc/self/stat, behind the name


def wait_for_order(asked: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Fork for each order; returns in what is forked, with its order and its descriptors."""
    while True:
        data, fds, _, _ = socket.recv_fds(asked, _LARGEST, _MOST_DESCRIPTORS)
        if not data:  # whoever asks has ended
            os._exit(0)
        between = os.fork()
        if not between:
            between = os.getpid()
            if child := os.fork():
                asked.send(str(child).encode())
                os._exit(0)
            while os.getppid() == between:
                time.sleep(_POLL_S)
            return json.loads(data), fds
        for fd in fds:
            os.close(fd)
        os.waitpid(between, 0)
        asked.send(b"adopted")


def _become(order: dict[str, Any], fds: list[int]) -> types.CodeType:
    """Be as a new interpreter that was started so; returns the code of its main module."""
    wanted = order["descriptors"]
    above = [fcntl.fcntl(fd, fcntl.F_DUPFD, max(wanted) + 1) for fd in fds]
    for fd in fds:
        if fd not in wanted:
            os.close(fd)
    for fd, number in zip(above, wanted, strict=True):
        os.dup2(fd, number)
        os.close(fd)
    if order["session"]:
        os.setsid()
    os.chdir(order["directory"])
    os.environ.clear()
    os.environ.update(order["environment"])
    path = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    here = [] if order["safe_path"] else [order["directory"]]
    sys.path[:] = [*here, *path, *(entry for entry in sys.path if entry not in path)]
    _call_oneself(order["command"])
    spec = importlib.util.find_spec(order["module"])
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{order['module']}.__main__")
    assert spec is not None
    assert spec.origin is not None
    main = types.ModuleType("__main__")
    main.__dict__.update(__file__=spec.origin, __spec__=spec, __package__=spec.parent)
    sys.modules["__main__"] = main
    sys.argv[:] = [spec.origin, *order["arguments"]]
    code: types.CodeType = spec.loader.get_code(spec.name)  # type: ignore[union-attr]
    return code


def _call_oneself(command: list[str]) -> None:
    """Let the system show this command line: tests find processes by it."""
    with open("/proc/self/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    begin, end = int(fields[_ARGUMENTS_BEGIN]), int(fields[_ARGUMENTS_END])
    line = b"".join(word.encode() + b"\0" for word in command)[: end - begin - 1]
    ctypes.memmove(begin, line.ljust(end - begin, b"\0"), end - begin)


if __name__ == "__main__":
    gc.disable()  # none of that is garbage
    for name in _PREPARED:
        with contextlib.suppress(ModuleNotFoundError):  # uvloop, where it is not installed
            importlib.import_module(name)
    gc.freeze()
    connection = socket.socket(fileno=int(sys.argv[1]))
    ordered, descriptors = wait_for_order(connection)
    connection.close()
    code = _become(ordered, descriptors)
    gc.enable()
    exec(code, sys.modules["__main__"].__dict__)
