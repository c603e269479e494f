"""Starting, commanding and ending the measured processes. Every answer has a deadline."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

_PEERS = Path(__file__).with_name("peers.py")
_END_S = 15.0


class PeerError(Exception):
    """A measured process failed, died or did not answer in time."""


class Peer:
    """One measured process (``peers.py``)."""

    def __init__(self, name: str, loop: str, environment: dict[str, str]) -> None:
        self.name = name
        self._said = tempfile.TemporaryFile("w+b")  # noqa: SIM115 - closed with the process
        self._process = subprocess.Popen(
            [sys.executable, str(_PEERS), loop],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            env=environment,
        )
        self.pid = self._process.pid
        self._got = b""
        self._asked = False

    def call(self, op: str, timeout: float = 60.0, **fields: Any) -> Any:
        """Send a command and return its result.

        Raises:
            PeerError: it failed, or gave no answer within ``timeout`` seconds; it is killed then.
        """
        self.start(op, **fields)
        return self.result(timeout)

    def start(self, op: str, **fields: Any) -> None:
        """Send a command; :meth:`result` gets what it returns."""
        line = json.dumps({"op": op, **fields}).encode() + b"\n"
        self._asked = True
        try:
            if self._process.stdin is not None:
                self._process.stdin.write(line)
                self._process.stdin.flush()
        except OSError as error:
            raise PeerError(f"{self.name} is gone ({error})\n{self._last_words()}") from error

    def result(self, timeout: float = 60.0) -> Any:
        """What the command under way returned. Raises as :meth:`call`."""
        reply = json.loads(self._line(timeout))
        self._asked = False
        if "error" in reply:
            raise PeerError(f"{self.name}: {reply['error']}{self._last_words()}")
        return reply["ok"]

    def _line(self, timeout: float) -> bytes:
        fd = self._process.stdout.fileno() if self._process.stdout is not None else -1
        deadline = time.monotonic() + timeout
        while b"\n" not in self._got:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([fd], [], [], left)[0]:
                self._process.kill()
                raise PeerError(f"{self.name}: no answer in {timeout:.0f} s\n{self._last_words()}")
            data = os.read(fd, 1 << 16)
            if not data:
                code = self._process.wait()
                raise PeerError(f"{self.name} ended with {code}\n{self._last_words()}")
            self._got += data
        line, _, self._got = self._got.partition(b"\n")
        return line

    def _last_words(self) -> str:
        self._said.seek(0)
        return self._said.read()[-4000:].decode(errors="replace")

    def close(self) -> None:
        """End the process: it ends by itself when its input closes, else it is killed."""
        if self._process.stdin is not None:
            try:
                self._process.stdin.close()
            except OSError:
                self._process.kill()
        if self._asked:  # a command is under way that nobody waits for any more
            self._process.terminate()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._said.close()


class Crew:
    """All measured processes of a run, made when first needed and all ended at its end."""

    def __init__(self) -> None:
        self._peers: dict[str, Peer] = {}
        self.started: dict[int, str] = {}
        self.servers: list[int] = []

    def __enter__(self) -> Crew:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def get(self, role: str, *, loop: str = "asyncio", omp: int | None = None) -> Peer:
        """The process of that role, on that kind of event loop, with OMP_NUM_THREADS=``omp``."""
        name = "-".join([role, loop, *([f"omp{omp}"] if omp is not None else [])])
        if name not in self._peers:
            environment = dict(os.environ)
            # A store around us is not ours, and the number of threads is part of what we measure.
            for other in ("TORCHSTORE_ADDRESS", "OMP_NUM_THREADS"):
                environment.pop(other, None)
            if omp is not None:
                environment["OMP_NUM_THREADS"] = str(omp)
            peer = self._peers[name] = Peer(name, loop, environment)
            self.started[peer.pid] = name
        return self._peers[name]

    def drop(self, role: str) -> None:
        """End the process of that role."""
        self._peers.pop(f"{role}-asyncio").close()

    def opened(self, reply: dict[str, Any]) -> str:
        """Note a store's server, so that its end is checked; the store's address."""
        self.servers.append(int(reply["server_pid"]))
        return str(reply["address"])

    def close(self) -> None:
        """End all processes."""
        for peer in self._peers.values():
            peer.close()
        self._peers.clear()

    def leftovers(self, timeout: float = 5.0) -> list[int]:
        """Servers that outlive their stores; they are killed. There should be none."""
        left = {pid for pid in self.servers if _is_server(pid)}
        deadline = time.monotonic() + timeout
        while left and time.monotonic() < deadline:
            left = {pid for pid in left if _is_server(pid)}
            time.sleep(0.02)
        for pid in left:
            os.kill(pid, 9)
        return sorted(left)


def _is_server(pid: int) -> bool:
    """Whether that pid (still) is a server, not a zombie, not somebody else's new process."""
    try:
        return b"torchstore_core.server" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
