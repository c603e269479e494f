"""The runtime ``local``: the server is a child process that ends with its owner."""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import shutil
import subprocess
import sys

import msgspec

from torchstore_core.contracts.runtime import Runtime, StoreOptions
from torchstore_core.errors import (
    PluginError,
    StoreClosedError,
    StoreTimeoutError,
    TorchStoreError,
    from_wire,
)
from torchstore_core.ranking import Policy

__all__ = ["LocalRuntime"]

log = logging.getLogger(__name__)

_KILL_AFTER_S = 3.0


class LocalRuntime(Runtime):
    """Starts ``python -m torchstore_core.server`` and watches over it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._directory = ""
        self._owner = os.getpid()

    async def start(self, options: StoreOptions, mesh: object | None) -> str:
        strategy = options.strategy
        config = {
            "store_name": options.store_name,
            "num_storage_volumes": options.num_storage_volumes,
            "capacity": options.capacity,
            "prefault": options.prefault,
            "block": Policy.make(block=options.block).block,
            "owner": os.getpid(),
        }
        if strategy is not None:
            config["strategy"] = strategy_name(strategy)
            config["strategy_fields"] = msgspec.json.encode(strategy)
        # -P: the server must not import what happens to lie in the current folder. A session of
        # its own: Ctrl-C is for the owner, which then ends it.
        process = await asyncio.to_thread(
            subprocess.Popen,
            [
                sys.executable,
                "-P",
                "-m",
                "torchstore_core.server",
                msgspec.json.encode(config).decode(),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self._process = process
        atexit.register(self._at_exit)
        try:
            line = await asyncio.wait_for(
                asyncio.to_thread(self._ready_line, process), options.timeout
            )
        except TimeoutError as error:
            await self.stop(0.0)
            raise StoreTimeoutError(
                f"the server (pid {process.pid}) did not come up within {options.timeout} s"
            ) from error
        except BaseException:
            await self.stop(0.0)
            raise
        try:
            return self._address(line, process)
        except TorchStoreError:
            await self.stop(1.0)
            raise

    def _ready_line(self, process: subprocess.Popen[bytes]) -> bytes:
        if process.stdout is None:
            return b""
        with process.stdout as stream:
            return stream.readline()

    def _address(self, line: bytes, process: subprocess.Popen[bytes]) -> str:
        try:
            said = msgspec.json.decode(line, type=dict[str, str | int])
        except msgspec.DecodeError as error:
            raise StoreClosedError(
                f"the server (pid {process.pid}) ended while starting; its standard error says why"
            ) from error
        if "address" not in said:
            raise from_wire(str(said.get("error")), f"server: {said.get('message')}", None, {})
        address = str(said["address"])
        self._directory = os.path.dirname(address.partition(":")[2])
        return address

    async def stop(self, timeout: float) -> None:
        if self._process is None or os.getpid() != self._owner:
            return
        self._process.terminate()
        await asyncio.to_thread(self._end, timeout)

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
        if self._process is not None and os.getpid() == self._owner:
            self._process.terminate()
            self._end(_KILL_AFTER_S)


def strategy_name(strategy: object) -> str:
    """The entry-point name of a strategy: its tag.

    Raises:
        PluginError: it is no Strategy with a tag.
    """
    config = getattr(type(strategy), "__struct_config__", None)
    if config is None or not isinstance(config.tag, str):
        raise PluginError(
            f"a strategy is a msgspec Struct derived from Strategy with a tag, not {strategy!r}"
        )
    return str(config.tag)
