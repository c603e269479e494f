"""What tests of every folder share."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import inspect
import itertools
import os
import signal
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import torchstore_core as ts
from torchstore_core.errors import PluginError
from torchstore_core.plugins.installed import GROUPS
from torchstore_core.plugins.registry import Registry

if TYPE_CHECKING:  # processes of tests that need no torch import this module, too
    import torch

__all__ = [
    "RUNTIMES",
    "SMALL",
    "at_rest",
    "bits",
    "disk_of",
    "emptied",
    "free_port",
    "halt",
    "leased",
    "load_all",
    "loops_and_sockets",
    "named_memory",
    "noise",
    "nothing_leased",
    "open_files",
    "resume",
    "running_store",
    "server_children",
    "start_store",
    "turn",
    "until",
    "until_none",
    "used",
]

_POLL_S = 0.005
_LONG_POLL_S, _LONGEST_POLL_S = 0.1, 0.25
_SHM = ("/", "dev", "shm")

#: Arguments of ``initialize`` for tests that are not about them.
SMALL: dict[str, Any] = {"capacity": 256 << 20, "prefault": 0}

#: What the public API is tested with: a server of this process, of torchrun's ranks, of a Monarch
#: job of which this process is the root client.
RUNTIMES = ("local", "spmd", "monarch")


async def until(predicate: Callable[[], Awaitable[Any] | Any], timeout: float = 20.0) -> Any:
    """Poll until ``predicate()`` (sync or async) is true, and return what it gave. One that takes
    long, or has been false for long, is asked less often: what is waited for needs the processor,
    too, and so do other tests.

    Raises:
        AssertionError: not within ``timeout`` seconds of pauses. How late those end does not count,
            and how long the predicate takes does only beyond three times as long: what is waited
            for may be as late.
    """
    first = time.monotonic()
    paused = 0.0
    while True:
        begun = time.monotonic()
        value = predicate()
        if inspect.isawaitable(value):
            value = await value
        if value:
            return value
        now = time.monotonic()
        if paused > timeout or now > first + 4 * timeout:
            raise AssertionError(f"not true within {timeout} s: {predicate!r} gave {value!r}")
        pause = max(_POLL_S, min(2 * (now - begun), _LONG_POLL_S), (now - first) / 40)
        pause = min(pause, _LONGEST_POLL_S)
        await asyncio.sleep(pause)
        paused += pause


async def until_none(found: Callable[[], object], timeout: float = 60.0) -> None:
    """Poll until nothing is found.

    Raises:
        AssertionError: as :func:`until`; it says what is still found.
    """
    last: object = None

    def none() -> bool:
        nonlocal last
        last = found()
        return not last

    try:
        await until(none, timeout)
    except AssertionError as error:
        raise AssertionError(f"after {timeout} s there still is {last!r}") from error


def children(pid: int | None = None) -> set[int]:
    """The processes that a process (None: this one) has started and not waited for."""
    found: set[int] = set()
    for task in _tasks(pid or os.getpid()):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread just ended
            found |= set(map(int, (task / "children").read_text().split()))
    return found


def _tasks(pid: int) -> list[Path]:
    """The folders of the threads of a process; none if it has just ended."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return list(Path(f"/proc/{pid}/task").iterdir())
    return []


def commands(name: bytes, pids: Iterable[int]) -> set[int]:
    """Those of the processes that run, and whose command line contains ``name``."""
    found: set[int] = set()
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it just ended
            if name in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.add(pid)
    return found


def server_children() -> set[int]:
    """The servers that this process has started and that still run."""
    return commands(b"torchstore_core.server", children())


async def halt(pid: int) -> None:
    """Stop a process (SIGSTOP), and wait until none of its threads runs any more."""
    os.kill(pid, signal.SIGSTOP)
    await until(lambda: _states(pid) == {"T"})


def stop(pid: int) -> None:
    """The same, in the middle of a step of the event loop."""
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + 60
    while _states(pid) != {"T"}:
        assert time.monotonic() < deadline, _states(pid)


def _states(pid: int) -> set[str]:
    found: set[str] = set()
    for task in _tasks(pid):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it just ended
            found.add((task / "stat").read_text().rpartition(")")[2].split()[0])
    return found


@contextmanager
def before_commits(call: Callable[[], object]) -> Iterator[None]:
    """Call something just before a put with ``blocking=False`` sends its commit and returns."""
    from torchstore_core.clients.transfer.puts import Putting

    begin_commit = Putting.begin_commit

    def begin_after(putting: Putting) -> None:
        call()
        begin_commit(putting)

    with mock.patch.object(Putting, "begin_commit", begin_after):
        yield


def resume(pid: int) -> None:
    """Let a process go on that was stopped, unless it has ended: the kernel lets one go on that has
    stopped by the time that its parent dies.
    """
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


async def turn() -> None:
    """Let everything else on this event loop have its turn, once."""
    await asyncio.sleep(0)


