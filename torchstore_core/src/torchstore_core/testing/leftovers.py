"""Finds what a store may leave behind: processes, directories, descriptors, threads. Linux only."""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import ipaddress
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from pathlib import Path
from typing import TypeVar

from torchstore_core.machine.directories import runtime_directory

__all__ = [
    "MARK",
    "at_rest",
    "descendants",
    "descriptors",
    "directories",
    "held_by",
    "kill_marked",
    "left_by",
    "listening",
    "marked",
    "private_runtime_directory",
    "readable",
    "state",
    "threads",
    "until_empty",
]

T = TypeVar("T", bound=Sized)

#: Environment variable that identifies processes even after their parent has died.
MARK = "CONFORMANCE_RUN"
# The state of a listening socket, as the kernel writes it.
_LISTENING = "0A"
_RUNTIME_DIRECTORY = "XDG_RUNTIME_DIR"
_POLL_S, _LONGEST_POLL_S = 0.02, 0.25
# After so many looks, and pauses between them, at which nothing has gone away, what is there stays.
_LOOKS, _PAUSE_S = 5, 0.05


def descendants(root: int) -> list[tuple[int, str]]:
    """Return pid and name of the descendants of the process ``root``, except zombies."""
    parents: dict[int, list[tuple[int, str]]] = {}
    for pid in _pids():
        try:
            text = Path(f"/proc/{pid}/stat").read_text()
        except OSError:  # it has ended in the meantime
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


def state(pid: int) -> str:
    """Return the state of a process, as one letter: ``T`` if all of its threads are stopped, ``X``
    if it is gone, otherwise ``R``.
    """
    try:
        stats = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    except OSError:  # a thread has ended in the meantime
        return "R" if Path(f"/proc/{pid}").exists() else "X"
    letters = {stat.rpartition(")")[2].split()[0] for stat in stats}
    return "T" if letters == {"T"} else "X" if letters <= {"X", "Z"} else "R"


def marked(mark: str) -> list[tuple[int, str]]:
    """Return pid and name of all processes started with :data:`MARK` set to ``mark``."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for pid in _pids():
        try:
            if wanted in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                found.append((pid, Path(f"/proc/{pid}/comm").read_text().strip()))
        except OSError:  # it has ended, or is another user's
            continue
    return found


def kill_marked(mark: str) -> None:
    """Kill the marked processes, which a runtime leaves behind if it fails its test."""
    for pid, _ in marked(mark):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _pids() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdigit())


def directories() -> list[str]:
    """Return the contents of the runtime directory: one entry for each running server."""
    return sorted(str(path) for path in runtime_directory().iterdir())


def descriptors() -> int:
    """Return the number of open descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))


def threads() -> int:
    """Return the number of threads of this process, including those of native libraries."""
    return len(os.listdir("/proc/self/task"))


def held_by(pid: int) -> dict[str, int]:
    """Count the open descriptors, threads, and mapped files of a process of this user."""
    try:
        with open(f"/proc/{pid}/maps") as maps:
            mapped = sum(1 for line in maps if "/" in line and ".so" not in line)
        return {
            "descriptors": len(os.listdir(f"/proc/{pid}/fd")),
            "threads": len(os.listdir(f"/proc/{pid}/task")),
            "mapped files": mapped,
        }
    except OSError:  # it has ended in the meantime
        return {}


def listening(pids: Iterable[int]) -> set[tuple[str, int]]:
    """Return where processes listen: addresses as the kernel writes them, and ports of TCP."""
    found: set[tuple[str, int]] = set()
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended in the meantime
            sockets = {f"socket:[{inode}]": place for inode, place in _places(pid)}
            for name in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(FileNotFoundError):  # it was just closed
                    link = os.readlink(f"/proc/{pid}/fd/{name}")
                    if link in sockets:
                        found.add(sockets[link])
    return found


def readable(address: str) -> str:
    """Return an address as people write it, which the kernel writes as words of the machine.

    >>> readable("0100007F")
    '127.0.0.1'
    """
    packed = bytes.fromhex(address)
    if sys.byteorder == "little":
        packed = b"".join(packed[at : at + 4][::-1] for at in range(0, len(packed), 4))
    return str(ipaddress.ip_address(packed))


def _places(pid: int) -> Iterator[tuple[str, tuple[str, int]]]:
    """Yield inode, address and port of the listening sockets of a process's network namespace."""
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(FileNotFoundError):  # a host without IPv6
            for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTENING:
                    address, _, port = fields[1].partition(":")
                    yield fields[9], (address, int(port, 16))


@functools.cache
def _own_base() -> str:
    near = tempfile.gettempdir()
    made = tempfile.mkdtemp(prefix="ts-kit-", dir=near if len(near) < 40 else "/tmp")  # noqa: S108
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return made


@contextlib.contextmanager
def private_runtime_directory() -> Iterator[None]:
    """Give the servers started in this context a runtime directory of their own."""
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
    """Call ``look`` until its result is empty or the time has expired; return the last result. One
    that takes long is called less often: what it waits for needs the processor, too. The time is
    that between the calls: how late they are does not count, and how long they take does only
    beyond three times as much, for what they wait for may be as late.
    """
    first, paused = time.monotonic(), 0.0
    while True:
        began = time.monotonic()
        left = look()
        now = time.monotonic()
        if not left or paused >= seconds or now >= first + 4 * seconds:
            return left
        pause = min(max(_POLL_S, 10 * (now - began)), _LONGEST_POLL_S)
        time.sleep(pause)
        paused += pause


def left_by(
    rounds: Callable[[], None], look: Callable[[], dict[str, int]], least: int, seconds: float
) -> list[str]:
    """Return what ``rounds()`` leaves behind: counts of ``look`` that are at least ``least`` higher
    afterwards, and are not lower within so many seconds. What was there before, and ends meanwhile,
    hides as much of that: if there is some, but less, it is done once more.
    """

    def grown(by: int) -> list[str]:
        gc.collect()
        return [
            f"{what}: {before.get(what, 0)} before, {count} after"
            for what, count in look().items()
            if count - before.get(what, 0) >= by
        ]

    for _ in range(2):
        gc.collect()
        before = at_rest(look, seconds)
        rounds()
        if (left := until_empty(lambda: grown(least), seconds)) or not grown(1):
            return left
    return []


def at_rest(look: Callable[[], dict[str, int]], seconds: float) -> dict[str, int]:
    """Call ``look`` until none of its counts falls any more, or the time has expired; return the
    least of each. What was closed last may end in the background, as the thread of a session does.
    """
    least, unchanged = look(), 0
    deadline = time.monotonic() + seconds
    while unchanged < _LOOKS and time.monotonic() < deadline:
        time.sleep(_PAUSE_S)
        seen = {what: min(count, least.get(what, count)) for what, count in look().items()}
        fell = any(seen.get(what, 0) < count for what, count in least.items())
        least, unchanged = seen, 0 if fell else unchanged + 1
    return least
