"""Monarch jobs for the tests: a root client in a process of its own, workers, emulated hosts.

Neither pytest nor another job is touched by what happens to one. Functions of test modules run in
the root client (``Job.root``) or in a worker (``Job.at``), by reference.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import itertools
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.monarch.forked import STAND_IN, forking
from tests.processes import fork
from tests.support import free_port

__all__ = ["Function", "Job", "kill_all", "python_path", "running"]

_REPOSITORY = Path(__file__).parents[2]
_MARK = "TORCHSTORE_TEST_JOB"
_START_S = 200.0
_END_S = 60.0

Function = Callable[..., Awaitable[Any]]


def python_path() -> str:
    """Where a fresh interpreter finds the tests' own modules, and what this one finds."""
    return os.pathsep.join(filter(None, [str(_REPOSITORY), os.environ.get("PYTHONPATH")]))


class Job:
    """A job, started; a context manager that ends it.

    Args:
        workers: processes of the mesh ``workers``: in all, or on each emulated host.
        hosts: emulated ones (0: the workers are on the root's host). The root is on none of them.
        wrappers: for each host, a command that runs its processes (its last arguments).
        addresses: for each host, where it listens (``tcp://…``); None: free ports here.
        transport: how the engine reaches the root (``tcp://…``); with hosts, by default over the
            loopback.
        fresh: the workers are new interpreters, which have not imported torch; as they are with
            wrappers.
    """

    def __init__(
        self,
        workers: int = 2,
        hosts: int = 0,
        *,
        wrappers: Sequence[Sequence[str]] = (),
        addresses: Sequence[str] | None = None,
        transport: str = "",
        fresh: bool = False,
    ) -> None:
        self.mark = uuid.uuid4().hex
        # Short: a Unix socket's path has at most 107 bytes.
        self._base = Path(tempfile.mkdtemp(prefix="ts-job-", dir="/tmp"))
        self.directory = self._base / "torchstore"
        self._environment = {
            **os.environ,
            "PYTHONPATH": python_path(),
            "XDG_RUNTIME_DIR": str(self._base),
            _MARK: self.mark,
        }
        if addresses is None:
            addresses = [f"tcp://127.0.0.1:{free_port()}" for _ in range(hosts)]
        self._hosts = [
            self._popen(
                [
                    *(wrappers[i] if wrappers else ()),
                    sys.executable,
                    "-c",
                    "from monarch.actor import run_worker_loop_forever\n"
                    f"run_worker_loop_forever(address={address!r}, ca='trust_all_connections')",
                ],
                {"TORCHSTORE_HOST_ID": f"host{i}"},
            )
            for i, address in enumerate(addresses)
        ]
        self._forking = contextlib.ExitStack()
        command = []
        if not fresh and not wrappers:
            command = self._forking.enter_context(forking(self._base, self._environment))
        ours, theirs = socket.socketpair()
        with open(self._base / "output", "ab") as output, Connection(theirs.detach()) as pipe:
            self._root = fork(
                _root,
                pipe,
                workers,
                transport,
                addresses,
                command,
                files={1: output.fileno(), 2: output.fileno()},
                environment=self._environment,
            )
        self._pipe = Connection(ours.detach())
        self._ids = itertools.count()
        self._lock = threading.Lock()
        self._waiting: dict[int, concurrent.futures.Future[Any]] = {}
        self._ready: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self._waiting[next(self._ids)] = self._ready
        threading.Thread(target=self._read, daemon=True).start()

    def _popen(
        self, command: Sequence[str], extra: dict[str, str], **options: Any
    ) -> subprocess.Popen[bytes]:
        # What it says goes to a file: pipes would have to be read.
        with open(self._base / "output", "ab") as output:
            return subprocess.Popen(
                command,
                env={**self._environment, **extra},
                cwd=_REPOSITORY,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                **options,
            )

    @property
    def pid(self) -> int:
        """Of the root client."""
        return int(self._root.pid or 0)

    def host_pids(self) -> list[int]:
        """Of the emulated hosts' own processes."""
        return [host.pid for host in self._hosts]

    def processes(self) -> set[int]:
        """All processes of the job that run, by pid."""
        return {pid for pid in running() if self._owns(pid)}

    def _owns(self, pid: int) -> bool:
        if pid == self.pid:  # forked: what the system knows of its environment is another's
            return True
        try:
            if f"{_MARK}={self.mark}".encode() not in Path(f"/proc/{pid}/environ").read_bytes():
                return False
            # The worker counts, not what the engine has started in its place.
            return STAND_IN.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            return False

    def directories(self) -> list[str]:
        """What there is of the job's socket directories."""
        return os.listdir(self.directory) if self.directory.exists() else []

    def left(self) -> dict[str, list[str]]:
        """The same, with what is in each: its sockets say whose it is."""
        found = {}
        for name in self.directories():
            with contextlib.suppress(OSError):  # it was just removed
                found[name] = os.listdir(self.directory / name)
        return found

    def output(self) -> str:
        """What all processes of the job said so far."""
        return (self._base / "output").read_text(errors="replace")

    # ---- calls ----------------------------------------------------------------------------

    async def root(self, function: Function, *args: Any, timeout: float = 180.0) -> Any:
        """Run ``await function(*args)`` in the root client; raises what it raises."""
        return await self._call(None, function, args, timeout)

    async def at(self, worker: int, function: Function, *args: Any, timeout: float = 180.0) -> Any:
        """The same in a worker. With hosts, workers count host by host."""
        return await self._call(worker, function, args, timeout)

    async def _call(
        self, worker: int | None, function: Function, args: tuple[Any, ...], timeout: float
    ) -> Any:
        started = asyncio.shield(asyncio.wrap_future(self._ready))  # others wait for it, too
        try:
            await asyncio.wait_for(started, _START_S)
        except TimeoutError as error:
            said = self.output()[-5000:]
            raise TimeoutError(f"no job after {_START_S} s; it has said:\n{said}") from error
        made: concurrent.futures.Future[Any] = concurrent.futures.Future()
        with self._lock:
            ident = next(self._ids)
            self._waiting[ident] = made
            self._pipe.send_bytes(pickle.dumps((ident, worker, function, args)))
        return await asyncio.wait_for(asyncio.wrap_future(made), timeout)

    def _read(self) -> None:
        while True:
            try:
                ident, good, value = pickle.loads(self._pipe.recv_bytes())
            except (EOFError, OSError):
                for future in list(self._waiting.values()):
                    if not future.done():
                        future.set_exception(ConnectionError("the root client has ended"))
                return
            future = self._waiting.pop(ident)
            if future.cancelled():
                continue
            if good:
                future.set_result(value)
            else:
                future.set_exception(value)

    # ---- the end --------------------------------------------------------------------------

    def leave(self) -> None:
        """The root client's ``main`` returns, whatever is open."""
        self._pipe.send_bytes(pickle.dumps(None))

    def ended(self) -> int | None:
        """The root client's exit status; None: it runs."""
        return self._root.exitcode

    def __enter__(self) -> Job:
        return self

    def __exit__(self, failed: type[BaseException] | None, *_: object) -> None:
        if failed is not None:
            print(self.output()[-20000:], file=sys.stderr)
        self.close()

    def close(self) -> None:
        """End everything. Idempotent."""
        self._root.kill()
        self._root.join()
        for host in self._hosts:
            host.kill()
            host.wait()
        self._pipe.close()
        self._forking.close()
        kill_all(self.processes, _END_S)
        shutil.rmtree(self._base, ignore_errors=True)


def kill_all(running: Callable[[], Iterable[int]], timeout: float) -> None:
    """Kill processes until none of them runs, at most so long: they may still start others."""
    deadline = time.monotonic() + timeout
    while (left := running()) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _root(pipe: Connection, *arguments: Any) -> None:
    from tests.monarch.root import main  # imports Monarch

    os.chdir(_REPOSITORY)
    main(pipe, *arguments)


def running() -> set[int]:
    """All processes of this machine that are no zombies."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            state = entry.read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state not in "ZX":
            found.add(int(entry.parent.name))
    return found
