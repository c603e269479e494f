"""Starts, commands and ends the measured processes. Every answer has a deadline."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from torchstore_core.errors import StoreTimeoutError, TorchStoreError, from_wire

__all__ = ["Worker", "Workers"]

_PROGRAM = ("-P", "-m", "torchstore_cli.bench.worker_main")
_EXIT_S = 15.0
_STDERR_CHARS = 4000


class Worker:
    """One measured process, which executes one command at a time (see ``worker_main.py``).

    Args:
        name: the name in error messages.
        command: the program and its arguments.
        environment: the environment of the process.
    """

    def __init__(self, name: str, command: Sequence[str], environment: dict[str, str]) -> None:
        self.name = name
        self._stderr = tempfile.TemporaryFile("w+b")  # noqa: SIM115 - closed with the process
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env=environment,
        )
        self.pid = self._process.pid
        self._unread = b""
        self._busy = False

    def call(self, op: str, timeout: float = 60.0, **fields: Any) -> Any:
        """Send a command and return its result.

        Raises:
            StoreTimeoutError: there was no answer within ``timeout`` seconds; kills the process.
            TorchStoreError: the command raised it, or the process has ended.
        """
        self.start(op, **fields)
        return self.result(timeout)

    def start(self, op: str, **fields: Any) -> None:
        """Send a command, whose result :meth:`result` returns."""
        line = json.dumps({"op": op, **fields}).encode() + b"\n"
        self._busy = True
        try:
            if self._process.stdin is not None:
                self._process.stdin.write(line)
                self._process.stdin.flush()
        except OSError as error:
            raise self._ended() from error

    def result(self, timeout: float = 60.0) -> Any:
        """Return the result of the last command. Raises the same errors as :meth:`call`."""
        reply = json.loads(self._read_line(timeout))
        self._busy = False
        if "error" in reply:
            raise from_wire(reply["error"], reply["message"], reply["key"], reply["details"])
        return reply["ok"]

    def _read_line(self, timeout: float) -> bytes:
        fd = self._process.stdout.fileno() if self._process.stdout is not None else -1
        deadline = time.monotonic() + timeout
        while b"\n" not in self._unread:
            remaining = deadline - time.monotonic()
            if remaining <= 0 or not select.select([fd], [], [], remaining)[0]:
                self._process.kill()
                raise StoreTimeoutError(
                    f"the process {self.name!r} did not answer within {timeout:.0f} s"
                    f"\n{self._error_output()}",
                    details={"timeout": timeout},
                )
            data = os.read(fd, 1 << 16)
            if not data:
                raise self._ended()
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _ended(self) -> TorchStoreError:
        status = self._process.wait(_EXIT_S)
        return TorchStoreError(
            f"the process {self.name!r} ended early, with status {status}\n{self._error_output()}"
        )

    def _error_output(self) -> str:
        self._stderr.seek(0)
        return self._stderr.read().decode(errors="replace")[-_STDERR_CHARS:]

    def close(self) -> None:
        """End the process by closing its input; kill it if it does not end."""
        if self._process.stdin is not None:
            try:
                self._process.stdin.close()
            except OSError:
                self._process.kill()
        if self._busy:  # nobody waits for the result of its command any more
            self._process.terminate()
        try:
            self._process.wait(_EXIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._stderr.close()


class Workers:
    """All measured processes of a run: each starts when it is first needed, and all end together.

    Args:
        program: arguments of the Python interpreter, which select the program that they run.
    """

    def __init__(self, program: Sequence[str] = _PROGRAM) -> None:
        self._program = program
        self._workers: dict[str, Worker] = {}
        self.started: dict[int, str] = {}
        self.servers: list[int] = []

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def get(self, role: str, *, loop: str = "asyncio", omp: int | None = None) -> Worker:
        """Return the process of that role, with that event loop and OMP_NUM_THREADS=``omp``."""
        name = "-".join([role, loop, *([f"omp{omp}"] if omp is not None else [])])
        if name not in self._workers:
            environment = dict(os.environ)
            # Another store must not be used, and the number of threads is part of the measurement.
            for other in ("TORCHSTORE_ADDRESS", "OMP_NUM_THREADS"):
                environment.pop(other, None)
            if omp is not None:
                environment["OMP_NUM_THREADS"] = str(omp)
            command = [sys.executable, *self._program, loop]
            worker = self._workers[name] = Worker(name, command, environment)
            self.started[worker.pid] = name
        return self._workers[name]

    def drop(self, role: str) -> None:
        """End the process of that role."""
        self._workers.pop(f"{role}-asyncio").close()

    def opened(self, reply: dict[str, Any]) -> str:
        """Record a store's server, so that its end is checked; return the store's address."""
        self.servers.append(int(reply["server_pid"]))
        return str(reply["address"])

    def close(self) -> None:
        """End all processes."""
        for worker in self._workers.values():
            worker.close()
        self._workers.clear()

    def leftovers(self, timeout: float = 5.0) -> list[int]:
        """Return the servers that outlive their stores, and kill them. There should be none."""
        left = {pid for pid in self.servers if _is_server(pid)}
        deadline = time.monotonic() + timeout
        while left and time.monotonic() < deadline:
            left = {pid for pid in left if _is_server(pid)}
            time.sleep(0.02)
        for pid in left:
            os.kill(pid, 9)
        return sorted(left)


def _is_server(pid: int) -> bool:
    """Return whether the pid still belongs to a server: not to a zombie, nor to a new process."""
    try:
        return b"torchstore_core.server" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
