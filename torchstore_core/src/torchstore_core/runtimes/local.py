"""The runtime ``local``: the server is a child process that ends with its owner."""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import shutil
import socket
import subprocess
import sys
import threading

import msgspec

from torchstore_core.clients.calls.thread_loops import in_thread
from torchstore_core.clients.calls.user_warnings import warn
from torchstore_core.contracts.runtime import Runtime, StoreOptions
from torchstore_core.errors import (
    StoreClosedError,
    StoreTimeoutError,
    from_wire,
    in_seconds,
)
from torchstore_core.machine.topology import beyond_memory, memory_limit_bytes
from torchstore_core.plugins.ranking import Policy
from torchstore_core.plugins.strategy_data import encode_strategy

__all__ = ["LocalRuntime"]

log = logging.getLogger(__name__)

_KILL_AFTER_S = 3.0
_END_STARTING_S = 1.0


class LocalRuntime(Runtime):
    """Starts ``python -m torchstore_core.server`` and watches over it.

    Args:
        members: the server is for all its members, see ``server.members``; this process only
            starts it, and leaves it to them with :meth:`release`.

    Attributes:
        server_pid: of the server, once it has started.
    """

    def __init__(self, *, members: bool = False) -> None:
        self.server_pid = 0
        self._members = members
        self._process: subprocess.Popen[bytes] | None = None
        self._path = self._directory = ""
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._given_up = False

    async def start(self, options: StoreOptions, mesh: object | None) -> str:
        limit = memory_limit_bytes()
        if beyond := beyond_memory(options.capacity or 0, limit, "this host"):
            warn(beyond)
        strategy = options.strategy
        config = {
            "store_name": options.store_name,
            "num_storage_volumes": options.num_storage_volumes,
            "capacity": options.capacity,
            "prefault": options.prefault,
            "block": Policy.unchecked(block=options.block).block,
            "owner": os.getpid(),
            "members": self._members,
        }
        if strategy is not None:
            config["strategy"], config["strategy_fields"] = encode_strategy(strategy)
        # -P: the server must not import what happens to lie in the current folder. A session of
        # its own: Ctrl-C is for the owner, which then ends it.
        command = [sys.executable, "-P", "-m", "torchstore_core.server"]
        command.append(msgspec.json.encode(config).decode())
        try:
            line = await asyncio.wait_for(in_thread(lambda: self._launch(command)), options.timeout)
            return self._address(line)
        except TimeoutError as error:
            await self._give_up()
            raise StoreTimeoutError(
                f"the server of store {options.store_name!r} did not come up within "
                f"{in_seconds(options.timeout)}",
                details={"operation": "initialize", "timeout": options.timeout},
            ) from error
        except BaseException:
            await self._give_up()
            raise

    def _launch(self, command: list[str]) -> bytes:
        """Start the server, wait until it is ready, and return the line it says then.

        In a thread, which goes on when the caller is cancelled: see :meth:`_give_up`.
        """
        with self._lock:
            if self._given_up:
                return b""
            process = self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                start_new_session=True,
            )
        atexit.register(self._at_exit)
        if process.stdout is None:
            return b""
        with process.stdout as stream:
            return stream.readline()

    async def _give_up(self) -> None:
        """End a server that is starting, or keep it from being started."""
        with self._lock:
            self._given_up = True
        await self.stop(_END_STARTING_S)

    def _address(self, line: bytes) -> str:
        try:
            said = msgspec.json.decode(line, type=dict[str, str | int])
        except msgspec.DecodeError as error:
            raise StoreClosedError(
                "the server ended while starting; its standard error says why"
            ) from error
        if "address" not in said:
            raise from_wire(str(said.get("error")), f"server: {said.get('message')}", None, {})
        address = str(said["address"])
        self._path = address.partition(":")[2]
        self._directory = os.path.dirname(self._path)
        self.server_pid = int(said["pid"])
        return address

    @property
    def ended(self) -> bool:
        process = self._process
        if process is None or os.getpid() != self._owner:
            return False
        if process.poll() is not None:
            return True
        with socket.socket(socket.AF_UNIX) as sock:  # a server that is ending does not listen
            sock.setblocking(False)
            try:
                sock.connect(self._path)
            except ConnectionRefusedError:
                return True
            except OSError:  # it is busy, or somebody has removed the socket
                return False
        return False

    def release(self) -> threading.Thread:
        """Leave the server to its members: it does not end by :meth:`stop` any more, nor with this
        process. The thread ends when the server has, and has removed what that left behind.
        """
        process, self._process = self._process, None
        atexit.unregister(self._at_exit)
        waiter = threading.Thread(
            target=self._reap, args=(process,), name="torchstore-server", daemon=True
        )
        waiter.start()
        return waiter

    def _reap(self, process: subprocess.Popen[bytes] | None) -> None:
        if process is not None:
            process.wait()
            shutil.rmtree(self._directory, ignore_errors=True)

    async def stop(self, timeout: float) -> None:
        if self._process is None or os.getpid() != self._owner:
            return
        self._process.terminate()
        # Whoever is cancelled meanwhile, the process is waited for.
        await asyncio.shield(asyncio.ensure_future(in_thread(lambda: self._end(timeout))))

    def _end(self, timeout: float) -> None:
        process, self._process = self._process, None
        atexit.unregister(self._at_exit)
        if process is None:
            return
        try:
            process.wait(min(timeout, _KILL_AFTER_S))
        except subprocess.TimeoutExpired:
            log.warning("server %d does not end by itself; killing it", process.pid)
            process.kill()
            process.wait()
        if self._directory:  # the server removes it, unless it was killed
            shutil.rmtree(self._directory, ignore_errors=True)

    def _at_exit(self) -> None:
        """The owner ends without shutdown: take the server along, and wait for it."""
        if self._process is None:
            return
        if os.getpid() != self._owner:
            self._process.returncode = 0  # the parent waits for it: a Popen would warn here
            return
        self._process.terminate()
        self._end(_KILL_AFTER_S)
