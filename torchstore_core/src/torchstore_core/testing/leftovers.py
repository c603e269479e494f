"""What a store may leave behind: processes, directories, descriptors, threads. Linux only."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sized
from pathlib import Path
from typing import TypeVar

from torchstore_core.machine.directories import runtime_directory

__all__ = [
    "MARK",
    "descendants",
    "descriptors",
    "directories",
    "kill_marked",
    "marked",
    "private_runtime_directory",
    "threads",
    "until_empty",
]

T = TypeVar("T", bound=Sized)

#: Environment variable by which processes are found again whose parent has died.
MARK = "CONFORMANCE_RUN"
_RUNTIME_DIRECTORY = "XDG_RUNTIME_DIR"


def descendants(root: int) -> list[tuple[int, str]]:
    """Processes below ``root``, zombies left out: pid and name."""
    parents: dict[int, list[tuple[int, str]]] = {}
    for pid in _pids():
        try:
            text = Path(f"/proc/{pid}/stat").read_text()
        except OSError:  # gone meanwhile
            continue
        name, _, rest = text.partition("(")[2].rpartition(")")
        state, parent = rest.split()[:2]
        if state != "Z":
            parents.setdefault(int(parent), []).append((pid, name))
    found: list[tuple[int, str]] = []
    todo = [root]
    while todo:
        below = parents.get(todo.pop(), [])
        found += below
        todo += [pid for pid, _ in below]
    return found


def marked(mark: str) -> list[tuple[int, str]]:
    """Processes that were started with :data:`MARK` set to ``mark``, by whomever: pid and name."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for pid in _pids():
        try:
            if wanted in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                found.append((pid, Path(f"/proc/{pid}/comm").read_text().strip()))
        except OSError:  # gone meanwhile, or another user's
            continue
    return found


def kill_marked(mark: str) -> None:
    """End what a runtime that failed its test has left."""
    for pid, _ in marked(mark):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _pids() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdigit())


def directories() -> list[str]:
    """What lies in the runtime directory: one entry for each running server."""
    return sorted(str(path) for path in runtime_directory().iterdir())


def descriptors() -> int:
    """Open descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))


def threads() -> int:
    """Threads of this process, those of native libraries too."""
    return len(os.listdir("/proc/self/task"))


@functools.cache
def _own_base() -> str:
    near = tempfile.gettempdir()
    made = tempfile.mkdtemp(prefix="ts-kit-", dir=near if len(near) < 40 else "/tmp")  # noqa: S108
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return made


@contextlib.contextmanager
def private_runtime_directory() -> Iterator[None]:
    """Servers that start now put their directories where no other process of this user does."""
    before = os.environ.get(_RUNTIME_DIRECTORY)
    os.environ[_RUNTIME_DIRECTORY] = _own_base()
    try:
        yield
    finally:
        if before is None:
            del os.environ[_RUNTIME_DIRECTORY]
        else:
            os.environ[_RUNTIME_DIRECTORY] = before


def until_empty(look: Callable[[], T], seconds: float) -> T:
    """What ``look`` still sees when nothing is left, or the time is over."""
    deadline = time.monotonic() + seconds
    while (left := look()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left