@asynccontextmanager
async def call_beside(store: Any = ts) -> AsyncIterator[None]:
    """Meanwhile a call waits for a key, so that replies to others come by way of the event loop:
    until then other tasks have their turns, and can cancel them. (Else they are received at once.)
    """
    await store.keys()  # there is a channel
    waiting = asyncio.create_task(store.wait("never"))
    await turn()
    try:
        yield
    finally:
        waiting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await waiting


def free_port() -> int:
    """A TCP port of this host that nobody listens at, and that the system gives to nobody else:
    this process keeps it bound. Who is told of it can listen all the same, for listeners set
    SO_REUSEADDR.
    """
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind(("127.0.0.1", 0))
    port = int(sock.getsockname()[1])
    sock.detach()
    return port


def open_files(pid: int | str = "self") -> dict[Path, str]:
    """The open files of a process, as links of /proc, and what each is; without those that are
    closed at this moment.
    """
    found: dict[Path, str] = {}
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found[link] = os.readlink(link)
    return found


def loops_and_sockets() -> int:
    """How many descriptors of this process are those of event loops and connections: other threads
    open files now and then, for a moment.
    """
    return sum(file.startswith(("socket:", "anon_inode:")) for file in open_files().values())


def has_loaded(pid: int, library: str) -> bool:
    """Whether a process has a library in its memory; False if it has ended."""
    try:
        return library in Path(f"/proc/{pid}/maps").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def named_memory(pids: Iterable[int]) -> set[Path]:
    """Files in /dev/shm that processes have mapped or opened, and that still have a name."""
    found: set[str] = set()
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it just ended
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
            found |= {line.split(maxsplit=5)[5] for line in lines if "/" in line}
            found.update(open_files(pid).values())
    return {path for name in found if (path := Path(name)).parts[:3] == _SHM and path.exists()}


# One for the process: the TCPStore that a rank 0 hosts stays as long as it.
_spmd_port = functools.cache(free_port)


async def start_store(runtime: str = "local", **arguments: Any) -> ts.Client:
    """Initialise a store with little memory by one of :data:`RUNTIMES`; ``arguments`` as for
    ``initialize``.
    """
    arguments = {**SMALL, **arguments}
    if runtime == "spmd":
        env = ts.SPMDEnv(0, 0, 1, 1, "127.0.0.1", _spmd_port())
        arguments.setdefault("num_storage_volumes", 1)
        return await ts.initialize_spmd(env=env, **arguments)
    return await ts.initialize(runtime=arguments.pop("runtime", runtime), **arguments)


@asynccontextmanager
async def running_store(runtime: str = "local", **arguments: Any) -> AsyncIterator[ts.Client]:
    """A store that is always shut down; arguments as for :func:`start_store`."""
    client = await start_store(runtime, **arguments)
    try:
        yield client
    finally:
        await ts.shutdown(client.store_name)


async def at_rest(client: ts.Client) -> None:
    """Wait until nobody writes or holds memory of a store. What was read is given back in the
    background, and not before the collector has found it.
    """
    looks = itertools.count()

    async def nothing_held() -> bool:
        if next(looks):
            gc.collect()
        volumes = (await client.status()).volumes
        return not any(volume.leased_bytes or volume.unfinished_bytes for volume in volumes)

    await until(nothing_held)


async def used() -> int:
    """Bytes of the default store that values have."""
    return sum(volume.used_bytes for volume in (await ts.status()).volumes)


async def leased() -> int:
    """Bytes of the default store that readers hold."""
    return sum(volume.leased_bytes for volume in (await ts.status()).volumes)


async def nothing_leased() -> bool:
    """Whether nobody holds memory of the default store to read it."""
    return not await leased()


async def emptied(client: ts.Client) -> None:
    """Make a store that tests share as it was for the first of them, but for its versions."""
    await client.delete_batch(await client.keys())
    await at_rest(client)


@contextmanager
def disk_of(folder: Path, nbytes: int) -> Iterator[Path]:
    """A new folder that is a file system of its own; skips the test if this process may not mount
    one.
    """
    import pytest  # which processes of tests that import this module do not need

    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "tmpfs", str(folder)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("this process may not mount a file system")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def noise(nbytes: int, seed: int | None = None) -> torch.Tensor:
    """Random bytes; with a seed, the same in every process. Eight are drawn at a time: to draw each
    byte by itself takes four times as long.
    """
    import torch

    generator = None if seed is None else torch.Generator().manual_seed(seed)
    words = torch.empty(-(-nbytes // 8), dtype=torch.int64)
    return words.random_(-(1 << 63), None, generator=generator).view(torch.uint8)[:nbytes]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The values' bytes, row-major, as uint8: equal exactly if all values are the same bits."""
    import torch

    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    plain = tensor.detach().resolve_conj().resolve_neg()
    if plain.element_size() == 16:
        plain = torch.view_as_real(plain)
    # Some dtypes have no kernel that copies; integers of the same width do.
    plain = plain.view(integers[plain.element_size()]).contiguous()
    return plain.reshape(-1).view(torch.uint8)


def load_all(registry: Registry) -> None:
    """Load every plug-in of every group, so that ``errors()`` is complete."""
    for group in GROUPS:
        for name in registry.names(group):
            with contextlib.suppress(PluginError):
                registry.load(group, name)
