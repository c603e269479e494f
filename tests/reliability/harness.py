"""Real processes for the tests of this folder, and what /proc says about them."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tests.processes import fork_server
from tests.reliability import children
from tests.support import turn, until

import torchstore_core as ts

__all__ = [
    "MB",
    "Account",
    "Child",
    "account",
    "children_of",
    "directory_of",
    "fds",
    "is_running",
    "kill",
    "maps",
    "settled",
    "under_way",
]

MB = 1 << 20


class Child:
    """A process that runs one function of ``children`` and talks over a pipe.

    Args:
        function: takes its end of the pipe, then ``args``.
        start: how the process is made, see ``multiprocessing``.
    """

    def __init__(self, function: Callable[..., Any], *args: Any, start: str = "fast") -> None:
        context: Any = fork_server() if start == "fast" else multiprocessing.get_context(start)
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=children.run, args=(function, theirs, *args), daemon=True
        )
        self._process.start()
        self.pid = int(self._process.pid or 0)
        self._killed = False
        theirs.close()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    async def said(self, timeout: float = 60.0) -> Any:
        """The child's next message; fails the test if it failed, ended, or says nothing."""
        return await asyncio.to_thread(self._receive, timeout)

    def _receive(self, timeout: float) -> Any:
        assert self._pipe.poll(timeout), f"child {self.pid} said nothing within {timeout} s"
        try:
            message = self._pipe.recv()
        except EOFError:
            raise AssertionError(f"child {self.pid} ended without a word") from None
        assert not isinstance(message, children.Failed), message.text
        return message

    def has_said(self) -> bool:
        """Whether :meth:`said` would return (or fail) at once."""
        return self._pipe.poll()

    def said_so_far(self) -> Iterator[Any]:
        """What it has said, without waiting for more: whoever heard each message in another thread
        might be slower than a child that goes on talking.
        """
        while self.has_said():
            yield self._receive(0)

    def tell(self, message: Any) -> None:
        """Send the child something."""
        self._pipe.send(message)

    async def ended(self, timeout: float = 60.0) -> int:
        """Wait for its end; the exit status."""
        await asyncio.to_thread(self._process.join, timeout)
        assert self._process.exitcode is not None, f"child {self.pid} did not end"
        return self._process.exitcode

    def last_words(self) -> Iterator[Any]:
        """``kill -9``, and what it had said before."""
        self._process.kill()
        self._process.join()
        with contextlib.suppress(EOFError):
            while self._pipe.poll():
                yield self._pipe.recv()

    def kill(self) -> None:
        """``kill -9``, if it still runs."""
        if not self._killed:
            self._killed = True
            self._process.kill()
            self._process.join()
            self._process.close()
            self._pipe.close()


class Account(NamedTuple):
    """What a store knows to be open; bytes over all volumes."""

    sessions: int
    used: int
    leased: int = 0
    unfinished: int = 0


async def account() -> Account:
    """The books of the default store."""
    status = await ts.status()
    return Account(
        len(status.sessions),
        sum(volume.used_bytes for volume in status.volumes),
        sum(volume.leased_bytes for volume in status.volumes),
        sum(volume.unfinished_bytes for volume in status.volumes),
    )


async def settled(expected: Account, timeout: float = 10.0) -> None:
    """Wait until the default store's books are as expected."""
    seen: list[Account] = []

    async def equal() -> bool:
        seen.append(await account())
        return seen[-1] == expected

    try:
        await until(equal, timeout)
    except AssertionError:
        raise AssertionError(f"after {timeout} s {seen[-1]}, expected {expected}") from None


async def used_at_rest() -> int:
    """The bytes in use once nothing is being written and what was read has been let go."""
    seen: list[Account] = []

    async def at_rest() -> bool:
        seen.append(await account())
        return not seen[-1].leased and not seen[-1].unfinished

    await until(at_rest)
    return seen[-1].used


async def under_way(
    begin: Callable[[], Coroutine[Any, Any, Any]],
    seen: Callable[[], Awaitable[bool]],
    seconds: float = 0.0,
) -> asyncio.Future[Any]:
    """Begin something, and return it when it is seen under way, and still is so many seconds later.
    On a busy machine it may be over before anybody looks: then it is begun again.
    """
    while True:
        work = asyncio.ensure_future(begin())
        while not work.done():
            if await seen():
                if not seconds:
                    return work
                await asyncio.sleep(seconds)
                if await seen():
                    return work
            await turn()
        await work


def fds(pid: int | str = "self") -> int:
    """Open file descriptors of a process."""
    return len(os.listdir(f"/proc/{pid}/fd"))


def maps(pid: int | str = "self") -> int:
    """Memory mappings of a process."""
    return Path(f"/proc/{pid}/maps").read_text().count("\n")


def is_running(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return text.rpartition(")")[2].split()[0] not in "ZX"


def children_of(pid: int) -> set[int]:
    """Pids of a process's children, zombies included."""
    found: set[int] = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = path.read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(text.rpartition(")")[2].split()[1]) == pid:
            found.add(int(path.parent.name))
    return found


def directory_of(address: str) -> Path:
    """Where a server's sockets are."""
    return Path(address.removeprefix("unix:")).parent


def kill(pid: int) -> None:
    """``kill -9``."""
    os.kill(pid, signal.SIGKILL)
