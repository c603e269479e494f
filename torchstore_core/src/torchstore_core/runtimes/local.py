"""The runtime ``local``: the server is a child process that ends with its owner."""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import shutil
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
from torchstore_core.machine.directories import is_abandoned
from torchstore_core.machine.processes import is_exiting
from torchstore_core.machine.topology import capacity_warning, memory_limit_bytes
from torchstore_core.plugins.installed import Inventory
from torchstore_core.plugins.ranking import Policy
from torchstore_core.plugins.strategy_data import encode_strategy

log = logging.getLogger(__name__)

_KILL_AFTER_S = 3.0
_CANCEL_START_S = 1.0


class LocalRuntime(Runtime):
    """Starts ``python -m torchstore_core.server`` and supervises the process.

    Args:
        members: whether the server belongs to all its members, see ``server.serving.members``.
            This process then only starts the server, and hands it over with :meth:`release`.

    Attributes:
        server_pid: of the server, once it has started.
    """

    keeps = True

    def __init__(self, *, members: bool = False) -> None:
        self.server_pid = 0
        self._members = members
        self._process: subprocess.Popen[bytes] | None = None
        self._path = self._directory = ""
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._start_cancelled = False

    async def start(self, options: StoreOptions, mesh: object | None) -> str:
        limit = memory_limit_bytes()
        if text := capacity_warning(options.capacity or 0, limit, "this host"):
            warn(text)
        strategy = options.strategy
        config = {
            "store_name": options.store_name,
            "num_storage_volumes": options.num_storage_volumes,
            "capacity": options.capacity,
            "prefault": options.prefault,
            "block": Policy.unchecked(block=options.block).block,
            "owner": os.getpid(),
            "spill": options.spill,
            "spill_capacity": options.spill_capacity,
            "when_full": options.when_full,
            "repair_bandwidth": options.repair_bandwidth,
            "members": self._members,
            "keeper": options.keeper is not False,
            "installed": Inventory.taken(),
        }
        if strategy is not None:
            config["strategy"], config["strategy_fields"] = encode_strategy(strategy)
        # -P: the server must not import modules that happen to be in the current directory. It gets
        # a process session of its own, so that Ctrl-C goes only to the owner, which then stops it.
        command = [sys.executable, "-P", "-m", "torchstore_core.server"]
        command.append(msgspec.json.encode(config).decode())
        try:
            line = await asyncio.wait_for(in_thread(lambda: self._launch(command)), options.timeout)
            return self._address(line)
        except TimeoutError as error:
            await self._cancel_start()
            raise StoreTimeoutError(
                f"the server of store {options.store_name!r} did not come up within "
                f"{in_seconds(options.timeout)}",
                details={"operation": "initialize", "timeout": options.timeout},
            ) from error
        except BaseException:
            await self._cancel_start()
            raise

    def _launch(self, command: list[str]) -> bytes:
        """Start the server, wait until it is ready, and return the line that it prints then.

        Runs in a thread, which continues if the caller is cancelled: see :meth:`_cancel_start`.
        """
        with self._lock:
            if self._start_cancelled:
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

    async def _cancel_start(self) -> None:
        """Stop a server that is starting, or prevent one from being started."""
        with self._lock:
            self._start_cancelled = True
        await self.stop(_CANCEL_START_S)

    def _address(self, line: bytes) -> str:
        try:
            answer = msgspec.json.decode(line, type=dict[str, str | int])
        except msgspec.DecodeError as error:
            raise StoreClosedError(
                "the server ended while starting; its standard error says why"
            ) from error
        if "address" not in answer:
            raise from_wire(str(answer.get("error")), f"server: {answer.get('message')}", None, {})
        address = str(answer["address"])
        self._path = address.partition(":")[2]
        self._directory = os.path.dirname(self._path)
        self.server_pid = int(answer["pid"])
        return address

    @property
    def pid(self) -> int:
        """Of the process that was started: the server, or its keeper; 0: there is none."""
        return 0 if self._process is None else self._process.pid

    @property
    def ended(self) -> bool:
        process = self._process
        if process is None or os.getpid() != self._owner:
            return False
        # A server that is about to exit no longer listens.
        return process.poll() is not None or is_exiting(process.pid) or is_abandoned(self._path)

    def release(self) -> threading.Thread:
        """Leave the server to its members: :meth:`stop` and the end of this process no longer
        affect it. The returned thread ends after the server has ended and its files were removed.
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
        # Shielded, so that the process is waited for even if the caller is cancelled.
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
        if self._directory:  # the server removes it unless it was killed
            shutil.rmtree(self._directory, ignore_errors=True)

    def _at_exit(self) -> None:
        """The owner exits without a shutdown: stop the server, and wait for it."""
        if self._process is None:
            return
        if os.getpid() != self._owner:
            self._process.returncode = 0  # the parent waits for it; prevents Popen's warning here
            return
        self._process.terminate()
        self._end(_KILL_AFTER_S)
